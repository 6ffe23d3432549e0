"""Linear layers in fp8: values and gradients against products in fp64, and where the recipe holds.

Covers: xamp.casting.fp8_linear, xamp.casting.fp8_regions.
"""

from __future__ import annotations

import collections
import copy
import math
import shutil
import subprocess
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked_python import python
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import xamp
from xamp.casting import fp8_regions
from xamp.casting.features_in_use import needs
from xamp.contract import Backend, Capabilities
from xamp.errors import PolicyError, StateError, UnsupportedPolicy
from xamp.registry import device_in_use
from xamp.torch_compat import scaled
from xamp.values.recipes import RECIPES

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated")  # inductor imports what uses it

RECIPE = [*RECIPES]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def random(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(bias: bool = False, inputs: int = 64, outputs: int = 96) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs, bias=bias)


def start(model: Any, recipe: str = "tensorwise", **options: Any) -> Any:
    options = {"keep_bf16": (), "cast_model_outputs": False, "verbosity": 0, **options}
    return xamp.initialize(model, level="fp8", fp8=recipe, **options)


def rounded(matrix: torch.Tensor, recipe: str, axis: int, gradient: bool = False, again: bool = False) -> Any:
    """What a matrix is after the cast and back, in fp64, by the formulas of the recipe written out."""
    wide = matrix.double()
    dtype = E5M2 if gradient and recipe == "tensorwise" else E4M3
    most = torch.finfo(dtype).max
    if recipe == "mxfp8":
        blocks = (wide if axis == 1 else wide.t()).unflatten(1, (-1, 32))
        unit = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))) - 8)
        made = (blocks / unit).clamp(-most, most).float().to(dtype).double().mul(unit).flatten(1)
        return made if axis == 1 else made.t()
    whole = recipe == "tensorwise" or (again and recipe == "rowwise_gw_hp")
    largest = wide.abs().amax() if whole else wide.abs().amax(axis, keepdim=True)
    scale = (most / largest).float()
    scale = scale if recipe == "tensorwise" else torch.exp2(torch.floor(torch.log2(scale)))
    made = (matrix.float() * scale).clamp(-most, most).to(dtype).double() / scale.double()
    return made


def close(made: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Assert that ``made`` is the product but for sums in fp32, and roundings to bf16: one, or two after a scale."""
    exact, sizes = left @ right, left.abs() @ right.abs()
    bound = 2.0**-7 * exact.abs() + left.shape[1] * 2.0**-24 * sizes
    assert ((made.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("recipe", RECIPE)
def test_output_and_gradients_are_the_products_of_what_was_cast(recipe: str) -> None:
    model = start(layer(), recipe)
    x = random(32, 64).bfloat16().requires_grad_()
    out = random(32, 96, seed=1).bfloat16()
    made = model(x)
    made.backward(out)
    weight = model.weight.detach()
    assert made.dtype == torch.bfloat16
    close(made, rounded(x.detach(), recipe, 1), rounded(weight.t(), recipe, 0))
    close(x.grad, rounded(out, recipe, 1, True), rounded(weight, recipe, 0, again=True))
    left, right = rounded(out.t(), recipe, 1, True), rounded(x.detach(), recipe, 0)
    if recipe == "rowwise_gw_hp":
        left, right = out.t().double(), x.detach().double()
    close(model.weight.grad, left, right)
    assert model.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (1, 2, 3, 64)])
@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_inputs_of_any_rank(recipe: str, shape: tuple[int, ...], bias: bool) -> None:
    model, x = start(layer(bias), recipe), random(*shape).requires_grad_()
    flat = x.detach().reshape(-1, 64).requires_grad_()
    made, alike = model(x), model(flat)
    assert made.shape == (*shape[:-1], 96)
    assert torch.equal(made.reshape(-1, 96), alike)
    made.float().square().sum().backward()
    whole, model.weight.grad = model.weight.grad, None
    alike.float().square().sum().backward()
    assert torch.equal(x.grad.reshape(-1, 64), flat.grad)
    assert torch.equal(whole, model.weight.grad)


def test_the_bias_is_added_in_bf16() -> None:
    with_bias, without = start(layer(True)), start(layer())
    with torch.no_grad():
        without.weight.copy_(with_bias.weight)
    x = random(32, 64)
    made = with_bias(x)
    assert torch.equal(made, without(x) + with_bias.bias.bfloat16())
    made.sum().backward()
    assert torch.equal(with_bias.bias.grad, torch.full((96,), 32.0))
    assert with_bias.bias.grad.dtype == torch.float32


@pytest.mark.parametrize("rows", [0, 32])
@pytest.mark.parametrize("recipe", RECIPE)
def test_no_rows_and_zeros_give_zeros(recipe: str, rows: int) -> None:
    model, x = start(layer(True), recipe), torch.zeros(rows, 64).requires_grad_()
    made = model(x)
    assert torch.equal(made, model.bias.bfloat16().expand(rows, 96))
    made.backward(torch.zeros_like(made))
    for found, shape in ((x.grad, (rows, 64)), (model.weight.grad, (96, 64)), (model.bias.grad, (96,))):
        assert found is not None
        assert torch.equal(found, torch.zeros(shape))


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("recipe", RECIPE)
def test_what_is_not_finite_gives_nan(recipe: str, value: float) -> None:
    model, x = start(layer(), recipe), random(32, 64)
    x[4, 9] = value
    assert model(x)[4].isnan().all()


# --- what is computed


class Counter(TorchDispatchMode):
    """Counts operators: products, maxima, casts to fp8."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        if name in ("amax", "max", "mm", "_scaled_mm"):
            self.found[{"max": "amax", "_scaled_mm": "mm"}.get(name, name)] += 1
        elif name == "_to_copy" and kwargs.get("dtype") in (E4M3, E5M2):
            self.found["cast"] += 1
        elif name in ("_local_scalar_dense", "item"):
            self.found["wait"] += 1
        return func(*args, **kwargs)


@pytest.mark.parametrize(("recipe", "casts"), [*zip(RECIPE, [3, 6, 4, 6], strict=True)])
def test_products_maxima_and_casts_of_a_layer_are_counted(recipe: str, casts: int) -> None:
    model, x = start(layer(), recipe), random(32, 64).bfloat16().requires_grad_()
    with Counter() as counter:
        model(x).sum().backward()
    assert counter.found == {"mm": 3, "amax": casts, "cast": casts}


@pytest.mark.parametrize("recipe", RECIPE)
def test_what_is_kept_for_the_backward(recipe: str) -> None:
    """The fp8 values, or the input as it is and the weight itself; nothing where no gradient is needed."""
    model, x = start(layer(), recipe), random(32, 64).bfloat16().requires_grad_()
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x)
        big = [each for each in kept if each.numel() > 1]
        if recipe == "tensorwise":
            assert sorted((each.dtype, each.numel()) for each in big) == [(E4M3, 32 * 64), (E4M3, 96 * 64)]
        else:
            assert [each.data_ptr() for each in big] == [x.data_ptr(), model.weight.data_ptr()]
        kept.clear()
        model.weight.requires_grad_(False)
        model(x)
        assert sum(each.numel() for each in kept if each.numel() > 1) == 96 * 64  # the input is not kept
        kept.clear()
        model(x.detach())
        assert not kept


@pytest.mark.parametrize("recipe", RECIPE)
@pytest.mark.parametrize("needed", ["input", "weight"])
def test_only_the_gradients_that_are_needed_are_computed(recipe: str, needed: str) -> None:
    model, x = start(layer(), recipe), random(32, 64).bfloat16().requires_grad_(needed == "input")
    model.weight.requires_grad_(needed == "weight")
    made = model(x)
    with Counter() as counter:
        made.sum().backward()
    assert counter.found["mm"] == 1
    assert (x.grad is None) == (needed == "weight")


@pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode])
def test_without_gradients(block: Any) -> None:
    model, x = start(layer(True)), random(32, 64)
    with block():
        made = model(x)
    assert not made.requires_grad
    assert torch.equal(made, model(x).detach())


def test_a_second_derivative_is_refused_by_name() -> None:
    model, x = start(layer()), random(32, 64).requires_grad_()
    loss = model(x).float().square().sum()
    with pytest.raises(StateError, match=r"create_graph=True.*keep_bf16=\.\.\..*level 'O4'"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_transforms_of_functions_are_refused_by_name() -> None:
    model, x = start(layer(True)), random(32, 64)
    said = r"torch.func \(grad, vjp, jvp, ...\) through a linear layer in fp8.*keep_bf16=\.\.\."
    with pytest.raises(StateError, match=said):
        torch.func.grad(lambda x: model(x).float().sum())(x)
    with pytest.raises(RuntimeError, match=r"shape|size"):  # of others nothing else is said
        model(random(32, 48))


@pytest.mark.parametrize("bias", [False, True])
def test_forward_mode_is_refused_by_name(bias: bool) -> None:
    model, x = start(layer(bias)), random(32, 64)
    with forward_ad.dual_level(), pytest.raises(StateError, match=r"forward-mode derivatives.*keep_bf16=\.\.\."):
        model(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("recipe", RECIPE)
def test_a_backward_inside_a_region_computes_the_same(recipe: str) -> None:
    found = []
    for inside in (False, True):
        model, x = start(layer(True), recipe), random(32, 64).requires_grad_()
        loss = model(x).float().square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss.backward()
        found.append((x.grad, model.weight.grad, model.bias.grad))
    assert all(map(torch.equal, *found))


# --- where the recipe holds


class Counting(Backend):
    """The backend of the CPU, which counts products in fp8."""

    calls: list[tuple[str, str]] = []

    def scaled_mm(self, left: Any, right: Any, dtype: torch.dtype, fast: bool) -> torch.Tensor:
        self.calls.append((left.scaling, right.scaling))
        return super().scaled_mm(left, right, dtype, fast)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The products in fp8 of the test."""
    start(layer())
    backend = Counting(fp8_regions._serving["cpu"].spec)
    backend.calls = []
    monkeypatch.setattr(fp8_regions, "install", lambda *_: None)
    monkeypatch.setitem(fp8_regions._serving, "cpu", backend)
    return backend.calls


def test_the_backend_casts_and_multiplies(products: list[Any]) -> None:
    model = start(layer(), "rowwise_gw_hp")
    model(random(4, 64).requires_grad_()).sum().backward()
    assert products == [("row", "row"), ("row", "tensor_power")]


class CastsBoth(Backend):
    """Casts along both dimensions at once, as one operator of an Ascend 950 does; records what is asked of it."""

    asked: list[tuple[int, ...]]

    def to_fp8_both(self, matrix: torch.Tensor, kind: str, scaling: str) -> Any:
        self.asked.append(tuple(matrix.shape))
        return super().to_fp8(matrix, kind, scaling, 1), super().to_fp8(matrix, kind, scaling, 0)

    def to_fp8(self, matrix: torch.Tensor, kind: str, scaling: str, axis: int) -> Any:
        self.asked.append((*matrix.shape, axis))
        return super().to_fp8(matrix, kind, scaling, axis)


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
@pytest.mark.parametrize(
    ("needed", "asked"),
    [
        (("input", "weight"), [(32, 64), (96, 64), (32, 96)]),
        (("input",), [(96, 64), (32, 64, 1), (32, 96, 1)]),
        (("weight",), [(32, 64), (64, 96, 0), (96, 32, 1)]),
        ((), [(32, 64, 1), (64, 96, 0)]),
    ],
    ids=["both", "input", "weight", "none"],
)
def test_one_operator_for_both_dimensions_casts_each_matrix_once(
    recipe: str, needed: tuple[str, ...], asked: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three casts a layer in place of six, and the same values. What no backward needs is cast along one dimension."""

    def run() -> list[Any]:
        model, x = start(layer(), recipe), random(32, 64).bfloat16().requires_grad_("input" in needed)
        model.weight.requires_grad_("weight" in needed)
        made = model(x)
        if needed:
            made.backward(random(32, 96, seed=1).bfloat16())
        return [made, x.grad, model.weight.grad]

    expected = run()
    backend = CastsBoth(fp8_regions._serving["cpu"].spec)
    backend.asked = []
    monkeypatch.setattr(fp8_regions, "install", lambda *_: None)
    monkeypatch.setitem(fp8_regions._serving, "cpu", backend)
    for found, value in zip(run(), expected, strict=True):
        assert (found is None and value is None) or torch.equal(found, value)
    assert backend.asked == asked
    backend.asked.clear()
    with torch.no_grad():
        start(layer(), recipe)(random(32, 64).requires_grad_())
    assert backend.asked == [(32, 64, 1), (64, 96, 0)]


def test_recipes_that_cast_otherwise_in_the_backward_do_not_ask_such_an_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start(layer())
    backend = CastsBoth(fp8_regions._serving["cpu"].spec)
    monkeypatch.setattr(fp8_regions, "install", lambda *_: None)
    monkeypatch.setitem(fp8_regions._serving, "cpu", backend)
    for recipe, casts in (("tensorwise", 3), ("rowwise_gw_hp", 4)):
        backend.asked = []
        start(layer(), recipe)(random(32, 64).requires_grad_()).sum().backward()
        assert [len(each) for each in backend.asked] == [3] * casts


class Gpt2Layer(nn.Module):
    """As transformers has it: the weight is (inputs, outputs)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(random(64, 96)), nn.Parameter(random(96, seed=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


@pytest.mark.parametrize("recipe", RECIPE)
def test_addmm_with_a_bias_is_a_linear_layer(recipe: str) -> None:
    model, alike = start(Gpt2Layer(), recipe), start(layer(True), recipe)
    with torch.no_grad():
        alike.weight.copy_(model.weight.t())
        alike.bias.copy_(model.bias)
    x = random(32, 64)
    made, wanted = model(x), alike(x)
    made.float().square().sum().backward()
    wanted.float().square().sum().backward()
    assert torch.equal(made, wanted)
    assert torch.equal(model.weight.grad, alike.weight.grad.t())


class Sums(nn.Module):
    """Products that are no linear layers."""

    def forward(self, x: torch.Tensor) -> Any:
        square = x[:16, :16]
        sums = [torch.addmm(square, square, square), torch.addmm(x[0, :16], square, square, beta=0.5)]
        sums += [torch.addmm(x[0, :16], square, square, alpha=2), torch.addmm(x[0, :1], square, square)]
        sums += [F.linear(square, square, each) for each in (x[0, :1], x[0, 0])]
        return [
            *sums,
            x @ x.t(),
            F.linear(x, x[0]),
            F.linear(x[:, :24], x[:16, :24]),
            torch.baddbmm(x, x[None], x[None]),
        ]


def test_other_products_stay_in_bf16(products: list[Any]) -> None:
    x = random(64, 64)
    made, wanted = start(Sums())(x), xamp.initialize(Sums(), level="O4", cast_model_outputs=False, verbosity=0)(x)
    assert products == []
    assert all(map(torch.equal, made, wanted))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float32])
def test_only_what_autocast_casts_runs_in_fp8(dtype: torch.dtype, products: list[Any]) -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, random(16, 64).to(dtype))

    start(Own())(random(32, 64).to(dtype))
    assert len(products) == (dtype is not torch.float64)


@pytest.mark.parametrize(
    "region",
    [
        lambda: torch.autocast("cpu", enabled=False),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: xamp.autocast(dtype=torch.bfloat16),
        xamp.disable_casts,
    ],
    ids=["off", "fp16", "xamp.autocast", "disable_casts"],
)
def test_other_regions_inside(region: Any, products: list[Any]) -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = layer(), layer(inputs=96), layer(inputs=96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.first(x)
            with region():
                made = self.second(made.float())
            return self.third(made)  # type: ignore[no-any-return]

    start(Inside())(random(8, 64))
    assert len(products) == 2


def test_a_managed_model_inside_has_its_own_policy(products: list[Any]) -> None:
    inner = xamp.initialize(layer(inputs=96), level="O4", verbosity=0)
    outer = start(nn.Sequential(layer(), inner))
    outer(random(8, 64))
    assert len(products) == 1


def test_the_state_is_as_before_after_a_region() -> None:
    model = start(layer())

    def states() -> list[Any]:
        return [(torch.is_autocast_enabled(device), needs.fp8.recipe()) for device in ("cpu", "ipu", "maia", "mtia")]

    before = states()
    model(random(4, 64))
    assert states() == before
    with xamp.autocast(fp8="mxfp8"):
        assert fp8_regions.recipe_here() == "mxfp8"
        with xamp.autocast(dtype=torch.bfloat16):
            assert fp8_regions.recipe_here() is None
            model(random(4, 64))
            with xamp.autocast(fp8="rowwise"):
                assert fp8_regions.recipe_here() == "rowwise"
        assert fp8_regions.recipe_here() == "mxfp8"
    assert states() == before


@pytest.mark.parametrize("overload", ["linear", "addmm"])
def test_torchs_own_autocast_gives_what_it_gave(overload: str) -> None:
    """Also where a weight is written to without a new version, while a graph of before is still there."""
    x, weight, bias = random(8, 64), layer().weight, nn.Parameter(random(96))
    if overload == "addmm":
        weight = nn.Parameter(weight.detach().t().contiguous())
    start(layer())(random(8, 64))
    kept = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            made = F.linear(x, weight, bias) if overload == "linear" else torch.addmm(bias, x, weight)
        matrix = weight.bfloat16().t() if overload == "linear" else weight.bfloat16()
        assert torch.equal(made, torch.addmm(bias.bfloat16(), x.bfloat16(), matrix))
        kept.append(made)
        weight.data.mul_(2)
    assert F.linear(x, random(96, 64)).dtype == torch.float32


def test_a_weight_is_cast_once_in_a_region_of_xamp_and_anew_after_a_step() -> None:
    x, weight = random(8, 64), nn.Parameter(random(96, 64))
    optimizer = start(layer()) and torch.optim.SGD([weight], lr=0.5)
    scaler = xamp.GradScaler(init_scale=1.0)
    with xamp.autocast("cpu", torch.bfloat16):
        one, two = F.linear(x, weight), F.linear(x, weight)
        nodes: list[Any] = [one.grad_fn, two.grad_fn]
        assert len({each.next_functions[1][0].next_functions[0][0] for each in nodes}) == 1
        scaler.scale((one + two).float().square().mean()).backward()
        version = weight._version
        with torch.no_grad():
            weight.data.sub_(0.5)  # no version tells
        assert weight._version == version
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(F.linear(x, weight), x.bfloat16() @ weight.bfloat16().t())


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_backward_recomputes_is_cast_from_the_weights_as_they_are(reentrant: bool) -> None:
    """No region of xamp drops what is cast there."""

    def trained(level: Any) -> list[float]:
        weights = [nn.Parameter(0.1 * random(32, 32, seed=n)) for n in range(2)]
        optimizer, x, losses = torch.optim.SGD(weights, lr=0.1), random(8, 32).requires_grad_(), []
        for _ in range(4):
            optimizer.zero_grad()
            with level():
                made: Any = checkpoint(
                    lambda x: F.linear(F.linear(x, weights[0]), weights[1]), x, use_reentrant=reentrant
                )
                loss = (made.float() - 1).square().sum()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        return losses

    start(layer())
    assert trained(lambda: xamp.autocast("cpu", torch.bfloat16)) == trained(
        lambda: torch.autocast("cpu", torch.bfloat16)
    )


def test_averages_that_are_swapped_in_are_cast() -> None:
    model = xamp.initialize(layer(), level="O4", cast_model_outputs=False, verbosity=0)
    start(layer())
    average = xamp.ema(model, decay=0.5)
    with torch.no_grad():
        model.weight.mul_(3)
    x = random(8, 64)
    with xamp.autocast("cpu", torch.bfloat16):
        before = F.linear(x, model.weight)
        with average.swapped():
            assert torch.equal(F.linear(x, model.weight), x.bfloat16() @ model.weight.bfloat16().t())
            assert not torch.equal(F.linear(x, model.weight), before)


_THREADS = """
import threading, torch, xamp
from torch import nn

xamp.initialize(nn.Sequential(*(nn.Linear(64, 64) for _ in range(2))), level="fp8", verbosity=0)

def work():
    layer, x = nn.Linear(64, 64), torch.ones(4, 64)
    for _ in range(1000):
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)  # no graph is left: leaving the region frees the cast

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("done")
"""


def test_threads_in_regions_of_torch_do_not_wait_for_each_other_for_ever() -> None:
    done = subprocess.run([python(), "-c", _THREADS], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("overload", ["linear", "addmm"])
def test_what_stands_in_for_torchs_entry_casts_too(overload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.9 its own entry cannot be called any more."""
    monkeypatch.setattr(fp8_regions, "finds_kernels", lambda: False)
    call = fp8_regions._elsewhere(overload, "cpu")
    x, weight, bias = random(8, 64), random(96, 64), random(96)
    args = (x, weight, bias) if overload == "linear" else (bias, x, weight.t())
    with torch.autocast("cpu", torch.bfloat16):
        made, wanted = call(None, *args), F.linear(x, weight, bias)
        assert torch.is_autocast_enabled("cpu")
        assert torch.mm(x, x.t()).dtype == torch.bfloat16  # the key is back
    assert torch.equal(made, wanted)


class Twice(nn.Module):
    """Two layers, the second of which is recomputed in backward."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = layer(), layer(inputs=96), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x)
        if self.reentrant is None:
            return self.second(made)  # type: ignore[no-any-return]
        return checkpoint(self.second, made, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", RECIPE)
def test_recomputation_computes_the_same(recipe: str, reentrant: bool, products: list[Any]) -> None:
    found = []
    for way in (None, reentrant):
        model, x = start(Twice(way), recipe), random(8, 64).requires_grad_()
        model(x).float().square().sum().backward()
        found.append((x.grad, model.first.weight.grad, model.second.weight.grad))
    assert all(map(torch.equal, *found))
    each = 2 if recipe == "rowwise_gw_hp" else 3
    assert len(products) == 4 * each + 1  # one more: the forward that is recomputed


def test_recomputation_of_another_library_finds_the_recipe(products: list[Any]) -> None:
    """One that restores no state of threads: it is found by the number of the node."""

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return F.linear(x, weight)

        @staticmethod
        def backward(ctx: Any, out: torch.Tensor) -> Any:
            x, weight = (each.detach().requires_grad_() for each in ctx.saved_tensors)
            with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
                made = F.linear(x, weight)
            return torch.autograd.grad(made, (x, weight), out)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(random(96, 64))

        def forward(self, x: torch.Tensor) -> Any:
            return Recompute.apply(x, self.weight)  # type: ignore[no-untyped-call]

    model, x = start(Own()), random(8, 64).requires_grad_()
    model(x).sum().backward()
    assert len(products) == 1 + 3


def test_a_copy_runs_in_fp8_with_its_own_weights(products: list[Any]) -> None:
    model = start(layer())
    made = copy.deepcopy(model)
    with torch.no_grad():
        made.weight.mul_(2)
    x = random(8, 64)
    assert torch.equal(made(x), 2 * model(x))
    assert len(products) == 2


# --- the compiler


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("op_policy", ["portable", "native"])
@pytest.mark.parametrize("recipe", RECIPE)
def test_a_compiled_model_computes_the_same_in_one_graph(recipe: str, op_policy: str) -> None:
    found = []
    for compiled in (False, True):
        made = nn.Sequential(layer(True), nn.GELU(), layer(inputs=96), nn.LayerNorm(96), layer(True, 96, 16))
        model: Any = start(made, recipe, op_policy=op_policy, keep_bf16=["2"])
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        x = random(8, 64).requires_grad_()
        out = run(x)
        out.float().square().sum().backward()
        found.append((out.detach(), x.grad, *(p.grad for p in model.parameters())))
    assert all(map(torch.equal, *found))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor needs a compiler")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recipe", RECIPE)
def test_the_default_compiler_keeps_every_bit(recipe: str) -> None:
    """But those of a sum in fp32: products of blocks, those in bf16, and all without torch's are the compiler's own."""
    found = []
    for compiled in (False, True):
        model: Any = start(layer(), recipe)
        run = torch.compile(model, fullgraph=True) if compiled else model
        x = random(40, 64).bfloat16().requires_grad_()
        run(x).backward(random(40, 96, seed=1).bfloat16())
        found.append((x.grad, model.weight.grad))
    by_torch = scaled.runs("cpu", "row") and recipe in ("tensorwise", "rowwise")
    for eager, made in zip(*found, strict=True):
        assert (made - eager).norm() <= (0 if by_torch else 0.005) * eager.norm()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_part_follows_the_region_that_calls_it(products: list[Any]) -> None:
    part = layer()
    run, x = torch.compile(part, backend="aot_eager"), random(8, 64)
    wanted = {}
    for recipe in (*RECIPE, None):
        with torch.no_grad(), xamp.autocast(dtype=torch.bfloat16, fp8=recipe):
            wanted[recipe] = part(x)
            assert torch.equal(run(x), wanted[recipe])
    assert len({tuple(each.flatten().tolist()) for each in wanted.values()}) == 4  # both kinds of rowwise are one


@pytest.mark.usefixtures("fresh_compiler")
def test_regions_by_hand_in_compiled_code() -> None:
    weight = layer().weight

    def function(x: torch.Tensor) -> Any:
        with xamp.autocast(fp8="rowwise"):
            one = F.linear(x, weight)
            with xamp.autocast(dtype=torch.bfloat16):
                two = F.linear(x, weight)
            with xamp.autocast(fp8="mxfp8"):
                three = F.linear(x, weight)
        return one, two, three, F.linear(x, weight)

    x = random(8, 64)
    wanted = function(x)
    made = torch.compile(function, fullgraph=True, backend="aot_eager")(x)
    assert all(map(torch.equal, made, wanted))
    assert not torch.equal(wanted[0], wanted[1])
    assert not torch.equal(wanted[0], wanted[2])


def test_the_recipe_is_in_the_keys_of_the_caches_on_disk() -> None:
    from torch.compiler import config

    start(layer())
    seen = []
    with xamp.autocast(fp8="rowwise"):
        seen.append(config.cache_key_tag)
        with xamp.autocast(dtype=torch.bfloat16):
            seen.append(config.cache_key_tag)
    assert "xamp-fp8-rowwise" in seen[0]
    assert "xamp-fp8-" not in seen[1]
    assert "xamp-cpufp8-" in seen[1]


# --- by hand


def test_autocast_takes_a_recipe() -> None:
    x, weight = random(8, 64), layer().weight
    alike = start(layer())(x)
    for region in (
        xamp.autocast(fp8="auto"),
        xamp.autocast("cpu", fp8="tensorwise"),
        xamp.autocast(fp8=" TensorWise "),
    ):
        with region:
            made = F.linear(x, weight)
        assert torch.equal(made, alike)

    @xamp.autocast(fp8="tensorwise")
    def decorated() -> torch.Tensor:
        return F.linear(x, weight)

    assert torch.equal(decorated(), alike)
    with xamp.autocast(False, fp8="tensorwise"):
        assert F.linear(x, weight).dtype == torch.float32


def test_what_autocast_refuses() -> None:
    with pytest.raises(
        PolicyError, match=r"autocast\(fp8='e4m3'\): no such recipe. Choices: None, 'auto', 'tensorwise'"
    ):
        xamp.autocast(fp8="e4m3")
    with pytest.raises(PolicyError, match=r"autocast\(dtype=torch.float16, fp8='auto'\).*bfloat16. Leave dtype out"):
        xamp.autocast(dtype=torch.float16, fp8="auto")


@pytest.mark.parametrize(
    ("can", "asked", "found"),
    [
        ({"fp8": ("mxfp8",), "fp8_rehearsed": ("tensorwise",)}, "auto", "mxfp8"),
        ({"fp8": ("mxfp8",), "fp8_rehearsed": ("tensorwise",)}, "tensorwise", "tensorwise"),
        ({"fp8_rehearsed": ("rowwise", "tensorwise")}, "auto", "rowwise"),
        ({"fp8": ("mxfp8",)}, "rowwise", "Recipes of fp8 there: mxfp8. Choose one of these, or fp8='auto' for 'mxfp8'"),
        ({}, "auto", "Recipes of fp8 there: none. Leave fp8 out, or use level 'O4'"),
    ],
)
def test_a_device_runs_what_it_has(
    can: dict[str, Any], asked: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, backend = device_in_use.in_use()
    monkeypatch.setattr(type(backend), "capabilities", lambda *_: Capabilities(**can))
    if " " not in found:
        assert fp8_regions.available(asked, backend, device) == found
        return
    with pytest.raises(UnsupportedPolicy, match=rf"initialize\(fp8='{asked}'\): backend 'cpu' cannot.*{found}"):
        fp8_regions.available(asked, backend, device)


def test_the_products_of_the_device_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    start(layer())
    monkeypatch.setattr(scaled, "tried", lambda *_: pytest.fail("tried again"))
    start(layer())
