"""What a backend declares is tried: each untrue claim is found, each true one passes.

Covers: xamp.doctor.declared, xamp.registry.findings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import pytest
import torch

from xamp.backend_kit import fp8_recipes
from xamp.contract import Backend, BackendSpec, Capabilities
from xamp.doctor import declared
from xamp.doctor.declared import find_mismatches
from xamp.plans import available
from xamp.policy import LEVELS
from xamp.registry import trials
from xamp.registry.findings import DEFECT, WARNING

CPU = torch.device("cpu")
TRUE: dict[str, Any] = {"fast_dtypes": ("bfloat16",), "fused_optimizers": ("SGD", "Adam")}


class Declaring(Backend):
    """A backend on the CPU that declares what the test says."""

    def __init__(self, **declared: Any) -> None:
        super().__init__(BackendSpec("declaring", ("cpu",), "a:B"))
        self.declared = {**TRUE, **declared}

    def capabilities(self, device: torch.device | None = None) -> Capabilities:
        return Capabilities(**self.declared)


def texts(backend: Backend, severity: str = DEFECT) -> list[str]:
    return [finding.text for finding in find_mismatches(backend, CPU) if finding.severity == severity]


def test_what_is_true_is_no_finding() -> None:
    assert find_mismatches(Declaring(), CPU) == []
    assert find_mismatches(Declaring(fp8=fp8_recipes(Declaring(), CPU), fp8_rehearsed=("mxfp8",)), CPU) == []
    fp16_only = {"levels": ("O0", "O1"), "dtypes": ("float16",), "fast_dtypes": ("float16",)}
    assert find_mismatches(Declaring(**fp16_only), CPU) == []
    assert find_mismatches(Declaring(levels=("O0",), dtypes=(), fast_dtypes=()), CPU) == []


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        (
            {"levels": ("O0", "O4", "O7")},
            "declares level 'O7', but there is no such level; there are O0, O1, O2, O3, O4,",
        ),
        (
            {"dtypes": ("bfloat16",), "levels": ("O0", "O1", "O4")},
            "declares level 'O1', but not float16, which it computes in (dtypes=('bfloat16',))",
        ),
        ({"levels": ("O1", "O4")}, "declares levels=('O1', 'O4'), but O0 is missing, which every device can run"),
        (
            {"levels": ("O0", "O5")},
            "declares fast_dtypes=('bfloat16',), but not the level that 'auto' means then, O4",
        ),
        (
            {"fast_dtypes": ("float32",)},
            "declares fast_dtypes=('float32',), but float32 is not among its dtypes=('float16', 'bfloat16')",
        ),
        (
            {"dtypes": ("float16", "bfloat16", "float17")},
            "declares dtype 'float17', but torch has no floating-point dtype of that name",
        ),
        (
            {"dtypes": ("float16", "bfloat16", "int8")},
            "declares dtype 'int8', but torch has no floating-point dtype of that name",
        ),
        ({"fused_optimizers": ("Nope",)}, "declares fused optimizer 'Nope', but torch.optim has none of that name"),
        (
            {"fused_optimizers": ("lr_scheduler",)},
            "declares fused optimizer 'lr_scheduler', but torch.optim has none of",
        ),
        ({"fused_optimizers": ("Rprop",)}, "declares fused optimizer 'Rprop', but its step fails: TypeError: "),
        ({"process_group": "warp"}, "declares process_group 'warp', but torch.distributed knows none of that name; it"),
        (
            {"op_policies": ("native", "magic")},
            "declares op_policy 'magic', but there is no such op policy; there are ",
        ),
        ({"fp8": ("e4m3",)}, "declares fp8 by 'e4m3', but there is no such recipe; there are tensorwise, rowwise, "),
        ({"fp8_rehearsed": ("nvfp4",)}, "declares fp8 by 'nvfp4', but there is no such recipe"),
        ({"fp8": ("mxfp8",)}, "declares fp8 by 'mxfp8', but its products fail, are wrong, or are multiplied in fp32"),
        ({"fp8": "mxfp8"}, "declares fp8='mxfp8', but it must be a tuple of strings"),
        ({"overflow": "wrap"}, "declares overflow='wrap', but it must be one of inf, flag"),
        ({"levels": "O1"}, "declares levels='O1', but it must be a tuple of strings"),
        ({"dtypes": (torch.float16,)}, "declares dtypes=(torch.float16,), but it must be a tuple of strings"),
    ],
)
def test_an_untrue_claim_is_found_alone(declared: dict[str, Any], text: str) -> None:
    (found,) = texts(Declaring(**declared))
    assert found.startswith(text)


def test_a_process_group_that_this_build_lacks_is_a_warning() -> None:
    lacking = [name for name in ("nccl", "mpi") if not torch.distributed.is_backend_available(name)]
    backend = Declaring(process_group=lacking[0])
    assert texts(backend) == []
    assert texts(backend, WARNING) == [
        f"declares process_group {lacking[0]!r}, but this build of torch comes without it: one process only"
    ]


def test_a_torch_without_distributed_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    (text,) = texts(Declaring(), WARNING)
    assert text.endswith("but this torch is built without torch.distributed")


def test_every_dtype_is_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def defect_of(device: torch.device, dtype: str, keeps_inf: bool, unscale_: Any) -> str:
        tried.append((dtype, keeps_inf))
        return "it is wrong" if dtype == "bfloat16" else ""

    monkeypatch.setattr(declared, "defect_of", defect_of)
    assert texts(Declaring()) == ["declares dtype 'bfloat16', but it is wrong"]
    texts(Declaring(overflow="flag"))
    assert tried == [("float16", True), ("bfloat16", True), ("float16", False), ("bfloat16", False)]


def test_a_chip_that_saturates_is_not_asked_to_keep_an_inf(monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *args, **kwargs: full(*args, **kwargs).clamp(-65504, 65504))
    assert "the device saturates" in trials.defect_of(CPU, "float16")
    assert trials.defect_of(CPU, "float16", keeps_inf=False) == ""


# --- unscaling


class Flagged(Declaring):
    """A chip that saturates: its overflow is a flag, cleared before each backward."""

    flag = True

    def clear_overflow(self, device: torch.device) -> None:
        self.flag = False

    def make_overflow_(self, grad: torch.Tensor) -> None:
        self.flag = True

    def unscale_(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        for grad in grads:
            grad.mul_(inv_scale)
        found_inf.fill_(float(self.flag))


def test_an_overflow_by_flag_is_tried_as_the_backend_makes_one() -> None:
    assert find_mismatches(Flagged(overflow="flag"), CPU) == []


def replaced(name: str, method: Callable[..., Any]) -> Declaring:
    return type("Replaced", (Flagged,), {name: method})(overflow="flag")  # type: ignore[no-any-return]


def fails(*arguments: object) -> NoReturn:
    raise OSError("no flag")


@pytest.mark.parametrize(
    ("name", "method", "lies"),
    [
        ("make_overflow_", lambda self, grad: None, ["unscale_ overlooks an overflow"]),
        ("clear_overflow", lambda self, device: None, ["unscale_ sees one where there is none"]),
        (
            "unscale_",
            lambda self, grads, found, inv: found.fill_(float(self.flag)),
            ["unscale_ does not multiply the gradient by inv_scale"],
        ),
        ("unscale_", fails, ["unscaling a gradient fails: OSError: no flag"]),
        ("make_overflow_", fails, ["unscaling an overflow fails: OSError: no flag"]),
    ],
)
def test_a_backend_whose_unscaling_is_wrong_is_found(name: str, method: Callable[..., Any], lies: list[str]) -> None:
    assert texts(replaced(name, method)) == [f"declares overflow='flag', but {lie}" for lie in lies]


# --- fused optimizers


class Step(torch.optim.SGD):
    """An optimizer whose fused implementation does what ``rule`` says with the flag."""

    rule: Callable[[float], bool]

    def __init__(self, params: Any, lr: float, fused: bool) -> None:
        super().__init__(params, lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if type(self).rule(self.found_inf.item()):  # type: ignore[attr-defined]
            with torch.no_grad():
                for param in self.param_groups[0]["params"]:
                    param.sub_(0.1)


@pytest.mark.parametrize(
    ("rule", "lie"),
    [
        (lambda found: not found, []),
        (lambda found: True, ["its step changes the parameter where found_inf says to skip it"]),
        (lambda found: False, ["its step changes nothing"]),
    ],
)
def test_a_fused_optimizer_must_skip_by_the_flag_and_step_without(
    rule: Callable[[float], bool], lie: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim, "Stepping", type("Stepping", (Step,), {"rule": staticmethod(rule)}), raising=False)
    assert texts(Declaring(fused_optimizers=("Stepping",))) == [
        f"declares fused optimizer 'Stepping', but {each}" for each in lie
    ]


# --- whatever happens


@pytest.mark.parametrize("error", [OSError("driver gone"), SystemExit(3)])
def test_a_trial_that_raises_is_a_finding(error: BaseException) -> None:
    def raises(self: Backend, device: Any = None) -> NoReturn:
        raise error

    (text,) = texts(replaced("capabilities", raises))
    assert text.startswith(f"trying what it declares ended in {type(error).__name__}: ")


def test_ctrl_c_gets_through() -> None:
    def interrupted(self: Backend, device: Any = None) -> NoReturn:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_mismatches(replaced("capabilities", interrupted), CPU)


def test_every_level_that_auto_may_mean_is_known_to_the_trial() -> None:
    assert [level.name for level in LEVELS.values() if level.dtype == "bfloat16" and not level.casts_parameters] == [
        "O4"
    ]
    assert [level.name for level in LEVELS.values() if level.dtype == "float16" and not level.casts_parameters] == [
        "O1"
    ]


@pytest.mark.parametrize(
    ("why", "line"),
    [
        ("", "yes, where fused='one-pass' asks for it"),
        ("Triton is not installed", "no (Triton is not installed)"),
    ],
)
def test_one_pass_is_a_line_and_no_finding(why: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device that is not the host, which has torch's own kernels."""
    monkeypatch.setattr(available, "refusal", lambda device: why)
    assert declared.one_pass(Declaring(), torch.device("meta")) == line
    assert declared.one_pass(Declaring(), CPU) == ""
    assert declared.one_pass(Declaring(levels=("O0", "O4")), torch.device("meta")) == ""
    assert declared.find_gaps(Declaring(), CPU) == []


def test_kernels_that_should_run_and_do_not_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "refusal", lambda device: "a kernel is wrong")
    assert not any("one pass" in finding.text for finding in declared.find_gaps(Declaring(), CPU))
    monkeypatch.setattr(available, "expects", lambda device: True)
    (found,) = [finding for finding in declared.find_gaps(Declaring(), CPU) if "one pass" in finding.text]
    assert (found.severity, found.text.endswith("slower: a kernel is wrong")) == ("warning", True)
    assert "install the Triton that this torch was built with" in found.cure
    monkeypatch.setattr(available, "refusal", lambda device: "")
    assert not any("one pass" in finding.text for finding in declared.find_gaps(Declaring(), CPU))
