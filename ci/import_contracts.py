"""A contract for import-linter: modules that must load without a package, such as torch, whatever they import.

import-linter itself counts an import inside a function like one at the top of a module. This contract follows imports
at module level only, through all of xamp; those under ``if TYPE_CHECKING`` do not run and do not count.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator
from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

ROOT = pathlib.Path(__file__).resolve().parent.parent


class LoadsWithout(Contract):
    """Fails where importing one of ``modules`` imports one of ``packages``."""

    modules: Any = fields.SetField(subfield=fields.StringField())
    packages: Any = fields.SetField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002  # import-linter's signature
        """See :meth:`importlinter.Contract.check`."""
        chains = [chain for name in sorted(self.modules) if (chain := self._chain_from(name))]
        return ContractCheck(kept=not chains, metadata={"chains": chains})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """See :meth:`importlinter.Contract.render_broken_contract`."""
        for chain in check.metadata["chains"]:
            output.print_error(" -> ".join(chain))

    def _chain_from(self, start: str) -> list[str] | None:
        """The way from ``start`` to a forbidden package; None where there is none."""
        if file_of(start) is None:
            return [start, "no such module"]
        ways, waiting = {start: [start]}, [start]
        while waiting:
            module = waiting.pop(0)
            for found in imported_on_load(module):
                if found.partition(".")[0] in self.packages:
                    return [*ways[module], found]
                if found not in ways and file_of(found) is not None:
                    ways[found] = [*ways[module], found]
                    waiting.append(found)
        return None


def file_of(module: str) -> pathlib.Path | None:
    """The source file of a module of xamp; None for what is none."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def imported_on_load(module: str) -> Iterator[str]:
    """The names of modules that loading ``module`` imports: its parents, and what it imports at module level."""
    parts = module.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts)))
    file = file_of(module)
    if file is not None:
        yield from _imports(ast.parse(file.read_text(encoding="utf-8")).body)


def _imports(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for field in ("body", "orelse", "finalbody"):
                yield from _imports(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _imports(handler.body)
