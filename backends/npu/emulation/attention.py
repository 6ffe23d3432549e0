"""``npu_fusion_attention``, forward and backward, by its formula: dropout(softmax(mask(scale * (q k^T + pse)))) v.

All three versions of the operator are served, in the layouts BSH, SBH, BSND, BNSD and TND, with fewer heads of keys
than of queries, and ``sparse_mode`` 0 to 4. The sums are float32; results are rounded once. What is not served is
refused by name: prefix masks, ``sink``, rotary parts, a dropout mask from outside, ``pse_type`` 2 and 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from xamp.backends.npu.emulation import arithmetic, randoms
from xamp.backends.npu.emulation.crossing import CPU, aside, computed

__all__ = ["KERNELS"]

Tensor = torch.Tensor
_COPIES = 8  # of each maximum and sum, in the results for the backward
_LEFT_UP, _RIGHT_DOWN, _BAND = 2, 3, 4
_NO_LIMIT = 2147483647
_REFUSED: dict[str, Any] = {
    "padding_mask": None,
    "prefix": None,
    "sink": None,
    "dropout_mask": None,
    "query_rope": None,
    "key_rope": None,
    "q_start_idx": None,
    "kv_start_idx": None,
    "softmax_layout": "",
}
_TO_BNSD: dict[str, Callable[[Tensor, int], Tensor]] = {
    "BNSD": lambda x, heads: x,  # noqa: ARG005
    "BSND": lambda x, heads: x.transpose(1, 2),  # noqa: ARG005
    "BSH": lambda x, heads: x.unflatten(2, (heads, -1)).transpose(1, 2),
    "SBH": lambda x, heads: x.unflatten(2, (heads, -1)).permute(1, 2, 0, 3),
}
_FROM_BNSD: dict[str, Callable[[Tensor], Tensor]] = {
    "BNSD": lambda x: x,
    "BSND": lambda x: x.transpose(1, 2),
    "BSH": lambda x: x.transpose(1, 2).flatten(2),
    "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
}


def _lengths_told(ends: Any) -> Any:
    """Where sequences end, as plain numbers: version 3 is told by tensors, of the host or of the card."""
    return ends.tolist() if isinstance(ends, Tensor) else ends


def _lengths(ends: Sequence[int]) -> list[int]:
    """The lengths of sequences that lie one behind the other, from where each ends."""
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


@dataclasses.dataclass
class _Call:
    """One call: its layout and options, and its tensors by (batch, head, place, channel)."""

    layout: str
    heads: int
    options: dict[str, Any]

    def check(self, query: Tensor) -> None:
        name = "npu::npu_fusion_attention"
        if arithmetic.CHIP.number < arithmetic.FIRST_A2:
            raise RuntimeError(f"{name}: {arithmetic.CHIP.name} has no such kernel, Atlas A2 has (emulated Ascend)")
        for option, plain in _REFUSED.items():
            if self.options.get(option, plain) not in (None, plain):
                raise NotImplementedError(f"{name} with {option} is not served on an emulated Ascend card")
        if self.options.get("sparse_mode", 0) > _BAND:
            raise NotImplementedError(f"{name} with sparse_mode above 4 is not served on an emulated Ascend card")
        if self.options.get("pse") is not None and self.options.get("pse_type", 1) != 1:
            raise NotImplementedError(f"{name} with this pse_type is not served on an emulated Ascend card")
        if self.layout != "TND" and self.layout not in _TO_BNSD:
            raise RuntimeError(
                f"The input_layout should be BSH/SBH/BNSD/BSND/TND, but got {self.layout} (emulated Ascend)"
            )
        if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise RuntimeError(f"{name} is not implemented for {query.dtype} (emulated Ascend)")

    def key_heads(self, query: Tensor, key: Tensor) -> int:
        """The number of heads of the keys."""
        if self.layout in ("BSH", "SBH"):
            return key.size(2) * self.heads // query.size(2)
        return key.size(2 if self.layout == "BSND" else 1)

    def samples(self, *tensors: tuple[Tensor, bool, int]) -> Iterator[list[Tensor]]:
        """The tensors in float32, as (batch, head, place, channel): all at once, or sequence by sequence for TND.

        Each comes with whether it belongs to the keys, and with its number of heads.
        """
        if self.layout != "TND":
            yield [_TO_BNSD[self.layout](tensor, heads).float() for tensor, _, heads in tensors]
            return
        of_query, of_key = _lengths(self.options["actual_seq_qlen"]), _lengths(self.options["actual_seq_kvlen"])
        parts = [tensor.split(of_key if keyed else of_query) for tensor, keyed, _ in tensors]
        for several in zip(*parts, strict=True):
            yield [part.transpose(0, 1).unsqueeze(0).float() for part in several]

    def joined(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Results of :meth:`samples`'s parts as one tensor, in the layout of the call."""
        if self.layout == "TND":
            return torch.cat([part[0].transpose(0, 1) for part in parts]).contiguous().to(dtype)
        return _FROM_BNSD[self.layout](parts[0]).contiguous().to(dtype)

    def hidden(self, rows: int, columns: int) -> Tensor | None:
        """True where a query does not see a key, as broadcast to (batch, head, rows, columns); None if all see all."""
        mask, mode = self.options.get("atten_mask"), self.options.get("sparse_mode", 0)
        row, column = torch.arange(rows).unsqueeze(1), torch.arange(columns)
        if mask is not None and mode in (_LEFT_UP, _RIGHT_DOWN, _BAND):
            if mode == _LEFT_UP:
                return column > row
            behind = columns - rows
            if mode == _RIGHT_DOWN:
                return column > row + behind
            before, after = self._tokens("pre"), self._tokens("next")
            return (column > row + behind + after) | (column < row + behind - before)
        return None if mask is None else mask[..., :rows, :columns].bool()

    def _tokens(self, side: str) -> int:
        return int(self.options.get(f"{side}_tockens", self.options.get(f"{side}_tokens", _NO_LIMIT)))

    def weights(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The softmax, and the maximum and the sum of each row; a row that sees nothing is 0."""
        scores = self.rounded(query @ _repeated(key, query).transpose(2, 3))
        if (pse := self.options.get("pse")) is not None:
            scores = scores + pse.float()[..., -scores.size(2) :, :]
        scores = scores * self.scale
        hidden = self.hidden(scores.size(2), scores.size(3))
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        largest = scores.amax(3, keepdim=True)
        powers = (scores - largest.nan_to_num(neginf=0.0)).exp()
        total = powers.sum(3, keepdim=True)
        return self.rounded(torch.where(total > 0, powers / total, torch.zeros_like(powers))), largest, total

    def rounded(self, made: Tensor) -> Tensor:
        """What the kernel keeps of ``made``, a part of its results, in the meantime."""
        narrow = self.options.get("between")
        return made if narrow is None else made.to(narrow).float()

    @property
    def scale(self) -> float:
        return float(self.options.get("scale", self.options.get("scale_value", 1.0)))

    def keeper(self, seed: int) -> Callable[[Tensor], Tensor]:
        """The dropout that ``seed`` determines: what an element of the weights is multiplied by."""
        keep = float(self.options.get("keep_prob", 1.0))
        generator = torch.Generator().manual_seed(seed)

        def kept(weights: Tensor) -> Tensor:
            if keep >= 1.0:
                return torch.ones(())
            return (torch.rand(weights.size(), generator=generator) < keep).float() / keep

        return kept


def _repeated(key: Tensor, query: Tensor) -> Tensor:
    """``key`` with as many heads as ``query``: each of its heads serves several neighbours."""
    times = query.size(1) // key.size(1)
    return key if times == 1 else key.repeat_interleave(times, 1)


def _gathered(grad: Tensor, key: Tensor) -> Tensor:
    """The gradient of what :func:`_repeated` was given."""
    times = grad.size(1) // key.size(1)
    return grad if times == 1 else grad.unflatten(1, (-1, times)).sum(2)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, heads: int, layout: str, seed: int, *values: Any, names: list[str]
) -> tuple[Any, ...]:
    call = _Call(layout, heads, dict(zip(names, values, strict=True)))
    call.check(query)
    of_key = call.key_heads(query, key)
    kept = call.keeper(seed)
    outs, largest, totals, numbers = [], [], [], 0
    for q, k, v in call.samples((query, False, heads), (key, True, of_key), (value, True, of_key)):
        weights, top, total = call.weights(q, k)
        outs.append((weights * kept(weights)) @ _repeated(v, q))
        largest.append(top.expand(*top.shape[:3], _COPIES))
        totals.append(total.expand(*total.shape[:3], _COPIES))
        numbers += weights.numel()
    tnd = layout == "TND"
    statistics = [
        torch.cat([part[0].transpose(0, 1) for part in parts]) if tnd else parts[0].contiguous()
        for parts in (largest, totals)
    ]
    return (call.joined(outs, query.dtype), *statistics, torch.empty(0, dtype=query.dtype), numbers)


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    heads: int,
    layout: str,
    seed: int,
    *values: Any,
    names: list[str],
) -> tuple[Any, ...]:
    call = _Call(layout, heads, dict(zip(names, values, strict=True)))
    call.check(query)
    of_key = call.key_heads(query, key)
    kept = call.keeper(seed)
    found: list[list[Tensor]] = [[], [], []]
    pse = call.options.get("pse")
    of_pse = torch.zeros_like(pse, dtype=torch.float32) if pse is not None else torch.empty(0, dtype=query.dtype)
    sides = ((query, False, heads), (key, True, of_key), (value, True, of_key), (grad, False, heads))
    for q, k, v, g in call.samples(*sides):
        weights, _, _ = call.weights(q, k)
        factor = kept(weights)
        of_weights = (g @ _repeated(v, q).transpose(2, 3)) * factor
        inner = weights * (of_weights - (of_weights * weights).sum(3, keepdim=True)) * call.scale
        parts = (
            inner @ _repeated(k, q),
            _gathered(inner.transpose(2, 3) @ q, k),
            _gathered((weights * factor).transpose(2, 3) @ g, v),
        )
        for several, part in zip(found, parts, strict=True):
            several.append(part)
        if pse is not None:
            of_pse[..., -inner.size(2) :, :] += inner.sum_to_size(of_pse[..., -inner.size(2) :, :].size())
    made = [call.joined(parts, tensor.dtype) for parts, tensor in zip(found, (query, key, value), strict=True)]
    return (*made, of_pse if pse is None else of_pse.to(pse.dtype))


_MASK = (1 << 63) - 1
_ENDS = ("actual_seq_qlen", "actual_seq_kvlen")
_computed_forward = computed("npu::npu_fusion_attention", _forward)
_computed_backward = computed("npu::npu_fusion_attention_grad", _backward)
_MORE = (
    *("pse", "padding_mask", "atten_mask", "scale", "keep_prob", "pre_tockens", "next_tockens", "inner_precise"),
    *("prefix", "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode", "gen_mask_parallel", "sync"),
    *("softmax_layout", "sink", "dropout_mask", "seed", "offset"),
)


def _run_forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The tensors, and seed and number of the dropout's random numbers."""
    options = {**dict(zip(_MORE, args[5:], strict=False)), **kwargs}
    options.update({name: _lengths_told(options[name]) for name in _ENDS if name in options})
    seed = int(options.pop("seed", 0))
    options.pop("offset", 0)
    if not seed and options.get("keep_prob", 1.0) < 1.0:
        with aside():
            seed = randoms.next_seed(None, (args, kwargs)) & _MASK
    made = _crossed(_computed_forward, (*args[:5], seed), options)
    return (*made[:4], seed, made[4])


def _crossed(kernel: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a computed kernel, whose arguments are converted one by one: options too, which it takes as a dict."""
    names = list(options)
    return kernel(*args, *(options[name] for name in names), names=names)


def _fusion_attention(*args: Any, **kwargs: Any) -> Any:
    *tensors, seed, numbers = _run_forward(args, kwargs)
    return (*tensors, seed, 0, numbers)


def _fusion_attention_v3(*args: Any, **kwargs: Any) -> Any:
    *tensors, seed, _ = _run_forward(args, kwargs)
    return (*tensors, torch.tensor([seed], device=CPU), torch.zeros(1, dtype=torch.int64, device=CPU))


def _grad(results: int) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        options = {name: value for name, value in kwargs.items() if not name.startswith(("softmax_", "attention_in"))}
        options.update({name: _lengths_told(options[name]) for name in _ENDS if name in options})
        options["softmax_layout"] = kwargs.get("softmax_layout", "")
        seed = options.pop("seed", 0)
        seed = int(seed.item()) if isinstance(seed, Tensor) else int(seed or 0)
        for name in ("offset", "numels"):
            options.pop(name, None)
        *made, of_pse = _crossed(_computed_backward, (*args[:6], seed), options)
        empty = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
        return (*made, of_pse, *([empty] * (results - 4)))

    return kernel


_PROMPT = {"num_heads", "input_layout", "num_key_value_heads"}
_PROMPT_SERVED = {"atten_mask", "scale_value", "pre_tokens", "next_tokens", "sparse_mode"}


def _prompt_attention(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
    """The forward alone, as inference asks for it, without quantized tensors and sequences of other lengths.

    It is made for speed: scores and weights of float16 are float16 between its two products.
    """
    options = {name: given for name, given in kwargs.items() if given is not None and name not in _PROMPT}
    for name in options.keys() - _PROMPT_SERVED:
        raise NotImplementedError(f"npu::npu_prompt_flash_attention with {name} is not served on an emulated card")
    options["between"] = torch.float16 if query.dtype is torch.float16 else None
    layout = kwargs.get("input_layout", "BSH")
    args = (query, key, value, kwargs.get("num_heads", 1), layout, 0)
    return _crossed(_computed_forward, args, options)[0]


KERNELS: dict[str, Callable[..., Any]] = {
    "npu::npu_prompt_flash_attention": _prompt_attention,
    "npu::npu_fusion_attention": _fusion_attention,
    "npu::npu_fusion_attention_v2": _fusion_attention,
    "npu::npu_fusion_attention_v3": _fusion_attention_v3,
    "npu::npu_fusion_attention_grad": _grad(5),
    "npu::npu_fusion_attention_grad_v2": _grad(7),
    "npu::npu_fusion_attention_grad_v3": _grad(5),
}
