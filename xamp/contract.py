"""What a backend is written against.

A backend is one class derived from :class:`Backend` and one :class:`BackendSpec` that names it; nothing in xamp changes
for it. Every method has a default that is right for a device on which torch's own operators work, so most backends
override two or three. The core calls them in this order::

    probe               once a process, before the backend is used or reported
    devices             for reports, and where an index is checked
    versions            for reports
    capabilities        when a level is chosen, when a policy is checked, by tests and by ``doctor``
    runtime             when ``xamp.accel`` is used
    precision_settings  when level O0 is chosen, and by ``doctor``: both warn of it; ``exact_fp32`` sets them back
    plain               when ``initialize`` looks at parameters
    optimizer_refusal   when ``initialize`` looks at an optimizer, and before each of its steps
    clear_overflow      on entering ``scale_loss``, and before a training forward where the chip saturates
    unscale_            on leaving ``scale_loss``
    make_overflow_      never in training: how a test makes this device overflow

This module imports no torch, so that a spec can be read where torch is missing or broken.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from xamp.policy import LEVELS

if TYPE_CHECKING:
    import torch


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
    "Setting",
    "masked",
]


CONTRACT = 1
"""The version of this contract. It grows when a backend that was right before is not right any more."""


@dataclasses.dataclass(frozen=True)
class BackendSpec:
    """Where a backend is and what it claims: cheap to read, names no class that needs importing.

    Attributes:
        name: what ``backend=`` and ``XAMP_BACKEND`` call it.
        device_types: the ``torch.device`` types it serves; mostly one.
        target: ``"package.module:Class"`` of the :class:`Backend`, imported only when the backend is probed.
        priority: among backends that serve a device type, and for the best device of a machine, the highest wins.
        install_hint: what to do where the backend's framework is missing, shown in errors and by ``doctor``.
        tested: whether the project that ships the backend runs its tests on such a device.
        masks: names of the environment variables that hide such devices from a process.
        causes: ``"package.module:NAME"`` of the table of its known failures: a sequence of :class:`Cause` rows, or a
            function from :class:`Failure` to ``(cause, cure)`` or None. Read when something fails, importing torch
            included, so it must need no framework; it goes before what the probe's own error says.
        emulations: names for ``xamp emulate``, each with ``"package.module:function"`` of what runs a command where
            such a device is emulated: from a chip's name (empty: the usual one), a number of devices and the command's
            words to its exit code.
        ledger: ``"package:file"`` of what it is known to fail of the conformance suite; see :mod:`xamp.testing.ledger`.
        contract: the version of this contract that the backend was written for. A backend that relies on what a later
            version brought says so here; it gets a clear message where it meets another one.
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
        levels: the levels the device can run.
        dtypes: names of the lower dtypes it computes in (``"float16"``, ``"bfloat16"``).
        fast_dtypes: those of ``dtypes`` that its hardware runs natively; what ``level="auto"`` goes by.
        fused_optimizers: names of the ``torch.optim`` classes whose ``fused=True`` form honours ``found_inf`` there.
        overflow: ``"inf"`` where an overflow shows as inf or nan in the gradient, ``"flag"`` where the chip saturates
            and raises a flag instead.
        process_group: the ``torch.distributed`` backend for this device; empty: there is none.
        op_policies: the op policies it can run under.
    """

    levels: tuple[str, ...] = tuple(LEVELS)
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    fast_dtypes: tuple[str, ...] = ()
    fused_optimizers: tuple[str, ...] = ()
    overflow: str = "inf"
    process_group: str = "gloo"
    op_policies: tuple[str, ...] = ("portable", "native")


class Diagnosis(NamedTuple):
    """What is wrong and what to do about it, one line each."""

    cause: str
    cure: str


@dataclasses.dataclass(frozen=True)
class Failure:
    """How importing torch, or a backend's probe, failed.

    Attributes:
        kind: ``"exception"``, ``"crash"`` (it ended its process) or ``"timeout"`` (it did not finish). The latter two
            are seen by ``doctor`` alone, which looks from another process.
        text: of an exception its type and text and those of every error behind it, one a line; else what the process
            printed last.
        during: ``"torch"`` while importing torch, ``"probe"`` afterwards.
        environment: the environment variables of that process.
        masks: those of :attr:`BackendSpec.masks` that are set, with their values.
    """

    kind: str
    text: str
    during: str = "probe"
    environment: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    masks: Mapping[str, str] = dataclasses.field(default_factory=dict)


Explanation = Callable[[Failure], "tuple[str, str] | None"]


@dataclasses.dataclass(frozen=True)
class Cause:
    r"""One known way to fail: a row of a table. Where it takes more, a function of :class:`Failure` does as a row too.

    Attributes:
        pattern: a regular expression, searched in :attr:`Failure.text`.
        cause: what is wrong, one line; ``\1`` and ``\g<name>`` stand for groups of the pattern.
        cure: what to do about it, likewise.
        kinds: the kinds of failure it applies to.
        during: when it applies.
        masked: it says that there is no device, so that a mask variable that is set is the likelier cause.
    """

    pattern: str
    cause: str
    cure: str
    kinds: tuple[str, ...] = ("exception", "crash", "timeout")
    during: tuple[str, ...] = ("torch", "probe")
    masked: bool = False

    def __call__(self, failure: Failure) -> tuple[str, str] | None:
        """Cause and cure, where this row applies to ``failure``."""
        found = re.search(self.pattern, failure.text)
        if found is None or failure.kind not in self.kinds or failure.during not in self.during:
            return None
        behind_mask = masked(failure.masks) if self.masked else None
        return behind_mask or (found.expand(self.cause), found.expand(self.cure))


def masked(masks: Mapping[str, str]) -> Diagnosis | None:
    """What to say where there is no device while ``masks`` are set; None where none is."""
    if not masks:
        return None
    shown = " ".join(f"{name}={value!r}" for name, value in masks.items())
    return Diagnosis(f"no device is visible under {shown}", f"unset {next(iter(masks))}, or name devices in it")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A switch or an environment variable that changes how a device computes.

    Attributes:
        name: what it is called where it is set.
        value: its present value.
        effect: what it changes, one line.
        undo: how to set it back.
        expected: it is torch's default, or changes no result for the worse: a note, and no warning.
        narrows_fp32: it takes so many digits from float32 that ``initialize`` warns of it at level O0, expected or not.
        exact: sets it so that float32 keeps its digits, and returns what sets it back as it was: what
            ``xamp.exact_fp32`` calls. None where it takes none, or where a program cannot change it.
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
        """How it is shown: ``"note"`` or ``"warning"``."""
        return "note" if self.expected else "warning"


@dataclasses.dataclass(frozen=True)
class BackendReport:
    """What is known of one registered backend after its probe.

    Attributes:
        name: the backend's name.
        device_types: the device types it serves.
        usable: whether its probe passed.
        reason: why not, one line; empty where usable.
        hint: what to do about it; empty where usable.
        devices: names of the devices found, in index order.
        versions: framework, driver and library versions, by name.
        capabilities: of the first device; None where not usable.
        source: ``"xamp"`` or the distribution (or call) that registered it.
        tested: see :attr:`BackendSpec.tested`.
        priority: see :attr:`BackendSpec.priority`.
        detail: the error itself, one line, where ``reason`` is a known cause of it.
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
    """The device side of a training step, with defaults that are right wherever torch's operators work.

    Attributes:
        spec: the record it was registered with; set when the registry makes the object.
        op_rules: what the device's own autocast does with operator overloads of :data:`xamp.casting.ops.table.RULES`
            where that differs from what its registrations tell: overload -> ``"same"`` where the results are the
            table's without an entry, or where the device has no kernel for them; else the kind of the device's own
            rule, which differs. An overload that is not listed here follows the table if it is registered, and is added
            if it is not.
    """

    spec: BackendSpec
    op_rules: Mapping[str, str] = types.MappingProxyType({})

    def __init__(self, spec: BackendSpec) -> None:
        self.spec = spec

    @property
    def name(self) -> str:
        """The name it is registered under."""
        return self.spec.name

    @property
    def device_type(self) -> str:
        """The ``torch.device`` type of the first device it serves."""
        return self.spec.device_types[0]

    def probe(self) -> None:
        """Use the device for something small.

        Called once a process, before any other method, with torch imported.

        Raises:
            BackendUnavailable: its first line is the cause, the lines after it are the cure; they become ``reason`` and
                ``hint`` of the report. Any other exception, SystemExit included, is kept as the reason too, with the
                spec's ``install_hint`` as the cure. Either gives way to what :attr:`BackendSpec.causes` knows of it.
        """

    def devices(self) -> Sequence[str]:
        """Names of the devices present, in index order."""
        return (self.device_type,)

    def versions(self) -> Mapping[str, str]:
        """Versions of the framework, driver and libraries that matter on this device, by name."""
        import torch

        return {"torch": torch.__version__}

    def capabilities(self, device: torch.device | None = None) -> Capabilities:
        """What ``device`` (None: the current one) can do."""
        return Capabilities()

    def runtime(self, device_type: str) -> Any:
        """What ``xamp.accel`` calls for this device: an object with the functions, and their arguments, of torch.cuda.

        It may lack names: what is right for any device with one index and one queue then comes from xamp, anything else
        is an error where it is used. One without ``set_device`` is taken to have one index, and is never passed any.

        Args:
            device_type: which of the types it serves, such as ``"cpu"``.
        """
        import torch

        return torch.get_device_module(device_type)

    def precision_settings(self, device: torch.device) -> Sequence[Setting]:
        """What is set, by torch's switches or by environment variables, that changes the arithmetic of ``device``.

        Only what differs from what the levels promise; ``doctor`` shows it, ``initialize`` warns of it at O0, and
        ``exact_fp32`` calls :attr:`Setting.exact` of each that has it.
        """
        return ()

    def clear_overflow(self, device: torch.device) -> None:
        """Forget overflows so far: a chip with an overflow flag lowers it here.

        Called on entering ``scale_loss`` and, where the chip has such a flag, before a training forward; must not wait
        for the device.
        """

    def unscale_(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        """Multiply ``grads`` in place by ``inv_scale`` and set ``found_inf`` to 1.0 where one is not finite.

        Args:
            grads: dense floating gradients of any dtypes, all on the device of ``found_inf``; none, where only the flag
                of a chip that has one is asked.
            found_inf: fp32, one element; only ever raised from 0.0 to 1.0 here. A chip's flag stays up: it is asked for
                each optimizer.
            inv_scale: fp32, one element, 1 / loss scale.
        """
        torch = sys.modules["torch"]  # an import statement costs more here than the operator
        torch._amp_foreach_non_finite_check_and_unscale_(list(grads), found_inf, inv_scale)

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in the storage format that all operators take, ``torch._foreach_*`` and fused ones among them.

        Only a device that has formats of its own, which some operators refuse, makes a copy of a tensor that is in one.
        Parameters that a level casts, and their masters, become plain; no fused form is chosen for others that are not.
        """
        return tensor

    def optimizer_refusal(self, optimizer: torch.optim.Optimizer, *, casts: bool) -> str:
        """Why a step of ``optimizer`` would be wrong without a word: the end of a sentence that begins with its name.

        For optimizers of the device's own, that keep copies of what they step. Called before every step, so an answer
        must take no time where the optimizer is none of those; must not wait for the device.

        Args:
            optimizer: as it is now.
            casts: whether its parameters are about to be cast, or masters to take their places.

        Returns:
            The reason and the cure; empty where the step is right.
        """
        return ""

    def make_overflow_(self, grad: torch.Tensor) -> None:
        """Make the device overflow as it does in training, writing the result into ``grad``. For tests."""
        grad.fill_(float("inf"))
