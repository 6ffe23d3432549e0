"""Which arguments of a method are cast: all, but for the names and types that ``cast_model_inputs`` exempts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xamp.casting.left import say_uncopied
from xamp.casting.loans import Loan, prepare_traced
from xamp.errors import PolicyError
from xamp.ground.caster import TO
from xamp.ground.compiler import keep_eager
from xamp.ground.containers import CASTABLE, cast_floats, leaf_of, sparing
from xamp.ground.log import Once
from xamp.ground.traced_walk import TracedWalk
from xamp.ground.walk import ATOM_KINDS, Leaf, Walk

__all__ = ["Lender", "check_names"]

_Lent = tuple[Any, Any, Any]


class Lender:
    """Casts the arguments of one method, call by call.

    Args:
        function: the method; without ``bound``, its first parameter is ``self``.
        dtype: the dtype to which floating tensors are cast.
        cast: the function that casts; what it is not told about is not taken back.
        spared: names of its parameters, and types, that are not cast. A type counts wherever an object of it is nested.
        bound: ``function`` has no parameter ``self``.

    Attributes:
        lend: casts positional and keyword arguments; returns them, and what :mod:`xamp.casting.loans` takes back: None
            if nothing was cast, a dict if only tensors were, else a :class:`Loan`.
        lend_traced: the same in code that the compiler traces; the third is a :class:`TracedWalk`.
    """

    __slots__ = ("_function", "_leaf", "_said", "_skip", "_spares", "lend", "lend_traced")

    def __init__(
        self,
        function: Callable[..., Any],
        dtype: torch.dtype,
        cast: Callable[[Any, torch.dtype], Any] = cast_floats,
        spared: Sequence[type | str] = (),
        *,
        bound: bool = False,
    ) -> None:
        self._function, self._skip, self._said = function, not bound, Once()
        self._spares = _spares(function, frozenset(each for each in spared if isinstance(each, str)), skip=not bound)
        leaf = leaf_of(cast, dtype)
        if leaf is None:
            self.lend = self.lend_traced = lambda args, kwargs: (cast(args, dtype), cast(kwargs, dtype), None)
            return
        self._leaf: Leaf = sparing(leaf, tuple(each for each in spared if isinstance(each, type)))
        plain = cast is cast_floats and not spared
        self.lend: Callable[[Any, Any], _Lent] = _lend_tensors(dtype, self._lend_all) if plain else self._lend_all
        self.lend_traced: Callable[[Any, Any], _Lent] = _lend_traced(self._leaf, self._spares)

    def _lend_all(self, args: Any, kwargs: Any) -> _Lent:
        """Cast arguments of all kinds."""
        if not torch.is_inference_mode_enabled():
            return self._lend_noted(args, kwargs)
        with torch.inference_mode(mode=False), torch.no_grad():  # inference tensors have no versions
            return self._lend_noted(args, kwargs)

    keep_eager(_lend_all)

    def _lend_noted(self, args: Any, kwargs: Any) -> _Lent:
        walk, ends, spares = Walk(self._leaf, notes_copies=True), [], self._spares
        given, named = [], {}
        for at, value in enumerate(args):
            given.append(value if spares(at) else walk.of(value))
            ends.append((len(walk.seen), len(walk.copied or ())))
        for name, value in kwargs.items():
            named[name] = value if spares(name) else walk.of(value)
            ends.append((len(walk.seen), len(walk.copied or ())))
        for each in walk.left:
            say_uncopied(each, getattr(self._function, "__qualname__", "the forward"))
        if not walk.changed:
            return args, kwargs, None
        return tuple(given), named, Loan(walk, ends, self._namer(len(args), [*kwargs]), self._said)

    def _namer(self, positional: int, keywords: list[str]) -> Callable[[int], str]:
        """Return a function that gives the name of an argument: positional ones first, then ``keywords``."""

        def name(number: int) -> str:
            if number >= positional:
                return keywords[number - positional]
            parameters = _parameters(self._function, self._skip)
            for at, parameter in enumerate(parameters):
                if at == number or parameter.kind is parameter.VAR_POSITIONAL:
                    return parameter.name
            return f"number {number}"

        return name


def _lend_tensors(dtype: torch.dtype, lend_all: Callable[[Any, Any], _Lent]) -> Callable[[Any, Any], _Lent]:
    """Return a function that casts arguments that are tensors, and gives others to ``lend_all``."""
    tensor, atoms, to = torch.Tensor, ATOM_KINDS, TO[dtype]
    first, second = CASTABLE - {dtype}
    is_inference = torch.is_inference_mode_enabled

    def lend(args: Any, kwargs: Any) -> _Lent:
        if is_inference():
            return lend_all(args, kwargs)
        lent: dict[int, tuple[Any, Any]] = {}
        given = []
        for item in args:
            kind = type(item)
            if kind is tensor:
                came = item.dtype
                if came is first or came is second:
                    key = id(item)
                    if key not in lent:
                        lent[key] = item, to(item)
                    item = lent[key][1]
            elif kind not in atoms:
                return lend_all(args, kwargs)
            given.append(item)
        if kwargs:
            named = {}
            for name, item in kwargs.items():
                kind = type(item)
                if kind is tensor:
                    came = item.dtype
                    if came is first or came is second:
                        key = id(item)
                        if key not in lent:
                            lent[key] = item, to(item)
                        item = lent[key][1]
                elif kind not in atoms:
                    return lend_all(args, kwargs)
                named[name] = item
            kwargs = named
        return given, kwargs, lent or None

    return keep_eager(lend)


def _lend_traced(leaf: Leaf, spares: Callable[[Any], bool]) -> Callable[[Any, Any], _Lent]:
    """Return a function that casts arguments in code that the compiler traces."""

    def lend(args: Any, kwargs: Any) -> _Lent:
        prepare_traced()
        walk = TracedWalk(leaf)
        given = [value if spares(at) else walk.run(value) for at, value in enumerate(args)]
        named = {name: value if spares(name) else walk.run(value) for name, value in kwargs.items()}
        return given, named, walk

    return lend


def _parameters(function: Callable[..., Any], skip: bool) -> list[inspect.Parameter]:
    """Return the parameters of ``function``, with ``skip`` without ``self``; none where it has no signature."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    if skip and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        del parameters[0]
    return parameters


def _spares(function: Callable[..., Any], names: frozenset[str], skip: bool) -> Callable[[Any], bool]:
    """Return a function that tells whether the argument at a position, or of a name, is one that ``names`` spares."""
    if not names:
        return lambda place: False
    positions, rest, named = _positions(function, names, skip)

    def spares(place: Any) -> bool:
        if isinstance(place, int):
            return place in positions or place >= rest
        return place in names or (named is not None and place not in named)

    return spares


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
    plain = frozenset(at for at, p in places if p.name in names and p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD))
    double = any(p.kind is p.VAR_KEYWORD and p.name in names for p in parameters)
    return plain, next(starred, float("inf")), frozenset(p.name for p in parameters) if double else None


def check_names(methods: Sequence[Callable[..., Any]], spared: Sequence[type | str]) -> None:
    """Refuse the name of an argument that no method has.

    Args:
        methods: the bound methods that run under the policy, of all models.
        spared: names and types; see :class:`Lender`.

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
    for name in spared:
        if isinstance(name, str) and name not in known:
            raise PolicyError(
                f"initialize(cast_model_inputs={tuple(spared)!r}): no method under the policy has an argument "
                f"{name!r}. Arguments: {', '.join(known) or 'none'}."
            )
