"""``profile``: its errors against a comparison by hand, its advice, its outputs, and that the model stays as it was.

Covers: xamp.debug.profiling, xamp.debug.profile_result, xamp.debug.measured, xamp.debug.runs.
"""

from __future__ import annotations

import copy
import json
import math
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import Conv, Mlp, Slot, loss_of, plant
from torch import nn
from torch.nn import functional as F

import xamp
from xamp.debug import profile
from xamp.errors import PolicyError


def test_the_errors_are_those_of_a_comparison_by_hand() -> None:
    torch.manual_seed(0)
    model, x = Mlp(2), torch.randn(8, 16)
    found = profile(model, x, "O5", loss=loss_of, tries=0)
    exact = copy.deepcopy(model).double()
    loss_of(exact(x.double())).backward()
    low = copy.deepcopy(model)
    optimizer = torch.optim.SGD(low.parameters(), lr=0.0)
    xamp.initialize(low, optimizer, level="O5", verbosity=0)
    output = low(x)
    with xamp.scale_loss(loss_of(output), optimizer) as scaled:
        scaled.backward()
    difference = (output.double() - exact(x.double())).norm() / exact(x.double()).norm()
    assert (found.reference, found.level, found.advice) == ("fp64", "O5", ())
    assert found.output_error == pytest.approx(float(difference.detach()))
    grads = [p.grad.double() for p in xamp.master_params(optimizer) if p.grad is not None]
    theirs = [p.grad for p in exact.parameters() if p.grad is not None]
    wrong = sum(float((a - b).square().sum()) for a, b in zip(grads, theirs, strict=True))
    size = sum(float(b.square().sum()) for b in theirs)
    assert found.gradient_error == pytest.approx((wrong / size) ** 0.5, rel=1e-5)
    row = next(row for row in found.rows if row.module == "layers.0.0")
    hand = exact.get_submodule("layers.0.0")(x.double()).detach()
    one = low.get_submodule("layers.0.0")(x.bfloat16()).detach().double()
    assert row.error == pytest.approx(float((one - hand).norm() / hand.norm()), rel=1e-6)
    assert row.largest == pytest.approx(float(hand.abs().max()))
    assert 0.0 < row.fp32_error < 1e-6
    assert (row.kind, row.dtype, row.calls) == ("Linear", "bfloat16", 1)


def test_shares_of_zeros_and_inf() -> None:
    model = nn.Sequential(nn.Identity(), Slot(), nn.Linear(4, 4))
    plant(model, "1", lambda x: x * x)
    x = torch.tensor([[1.0, 1e-5, 300.0, 1e-7], [1.0, 2.0, 1.0, 1e-6]])
    found = profile(model, x, "O3", tries=0, loss=lambda output: output.sum() * 0)
    row = next(row for row in found.rows if row.module == "1")
    assert (row.underflow, row.overflow) == (3 / 8, 1 / 8)
    assert row.error == float("inf")
    assert "37.5 %" in found.table()
    assert "12.5 %" in found.table()


def test_a_gradient_that_underflows_without_a_scale() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    lost = profile(model, x, "O2", loss=lambda y: y.sum() * 1e-9, loss_scale=1.0, tries=0)
    kept = profile(model, x, "O2", loss=lambda y: y.sum() * 1e-9, tries=0)
    assert [row.gradient_underflow for row in lost.rows if row.module == "0"] == [1.0]
    assert [row.gradient_underflow for row in kept.rows if row.module == "0"] == [0.0]
    assert (lost.gradient_error, kept.loss_scale) == (1.0, 65536.0)
    assert kept.gradient_error < 0.05


def test_the_loss_scale_is_the_largest_that_fits() -> None:
    model = nn.Linear(4, 4)
    found = profile(model, torch.ones(1, 4), "O2", loss=lambda y: (y * 8.0).sum(), tries=0, reference="fp32")
    assert found.loss_scale == 2.0**12  # 8 * 2^13 is 65536, which fp16 does not hold


def test_the_model_stays_as_it_was() -> None:
    class Unlucky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Conv()
            self.calls = 0
            self.fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            random.random()
            if self.fails and x.dtype == torch.float32:
                raise ArithmeticError("planted")
            found: torch.Tensor = F.dropout(self.inner(x), 0.5, self.training)
            return found

    model = Unlucky()
    model.inner.head.weight.grad = torch.full_like(model.inner.head.weight, 3.0)
    model.inner.blocks[0].eval()
    handle = model.register_forward_hook(lambda *_: None)

    def state() -> list[Any]:
        tensors = [*model.state_dict().values(), model.inner.head.weight.grad]
        rest = ([m.training for m in model.modules()], list(model._forward_hooks), model.calls, random.getstate())
        return [[tensor.clone() for tensor in tensors if tensor is not None], rest, torch.get_rng_state()]

    before = state()
    found = profile(model, torch.randn(4, 4, 6, 6, generator=torch.Generator().manual_seed(1)), "O1", tries=1)
    assert found.output_error < 0.05  # with dropout the runs would differ by more
    model.fails = True
    with pytest.raises(ArithmeticError, match="planted"):
        profile(model, torch.ones(4, 4, 6, 6), "O1")
    after = state()
    assert all(map(torch.equal, before[0], after[0]))
    assert before[1] == after[1]
    assert torch.equal(before[2], after[2])
    handle.remove()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_managed_model_is_taken_with_its_exact_weights(level: str) -> None:
    torch.manual_seed(0)
    plain, x = Mlp(1), torch.randn(8, 16)
    wanted = profile(plain, x, "O5", loss=loss_of, tries=0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = xamp.initialize(plain, optimizer, level=level, verbosity=0)[0]
    found = profile(model, x, "O5", loss=loss_of, tries=0)
    assert found.rows == wanted.rows
    assert xamp.session(model).policy.level == level


def test_batches_and_losses() -> None:
    model = nn.Linear(4, 3)
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    cross = nn.CrossEntropyLoss()
    with torch.no_grad():
        expected = float(cross(model(x).double(), y))
    forms: list[dict[str, Any]] = [{"batch": (x, y), "loss": cross}, {"batch": x, "loss": cross, "target": y}]
    for arguments in forms:
        assert profile(model, level="O4", tries=0, **arguments).loss_reference == pytest.approx(expected)
    assert profile(model, {"input": x}, "O4", tries=0).loss_reference > 0
    assert profile(model, [x], "O4", tries=0, reference="fp32").reference == "fp32"


class _Masked(nn.Module):
    """Takes an input and a mask, which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        output: torch.Tensor = self.layer(x if mask is None else x * mask)
        return output


class _NeedsMask(_Masked):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, mask)


def test_a_forward_of_two_arguments_and_a_loss_of_two() -> None:
    model = _Masked()
    x, mask, y = torch.randn(5, 4), torch.randint(2, (5, 4)).float(), torch.tensor([0, 1, 2, 0, 1])
    cross = nn.CrossEntropyLoss()
    with torch.no_grad():
        whole, masked = (float(cross(out.double(), y)) for out in (model(x), model(x, mask)))
    forms: list[tuple[dict[str, Any], float]] = [
        ({"batch": (x, y), "loss": cross}, whole),
        ({"batch": (x, mask, y), "loss": cross}, masked),
        ({"batch": (x, mask), "loss": cross, "target": y}, masked),
        ({"batch": {"x": x, "mask": mask}, "loss": cross, "target": y}, masked),
        ({"batch": (x, mask), "loss": lambda output: cross(output, y)}, masked),
        ({"batch": (x, mask, y), "loss": lambda output, *rest: cross(output, y)}, masked),
    ]
    for arguments, expected in forms:
        assert profile(model, level="O4", tries=0, **arguments).loss_reference == pytest.approx(expected)
    both = _NeedsMask()
    both.load_state_dict(model.state_dict())
    for batch in (((x, mask), y), [[x, mask], y]):
        assert profile(both, batch, "O4", cross, tries=0).loss_reference == pytest.approx(masked)


def test_a_loss_that_gets_no_target_says_how_to_give_one() -> None:
    model, x = _Masked(), torch.randn(5, 4)
    for batch in (x, {"x": x}, (x,)):
        with pytest.raises(PolicyError, match=r"profile\(loss=CrossEntropyLoss\).* no target. Pass target=y"):
            profile(model, batch, "O4", nn.CrossEntropyLoss())
    with pytest.raises(PolicyError, match=r"profile\(loss=three\).* output and one target. .*loss=lambda output"):
        profile(model, (x, x, x), "O4", three)
    with pytest.raises(PolicyError, match=r"output and one target"):
        profile(model, x, "O4", loss_of, target=x)


def test_a_target_that_the_forward_took_says_how_to_give_one() -> None:
    x, mask = torch.randn(5, 4), torch.randint(2, (5, 4)).float()
    for batch in ((x, mask), [x, mask]):
        with pytest.raises(PolicyError, match=r"profile\(batch=...\): .* takes the last of the batch's 2 .* target=y"):
            profile(_NeedsMask(), batch, "O4", nn.CrossEntropyLoss())


def three(output: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return output.sum() + x.sum() + y.sum()


def test_texts_and_picture(tmp_path: Path) -> None:
    model = Mlp(2)
    plant(model, "layers.1.2", lambda x: x + ((x.detach() * 1e-9) * 1e9 - x.detach()))
    found = profile(model, model.batch(), "O2", loss=loss_of, tries=1)
    told = json.loads(found.to_json())
    assert told["keep_fp32"] == found.keep_fp32 == ["layers.1.2"]
    assert [row["module"] for row in told["rows"]] == [row.module for row in found.rows]
    assert found.rows[0].module == "layers.0.0"
    assert "keep_fp32=['layers.1.2']" in found.table()
    assert found.table(rows=1).count("(") < found.table().count("(")
    found.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(PolicyError, match="cannot be written"):
        found.plot(tmp_path / "absent" / "a.png")


def test_wrong_arguments() -> None:
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    wrong: list[tuple[str, dict[str, Any]]] = [
        (r"model=str", {"model": "m"}),
        (r"loss=int", {"loss": 3}),
        (r"reference='fp16'", {"reference": "fp16"}),
        (r"tries=-1", {"tries": -1}),
        (r"verbosity", {"verbosity": 0}),
        (r"loss must be a tensor of one element.*shape \(1, 2\)", {"loss": lambda y: y}),
        (r"level='O9'", {"level": "O9"}),
    ]
    for match, arguments in wrong:
        with pytest.raises(PolicyError, match=match):
            profile(**{"model": model, "batch": x, **arguments})
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(PolicyError, match=r"cannot be copied by copy\.deepcopy: TypeError"):
        profile(model, x)


# ---------------------------------------------------------------- modules that are at fault together


class Overflows(nn.Module):
    """Too large for fp16 in between; with a layer inside that is not at fault."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.layer(x) * 0 + torch.exp(40.0 * x.abs().clamp(0.5, 1.0))).log() / 40.0
        return found


class Backward(nn.Module):
    """Finite, but in fp16 its gradient is not, whatever the loss scale: the power's derivative is 65000."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.abs() * 0 + 6e-8).pow(0.25) + x


class Parallel(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(sum((part(x) for part in self.parts), torch.zeros(())))
        return found


def linear() -> nn.Module:
    return nn.Linear(16, 16)


TOGETHER: dict[str, tuple[Any, list[str]]] = {
    "one after the other": (lambda: nn.Sequential(linear(), Overflows(), linear(), Overflows(), linear()), ["1", "3"]),
    "three": (
        lambda: nn.Sequential(linear(), Overflows(), *(linear() for _ in range(8)), Overflows(), linear(), Overflows()),
        ["1", "10", "12"],
    ),
    "side by side": (lambda: Parallel(Overflows(), linear(), Overflows()), ["parts.0", "parts.2"]),
    "in backward": (lambda: nn.Sequential(linear(), Backward(), linear(), Backward(), linear()), ["1", "3"]),
    "forward and backward": (lambda: nn.Sequential(linear(), Overflows(), linear(), Backward(), linear()), ["1", "3"]),
}


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize(("make", "culprits"), TOGETHER.values(), ids=TOGETHER)
def test_modules_that_are_at_fault_together_are_found(make: Any, culprits: list[str], level: str) -> None:
    """With what is advised output and gradients are finite, and without any of it they are not."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(4, 16)
    found = profile(model, x, level)
    assert sorted(found.keep_fp32) == sorted(culprits)
    assert found.advice[0].gain > 0.9
    assert f"keep_fp32={found.keep_fp32}" in found.table()
    for left in (None, *culprits):
        kept = [name for name in found.keep_fp32 if name != left]
        again = profile(model, x, level, keep_fp32=kept, tries=0)
        assert (math.isfinite(again.output_error) and math.isfinite(again.gradient_error)) == (left is None), left
    told = json.loads(found.to_json())
    assert told["advice"][0]["modules"] == found.keep_fp32


def test_what_no_loss_scale_cures_is_said() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    forward = profile(nn.Sequential(linear(), Overflows()), x, "O2", tries=0)
    backward = profile(nn.Sequential(linear(), Backward()), x, "O2", tries=0)
    static = profile(nn.Sequential(linear(), Backward()), x, "O3", tries=0)
    fine = profile(nn.Sequential(linear(), linear()), x, "O2", tries=0)
    assert "The forward gives inf or nan, which no loss scale changes." in forward.table()
    assert "No loss scale helps: at 1, the smallest, gradients are still inf or nan." in backward.table()
    told = [json.loads(each.to_json())["no_scale_helps"] for each in (forward, backward, static, fine)]
    assert told == [True, True, False, False]
    assert "No loss scale" not in static.table() + fine.table()
