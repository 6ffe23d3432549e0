"""What is changed in code to make mutants, and what is left alone; see ``made``."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence

__all__ = ["Change", "Function", "Piece", "changes_at", "children", "is_declaration", "place_of"]

Change = tuple[str, ast.AST, str]
"""The operator, the node that goes, and the text that comes in its place."""
Function = (ast.FunctionDef, ast.AsyncFunctionDef)

_BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_OPPOSITES = ((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Lt, ast.GtE), (ast.Gt, ast.LtE))
_NEGATED = dict([*_OPPOSITES, *((second, first) for first, second in _OPPOSITES)])
_ARITHMETIC = dict(
    [
        *((ast.Add, ast.Sub), (ast.Sub, ast.Add), (ast.Mult, ast.Div), (ast.Div, ast.Mult), (ast.FloorDiv, ast.Mult)),
        *((ast.Mod, ast.FloorDiv), (ast.Pow, ast.Mult), (ast.LShift, ast.RShift), (ast.RShift, ast.LShift)),
        *((ast.BitAnd, ast.BitOr), (ast.BitOr, ast.BitAnd), (ast.BitXor, ast.BitOr)),
    ]
)
_OTHER_CALL = {"any": "all", "all": "any", "min": "max", "max": "min"}

_COMMUTATIVE = {"add", "add_", "mul", "mul_", "addcmul", "addcmul_", "maximum", "minimum", "logical_or", "logical_and"}
"""Calls whose first two arguments may change places."""
_OF_TYPES = {
    "isinstance",
    "issubclass",
    "cast",
    "TypeVar",
    "ParamSpec",
    "NewType",
    "assert_never",
    "getattr",
    "hasattr",
}
"""Calls whose arguments are left alone: a type checker holds them, or a swap fails at once."""
_OF_TEXT = {"debug", "info", "warning", "error", "exception", "warn", "log"}
"""Calls whose arguments are mostly texts for people."""
_OF_DECLARATION = {"overload", "abstractmethod"}
_KEPT_DECORATORS = {
    *("property", "setter", "deleter", "staticmethod", "classmethod", "dataclass", "contextmanager", "wraps"),
    *("final", "override", "cache", "lru_cache", "cached_property", "total_ordering", "runtime_checkable"),
    *_OF_DECLARATION,
}
"""Without one of these a module does not work at all, or does the same, only slower."""
_KEPT_KEYWORDS = {"stacklevel", "slots", "frozen", "repr", "strict"}
_KEPT_NAMES = {"__all__", "__slots__"}


class Piece(ast.AST):
    """A piece of code that is no node: the line of a ``with``, a decorator with its sign."""

    def __init__(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        super().__init__()
        self.start, self.end = start, end


def place_of(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return where a node begins and ends: a line, from 1, and a place in it, in bytes."""
    if isinstance(node, Piece):
        return node.start, node.end
    assert isinstance(node, (ast.expr, ast.stmt))
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def is_declaration(node: ast.AST) -> bool:
    """Return whether a function only declares something: an overload, or a method that is abstract."""
    return isinstance(node, Function) and any(_last_name(each) in _OF_DECLARATION for each in node.decorator_list)


def _last_name(node: ast.AST) -> str:
    """``b`` of ``b``, ``a.b``, ``a.b()``."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _mentions(node: ast.AST, *names: str) -> bool:
    return any(_last_name(each) in names for each in ast.walk(node))


def children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may be changed in ``node``."""
    if isinstance(node, (ast.Assert, ast.Raise, ast.JoinedStr)):
        return
    if isinstance(node, ast.If) and _mentions(node.test, "TYPE_CHECKING", "version_info"):
        yield from node.orelse
        return
    if isinstance(node, ast.Call) and _last_name(node) in _OF_TYPES | _OF_TEXT:
        return
    if isinstance(node, ast.Assign) and any(_last_name(target) in _KEPT_NAMES for target in node.targets):
        return
    for field, value in ast.iter_fields(node):
        if field in {"annotation", "returns", "decorator_list", "type_params", "bases"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.keyword) and child.arg in _KEPT_KEYWORDS:
                continue
            if isinstance(child, ast.AST):
                yield child


# ---------------------------------------------------------------- the operators


def changes_at(node: ast.AST) -> Iterator[Change]:
    """Yield the changes of ``node`` itself."""
    for kind, of_kind in _OPERATORS:
        if isinstance(node, kind):
            yield from of_kind(node)


def _expression(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _of_compare(node: ast.Compare) -> Iterator[Change]:
    for operator, table in (("boundary", _BOUNDARY), ("negated", _NEGATED)):
        for place, old in enumerate(node.ops):
            if (new := table.get(type(old))) is not None:
                operators = [*node.ops[:place], new(), *node.ops[place + 1 :]]
                yield operator, node, _expression(ast.Compare(node.left, operators, node.comparators))


def _of_boolean(node: ast.BoolOp) -> Iterator[Change]:
    other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield "and-or", node, _expression(ast.BoolOp(other, node.values))


def _of_unary(node: ast.UnaryOp) -> Iterator[Change]:
    if isinstance(node.op, (ast.Not, ast.USub)):
        yield "not" if isinstance(node.op, ast.Not) else "arithmetic", node, _expression(node.operand)


def _is_text_or_row(node: ast.expr) -> bool:
    is_text = isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, (str, bytes)))
    return is_text or isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp))


def _of_binary(node: ast.BinOp) -> Iterator[Change]:
    new = _ARITHMETIC.get(type(node.op))
    if new is not None and not _is_text_or_row(node.left) and not _is_text_or_row(node.right):
        yield "arithmetic", node, _expression(ast.BinOp(node.left, new(), node.right))


def _of_augmented(node: ast.AugAssign) -> Iterator[Change]:
    new = _ARITHMETIC.get(type(node.op))
    if new is not None and not _is_text_or_row(node.value):
        yield "arithmetic", node, ast.unparse(ast.AugAssign(node.target, new(), node.value))
    yield "deleted", node, "pass"


def _of_constant(node: ast.Constant) -> Iterator[Change]:
    value = node.value
    if isinstance(value, bool):
        yield "constant", node, str(not value)
    elif isinstance(value, int):
        yield "constant", node, {0: "1", 1: "0"}.get(value, str(value + 1))
    elif isinstance(value, float):
        yield "constant", node, repr(2 * value if 2 * value != value else 1.0)


def _is_truth(node: ast.expr) -> bool:
    return isinstance(node, (ast.Compare, ast.BoolOp)) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    )


def _of_return(node: ast.Return) -> Iterator[Change]:
    if node.value is None:
        yield "deleted", node, "pass"
    elif _is_truth(node.value):
        yield "returned", node, "return True"
        yield "returned", node, "return False"
    elif not isinstance(node.value, ast.Constant):
        yield "returned", node, "return None"


def _of_statement(node: ast.stmt) -> Iterator[Change]:
    """One that does something by itself is left out. A name that would then be missing fails at once, and is kept."""
    gone = isinstance(node, (ast.Raise, ast.Continue, ast.Break))
    if isinstance(node, ast.Expr):
        gone = isinstance(node.value, ast.Call)
    elif isinstance(node, (ast.Assign, ast.Delete)):
        gone = all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
    elif isinstance(node, ast.AnnAssign):
        gone = node.value is not None and isinstance(node.target, (ast.Attribute, ast.Subscript))
    if gone:
        yield "deleted", node, "pass"


def _of_condition(node: ast.If | ast.IfExp | ast.While) -> Iterator[Change]:
    if isinstance(node.test, ast.Constant) or _mentions(node.test, "TYPE_CHECKING", "version_info"):
        return
    if not isinstance(node, ast.While):  # it would never end
        yield "forced", node.test, "(True)"
    yield "forced", node.test, "(False)"


def _of_comprehension(node: ast.comprehension) -> Iterator[Change]:
    for test in node.ifs:
        yield "forced", test, "(True)"


def _of_call(node: ast.Call) -> Iterator[Change]:
    if isinstance(node.func, ast.Name) and node.func.id in _OTHER_CALL:
        yield "other-call", node.func, _OTHER_CALL[node.func.id]
    elif len(node.args) > 1 and _last_name(node) not in _OF_TYPES | _OF_TEXT | _COMMUTATIVE:
        first, second, *others = node.args
        if all(isinstance(each, (ast.Name, ast.Attribute, ast.Subscript)) for each in (first, second)):
            yield "swapped", node, _expression(ast.Call(node.func, [second, first, *others], node.keywords))


def _of_with(node: ast.With) -> Iterator[Change]:
    """Run its body without it, where nothing takes what it yields."""
    if all(item.optional_vars is None for item in node.items):
        first = node.body[0]
        decorators: Sequence[ast.expr] = getattr(first, "decorator_list", [])
        if not decorators:
            new = "if True:" + "\n" * (first.lineno - node.lineno) + " " * first.col_offset
            yield "with", Piece((node.lineno, node.col_offset), (first.lineno, first.col_offset)), new


def _of_decorated(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[Change]:
    for each in node.decorator_list:
        if _last_name(each) not in _KEPT_DECORATORS:
            (line, column), end = place_of(each)
            yield "decorator", Piece((line, column - 1), end), ""


_OPERATORS: Sequence[tuple[type | tuple[type, ...], Callable[..., Iterator[Change]]]] = (
    (ast.Compare, _of_compare),
    (ast.BoolOp, _of_boolean),
    (ast.UnaryOp, _of_unary),
    (ast.BinOp, _of_binary),
    (ast.AugAssign, _of_augmented),
    (ast.Constant, _of_constant),
    (ast.Return, _of_return),
    (ast.stmt, _of_statement),
    ((ast.If, ast.IfExp, ast.While), _of_condition),
    (ast.comprehension, _of_comprehension),
    (ast.Call, _of_call),
    (ast.With, _of_with),
    ((*Function, ast.ClassDef), _of_decorated),
)
