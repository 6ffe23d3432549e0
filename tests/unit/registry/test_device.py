"""The device in use: XAMP_DEVICE, else the best accelerator, else the CPU.

Covers: xamp.registry.device_in_use.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence

import pytest
import torch

import xamp
from xamp.contract import Backend, BackendSpec, Capabilities
from xamp.registry import device_in_use
from xamp.registry.registry import Registry

PLUGIN = "xamp_test_devices"


class Cpu(Backend):
    pass


class TwoCards(Backend):
    """Serves ``meta``, a device type that every build of torch knows and no built-in backend serves."""

    def devices(self) -> Sequence[str]:
        return ("First", "Second")

    def capabilities(self, device: torch.device | None = None) -> Capabilities:
        return Capabilities(process_group="acme" if device == torch.device("meta") else "wrong")


class OneXpu(Backend):
    pass


class Busy(Backend):
    """A card that another process has at its first probe."""

    probes = 0

    def probe(self) -> None:
        Busy.probes += 1
        if Busy.probes == 1:
            raise RuntimeError("all devices are busy or unavailable")


class Full(Backend):
    """A card whose memory others have used up."""

    def probe(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


class Unplugged(Backend):
    def probe(self) -> None:
        raise xamp.BackendUnavailable("no card in the slot\nput one in")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the process see these backends only: ``machine(meta=(TwoCards, 100))``; ``cpu`` is always there."""
    monkeypatch.delenv("XAMP_DEVICE", raising=False)
    monkeypatch.delenv("XAMP_BACKEND", raising=False)
    monkeypatch.setattr(device_in_use, "_told", set())
    module = types.ModuleType(PLUGIN)
    vars(module).update({one.__name__: one for one in (Cpu, TwoCards, OneXpu, Busy, Full, Unplugged)})
    monkeypatch.setitem(sys.modules, PLUGIN, module)

    def build(**backends: tuple[type[Backend], int]) -> None:
        specs = [
            BackendSpec(kind, (kind,), f"{PLUGIN}:{cls.__name__}", priority)
            for kind, (cls, priority) in {"cpu": (Cpu, 0), **backends}.items()
        ]
        monkeypatch.setattr(device_in_use, "REGISTRY", Registry(specs, group=None))

    return build


def test_without_an_accelerator_it_is_the_cpu(machine: Callable[..., None]) -> None:
    machine(meta=(Unplugged, 100))
    assert xamp.device() == torch.device("cpu")
    assert xamp.device_type() == "cpu"
    assert xamp.is_available() is False
    assert xamp.distributed_backend() == "gloo"


def test_a_card_that_was_busy_is_not_tried_again_and_the_log_says_what_is_used(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Busy, "probes", 0)
    machine(meta=(Busy, 100))
    assert [device_in_use.in_use().device.type for _ in range(3)] == ["cpu"] * 3
    assert xamp.device() == torch.device("cpu")
    assert Busy.probes == 1
    assert [record.message.partition("\n")[0] for record in caplog.records] == [
        "backend 'meta' cannot be used: it was tried while it was out of memory or busy: RuntimeError: all devices are "
        "busy or unavailable"
    ]


def test_the_device_in_use_follows_the_variable(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(meta=(TwoCards, 100))
    assert device_in_use.in_use().device == torch.device("meta")
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    assert device_in_use.in_use().device == torch.device("cpu")
    monkeypatch.delenv("XAMP_DEVICE")
    assert device_in_use.in_use().device == torch.device("meta")


def test_a_full_card_is_not_replaced_in_silence(machine: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    machine(meta=(Full, 100))
    assert [device_in_use.in_use().device.type for _ in range(3)] == ["cpu"] * 3
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("xamp", "WARNING")
    assert record.message.startswith(
        "backend 'meta' cannot be used: it was tried while it was out of memory or busy: OutOfMemoryError: CUDA out of "
    )
    assert record.message.endswith("\nSo the device in use is cpu. XAMP_DEVICE=cpu says so.")


def test_an_index_means_nothing_on_the_cpu(machine: Callable[..., None]) -> None:
    machine()
    assert xamp.device(3) == torch.device("cpu")


def test_the_accelerator_that_works_with_the_highest_priority_wins(machine: Callable[..., None]) -> None:
    machine(xpu=(OneXpu, 50), meta=(TwoCards, 70), mps=(Unplugged, 90))
    assert xamp.device() == torch.device("meta")
    assert xamp.device_type() == "meta"
    assert xamp.is_available() is True
    assert xamp.distributed_backend() == "acme"


def test_an_accelerator_wins_over_the_cpu_whatever_its_priority(machine: Callable[..., None]) -> None:
    machine(meta=(TwoCards, -5))
    assert xamp.device() == torch.device("meta")


def test_an_index_chooses_the_card(machine: Callable[..., None]) -> None:
    machine(meta=(TwoCards, 1))
    assert xamp.device(1) == torch.device("meta", 1)


def test_an_index_beyond_the_cards_lists_them(machine: Callable[..., None]) -> None:
    machine(meta=(TwoCards, 1))
    with pytest.raises(
        xamp.BackendUnavailable, match=r"device\(2\): there is no meta:2. There are meta:0 \(First\), meta:1 \(Second\)"
    ):
        xamp.device(2)


@pytest.mark.parametrize("index", [-1, "0", 1.0, True])
def test_an_index_is_an_int_from_zero_on(machine: Callable[..., None], index: object) -> None:
    machine()
    with pytest.raises(xamp.PolicyError, match=r"the index must be an int >= 0, or None"):
        xamp.device(index)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "device"), [("cpu", "cpu"), ("cpu:2", "cpu"), ("xpu", "xpu"), (" meta:1 ", "meta:1"), ("", "meta")]
)
def test_the_variable_chooses(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, value: str, device: str
) -> None:
    machine(meta=(TwoCards, 100), xpu=(OneXpu, 50))
    monkeypatch.setenv("XAMP_DEVICE", value)
    assert xamp.device() == torch.device(device)
    assert xamp.is_available() is (device != "cpu")


def test_an_index_goes_before_that_of_the_variable(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(meta=(TwoCards, 100))
    monkeypatch.setenv("XAMP_DEVICE", "meta:7")
    assert xamp.device(0) == torch.device("meta", 0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("the gpu", r"must be a device type, with or without an index"),
        ("meta:", r"must be a device type, with or without an index"),
        ("meta:-1", r"must be a device type, with or without an index"),
        ("metta", r"no registered backend serves device type 'metta'\. Did you mean 'meta'\?"),
        ("mtea", r"no registered backend serves device type 'mtea'\. Did you mean 'meta'\?"),
        ("spm", r"no registered backend serves device type 'spm'\. Did you mean 'mps'\?"),
        (
            "ups",
            r"no registered backend serves device type 'ups'\. Device types with",
        ),  # one of three letters is too much
        ("zzz", r"no registered backend serves device type 'zzz'\. Device types with"),
        ("mps", r"no backend for device type 'mps' can be used:\nmps: no card in the slot\nput one in"),
    ],
)
def test_a_wrong_variable_is_an_error_that_names_it_and_the_choices(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    machine(meta=(TwoCards, 100), mps=(Unplugged, 50))
    monkeypatch.setenv("XAMP_DEVICE", value)
    for ask in (xamp.device, xamp.device_type, xamp.is_available, xamp.distributed_backend):
        with pytest.raises(
            xamp.BackendUnavailable, match=rf"^XAMP_DEVICE={value} \(environment variable\): {message}"
        ) as e:
            ask()
        assert "Device types with a backend are cpu, meta, mps; usable here: cpu, meta." in str(e.value)


def test_a_card_that_is_not_there_is_an_error_that_names_the_variable(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(meta=(TwoCards, 100))
    monkeypatch.setenv("XAMP_DEVICE", "meta:2")
    with pytest.raises(xamp.BackendUnavailable, match=r"^XAMP_DEVICE=meta:2 .*no meta:2\. There are meta:0 \(First\)"):
        xamp.device()


def test_a_backend_from_the_environment_that_does_not_serve_the_device_is_an_error(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(meta=(TwoCards, 100))
    monkeypatch.setenv("XAMP_BACKEND", "cpu")
    assert xamp.device() == torch.device("meta")
    with pytest.raises(xamp.BackendUnavailable, match=r"^XAMP_BACKEND='cpu'.*serves cpu, not 'meta'"):
        xamp.distributed_backend()


def test_here_the_device_is_one_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XAMP_DEVICE", raising=False)
    chosen = xamp.device()
    assert torch.ones(3, device=chosen).sum().item() == 3.0
    assert xamp.is_available() is (chosen.type != "cpu")
