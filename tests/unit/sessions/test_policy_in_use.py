"""Which level ``auto`` means on a device, what a device refuses, and what is said about the effective policy.

Covers: xamp.sessions.initialize, xamp.sessions.set_up.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_python import python
from lanes import Lane
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import xamp
from xamp.contract import Backend, BackendSpec, Capabilities
from xamp.errors import PolicyError, StateError, UnsupportedPolicy
from xamp.registry.registry import Registry

SPOKEN = "level O4, dtype bf16, op policy portable, loss scale static 1, outputs fp32, backend cpu on cpu"
SCRIPT = """
import torch, xamp
for verbosity in ({verbosity},):
    xamp.initialize(torch.nn.Linear(2, 2), level="O4", verbosity=verbosity)
"""


def use_backend(monkeypatch: pytest.MonkeyPatch, capabilities: Capabilities) -> None:
    """A registry whose one backend serves the CPU and declares ``capabilities``."""

    class Declared(Backend):
        def capabilities(self, device: torch.device | None = None) -> Capabilities:
            return capabilities

    module = types.ModuleType("xamp_test_declared")
    module.Declared = Declared  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    registry = Registry((BackendSpec("declared", ("cpu",), "xamp_test_declared:Declared"),), None)
    monkeypatch.setattr("xamp.registry.registry.REGISTRY", registry)


@pytest.mark.parametrize(
    ("fast", "level"),
    [
        (("float16", "bfloat16"), "O4"),
        (("bfloat16",), "O4"),
        (("float16",), "O1"),
        ((), "O0"),
    ],
)
def test_auto_goes_by_what_the_hardware_runs_natively(
    monkeypatch: pytest.MonkeyPatch, fast: tuple[str, ...], level: str
) -> None:
    use_backend(monkeypatch, Capabilities(fast_dtypes=fast))
    model = nn.Linear(2, 2)
    assert xamp.initialize(model, verbosity=0) is model
    assert xamp.session(model).policy.level == level
    assert xamp.session(model).backend.name == "declared"


def test_a_model_without_parameters_is_taken(lane: Lane) -> None:
    model = nn.ReLU()
    xamp.initialize(model, level="O0", verbosity=0)
    assert model(torch.ones(2, dtype=torch.float16)).dtype == torch.float32


def test_what_a_device_cannot_do_is_refused_and_what_it_can_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, Capabilities(levels=("O0", "O4"), dtypes=("bfloat16",)))
    model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedPolicy, match=r"level='O1'\): backend 'declared' cannot run it on cpu.*: O0, O4\."):
        xamp.initialize(model, level="O1")
    with pytest.raises(UnsupportedPolicy, match=r"cannot compute in it on cpu\. Lower dtypes there: bfloat16"):
        xamp.initialize(model, level="O4", dtype="float16")
    with pytest.raises(UnsupportedPolicy, match=r"delegate=True\): backend 'declared' has nothing to hand over to"):
        xamp.initialize(model, level="O4", delegate=True)
    use_backend(monkeypatch, Capabilities(op_policies=("vendor",)))
    with pytest.raises(UnsupportedPolicy, match=r"op_policy='portable'\): backend 'declared' has vendor"):
        xamp.initialize(model, level="O4")
    assert type(model) is nn.Linear


# ---------------------------------------------------------------- what is said


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "xamp"]


def test_the_effective_policy_is_logged_once_at_verbosity_1(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="xamp")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level="O4")
    assert messages(caplog) == [SPOKEN]
    assert caplog.records[0].levelno == logging.INFO


def test_nothing_is_said_at_verbosity_0_or_where_warnings_are_asked_for(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    xamp.initialize(nn.Linear(2, 2), level="O4", verbosity=0)
    caplog.set_level(logging.WARNING, logger="xamp")
    xamp.initialize(nn.Linear(2, 2), level="O4")
    assert messages(caplog) == []
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def process_group(request: pytest.FixtureRequest) -> Iterator[int]:
    """This process as one rank of two that never talk."""
    dist.init_process_group("fake", rank=request.param, world_size=2, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("process_group", [0, 1], indirect=True)
def test_only_rank_0_speaks(process_group: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="xamp")
    xamp.initialize(nn.Linear(2, 2), level="O4")
    assert messages(caplog) == ([SPOKEN] if process_group == 0 else [])


@pytest.mark.parametrize(("verbosity", "said"), [(1, f"xamp: {SPOKEN}\n"), (0, "")])
def test_without_logging_set_up_it_goes_to_stderr(verbosity: int, said: str) -> None:
    script = SCRIPT.format(verbosity=verbosity)
    done = subprocess.run([python(), "-c", script], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == ""
    assert "".join(line for line in done.stderr.splitlines(True) if "NumPy" not in line) == said


def test_with_logging_set_up_it_goes_there_only() -> None:
    script = (
        "import logging, sys; logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(name)s|%(message)s')"
    )
    done = subprocess.run(
        [python(), "-c", script + SCRIPT.format(verbosity=1)],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert done.stdout == f"xamp|{SPOKEN}\n"
    assert SPOKEN not in done.stderr


@pytest.mark.parametrize(("spelling", "lowered"), [("False", False), ("true", True)])
def test_enabled_is_read_from_a_string_too(spelling: Any, lowered: bool) -> None:
    model = nn.Linear(2, 2)
    xamp.initialize(model, level="O2", enabled=spelling, verbosity="0")
    assert (model.weight.dtype == torch.float16) is lowered


def test_training_cannot_be_set_up_in_inference_mode() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.inference_mode(), pytest.raises(StateError, match=r"inference_mode\(\)"):
        xamp.initialize(model, optimizer, "O2")
    assert model.weight.dtype == torch.float32


class Streaming(nn.Linear):
    def stream(self, x: torch.Tensor) -> Any:
        yield self(x)


def test_a_generator_cannot_run_in_a_region() -> None:
    with pytest.raises(PolicyError, match=r"Streaming\.stream is a generator or coroutine"):
        xamp.initialize(Streaming(2, 2), level="O4", methods=["stream"])
