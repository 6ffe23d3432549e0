"""Whose method ``x.cuda()`` is: a tensor's or a module's, or a storage's, or one of a class of the file."""

from __future__ import annotations

from typing import Any

from xamp.port.places import is_map_location
from xamp.port.scopes import Binding
from xamp.port.source import Node, kind
from xamp.port.work import Work

__all__ = ["OWN", "assigned", "doubt_about"]

OWN = "own"
_SAME_OBJECT = ("to", "half", "float", "eval", "train")
_SUPER = "this is the base class's cuda; write super().to(xamp.device(...)), and let callers call .to as well"
_STORAGE = "a storage has no .to; give torch.load map_location=xamp.device(...), or move the tensor"
_IMPORTED = "this is imported; where it is a tensor or a module, write .to(xamp.device(...))"
_PERHAPS_OWN = "a class of this file has this method too; where it is a tensor or a module, write .to(xamp.device(...))"


def doubt_about(work: Work, func: Any) -> str:
    """Why ``x.cuda`` may not become ``x.to``.

    Returns:
        A note; ``OWN`` where the method is of a class of the file, which keeps it; empty where nothing is in the way.
    """
    receiver = func.value
    if work.path(func):
        return _IMPORTED
    if _is_storage(work, receiver):
        return _STORAGE
    if kind(receiver) == "Call" and work.code(receiver.func) == "super":
        return _SUPER
    owners = _owners(work, func.attr.value)
    found = _is_own(work, receiver, owners, 0) if owners else False
    return OWN if found else _PERHAPS_OWN if found is None else ""


def _is_storage(work: Work, receiver: Any) -> bool:
    what = kind(receiver)
    if what == "Call":
        return kind(receiver.func) == "Attribute" and receiver.func.attr.value.endswith("storage")
    last = receiver.attr.value if what == "Attribute" else receiver.value if what == "Name" else ""
    if str(last).lower().endswith("storage"):
        return True
    if what != "Name":
        return False
    for binding in work.scopes.bindings(receiver):
        if binding.how == "parameter" and _places_storages(work, binding.node):
            return True
    return False


def _places_storages(work: Work, param: Node) -> bool:
    """Whether a parameter is the first of a function that is given to a load as ``map_location``."""
    function = work.parent(work.parent(param))
    if kind(function) not in ("FunctionDef", "Lambda") or list(function.params.params)[:1] != [param]:
        return False
    if kind(function) == "Lambda" and is_map_location(work, function):
        return True
    names = {function.name.value} if kind(function) == "FunctionDef" else _names_of(work, function)
    return bool(names & _map_locations(work))


def _map_locations(work: Work) -> set[str]:
    """The names that the file gives to a load as ``map_location``."""
    if "map-locations" not in work.found:
        names = (node for node in work.source.nodes if kind(node) == "Name")
        work.found["map-locations"] = {node.value for node in names if is_map_location(work, node)}
    found: set[str] = work.found["map-locations"]
    return found


def _names_of(work: Work, value: Node) -> set[str]:
    assign = work.parent(value)
    if kind(assign) != "Assign":
        return set()
    return {each.target.value for each in assign.targets if kind(each.target) == "Name"}


def _owners(work: Work, method: str) -> set[str]:
    """The classes of the file that have the method themselves, or from another such class."""
    if f"def {method}(".encode() not in work.source.data:
        return set()
    key = f"owners of {method}"
    if key not in work.found:
        work.found[key] = _classes_with(work, method)
    found: set[str] = work.found[key]
    return found


def _classes_with(work: Work, method: str) -> set[str]:
    classes = [node for node in work.source.nodes if kind(node) == "ClassDef"]
    found = {
        node.name.value
        for node in classes
        if any(kind(each) == "FunctionDef" and each.name.value == method for each in getattr(node.body, "body", ()))
    }
    for _ in classes:
        more = {node.name.value for node in classes if any(work.code(base.value) in found for base in node.bases)}
        if more <= found:
            break
        found |= more
    return found


def _is_own(work: Work, node: Any, owners: set[str], depth: int) -> bool | None:
    """Whether an expression is an object of such a class; None where that cannot be told."""
    what = kind(node)
    if depth > 4:
        return None
    if what == "Name":
        return _is_own_name(work, node, owners, depth)
    if what == "Attribute":
        found = [_is_own(work, value, owners, depth + 1) for value in assigned(work, node.attr.value)]
        is_part = kind(node.value) == "Name" and node.value.value == "self"  # an own class moves its parts
        return any(found) if is_part else _joined(found)
    if what == "Subscript":
        return True if _mentions(work, node.value, owners, depth) else _is_own(work, node.value, owners, depth + 1)
    if what == "Call":
        return _is_own_result(work, node, owners, depth)
    if what in ("IfExp", "BooleanOperation"):
        sides = [node.body, node.orelse] if what == "IfExp" else [node.left, node.right]
        return _joined([_is_own(work, side, owners, depth + 1) for side in sides])
    return None


def _joined(found: list[bool | None]) -> bool | None:
    """What holds for all of several values; None where they differ, or there are none."""
    return found[0] if found and all(each is found[0] for each in found) else None


def _is_own_result(work: Work, call: Any, owners: set[str], depth: int) -> bool | None:
    """The same of what a call returns. A function of another file does not know the classes of this one."""
    if work.code(call.func) in owners:
        return True
    if kind(call.func) == "Attribute" and call.func.attr.value in _SAME_OBJECT:
        return _is_own(work, call.func.value, owners, depth + 1)
    if _mentions(work, call, owners, depth):
        return None
    if work.path(call.func):
        return False
    bindings = work.scopes.bindings(call.func) if kind(call.func) == "Name" else ()
    return False if bindings and all(kind(each.node) == "ClassDef" for each in bindings) else None


def _is_own_name(work: Work, node: Any, owners: set[str], depth: int) -> bool | None:
    if node.value in ("self", "cls"):
        return any(kind(each) == "ClassDef" and each.name.value in owners for each in work.source.above(node))
    return _joined([_of_binding(work, binding, owners, depth) for binding in work.scopes.bindings(node)])


def _of_binding(work: Work, binding: Binding, owners: set[str], depth: int) -> bool | None:
    if binding.how == "parameter":
        return _of_parameter(work, binding.node, owners)
    if binding.value is not None:
        return _is_own(work, binding.value, owners, depth + 1)
    around = (each for each in work.source.above(binding.node) if kind(each) in ("For", "CompFor", "With", "Assign"))
    source: Any = next(around, None)
    if kind(source) in ("For", "CompFor"):
        return True if _mentions(work, source.iter, owners, depth) else None
    if kind(source) == "Assign" and kind(source.value) == "Call" and work.path(source.value.func).startswith("torch."):
        return _is_own_result(work, source.value, owners, depth)
    return None


def _of_parameter(work: Work, param: Any, owners: set[str]) -> bool | None:
    written = work.code(param.annotation) if param.annotation is not None else ""
    if any(owner in written for owner in owners):
        return True
    return False if "Tensor" in written or "Module" in written else None


def _mentions(work: Work, node: Node, owners: set[str], depth: int) -> bool:
    """Whether an expression, or what its names stand for, makes objects of such a class."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if kind(each) == "Name":
            if each.value in owners:
                return True
            for binding in work.scopes.bindings(each) if depth < 4 else ():
                if binding.value is not None and _mentions(work, binding.value, owners, depth + 1):
                    return True
                if kind(binding.node) == "FunctionDef" and _mentions(work, binding.node.body, owners, depth + 2):
                    return True
        waiting += work.source.children(each)
    return False


def assigned(work: Work, last: str) -> list[Node]:
    """The values that the file gives to an attribute, of the same object or another."""
    if "assigned" not in work.found:
        by_name: dict[str, list[Node]] = {}
        for node in work.source.nodes:
            for each in node.targets if kind(node) == "Assign" else ():
                if kind(each.target) == "Attribute":
                    by_name.setdefault(each.target.attr.value, []).append(node.value)
        work.found["assigned"] = by_name
    values: list[Node] = work.found["assigned"].get(last, [])
    return values
