"""torch's own list of operators and sample inputs, each on the card and on the CPU: results and gradients alike.

Covers: backends.npu.emulation.kernels, backends.npu.emulation.written, backends.npu.emulation.strided.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo
from torch.utils._pytree import tree_leaves, tree_map

# Deprecated operators are in the list too.
pytestmark = pytest.mark.filterwarnings("ignore")

_RANDOM = "its results are random, and the card's generator is another one"
_SPARSE = "torch_npu has no kernels for sparse tensors in rows"
KNOWN: dict[str, str] = {
    "bernoulli": _RANDOM,
    "exponential": _RANDOM,
    "nn.functional.multi_head_attention_forward": _RANDOM,
    "nn.functional.rrelu": _RANDOM,
    "normal": _RANDOM,
    "normal.in_place": _RANDOM,
    "normal.number_mean": _RANDOM,
    "rand_like": _RANDOM,
    "randn": _RANDOM,
    "randn_like": _RANDOM,
    "uniform": _RANDOM,
    "sparse.mm.reduce": _SPARSE,
    "sparse.sampled_addmm": _SPARSE,
    "tensor_split": "its sample keeps the indices, which must be on the CPU, on the device",
    "torch._scaled_mm": "assert_close compares fp8 bit for bit only",
}
"""Forward: the results differ or there are none."""
UNSET = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Their values are what the memory held, alike or not; shape and dtype are compared."""
KNOWN_BACKWARD = {
    "nn.functional.binary_cross_entropy_with_logits": "torch_npu's formula has no gradient for the target",
}


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def to_card(value: Any) -> Any:
    """``value`` with its tensors, strides and all, and devices on the card."""

    def move(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.detach().to("npu").requires_grad_(x.requires_grad)
        return torch.device("npu") if isinstance(x, torch.device) or (isinstance(x, str) and x == "cpu") else x

    return tree_map(move, value)


def tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def plain(x: torch.Tensor) -> torch.Tensor:
    return (x if x.layout is torch.strided else x.to_dense()).detach().cpu()


def compare(found: Any, wanted: Any, name: str = "", tolerance: float = 1e-4) -> None:
    mine, theirs = tensors(found), tensors(wanted)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if name in UNSET:
            continue
        assert_close(plain(a), plain(b), equal_nan=True, atol=tolerance / 10, rtol=tolerance)


@functools.cache
def samples(lower: torch.dtype | None = None) -> list[tuple[Any, Any]]:
    """Operators with their first sample inputs: in fp32 where they take it, or those that take ``lower`` in that."""
    # In a thread, for torch looks through the source of every caller of each of these.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: list(_samples(lower))).result()


def _samples(lower: torch.dtype | None) -> Iterator[tuple[Any, Any]]:
    for op in op_db:
        supported = sorted(op.supported_dtypes("cpu"), key=str)
        torch.manual_seed(0)
        # Some have no dtype on a CPU, some need a library that may not be there.
        with contextlib.suppress(Exception):
            dtype = next((one for one in (torch.float32, torch.int64) if one in supported), None) or supported[0]
            if lower is not None and lower not in supported:
                continue
            grad = op.supports_autograd and dtype.is_floating_point and lower is None
            yield op, next(iter(op.sample_inputs("cpu", lower or dtype, requires_grad=grad)))


def on_cpu(run: Callable[[], Any]) -> Any:
    """What ``run`` gives; None where the CPU refuses it, so that there is nothing to compare with."""
    torch.manual_seed(1)
    try:
        return run()
    except Exception:
        return None


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:200]}"


def gradients(inputs: Any, results: Any) -> list[torch.Tensor | None]:
    wanting = [x for x in tensors(inputs) if x.requires_grad]
    outs = [x.sum() for x in tensors(results) if x.requires_grad and x.is_floating_point()]
    return list(torch.autograd.grad(outs, wanting, allow_unused=True)) if outs and wanting else []


def test_operators_and_their_gradients_are_the_cpus() -> None:
    failed: dict[str, str] = {}
    failed_backward: dict[str, str] = {}
    forward = backward = 0
    for op, sample in samples():
        inputs = ((sample.input, *sample.args), sample.kwargs)
        moved = to_card(inputs)
        wanted = on_cpu(functools.partial(op, *inputs[0], **inputs[1]))
        if wanted is None:
            continue
        try:
            torch.manual_seed(1)
            found = op(*moved[0], **moved[1])
            compare(found, wanted, name_of(op))
        except Exception as error:
            failed[name_of(op)] = said(error)
            continue
        forward += 1
        try:
            theirs = gradients(inputs, wanted)
            mine = gradients(moved, found)
            assert [g is None for g in mine] == [g is None for g in theirs], "a gradient is missing"
            compare(mine, theirs)
        except Exception as error:
            failed_backward[name_of(op)] = said(error)
            continue
        backward += bool(theirs)
    unknown = {name: text for name, text in failed.items() if name not in KNOWN}
    assert not unknown
    assert set(KNOWN) == set(failed), "an operator of the list works"
    assert failed_backward.keys() == KNOWN_BACKWARD.keys(), failed_backward
    assert forward >= 650
    assert backward >= 510


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_operators_in_lower_precision_are_the_cpus(dtype: torch.dtype) -> None:
    failed, right = {}, 0
    for op, sample in samples(dtype):
        inputs = ((sample.input, *sample.args), sample.kwargs)
        with torch.no_grad():
            moved = to_card(inputs)
            wanted = on_cpu(functools.partial(op, *inputs[0], **inputs[1]))
            if wanted is None:
                continue
            try:
                torch.manual_seed(1)
                compare(op(*moved[0], **moved[1]), wanted, name_of(op), torch.finfo(dtype).eps)
            except Exception as error:
                failed[name_of(op)] = said(error)
                continue
        right += 1
    assert {name: text for name, text in failed.items() if name not in KNOWN} == {}
    assert right >= 530


def sweep(run: Callable[[Any, Any], Any], condition: Callable[[Any], bool], known: Sequence[str] = ()) -> int:
    """How many operators give on the card what they give on the CPU; the test fails for the others."""
    failed, right = {}, 0
    for op, sample in samples():
        name = name_of(op)
        if name in KNOWN or not condition(op):
            continue
        moved = to_card((sample.input, sample.args, sample.kwargs))
        card = type(sample)(moved[0], args=moved[1], kwargs=moved[2])
        try:
            with torch.no_grad():
                wanted = on_cpu(functools.partial(run, op, sample))
                if wanted is None:
                    continue
                torch.manual_seed(1)
                compare(run(op, card), wanted, name)
            right += 1
        except Exception as error:
            failed[name] = said(error)
    assert failed.keys() == set(known), failed
    return right


def test_in_place() -> None:
    def run(op: Any, sample: Any) -> Any:
        value = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, sample.input)
        made = op.inplace_variant(value, *sample.args, **sample.kwargs)
        assert made is value
        return made

    assert sweep(run, lambda op: op.inplace_variant is not None) >= 155


def test_out() -> None:
    # mode says itself that its out= is for CPU, CUDA and XPU only.
    def run(op: Any, sample: Any) -> Any:
        results = op(sample.input, *sample.args, **sample.kwargs)
        out = tree_map(lambda x: torch.empty_like(x) if isinstance(x, torch.Tensor) else x, results)
        made = op(sample.input, *sample.args, **sample.kwargs, out=out)
        assert [a is b for a, b in zip(tensors(made), tensors(out), strict=True)].count(False) == 0
        return out

    assert sweep(run, lambda op: op.supports_out, known=["mode"]) >= 300


def test_non_contiguous() -> None:
    def run(op: Any, sample: Any) -> Any:
        strided = sample.noncontiguous()
        return op(strided.input, *strided.args, **strided.kwargs)

    assert sweep(run, lambda op: not op.name.startswith(("sparse", "masked"))) >= 500


def test_zero_size() -> None:
    def run(op: Any, sample: Any) -> Any:
        none = torch.empty(0, 3, device=sample.input.device)
        if isinstance(op, BinaryUfuncInfo):
            return op(none, none)
        return op(none, dim=1) if isinstance(op, ReductionOpInfo) else op(none)

    assert sweep(run, lambda op: isinstance(op, UnaryUfuncInfo | BinaryUfuncInfo | ReductionOpInfo)) >= 150


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t.transpose(0, 2),
    lambda t: t[:, 1:],
    lambda t: t.permute(2, 0, 1)[1],
    lambda t: t.reshape(6, 4).t(),
    lambda t: t[..., None].expand(2, 3, 4, 2),
    lambda t: t.unfold(2, 2, 1),
    lambda t: t.view(-1)[5:9],
    lambda t: t.diagonal(0, 0, 1),
    lambda t: t.chunk(2, 2)[1],
    lambda t: t.narrow(1, 1, 2),
    lambda t: t.as_strided((2, 2), (3, 1)),
    lambda t: t.movedim(0, 1),
    lambda t: t.split(2, 1)[1],
]


@pytest.mark.parametrize("number", range(len(VIEWS)))
def test_views_share_their_memory(number: int) -> None:
    host, card = torch.arange(24.0).reshape(2, 3, 4), torch.arange(24.0, device="npu").reshape(2, 3, 4)
    mine, theirs = VIEWS[number](card), VIEWS[number](host)
    assert (mine.shape, mine.stride(), mine.storage_offset()) == (
        theirs.shape,
        theirs.stride(),
        theirs.storage_offset(),
    )
    assert mine.tolist() == theirs.tolist()
    if not any(stride == 0 for stride in mine.stride()):
        mine.mul_(2.0).add_(100.0)
        theirs.mul_(2.0).add_(100.0)
        assert card.tolist() == host.tolist()
        mine.copy_(torch.zeros(mine.shape))
        theirs.zero_()
        assert card.tolist() == host.tolist()
