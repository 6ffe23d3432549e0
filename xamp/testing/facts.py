"""Records the gaps and manners of a device: which operators it refuses, what autocast does there, when the host waits.

    python -m xamp.testing.facts --device cuda --json facts.json

All is found by trial on the device, in some seconds. xamp need not be able to use it: only torch must. A device that
computes on the CPU and reads such a file then stands in for the real one where there is none, see docs/backends.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from xamp.casting.ops.table import Kind
from xamp.errors import XampError
from xamp.op_dtypes.survey import survey
from xamp.registry import registry
from xamp.registry.plugins import spec_of
from xamp.testing.fact_calls import DTYPES, OPERATORS, STEPS, WAITING, Step
from xamp.testing.processes import environment
from xamp.torch_compat.torch_private.dispatch import get_privateuse1_backend_name
from xamp.values.version import __version__

__all__ = ["LATEST", "main", "record"]

LATEST = 300
"""So many operators are put into the queue to see when a copy arrives; who arrives later is not waited for."""
_LOWER = ("float16", "bfloat16")
_LAYERS = (torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM)
_LIMIT = 120.0
"""Seconds in which a forked process has used the device."""
_FORK = """
import json, os, sys
from xamp.testing import facts
kind, specs = sys.argv[1:]
facts.make_known(kind, json.loads(specs))
import torch
torch.ones(2, device=kind).add_(1)
child = os.fork()
if child:
    print(json.dumps({"code": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}), flush=True)
else:
    try:
        torch.ones(2, device=kind).add_(1)
    except Exception as error:
        print(json.dumps({"error": str(error)}), flush=True)
    os._exit(0)
"""


def record(kind: str) -> dict[str, Any]:
    """Return the facts of the current device of a type, as data that JSON can hold.

    Args:
        kind: the type, such as ``"cpu"``.

    Raises:
        RuntimeError: torch has no such device, or a fact could not be found out.
    """
    make_known(kind)
    torch.empty(1, device=kind)
    dtypes = [name for name in _LOWER if not _error_of(lambda name=name: _multiply(kind, name))]  # type: ignore[misc]
    return {
        "about": _about(kind),
        "cards": int(_ask(kind, "device_count", 1)),
        "dtypes": dtypes,
        "refuses": _refused(kind),
        "fp32_numbers": _with_fp32_numbers(kind),
        "fused": _forms(kind, "fused"),
        "capturable": _forms(kind, "capturable"),
        "autocast": _autocast(kind, dtypes),
        "recurrent": _recurrent(kind, dtypes),
        "copies": {"late_by": _late_by(kind)},
        "waits": _waits(kind),
        "fork": _fork(kind),
    }


def make_known(kind: str, specs: Sequence[Mapping[str, Any]] = ()) -> None:
    """Let the backend of ``kind`` teach torch the device, as its package may have to; it need not be usable.

    ``specs``: of backends that another process has registered, as plain values.
    """
    for spec in map(spec_of, specs):
        if spec not in registry.REGISTRY.specs():
            registry.register_backend(spec, override=True)
    with contextlib.suppress(XampError):
        registry.resolve("auto", kind)


def _ask(kind: str, function: str, default: Any) -> Any:
    found = getattr(torch.get_device_module(kind), function, None)
    return default if found is None else found()


def _about(kind: str) -> dict[str, str]:
    name = str(_ask(kind, "get_device_name", kind))
    return {"card": name, "torch": torch.__version__, "how": f"recorded on it by xamp {__version__}"}


def _error_of(call: Callable[[], Any]) -> str:
    """What a call raises: its text, or its class where it has none; empty where it works."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception as error:  # a device may raise anything, and that is the fact
            return str(error).strip() or type(error).__name__
    return ""


def _multiply(kind: str, dtype: str) -> None:
    ones = torch.ones(8, 8, dtype=getattr(torch, dtype), device=kind)
    if (ones @ ones).float().ne(8.0).any().item():
        raise RuntimeError("a product is wrong")


def _refused(kind: str) -> dict[str, dict[str, str]]:
    refused: dict[str, dict[str, str]] = {}
    for name, call in OPERATORS.items():
        for dtype in DTYPES:
            error = _error_of(lambda: call(torch.ones(8, dtype=getattr(torch, dtype), device=kind)))  # noqa: B023
            if error:
                refused.setdefault(name, {})[dtype] = error
    return refused


def _with_fp32_numbers(kind: str) -> list[str]:
    """The fused steps that take their numbers in fp32: those that come nearer to the host's step with such numbers."""
    return [name for name, step in STEPS.items() if _is_nearer(kind, step)]


def _is_nearer(kind: str, step: Step) -> bool:
    start = torch.linspace(0.1, 1.7, 1024)
    exact, rounded, there = start.clone(), start.clone(), start.to(kind)
    step(exact, float)
    step(rounded, _nearest)
    if _error_of(lambda: step(there, float)):
        return False
    found = there.cpu()
    return (found - rounded).abs().sum().item() < (found - exact).abs().sum().item()


def _nearest(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


def _forms(kind: str, option: str) -> dict[str, str]:
    """By optimizer that has the option, why it does not step with it; empty where it does."""
    classes = [cls for cls in vars(torch.optim).values() if inspect.isclass(cls) and cls is not torch.optim.Optimizer]
    named = {cls.__name__: cls for cls in classes if option in inspect.signature(cls).parameters}
    return {name: _as_pattern(_error_of(lambda: _step(kind, cls, option)), kind) for name, cls in sorted(named.items())}  # noqa: B023


def _step(kind: str, cls: Any, option: str) -> None:
    param = torch.nn.Parameter(torch.ones(8, device=kind))
    optimizer = cls([param], lr=0.125, **{option: True})
    param.grad = torch.ones_like(param)
    optimizer.step()
    if param.detach().eq(1.0).any().item():
        raise RuntimeError("a step changes nothing")


def _as_pattern(error: str, kind: str) -> str:
    """An error with ``{dtype}`` and ``{device}`` for those of the trial."""
    braced = error.replace("{", "{{").replace("}", "}}")
    return braced.replace("torch.float32", "{dtype}").replace(kind, "{device}")


def _autocast(kind: str, dtypes: list[str]) -> dict[str, str]:
    """The overloads of the device's autocast by what it does to them."""
    if not dtypes:
        return {}
    rows = survey(kind, {}, getattr(torch, dtypes[-1]), "native").rows
    kinds = sorted({row.native for row in rows if row.registered}.intersection(get_args(Kind)))
    return {kind: " ".join(sorted(row.overload for row in rows if row.native == kind)) for kind in kinds}


def _recurrent(kind: str, dtypes: list[str]) -> str:
    """The dtype to which autocast casts recurrent layers whatever its own; empty where it is its own, or fp32."""
    found = {_layer_dtype(kind, layer, dtype) for layer in _LAYERS for dtype in dtypes}
    always = found.pop() if len(found) == 1 else ""
    return always if len(dtypes) > 1 and always in _LOWER else ""


def _layer_dtype(kind: str, layer: Any, dtype: str) -> str:
    """The dtype of what a layer gives in a region of ``dtype``; empty where it raises."""
    model = layer(4, 4).to(kind)
    try:
        with torch.no_grad(), torch.autocast(kind, getattr(torch, dtype)):
            result: torch.Tensor = model(torch.ones(2, 3, 4, device=kind))[0]
    except RuntimeError:
        return ""
    return str(result.dtype).removeprefix("torch.")


def _late_by(kind: str) -> int:
    """After how many operators a copy to pinned memory has arrived; 0 where it arrives at once, or the host waits."""
    try:
        return _count_until_arrived(kind)
    except (RuntimeError, AttributeError, NotImplementedError, AssertionError):
        return 0


def _count_until_arrived(kind: str) -> int:
    module: Any = torch.get_device_module(kind)
    host, values = torch.zeros(8, pin_memory=True), torch.ones(8, device=kind)
    busy = torch.ones(4096, 4096, device=kind) if _is_real(kind) else values.outer(values)
    module.synchronize()
    for _ in range(50):  # the queue gets some 100 ms of work on a large card
        busy @ busy
    host.copy_(values, non_blocking=True)
    event = module.Event()
    event.record()
    early = bool(host.eq(0.0).all()) and not event.query()
    count = 0
    while count < LATEST and not event.query():
        values.add_(1.0)  # one operator, behind the copy in the queue
        count += 1
    event.synchronize()
    return count if early and bool(host.eq(1.0).all()) else 0


def _is_real(kind: str) -> bool:
    """Whether the device computes beside the CPU, as a type of torch's own does: large products take it no time."""
    return kind not in ("cpu", get_privateuse1_backend_name())


def _waits(kind: str) -> list[str]:
    """The operators at which the host waits, as far as the device's module can tell."""
    set_mode = getattr(torch.get_device_module(kind), "set_sync_debug_mode", None)
    if set_mode is None:
        return []
    tensor, found = torch.ones(8, device=kind), []
    for name, call in WAITING.items():
        with _raising(set_mode):
            if _error_of(lambda: call(tensor)):  # noqa: B023
                found.append(name)
    return found


@contextlib.contextmanager
def _raising(set_mode: Callable[[str], None]) -> Iterator[None]:
    set_mode("error")
    try:
        yield
    finally:
        set_mode("default")


def _fork(kind: str) -> str:
    """The error of a forked process that uses the device after its parent did; empty where it works.

    Raises:
        RuntimeError: the parent did not get so far as to fork.
    """
    specs = [dataclasses.asdict(spec) for spec in registry.REGISTRY.specs() if kind in spec.device_types]
    command = [sys.executable, "-W", "ignore", "-c", _FORK, kind, json.dumps(specs)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A session of its own, so that what was forked can be ended with it.
    with subprocess.Popen(command, **pipes, env=environment(), start_new_session=True) as parent:
        try:
            out, err = parent.communicate(timeout=_LIMIT)
        except subprocess.TimeoutExpired:
            return "a forked process that uses the device never ends"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
    told = {
        name: value for line in out.splitlines() if line.startswith("{") for name, value in json.loads(line).items()
    }
    if "code" not in told:
        raise RuntimeError(
            f"the process that was to fork on {kind} ended with code {parent.returncode}:\n{err[-2000:]}"
        )
    if told["code"] < 0:
        return f"it ends by {signal.Signals(-told['code']).name}"
    return str(told.get("error", "")).strip() or (f"it ends with code {told['code']}" if told["code"] else "")


def main(words: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m xamp.testing.facts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", required=True, help="the device's type in torch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the facts (default: the output)")
    args = parser.parse_args(words)
    try:
        found = json.dumps(record(args.device), indent=2) + "\n"
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for a device
        sys.stderr.write(f"{parser.prog}: --device {args.device}: {str(error).splitlines()[0]}\n")
        return 2
    if args.json is None:
        sys.stdout.write(found)
    else:
        args.json.write_text(found, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
