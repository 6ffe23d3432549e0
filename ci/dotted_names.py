"""Finds the private names of torch in a module's source, by the rule that ci/private_names.py gives."""

from __future__ import annotations

import ast
import re

__all__ = ["names"]

_BY_TEXT = {"getattr", "hasattr", "setattr", "delattr"}
_PRIVATE = re.compile(r"torch(?!\.npu\b|\.ops\.npu\b)(?=.*[.:]_(?!_|xamp))(?:[.:]\w+)+")


class _Names(ast.NodeVisitor):
    """Collects the private names in a module, with their lines.

    Attributes:
        found: line number and name, each as often as it stands there.
    """

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._stands_for: dict[str, str] = {}

    def _dotted(self, node: ast.expr | None) -> str:
        """What ``node`` is as a dotted name, with its beginning resolved; empty where it is none."""
        if isinstance(node, ast.Name):
            return self._stands_for.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (owner := self._dotted(node.value)):
            return f"{owner}.{node.attr}"
        if isinstance(node, ast.Subscript) and self._dotted(node.value) == "sys.modules":
            key = node.slice
            return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""
        return ""

    def _note(self, node: ast.AST, name: str) -> None:
        name = re.sub(r"(\.__\w+__)+$", "", name)
        if _PRIVATE.fullmatch(name):
            self.found.append((getattr(node, "lineno", 0), name.replace(":", ".")))

    def _name(self, target: ast.expr, value: ast.expr | None) -> None:
        """Remember what a variable stands for from here on."""
        if isinstance(target, (ast.Tuple, ast.List)):
            values = value.elts if isinstance(value, ast.Tuple) else [None] * len(target.elts)
            for part, given in zip(target.elts, values, strict=False):
                self._name(part, given)
        elif isinstance(target, ast.Name):
            name = self._dotted(value)
            self._stands_for[target.id] = name if name.startswith("torch.") else target.id

    def visit_Import(self, node: ast.Import) -> None:
        """``import torch._x as y``."""
        for each in node.names:
            self._note(node, each.name)
            if each.asname:
                self._stands_for[each.asname] = each.name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """``from torch._x import y``."""
        for each in node.names if node.level == 0 else ():
            name = f"{node.module}.{each.name}"
            self._note(node, name)
            self._stands_for[each.asname or each.name] = name

    def visit_Assign(self, node: ast.Assign) -> None:
        """``x = torch._y``."""
        self.generic_visit(node)
        for target in node.targets:
            self._name(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """``x: Any = torch._y``."""
        self.generic_visit(node)
        self._name(node.target, node.value)

    def _in_scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        around, given = self._stands_for, node.args
        arguments = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
        self._stands_for = {**around, **{each.arg: each.arg for each in arguments if each}}
        self.generic_visit(node)
        self._stands_for = around

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _in_scope

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """``torch._x``: the whole chain at once."""
        if name := self._dotted(node):
            self._note(node, name)
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """A variable counts where it was assigned."""

    def visit_Call(self, node: ast.Call) -> None:
        """``getattr(torch, "_x")``."""
        if isinstance(node.func, ast.Name) and node.func.id in _BY_TEXT and len(node.args) > 1:
            owner, name = self._dotted(node.args[0]), node.args[1]
            if owner and isinstance(name, ast.Constant) and isinstance(name.value, str):
                self._note(node, f"{owner}.{name.value}")
                for each in (*node.args[2:], *node.keywords):
                    self.visit(each)
                return
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """``"torch._x"``."""
        if isinstance(node.value, str):
            self._note(node, node.value)


def names(source: str) -> list[tuple[int, str]]:
    """Line number and name of each private name of torch in ``source``, each as often as it stands there."""
    found = _Names()
    found.visit(ast.parse(source))
    return found.found
