"""What a flag of a script stands for: the values that it is set to, or what the function of its name returns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from xamp.port.owners import given
from xamp.port.receivers import assigned
from xamp.port.source import Node, kind
from xamp.port.work import Work

__all__ = ["is_negative", "operands", "values_of"]

_NONE = ("NotEqual", "NotIn", "IsNot")
_FEWER = ("Equal", "LessThan", "LessThanEqual", "Is")


def operands(node: Any, sign: str) -> list[Any]:
    """The tests that ``and``, or ``or``, joins."""
    if kind(node) == "BooleanOperation" and kind(node.operator) == sign:
        return [*operands(node.left, sign), *operands(node.right, sign)]
    return [node]


def is_negative(work: Work, test: Any) -> bool:
    """Whether a test is true where the device is not there: ``d != "cuda"``, ``not ...``, ``device_count() == 0``."""
    if kind(test) == "UnaryOperation" and kind(test.operator) == "Not":
        return not is_negative(work, test.expression)
    if kind(test) != "Comparison" or len(test.comparisons) != 1:
        return False
    sign, right = kind(test.comparisons[0].operator), test.comparisons[0].comparator
    if work.code(right) == "1":
        return sign == "LessThan"
    if work.code(right) in ("0", "False", "None"):  # a count, or an answer
        return sign in _FEWER
    return sign in _NONE


def values_of(work: Work, node: Any) -> Iterator[Node]:
    """What a flag is set to, or what a function, a method or a property of the file returns."""
    what = kind(node)
    if what == "Call":
        yield from _called(work, node.func)
    elif what == "Name":
        for each in work.scopes.bindings(node):
            value = given(work, each)
            yield from () if value is None else _inside(value)
    elif what == "Attribute" and not work.path(node):
        yield from assigned(work, node.attr.value)
        yield from _of_class(work, node.attr.value)


def _called(work: Work, func: Any) -> Iterator[Node]:
    if kind(func) == "Name":
        for each in work.scopes.bindings(func):
            if kind(each.node) == "FunctionDef":
                yield from _returned(work, each.node)
            elif kind(value := given(work, each)) == "Lambda":
                yield value.body
    elif kind(func) == "Attribute" and not work.path(func):
        yield from _of_class(work, func.attr.value)


def _of_class(work: Work, name: str) -> Iterator[Node]:
    """What stands under a name in the classes of a file. Whose an attribute is no file tells, so all are taken."""
    if "of classes" not in work.found:
        by_name: dict[str, list[Node]] = {}
        for binding in work.scopes.all_bindings():
            node: Any = binding.node
            is_function = kind(node) == "FunctionDef"
            around = itertools.islice(work.source.above(node), 2 if is_function else 5)
            if (is_function or binding.value is not None) and any(kind(each) == "ClassDef" for each in around):
                values = _returned(work, node) if is_function else _inside(binding.value)
                by_name.setdefault(node.name.value if is_function else node.value, []).extend(values)
        work.found["of classes"] = by_name
    yield from work.found["of classes"].get(name, ())


def _inside(value: Any) -> Iterator[Node]:
    """A value, or what ``property(lambda self: ...)`` gives."""
    is_made = kind(value) == "Call" and len(value.args) == 1 and kind(value.args[0].value) == "Lambda"
    yield value.args[0].value.body if is_made else value


def _returned(work: Work, function: Node) -> Iterator[Node]:
    waiting = [function]
    while waiting:
        each: Any = waiting.pop()
        if kind(each) == "Return" and each.value is not None:
            yield each.value
        waiting += work.source.children(each)
