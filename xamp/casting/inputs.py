"""Which arguments of a method are cast: all, but for the names and types that ``cast_model_inputs`` exempts."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from xamp.casting.unseen_results import say_uncopied
from xamp.casting.write_back import prepare_traced, take_back
from xamp.errors import PolicyError
from xamp.torch_compat.compiler import keep_eager, own_code
from xamp.torch_compat.torch_private.autograd import InferenceMode, set_grad_enabled
from xamp.values.containers import Uncommon, cast_floats, common_caster, leaf_of, sparing
from xamp.values.log import Once
from xamp.values.walk import CASTS, COPIES, INSIDE, Leaf, TracedWalk, Walk

__all__ = ["Lender", "check_names"]

_Lent = tuple[Any, Any, Any]


class Lender:
    """Casts the arguments of one method, call by call, and takes back what the method wrote into them.

    Args:
        function: the method; without ``bound``, its first parameter is ``self``.
        dtype: the dtype to which floating tensors are cast.
        cast: the function that casts; what an unknown one makes is not taken back.
        excluded: names of its parameters, and types, that are not cast. A type counts wherever an object of it is
        nested.
        bound: ``function`` has no parameter ``self``.

    Attributes:
        lend: casts positional and keyword arguments; returns them and what :meth:`take_back` gets, or None.
        lend_traced: the same in code that the compiler traces, for :func:`xamp.casting.write_back.take_back_traced`.
    """

    __slots__ = ("_excludes", "_function", "_leaf", "_said", "_skip", "lend", "lend_traced")

    def __init__(
        self,
        function: Callable[..., Any],
        dtype: torch.dtype,
        cast: Callable[[Any, torch.dtype], Any] = cast_floats,
        excluded: Sequence[type | str] = (),
        *,
        bound: bool = False,
    ) -> None:
        self._function, self._skip, self._said = function, not bound, Once()
        self.lend: Callable[[Any, Any], _Lent]
        self.lend_traced: Callable[[Any, Any], _Lent]
        leaf = leaf_of(cast, dtype)
        if leaf is None:
            self.lend = self.lend_traced = lambda args, kwargs: (cast(args, dtype), cast(kwargs, dtype), None)
            return
        types = tuple(each for each in excluded if isinstance(each, type))
        self._leaf: Leaf = sparing(leaf, types)
        self._excludes = _excludes(
            function, frozenset(each for each in excluded if isinstance(each, str)), skip=not bound
        )
        self.lend = self._lend_by_walk
        if cast is cast_floats and not excluded:
            self.lend = _lend_common(dtype, self._lend_by_walk)
        self.lend_traced = _lend_traced(self._leaf, self._excludes, self._argument)

    def take_back(self, lent: Any, args: Any, kwargs: Any) -> None:
        """Write into the caller's objects what the method wrote into its arguments.

        Args:
            lent: what ``lend`` returned.
            args: the positional arguments as the caller gave them.
            kwargs: the keyword arguments.
        """
        for _, new in lent[CASTS]:
            if new._version:
                break
        else:
            if not lent[COPIES]:  # nothing to write back: 0.3 us less
                return
        take_back(lent, lambda old: self._name(old, args, kwargs), self._said)

    keep_eager(take_back)

    def _lend_by_walk(self, args: Any, kwargs: Any, seen: dict[int, Any] | None = None) -> _Lent:
        """Cast arguments of all kinds; ``seen`` has what was cast already."""
        if torch.is_inference_mode_enabled():
            with _with_versions():
                return self._lend_by_walk(args, kwargs, seen)
        walk, is_excluded = Walk(self._leaf, records=True), self._excludes
        if seen is not None and seen[CASTS]:
            walk.made.update({id(old): new for old, new in seen[CASTS]})
            walk.made[CASTS] = seen[CASTS]
            walk.changed = True
        given = [value if is_excluded(at) else walk.of(value)[0] for at, value in enumerate(args)]
        named = {name: value if is_excluded(name) else walk.of(value)[0] for name, value in kwargs.items()}
        for each in walk.left:
            say_uncopied(each, getattr(self._function, "__qualname__", "the forward"))
        return (given, named, walk.made) if walk.changed else (args, kwargs, None)

    keep_eager(_lend_by_walk)

    def _name(self, old: Any, args: Any, kwargs: Any) -> str:
        """Return the name of the argument that is ``old``, or holds it."""
        for name, value in kwargs.items():
            if _holds(value, old):
                return str(name)
        return self._argument(next((at for at, value in enumerate(args) if _holds(value, old)), 0))

    def _argument(self, number: int) -> str:
        """Return the name of the positional argument with this number."""
        for at, parameter in enumerate(_parameters(self._function, self._skip)):
            if at == number or parameter.kind is parameter.VAR_POSITIONAL:
                return parameter.name
        return f"number {number}"


def _holds(value: Any, old: Any) -> bool:
    """Return whether ``value`` is ``old`` or holds it."""
    found: list[bool] = []

    def leaf(each: Any) -> Any:
        found.extend([True] if each is old else ())
        return each if isinstance(each, torch.Tensor) else INSIDE

    Walk(leaf).run(value)
    return bool(found)


@contextlib.contextmanager
def _with_versions() -> Iterator[None]:
    """Let tensors that are made have versions, which inference tensors have not."""
    with InferenceMode(False):
        set_grad_enabled(False)  # the end of the mode sets it as it was
        yield


def _lend_common(
    dtype: torch.dtype, in_general: Callable[[Any, Any, dict[int, Any]], _Lent]
) -> Callable[[Any, Any], _Lent]:
    """Return a function that casts arguments of common kinds, which is faster than ``in_general``."""
    is_inference, common = torch.is_inference_mode_enabled, common_caster(dtype, lends=True)

    def lend(args: Any, kwargs: Any) -> _Lent:
        if is_inference():
            with _with_versions():
                return lend(args, kwargs)
        casts: list[Any] = []
        seen: dict[int, Any] = {CASTS: casts, COPIES: []}
        try:
            if not kwargs:
                return common(args, seen), kwargs, seen if casts else None
            given = common((*args, *kwargs.values()), seen)
        except Uncommon:
            given = None  # what the walk raises is not to be told as raised while this was handled
        if given is None:
            return in_general(args, kwargs, seen)
        count = len(args)
        return given[:count], dict(zip(kwargs, given[count:], strict=True)), seen if casts else None

    return keep_eager(lend)


def _lend_traced(
    leaf: Leaf, is_excluded: Callable[[Any], bool], name_of: Callable[[int], str]
) -> Callable[[Any, Any], _Lent]:
    """Return a function that casts arguments in code that the compiler traces."""

    def argument(number: int) -> str:
        return name_of(number)

    argument._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the compiler runs it while it traces

    def lend(args: Any, kwargs: Any) -> _Lent:
        prepare_traced()
        walk = TracedWalk(leaf)
        given = [value if is_excluded(at) else walk.run(value, argument(at)) for at, value in enumerate(args)]
        named = {name: value if is_excluded(name) else walk.run(value, name) for name, value in kwargs.items()}
        return given, named, walk

    return own_code(lend)


def _parameters(function: Callable[..., Any], skip: bool) -> list[inspect.Parameter]:
    """Return the parameters of ``function``, with ``skip`` without ``self``; none where it has no signature."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    if skip and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        del parameters[0]
    return parameters


def _excludes(function: Callable[..., Any], names: frozenset[str], skip: bool) -> Callable[[Any], bool]:
    """Return a function that tells whether the argument at a position, or of a name, is one that ``names`` spares."""
    if not names:
        return lambda _: False
    positions, rest, named = _positions(function, names, skip)

    def is_excluded(place: Any) -> bool:
        if isinstance(place, int):
            return place in positions or place >= rest
        return place in names or (named is not None and place not in named)

    return is_excluded


def _positions(
    function: Callable[..., Any], names: frozenset[str], skip: bool
) -> tuple[frozenset[int], float, frozenset[str] | None]:
    """Find the parameters called ``names``.

    Returns:
        Their positions; the position where ``*args`` of such a name begins, or inf; and, where ``**kwargs`` has such a
        name, the names of the parameters that are not in it, or None.
    """
    parameters = _parameters(function, skip)
    if not parameters:  # a callable without a signature: names stand for keywords only
        return frozenset(), float("inf"), None
    places = list(enumerate(parameters))
    starred = (at for at, p in places if p.kind is p.VAR_POSITIONAL and p.name in names)
    positions = frozenset(at for at, p in places if p.name in names and p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD))
    double = any(p.kind is p.VAR_KEYWORD and p.name in names for p in parameters)
    return positions, next(starred, float("inf")), frozenset(p.name for p in parameters) if double else None


def check_names(methods: Sequence[Callable[..., Any]], excluded: Sequence[type | str]) -> None:
    """Refuse the name of an argument that no method has.

    Args:
        methods: the bound methods that run under the policy, of all models.
        excluded: names and types; see :class:`Lender`.

    Raises:
        PolicyError: the message lists the arguments there are.
    """
    known: dict[str, None] = {}
    for method in methods:
        try:
            parameters = inspect.signature(method).parameters.values()
        except (TypeError, ValueError):
            return
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return  # any name may come
        known.update(dict.fromkeys(p.name for p in parameters))
    for name in excluded:
        if isinstance(name, str) and name not in known:
            raise PolicyError(
                f"initialize(cast_model_inputs={tuple(excluded)!r}): no method under the policy has an argument "
                f"{name!r}. Arguments: {', '.join(known) or 'none'}."
            )
