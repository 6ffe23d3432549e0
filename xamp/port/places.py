"""Where an expression stands, and what the names around it say that it is for."""

from __future__ import annotations

import ast
import re
from typing import Any

from xamp.port.source import Node, kind, quietly, text_of
from xamp.port.work import Work

__all__ = [
    "ASK",
    "default_of",
    "is_device_place",
    "is_like_device",
    "is_map_location",
    "is_spoken",
    "last_name",
    "needs_brackets",
    "outermost",
    "place_of",
    "takes_a_device",
    "whole_text",
]

ASK = "does this text name a device? Then write xamp.device_type()"
_LIKE_DEVICE = re.compile(r"dev(ice)?s?(_?(type|name|str|string))?\d*$|^(map_)?loc(ation)?$|accelerator$", re.I)


def is_like_device(name: str) -> bool:
    """Whether a name is one for devices."""
    return bool(_LIKE_DEVICE.search(name))


def last_name(work: Work, node: Node) -> str:
    """The last part of a chain of names; of a subscript with a text, that text."""
    what = kind(node)
    if what == "Attribute":
        return str(node.attr.value)
    if what == "Name":
        return str(node.value)
    if what == "Subscript" and len(node.slice) == 1 and kind(node.slice[0].slice) == "Index":
        return text_of(node.slice[0].slice.value) or last_name(work, node.value)
    if what == "Call" and work.code(node.func) == "str" and node.args:
        return last_name(work, node.args[0].value)
    return ""


def place_of(work: Work, node: Node) -> tuple[str, str]:
    """Where an expression stands, and the name that tells what it is for.

    Returns:
        ``("call", callee)``, ``("keyword", name)``, ``("default", parameter)``, ``("assign", target)``,
        ``("return", function)``, ``("key", "")``, ``("compare", "")``, ``("element", "")``, ``("value", key)`` of a
        dict, ``("option", flag)`` for ``default=`` of an option of argparse, or ``("other", class)``.
    """
    inner, parent = node, work.parent(node)
    while kind(parent) in ("IfExp", "BooleanOperation") and not (kind(parent) == "IfExp" and parent.test is inner):
        inner, parent = parent, work.parent(parent)
    what = kind(parent)
    if what == "Arg":
        return _argument(work, parent)
    if what == "Param":
        return "default", str(parent.name.value)
    if what in ("Assign", "AnnAssign", "NamedExpr"):
        target = parent.targets[0].target if what == "Assign" else parent.target
        return "assign", last_name(work, target)
    if what == "Return":
        function = next((each for each in work.source.above(parent) if kind(each) == "FunctionDef"), None)
        return "return", str(function.name.value) if function is not None else ""
    if what == "DictElement" or (what == "DictComp" and is_map_location(work, parent)):
        if what == "DictComp" or is_map_location(work, work.parent(parent)):
            return ("key", "") if parent.key is inner else ("keyword", "map_location")
        return ("key", "") if parent.key is inner else ("value", text_of(parent.key) or "")
    if what == "Lambda":
        return place_of(work, parent)
    if what in ("Comparison", "ComparisonTarget"):
        return "compare", ""
    return ("element" if what == "Element" else "other"), what


def _argument(work: Work, arg: Node) -> tuple[str, str]:
    call = work.parent(arg)
    if kind(call) != "Call":
        return "other", kind(call)
    callee = work.path(call.func) or work.code(call.func)
    if arg.keyword is None:
        second = callee == "torch.load" and len(call.args) > 1 and call.args[1] is arg
        return ("keyword", "map_location") if second else ("call", callee)
    name = str(arg.keyword.value)
    if name == "default" and callee.endswith(
        ("add_argument", "option", "DEFINE_string", "Option", "Argument", "field")
    ):
        flags = [text_of(each.value) or "" for each in call.args if each.keyword is None]
        return "option", flags[0].strip("-").replace("-", "_") if flags else ""
    return "keyword", name


def is_map_location(work: Work, node: Node) -> bool:
    """Whether an expression says where a load puts what it loads."""
    parent = work.parent(node)
    while kind(parent) in ("IfExp", "BooleanOperation"):
        node, parent = parent, work.parent(parent)
    if kind(parent) in ("Assign", "AnnAssign"):
        target = parent.targets[0].target if kind(parent) == "Assign" else parent.target
        return "map_loc" in work.code(target)
    if kind(parent) != "Arg":
        return False
    if parent.keyword is not None:
        return bool(parent.keyword.value == "map_location")
    call = work.parent(parent)
    if kind(call) != "Call" or call.args.index(parent) != 1:
        return False
    return work.path(call.func) == "torch.load" or work.code(call.func) in ("torch.load", "load_url")


def default_of(work: Work, node: Node) -> str | None:
    """The key whose default a node is: ``"device"`` for the last of ``config.get("device", x)``; else None."""
    arg = work.parent(node)
    call = work.parent(arg)
    if kind(arg) != "Arg" or kind(call) != "Call" or arg.keyword is not None:
        return None
    last = work.code(call.func).rpartition(".")[2]
    place = call.args.index(arg)
    if last in ("getattr", "setattr"):
        return _key(call.args[1]) if place == 2 else None
    return _key(call.args[0]) if last in _LOOK_UPS and place == 1 else None


def _key(arg: Node) -> str:
    return (text_of(arg.value) or "").strip("-").replace("-", "_").lower()


def needs_brackets(work: Work, node: Any, sign: str) -> bool:
    """Whether an expression must stand in brackets where a node stands.

    Args:
        work: the file.
        node: the node whose place it takes.
        sign: its operator: ``"Or"``, ``"And"`` or ``"Comparison"``.
    """
    if getattr(node, "lpar", ()):
        return False
    parent = work.parent(node)
    what = kind(parent)
    if what == "BooleanOperation":
        return sign not in (kind(parent.operator), "Comparison")
    return what not in _OPEN or bool(getattr(parent, "star", ""))


_OPEN = (
    *("If", "While", "Assert", "IfExp", "CompIf", "Assign", "AnnAssign", "NamedExpr", "Return", "Lambda", "Expr"),
    *("Arg", "Param", "Element", "DictElement", "Index"),
)


def outermost(work: Work, node: Node) -> Node:
    """The text that a text is part of: sums, ``%``, ``.format``, f-strings and lists of them."""
    while True:
        parent = work.parent(node)
        what = kind(parent)
        if what == "Attribute" and kind(work.parent(parent)) == "Call" and parent.attr.value in _SHAPING:
            node = work.parent(parent)
        elif what in ("BinaryOperation", "ConcatenatedString", "FormattedString", "FormattedStringExpression"):
            node = parent
        elif what == "Arg" and kind(work.parent(parent)) == "Call" and _shapes(work, work.parent(parent).func):
            node = work.parent(parent)
        else:
            return node


def _shapes(work: Work, callee: Node) -> bool:
    return work.code(callee) == "str" or (kind(callee) == "Attribute" and callee.attr.value == "format")


def whole_text(work: Work, node: Node) -> str | None:
    """The value of a text, also of one of several pieces or with escapes; None for what is not a plain text."""
    try:
        with quietly():
            value = ast.literal_eval(work.code(node))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def is_spoken(work: Work, node: Node) -> bool:
    """Whether people read the text, or it is a name of something else than a device: a key, a help text, a message."""
    node = outermost(work, node)
    parent = work.parent(node)
    if kind(parent) in ("Expr", "Subscript", "Index", "SubscriptElement", "Annotation", "Raise"):
        return True
    if kind(parent) == "Assert" and parent.msg is node:
        return True
    if any(kind(each) == "Raise" for each in work.source.above(node)):
        return True
    place, name = place_of(work, node)
    if place == "keyword":
        return name in (
            "help",
            "description",
            "message",
            "title",
            "metavar",
            "dest",
            "usage",
            "epilog",
            "label",
            "desc",
        )
    if place != "call":
        return place == "key"
    last = name.rpartition(".")[2]
    if last in _LOOK_UPS or last in ("getattr", "hasattr", "setattr"):
        return default_of(work, node) is None
    return last in _SPEAKING or last.endswith(("Error", "Exception", "Warning"))


def is_device_place(work: Work, node: Node) -> bool | None:
    """Whether what stands at a node is a device; None where that cannot be told; False where it is none."""
    key = default_of(work, node)
    if key is not None:
        return True if is_like_device(key) else None
    place, name = place_of(work, node)
    if place == "call":
        if name.rpartition(".")[2] in _ON_TEXTS:
            return None
        return (
            True
            if name.endswith((".to", "torch.device", "to_device")) or is_like_device(name) or "device" in name
            else None
        )
    if place == "keyword":
        if name in ("help", "description", "message", "title", "choices", "dest", "metavar"):
            return False
        return True if is_like_device(name) else None
    if place == "option":
        return True if is_like_device(name) or name in ("dev", "gpu", "cuda") else None
    if place in ("default", "assign", "return", "value"):
        return True if is_like_device(name) or (place == "return" and "device" in name) else None
    return False if place in ("key", "compare") else None


def takes_a_device(work: Work, node: Node) -> bool:
    """Whether an expression is an argument of torch's, which takes a device; other calls may store it as it is."""
    arg = work.parent(node)
    call = work.parent(arg)
    if kind(arg) != "Arg" or kind(call) != "Call":
        return False
    place, name = place_of(work, node)
    if place == "call":
        return name.endswith((".to", ".cuda", ".npu", ".set_device")) or name == "torch.device"
    if place != "keyword" or name not in ("device", "map_location"):
        return False
    callee = work.path(call.func) or work.code(call.func)
    last = callee.rpartition(".")[2]
    return callee.startswith("torch.") or last == "to" or last.startswith("new_") or last in _LOADING


_LOADING = ("load", "load_url", "load_state_dict_from_url", "Generator")
_ON_TEXTS = ("startswith", "endswith", "replace", "split", "partition", "find", "index", "count", "removeprefix")
_LOOK_UPS = ("get", "pop", "setdefault", "getenv", "from_env")
_SHAPING = ("format", "format_map", "lower", "upper", "strip")
_SPEAKING = {
    *("print", "info", "warning", "warn", "error", "debug", "critical", "exception", "log", "write", "echo"),
    *("add_argument", "update_config", "append_log", "import_module", "find_spec", "range_push", "section"),
}
