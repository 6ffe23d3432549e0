"""``xamp.debug.profile``: a batch at a level against the same batch in fp32 and fp64, module by module.

All runs work on copies of the model, with the same random numbers and without dropout. Advice comes from trying: the
batch runs again with one module kept in fp32 at a time, those with the largest errors of their own first. Where none
makes an inf or nan go away, the best one is kept, and others are tried beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from xamp.debug.measured import Measured, relative_error, rows_of
from xamp.debug.profile_result import Advice, Profile
from xamp.debug.runs import Batch, copied, measure
from xamp.errors import PolicyError, UnsupportedPolicy
from xamp.policy import parse_level
from xamp.sessions.initialize import initialize
from xamp.values.arguments import number_between

__all__ = ["profile"]

_BYTES_FOR_FP64 = 2**30  # of parameters in fp64: above that, fp32 is the reference


def profile(
    model: nn.Module,
    batch: Any,
    level: str = "O1",
    loss: Callable[..., Any] | None = None,
    *,
    target: Any = None,
    reference: str = "auto",
    tries: int = 12,
    **settings: Any,
) -> Profile:
    """Run a batch at ``level`` and in full precision, and say where the two differ.

    ::

        found = xamp.debug.profile(model, (x, y), level="O1", loss=criterion)
        print(found.table())

    ``model`` stays exactly as it is, with its buffers, gradients, mode and hooks, and so do the random generators: the
    runs use copies. They need memory for the results and gradients of all modules of two runs.

    Args:
        model: the model, before or after ``initialize``, in training or evaluation mode.
        batch: what the model is called with: a tensor; a tuple or list of positional arguments; a dict of named ones.
            Where ``loss`` needs a target, the last one of a tuple is it, unless ``target`` is given: ``(x, y)``,
            ``(x, mask, y)``, and ``((x, mask), y)`` where the model needs both.
        level: the level to look at.
        loss: makes the loss of the model's output: called as ``loss(output)``, or as ``loss(output, target)`` where
            there is a target. None: the output's ``loss``, where it has one, else the mean of its squares.
        target: the target, where ``batch`` does not hold it.
        reference: ``"fp32"``, ``"fp64"``, or ``"auto"``: fp64 where the device has it and the parameters take less than
            1 GiB in it.
        tries: how many modules are tried in fp32, one run each; so many again beside the best one where no module alone
            makes an inf or nan go away. 0: none, and there is no advice.
        settings: more arguments of :func:`xamp.initialize`: ``keep_fp32``, ``op_policy``, ``loss_scale``.

    Returns:
        The result, with ``rows``, ``advice``, ``table()``, ``to_json()`` and ``plot(path)``.

    Raises:
        PolicyError: an argument cannot be right, or the model cannot be copied.
        UnsupportedPolicy: the device cannot do this level.
    """
    _check(model, loss, reference, tries, settings)
    parse_level(level, call="profile")
    runs = _Runs(model, Batch.of(model, batch, target, loss), level, settings)
    exact, name = runs.reference(reference)
    single = runs.plain(torch.float32) if name == "fp64" else exact
    low = runs.at_level()
    rows = rows_of(low, exact, single)
    return Profile(
        level=str(low.level),
        reference=name,
        loss_scale=low.loss_scale,
        loss=low.loss,
        loss_reference=exact.loss,
        output_error=relative_error(low.output, exact.output),
        gradient_error=relative_error(low.all_gradients(), exact.all_gradients()),
        rows=tuple(rows),
        advice=_Search(runs, low, exact, int(tries)).advice(),
        dynamic=low.dynamic,
    )


class _Search:
    """Looks for the modules to keep in fp32.

    Args:
        runs: runs the batch.
        low, exact: the runs at the level and in full precision.
        tries: how many modules to try in a round.
    """

    def __init__(self, runs: _Runs, low: Measured, exact: Measured, tries: int) -> None:
        self._runs, self._low, self._exact, self._tries = runs, low, exact, tries
        self._start = low.loss_scale if low.dynamic and low.all_finite else None
        self._before = self._error(low)

    def advice(self) -> tuple[Advice, ...]:
        """Return what was tried, the best first."""
        own = self._own(self._low)
        found = [Advice(name, self._before, self._error(self._run([name]))) for name in self._best(own)]
        found.sort(key=lambda each: (-round(20 * each.gain), -own[each.module]))  # of those alike, what adds most
        if found and not self._is_usable(self._low):
            found = [*self._together(min(found, key=lambda each: each.after)), *found]
        return tuple(found)

    def _together(self, first: Advice) -> list[Advice]:
        """Add modules to the best one while the result is not finite and becomes less wrong; return what was added."""
        found: list[Advice] = []
        kept, after, run = [first.module], first.after, self._run([first.module])
        while after < self._before and not self._is_usable(run):
            for name in self._best(self._own(run, kept)):
                tried = self._run([*kept, name])
                error = self._error(tried)
                if error < after:
                    found.insert(0, Advice(name, self._before, error, tuple(kept)))
                    kept, after, run = [*kept, name], error, tried
                    break
            else:
                return found
        return found

    def _run(self, keep: Sequence[str]) -> Measured:
        return self._runs.at_level(keep, self._start)

    def _own(self, run: Measured, kept: Sequence[str] = ()) -> dict[str, float]:
        """Return the errors of their own of the modules that are not in fp32 yet."""
        inside = tuple(f"{name}." for name in kept)
        rows = rows_of(run, self._exact, self._exact)
        return {
            row.module: row.own
            for row in rows
            if row.module and row.module not in kept and not row.module.startswith(inside)
        }

    def _best(self, own: Mapping[str, float]) -> list[str]:
        return sorted(own, key=lambda name: -own[name])[: self._tries]

    def _error(self, run: Measured) -> float:
        """Return the error of a run in one number: that of the output and that of all gradients.

        What is not finite counts 1, and besides the mean share that is not finite in the modules' results or gradients.
        """
        wrong = self._errors(run)
        if all(map(math.isfinite, wrong)):
            return sum(wrong)
        rows = rows_of(run, self._exact, self._exact)
        lost = [sum(_known(row.overflow) for row in rows), sum(_known(row.gradient_overflow) for row in rows)]
        return sum(
            part if math.isfinite(part) else 1.0 + share / max(1, len(rows))
            for part, share in zip(wrong, lost, strict=True)
        )

    def _errors(self, run: Measured) -> tuple[float, float]:
        return (
            relative_error(run.output, self._exact.output),
            relative_error(run.all_gradients(), self._exact.all_gradients()),
        )

    def _is_usable(self, run: Measured) -> bool:
        return not any(map(math.isinf, self._errors(run)))


def _known(share: float) -> float:
    return 0.0 if math.isnan(share) else share


class _Runs:
    """Runs the batch on copies of the model, each with the random numbers of the first."""

    def __init__(self, model: nn.Module, batch: Batch, level: str, settings: Mapping[str, Any]) -> None:
        self._model, self._batch, self._level, self._settings = model, batch, level, dict(settings)

    def plain(self, dtype: torch.dtype) -> Measured:
        """Run in ``dtype``, without xamp."""
        return measure(copied(self._model).to(dtype), self._batch.to(dtype))

    def reference(self, name: str) -> tuple[Measured, str]:
        """Run in the most exact dtype that is asked for and possible; return its name too."""
        size = 8 * sum(param.numel() for param in self._model.parameters())
        if name == "fp32" or (name == "auto" and size > _BYTES_FOR_FP64):
            return self.plain(torch.float32), "fp32"
        try:
            return self.plain(torch.float64), "fp64"
        except (RuntimeError, TypeError) as error:  # the device has no fp64, or a module insists on fp32
            if name == "fp64":
                raise UnsupportedPolicy(
                    f"profile(reference='fp64'): the model does not run in fp64: {error}. Use reference='fp32'."
                ) from error
            return self.plain(torch.float32), "fp32"

    def at_level(self, keep: Sequence[str] = (), start: float | None = None) -> Measured:
        """Run at the level; a dynamic loss scale is the largest at which backward is finite, as training would find it.

        Args:
            keep: more modules to keep in fp32.
            start: the first loss scale to try, where it is dynamic.
        """
        kept = self._settings.get("keep_fp32", ())
        settings: dict[str, Any] = self._settings | {"verbosity": 0}
        settings["keep_fp32"] = [*([kept] if isinstance(kept, (str, type)) else kept), *keep]
        if start is not None:
            settings["init_scale"] = start
        found = self._once(settings)
        if found.all_finite or not found.dynamic or found.loss_scale <= found.floor or found.backoff >= 1.0:
            return found
        least = self._once(settings | {"init_scale": found.floor})
        if not least.all_finite:
            return least  # no scale helps
        good, bad = found.steps_to_floor, 0  # how often the scale has backed off
        while good - bad > 1:
            middle = (good + bad) // 2
            tried = self._once(settings | {"init_scale": found.loss_scale * found.backoff**middle})
            good, bad, least = (middle, bad, tried) if tried.all_finite else (good, middle, least)
        return least

    def _once(self, settings: Mapping[str, Any]) -> Measured:
        copy = copied(self._model)
        params = [param for param in copy.parameters() if param.requires_grad]
        optimizer = torch.optim.SGD(params, lr=0.0) if params else None
        initialize(copy, optimizer, level=self._level, **settings)
        return measure(copy, self._batch, optimizer)


def _check(model: Any, loss: Any, reference: Any, tries: Any, settings: Mapping[str, Any]) -> None:
    if not isinstance(model, nn.Module):
        raise PolicyError(f"profile(model={type(model).__name__}): must be an nn.Module.")
    if loss is not None and not callable(loss):
        raise PolicyError(f"profile(loss={type(loss).__name__}): must be a function of the output, or None.")
    if reference not in ("auto", "fp32", "fp64"):
        raise PolicyError(f"profile(reference={reference!r}): no such choice. Choices: 'auto', 'fp32', 'fp64'.")
    number_between("tries", tries, -1, 2**31, whole=True, call="profile")
    own = sorted({"verbosity", "enabled", "delegate", "process_group"} & settings.keys())
    if own:
        raise PolicyError(f"profile({own[0]}=...): it decides on {own[0]} itself. Leave it out.")
    if not any(True for _ in model.parameters()):
        raise PolicyError(f"profile(model={type(model).__name__}): it has no parameters.")
