"""The interface that a backend implements.

To add a device, derive one class from :class:`Backend` and describe it in one :class:`BackendSpec`. Nothing in xamp
changes. Every method has a default, which is right for a device on which torch's own operators work. Most backends
override two or three methods. The core calls them in this order::

    probe               once a process, before the backend is used or reported
    devices             for reports, and where an index is checked
    versions            for reports
    capabilities        when a level is chosen, when a policy is checked, by tests and by ``doctor``
    runtime             when ``xamp.accel`` is used
    capture_check       when a session is made; what it returns tells in each step whether a graph is being captured
    precision_settings  when level O0 is chosen, and by ``doctor``: both warn of it; ``exact_fp32`` sets them back
    plain               when ``initialize`` looks at parameters
    join_weights_       when ``initialize`` has cast a recurrent layer, and in each of its forwards that casts weights
    optimizer_refusal   when ``initialize`` looks at an optimizer, and before each of its steps
    join_gradients      after a backward and before a step, at levels that cast parameters
    clear_overflow      on entering ``scale_loss``, and before a training forward where the chip saturates
    to_fp8              in each linear layer that runs in fp8, and in its backward
    to_fp8_both         before it, where both of a matrix's dimensions are asked for
    scaled_mm           the same
    unscale_            on leaving ``scale_loss``
    make_overflow_      never in training: how a test makes this device overflow

This module imports no torch, so that a spec can be read where torch is missing or broken.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from xamp.policy import LEVELS

if TYPE_CHECKING:
    import torch

    from xamp.torch_compat.scaled import Scaled

__all__ = [
    "CONTRACT",
    "Backend",
    "BackendReport",
    "BackendSpec",
    "Capabilities",
    "Cause",
    "Diagnosis",
    "Explanation",
    "Failure",
    "RecurrentLayer",
    "Setting",
    "masked",
]


_KERNELS = "xamp.torch_compat.kernels"  # which imports torch, so it is imported by the first call that needs it
_SCALED = "xamp.torch_compat.scaled"

CONTRACT = 1
"""The version of this interface. It grows when a change would break a backend that was right before."""


@dataclasses.dataclass(frozen=True)
class BackendSpec:
    """Describes a backend before it is imported: its name, its devices and where its class is.

    Reading a spec imports nothing, since it names classes, tables and functions as strings.

    Attributes:
        name: what users pass as ``backend=`` or set in ``XAMP_BACKEND``.
        device_types: the ``torch.device`` types that the backend serves; mostly one.
        target: the :class:`Backend` subclass, as ``"package.module:Class"``. It is imported when the backend is probed.
        priority: the highest wins, among the backends of one device type and among the devices of one machine.
        install_hint: what the user must do where the backend's framework is missing. Errors and ``doctor`` show it.
        tested: whether the project that ships the backend runs its tests on such a device.
        masks: names of the environment variables that hide such devices from a process.
        causes: the table of causes, as ``"package.module:NAME"``: a sequence of :class:`Cause` rows, or a function that
            takes a :class:`Failure` and returns ``(cause, cure)`` or None. xamp reads it after any failure, also of
            ``import torch``, so its module must import no framework. What the table says goes before the message of
            the probe's own error.
        emulations: pairs for ``xamp emulate``: a name, and ``"package.module:function"``. The function takes a chip's
            name (empty for the usual chip), a number of devices and the words of a command. It runs the command where
            such devices are emulated, and returns the command's exit code. Options that are given reach it as
            ``wheels=`` and ``strict=``.
        ledger: the file of the known gaps in the conformance suite, as ``"package:file"``; see
            :mod:`xamp.testing.ledger`.
        contract: the version of this interface (:data:`CONTRACT`) that the backend was written for. Where xamp has
            another version, it refuses the backend with a message that names both.
    """

    name: str
    device_types: tuple[str, ...]
    target: str
    priority: int = 0
    install_hint: str = ""
    tested: bool = True
    masks: tuple[str, ...] = ()
    causes: str = ""
    ledger: str = ""
    emulations: tuple[tuple[str, str], ...] = ()
    contract: int = 1


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What a backend declares for one device. Errors, selection, tests and ``doctor`` all read this one record.

    Attributes:
        levels: the levels that the device can run.
        dtypes: names of the lower dtypes that it computes in (``"float16"``, ``"bfloat16"``).
        fast_dtypes: those of ``dtypes`` that its hardware runs natively. ``level="auto"`` chooses by them.
        fused_optimizers: names of the ``torch.optim`` classes whose ``fused=True`` honours ``found_inf`` there.
        overflow: ``"inf"`` where an overflow shows as inf or nan in the gradient; ``"flag"`` where the chip saturates
            and raises a flag instead.
        process_group: the ``torch.distributed`` backend for this device; empty where there is none.
        op_policies: the op policies that the device can run under.
        lacking: pairs: a lower dtype that one would expect of the device and that is not among ``dtypes``, and why, in
            one line. Errors about a level of that dtype and ``doctor`` say so.
        fp8: names of the recipes (:mod:`xamp.values.recipes`) that its hardware was found to run, the fastest first.
        fp8_rehearsed: those that it computes otherwise, with the same results and no gain of time.
    """

    levels: tuple[str, ...] = tuple(LEVELS)
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    fast_dtypes: tuple[str, ...] = ()
    fused_optimizers: tuple[str, ...] = ()
    overflow: str = "inf"
    process_group: str = "gloo"
    op_policies: tuple[str, ...] = ("portable", "native")
    lacking: tuple[tuple[str, str], ...] = ()
    fp8: tuple[str, ...] = ()
    fp8_rehearsed: tuple[str, ...] = ()

    def why_not(self, dtype: str | None) -> str:
        """Why ``dtype`` is not among :attr:`dtypes`, as a sentence to put behind another one; empty if nobody knows."""
        reason = dict(self.lacking).get(dtype or "")
        return f" {dtype} is not there because {reason.rstrip('.')}." if reason else ""


class Diagnosis(NamedTuple):
    """A cause and its cure: what is wrong, and what to do about it. Each is one line."""

    cause: str
    cure: str


@dataclasses.dataclass(frozen=True)
class Failure:
    """How ``import torch`` or the probe of a backend failed.

    Attributes:
        kind: ``"exception"``, ``"crash"`` (the process ended) or ``"timeout"`` (it did not finish). Only ``doctor``
            sees the last two, because it looks from another process.
        text: for an exception, its type and text, then those of every error that it was raised from, one a line; for a
            crash or a timeout, what the process printed last.
        during: ``"torch"`` while torch is imported, ``"probe"`` afterwards.
        environment: the environment variables of the process that failed.
        masks: those variables of :attr:`BackendSpec.masks` that are set, with their values.
    """

    kind: str
    text: str
    during: str = "probe"
    environment: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    masks: Mapping[str, str] = dataclasses.field(default_factory=dict)


Explanation = Callable[[Failure], "tuple[str, str] | None"]


@dataclasses.dataclass(frozen=True)
class Cause:
    r"""One row of a table of causes: one known way to fail.

    Where a regular expression is not enough, a function from a :class:`Failure` to ``(cause, cure)`` or None may be a
    row too.

    Attributes:
        pattern: a regular expression, searched in :attr:`Failure.text`.
        cause: what is wrong, one line; ``\1`` and ``\g<name>`` stand for groups of the pattern.
        cure: what to do about it, one line, with the same groups.
        kinds: the values of :attr:`Failure.kind` that the row applies to.
        during: the values of :attr:`Failure.during` that the row applies to.
        masked: True where the row means "there is no device". A mask variable that is set is then the likelier cause,
            and the row names that instead.
    """

    pattern: str
    cause: str
    cure: str
    kinds: tuple[str, ...] = ("exception", "crash", "timeout")
    during: tuple[str, ...] = ("torch", "probe")
    masked: bool = False

    def __call__(self, failure: Failure) -> tuple[str, str] | None:
        """The cause and the cure, or None where this row does not apply to ``failure``."""
        found = re.search(self.pattern, failure.text)
        if found is None or failure.kind not in self.kinds or failure.during not in self.during:
            return None
        behind_mask = masked(failure.masks) if self.masked else None
        return behind_mask or (found.expand(self.cause), found.expand(self.cure))


def masked(masks: Mapping[str, str]) -> Diagnosis | None:
    """The cause and the cure where no device is found while ``masks`` are set; None where no mask is set."""
    if not masks:
        return None
    shown = " ".join(f"{name}={value!r}" for name, value in masks.items())
    return Diagnosis(f"no device is visible under {shown}", f"unset {next(iter(masks))}, or name devices in it")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A switch or an environment variable that changes how a device computes.

    Attributes:
        name: the name under which it is set.
        value: its present value.
        effect: what it changes, one line.
        undo: how the user sets it back.
        expected: it is torch's default, or makes no result worse. It is shown as a note, not as a warning.
        narrows_fp32: it takes so many digits from float32 that ``initialize`` warns at level O0, expected or not.
        exact: a function for ``xamp.exact_fp32``. It changes the setting so that float32 keeps its digits, and returns
            a function that restores the old value. None where float32 loses no digits, or where a program cannot
            change the setting.
    """

    name: str
    value: str
    effect: str
    undo: str
    expected: bool = False
    narrows_fp32: bool = False
    exact: Callable[[], Callable[[], object]] | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def severity(self) -> str:
        """How ``doctor`` shows the setting: ``"note"`` or ``"warning"``."""
        return "note" if self.expected else "warning"


class RecurrentLayer(NamedTuple):
    """What the weights of a ``torch.nn.LSTM``, ``GRU`` or ``RNN`` are for; see :meth:`Backend.join_weights_`.

    Attributes:
        kind: the operator that runs the layer: ``"lstm"``, ``"gru"``, ``"rnn_tanh"`` or ``"rnn_relu"``.
        input_size: features of an input at one time step.
        hidden_size: features of the state; of an LSTM with projections those of its cell.
        proj_size: features of an LSTM's projected state; 0 without projections.
        num_layers: layers that follow each other.
        bias: whether there are biases.
        bidirectional: whether each layer also reads the sequence backwards.
    """

    kind: str
    input_size: int
    hidden_size: int
    proj_size: int
    num_layers: int
    bias: bool
    bidirectional: bool


@dataclasses.dataclass(frozen=True)
class BackendReport:
    """What is known about one registered backend after its probe.

    Attributes:
        name: the backend's name.
        device_types: the device types that it serves.
        usable: whether its probe passed.
        reason: why the backend is not usable, one line; empty where it is.
        hint: what the user must do about it; empty where the backend is usable.
        devices: names of the devices found, in index order.
        versions: framework, driver and library versions, by name.
        capabilities: those of the first device; None where the backend is not usable.
        source: ``"xamp"``, or the distribution or the call that registered the backend.
        tested: see :attr:`BackendSpec.tested`.
        priority: see :attr:`BackendSpec.priority`.
        detail: the error itself, one line, where ``reason`` comes from a table of causes.
    """

    name: str
    device_types: tuple[str, ...]
    usable: bool
    reason: str = ""
    hint: str = ""
    devices: tuple[str, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    capabilities: Capabilities | None = None
    source: str = "xamp"
    tested: bool = True
    priority: int = 0
    detail: str = ""


class Backend:
    """The device side of a training step. The defaults are right wherever torch's operators work.

    Attributes:
        spec: the spec that the backend was registered with; the registry passes it when it makes the object.
        op_rules: exceptions, for overloads of the op table (:data:`xamp.casting.ops.table.RULES`), as overload -> rule.
            xamp assumes that an overload in the device's own autocast list follows the table, and adds an entry of its
            own for each one that is not in that list. Name here the overloads for which this is wrong. The rule is
            ``"same"`` where the results are those of the table without an entry, or where the device has no kernel
            for the overload. It is ``"float16"`` or ``"bfloat16"`` where the device's own autocast casts to that
            dtype, whatever the region's, an overload that the table lowers: xamp's regions then cast it to their own
            dtype, under the native policy too. Otherwise it is the kind of the device's own rule, which differs from
            the table's.
        fp8_formats: the names of torch's dtypes for the two kinds of fp8.
    """

    spec: BackendSpec
    op_rules: Mapping[str, str] = types.MappingProxyType({})
    fp8_formats: Mapping[str, str] = types.MappingProxyType({"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"})

    def __init__(self, spec: BackendSpec) -> None:
        self.spec = spec

    @property
    def name(self) -> str:
        """The name that the backend is registered under."""
        return self.spec.name

    @property
    def device_type(self) -> str:
        """The first of the ``torch.device`` types that the backend serves."""
        return self.spec.device_types[0]

    def probe(self) -> None:
        """Check that the device works, by using it for something small.

        Called once a process, before any other method, with torch imported.

        Raises:
            BackendUnavailable: the device cannot be used. The first line of the message is the cause and becomes
                ``reason`` of the report; the other lines are the cure and become ``hint``. Any other exception,
                SystemExit included, counts as a failure too: its text becomes the reason and the spec's
                ``install_hint`` the cure. Where the table of :attr:`BackendSpec.causes` knows the error, the cause and
                the cure come from the table.
        """

    def devices(self) -> Sequence[str]:
        """Names of the devices present, in index order."""
        return (self.device_type,)

    def versions(self) -> Mapping[str, str]:
        """Versions of the framework, driver and libraries that matter on this device, by name."""
        import torch

        return {"torch": torch.__version__}

    def capabilities(self, device: torch.device | None = None) -> Capabilities:
        """What ``device`` can do; None means the current device."""
        return Capabilities()

    def runtime(self, device_type: str) -> Any:
        """The object whose functions ``xamp.accel`` calls, with the names and the arguments of those of torch.cuda.

        The object may lack names. ``xamp.accel`` then uses its own function, where one is right for any device with one
        index and one queue; any other missing name is an error when it is used. An object without ``set_device`` is
        taken to have one index, and is never passed one.

        Args:
            device_type: one of the types that the backend serves, such as ``"cpu"``.
        """
        import torch

        return torch.get_device_module(device_type)

    def capture_check(self, device: torch.device) -> Callable[[], bool] | None:
        """A function that tells whether a graph is being captured on ``device`` now; None: it has no graphs.

        The device replays a captured step without Python. So while this function returns True xamp puts into the graph
        everything that a later step may need, and refuses what must read the device. It is called in each step.
        """
        try:
            runtime: Any = self.runtime(device.type)
        except (RuntimeError, AttributeError):  # a device whose module is not registered with torch
            return None
        found: Callable[[], bool] | None = getattr(runtime, "is_current_stream_capturing", None)
        return found

    def precision_settings(self, device: torch.device) -> Sequence[Setting]:
        """The settings in force, torch's switches and environment variables, that change the arithmetic of ``device``.

        Return only settings whose effect differs from what the levels promise. ``doctor`` shows them, ``initialize``
        warns of them at O0, and ``exact_fp32`` calls :attr:`Setting.exact` where a setting has it.
        """
        return ()

    def clear_overflow(self, device: torch.device) -> None:
        """Forget the overflows so far: a chip with an overflow flag lowers the flag here.

        Called on entering ``scale_loss`` and, where the chip has such a flag, before a training forward. This method
        must not wait for the device.
        """

    def unscale_(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        """Multiply ``grads`` in place by ``inv_scale``, and set ``found_inf`` to 1.0 if a gradient is not finite.

        The default calls torch's kernel for the dtypes that it takes on this device, and for the others operators with
        the same results. A product is rounded once.

        On a chip with an overflow flag, set ``found_inf`` to 1.0 if the flag is up. Leave the flag up: this method is
        called for each optimizer.

        Args:
            grads: dense floating gradients of any dtypes, all on the device of ``found_inf``. May be empty: then only
                the chip's flag is asked.
            found_inf: fp32, one element; this method changes it from 0.0 to 1.0 or leaves it.
            inv_scale: fp32, one element, 1 / loss scale. Its attribute ``is_power_of_two`` is True where the host
                knows that its value always is one, so that a product in 16 bits loses nothing.
        """
        # An import statement costs more here than the operator.
        kernels = sys.modules.get(_KERNELS) or importlib.import_module(_KERNELS)
        kernels.unscale_(grads, found_inf, inv_scale)

    def to_fp8(self, matrix: torch.Tensor, kind: str, scaling: str, axis: int) -> Scaled:
        """Cast ``matrix``, which is not empty, to fp8 with the scales that its values ask for.

        Only :meth:`scaled_mm` gets what this returns. ``Scaled`` is that of :mod:`xamp.torch_compat.scaled`.

        Args:
            matrix: in fp32 or bf16.
            kind: ``"e4m3"`` or ``"e5m2"``.
            scaling: see :class:`xamp.values.recipes.Recipe`.
            axis: the dimension that the product will sum over, 0 or 1.
        """
        scaled = importlib.import_module(_SCALED)
        return scaled.quantise(matrix, scaled.dtype_of(self.fp8_formats[kind]), scaling, axis)  # type: ignore[no-any-return]

    def to_fp8_both(self, matrix: torch.Tensor, kind: str, scaling: str) -> tuple[Scaled, Scaled] | None:
        """Return :meth:`to_fp8` along dimension 1 and, for a backward, 0, where one operator makes both; else None.

        Args:
            matrix: as that of :meth:`to_fp8`.
            kind: as there.
            scaling: as there.
        """
        return None

    def scaled_mm(self, left: Scaled, right: Scaled, dtype: torch.dtype, fast: bool) -> torch.Tensor:
        """The product of two matrices that :meth:`to_fp8` made, or their ``turned()`` ones.

        Args:
            left: summed over dimension 1.
            right: summed over dimension 0.
            dtype: that of the result.
            fast: the sum may have fewer digits than fp32: in a forward.
        """
        return importlib.import_module(_SCALED).multiply(left, right, dtype, fast)  # type: ignore[no-any-return]

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in a storage format that every operator takes, also ``torch._foreach_*`` and fused operators.

        Override it for a device whose own storage formats some operators refuse. Return a copy of a tensor in such a
        format, and any other tensor itself. xamp makes parameters that a level casts, and their masters, plain.
        For other parameters that are not plain it chooses no fused implementation.
        """
        return tensor

    def join_weights_(self, weights: Sequence[torch.Tensor], layer: RecurrentLayer) -> None:
        """Move the weights of a recurrent layer into one block of memory, where the device's kernels want them so.

        Override it for a device whose kernels compact the weights at each call unless they lie together. Only the
        storage of ``weights`` may change, not their values, as in ``torch.Tensor.set_``. Called after a cast, in the
        order of the arguments of ``torch.nn.RNNBase.forward``, with gradients switched off.

        Args:
            weights: plain tensors of one dtype on one device, for each layer and direction: weights of the input and
                of the state, their biases if there are any, and the weights of the projection if there is one.
            layer: what they are for.
        """

    def optimizer_refusal(self, optimizer: torch.optim.Optimizer, *, casts: bool) -> str:
        """Why a step of ``optimizer`` would give wrong results without an error; empty where the step is right.

        Override it where the device's own optimizers keep copies of the parameters that they step. Called before every
        step: it must return at once for any other optimizer, and must not wait for the device.

        Args:
            optimizer: the optimizer in its present state.
            casts: whether its parameters are about to be cast, or to be replaced by masters.

        Returns:
            The reason and the cure, as the end of a sentence that begins with the optimizer's name; or ``""``.
        """
        return ""

    def join_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Write the gradients of ``optimizer`` into the buffers that it steps.

        Override it where the device's own optimizers step buffers in which they joined gradients. Called at levels that
        cast parameters, after each backward and before each step, since there gradients come as new tensors. It must
        return at once for any other optimizer, and must not wait for the device.
        """

    def make_overflow_(self, grad: torch.Tensor) -> None:
        """Make the device overflow as it does in training, and write the result into ``grad``. Only tests call this."""
        grad.fill_(float("inf"))
