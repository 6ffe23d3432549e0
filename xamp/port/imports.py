"""Import statements: rewritten by the rules' tables, dropped where nothing needs them, and ``import xamp`` added."""

from __future__ import annotations

import dataclasses
from typing import Any

from xamp.port.magics import MARK
from xamp.port.npu_import import why_it_stays
from xamp.port.rule import Grade, Rule, Target
from xamp.port.scopes import Binding, dotted
from xamp.port.source import Node, kind
from xamp.port.work import Work

__all__ = ["is_at_top_level", "rewrite_imports"]

_ROOTS = ("apex", "torch_npu")  # packages that a port no longer needs
_WHOLE = ("amp_C", "apex_C")  # modules that move with all of their names


@dataclasses.dataclass
class _Parts:
    """What becomes of the names of one statement."""

    kept: list[str] = dataclasses.field(default_factory=list)
    new: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # module -> names, or "" -> whole statements
    dropped: int = 0
    plain: int = 0  # names that `import xamp` at the top takes the place of


def is_at_top_level(work: Work, alias: Node) -> bool:
    """Whether an import stands at the top level of the module, under no condition."""
    line = work.parent(work.parent(alias))
    return kind(line) == "SimpleStatementLine" and kind(work.parent(line)) == "Module"


def rewrite_imports(work: Work, renamed: set[Binding]) -> list[tuple[int, int, str]]:
    """Edits of all import statements; findings go into ``work``."""
    edits: list[tuple[int, int, str]] = []
    plain: list[Node] = []
    last: list[Node] = []  # torch_npu, which goes where others are xamp's
    for node in work.source.nodes:
        if kind(node) == "ImportFrom" and not node.relative and node.module is not None:
            edits += _import_from(work, node, renamed, plain)
        elif kind(node) == "Import" and any(dotted(alias.name) == "torch_npu" for alias in node.names):
            last.append(node)
        elif kind(node) == "Import":
            edits += _import(work, node, plain)
    is_alone = not work.needs and not plain and not any("xamp" in new for _, _, new in edits)
    is_alone = is_alone and b"from torch_npu" not in work.source.data
    for node in last:
        edits += _import(work, node, plain, is_alone)
    plain.sort(key=lambda node: work.source.span(node)[0])
    return edits + _import_xamp(work, plain)


def _bindings(work: Work, alias: Node) -> list[Binding]:
    name = alias.asname.name.value if alias.asname is not None else dotted(alias.name).partition(".")[0]
    return [each for each in work.scopes.is_bound(name) if each.node is alias]


def _is_kept(work: Work, rule: Rule, node: Node, alias: Node) -> bool:
    return work.is_kept(rule, node) or not work.kept.isdisjoint(_bindings(work, alias))


def _find(work: Work, path: str) -> tuple[Rule, Target] | None:
    """The entry of a path; of a name in a module of which all names move along, one for that name."""
    found = work.target(path)
    if found is not None and found[2] == path:
        return found[0], found[1]
    if found is None or found[1].new is None or found[1].is_module or found[2] not in _WHOLE:
        return None
    return found[0], found[1]._replace(new=f"{found[1].new}{path[len(found[2]) :]}")


def _import_from(work: Work, node: Node, renamed: set[Binding], plain: list[Node]) -> list[tuple[int, int, str]]:
    module = dotted(node.module)
    if kind(node.names) == "ImportStar":
        return _star(work, node, module)
    parts = _Parts()
    simple = True  # only the module's name changes
    modules = set()
    for alias in node.names:
        name = alias.name.value
        local = alias.asname.name.value if alias.asname is not None else name
        found = _find(work, f"{module}.{name}")
        if found is None or _is_kept(work, found[0], node, alias) or _stays(work, alias, f"{module}.{name}"):
            parts.kept.append(work.code(alias).rstrip(", \t"))
            continue
        rule, target = found
        if target.new is None:
            parts.kept.append(work.code(alias).rstrip(", \t"))
            if target.grade is not Grade.NEUTRAL:
                work.say(rule, alias, target.grade, target.note)
            continue
        work.say(rule, alias, target.grade, target.note)
        if any(binding in renamed for binding in _bindings(work, alias)):
            parts.plain += 1
            continue
        home, _, last = target.new.rpartition(".")
        modules.add(home)
        simple = simple and last == name and bool(home)
        if home:
            parts.new.setdefault(home, []).append(last if last == local else f"{last} as {local}")
        else:
            parts.new.setdefault("", []).append(f"import {last}" if last == local else f"import {last} as {local}")
    if not parts.new and not parts.plain:
        return []
    if simple and not parts.kept and not parts.plain and len(modules) == 1:
        return [(*work.source.span(node.module), modules.pop())]
    return _statement(work, node, f"from {module} import", parts, plain)


def _stays(work: Work, alias: Node, path: str) -> bool:
    """Whether the name is torch.amp's and some use gives it a device that only the run knows."""
    if path not in ("torch.amp.autocast", "torch.amp.GradScaler", "torch.amp.custom_fwd", "torch.amp.custom_bwd"):
        return False
    from xamp.port.rules.torch_amp import names_the_device

    uses = [use for binding in _bindings(work, alias) for use in work.scopes.uses.get(binding, [])]
    return not uses or not all(names_the_device(work, use) for use in uses)


def _star(work: Work, node: Node, module: str) -> list[tuple[int, int, str]]:
    found = _find(work, module)
    if found is None or work.is_kept(found[0], node):
        return []
    rule, target = found
    if target.new is None or not target.new.startswith("xamp.apex"):
        text = f"a star import from {module}: import by name what the file uses, then port again"
        work.say(rule, node, Grade.UNSUPPORTED, text)
        return []
    work.say(rule, node, target.grade)
    return [(*work.source.span(node.module), target.new)]


def _import(work: Work, node: Node, plain: list[Node], is_alone: bool = False) -> list[tuple[int, int, str]]:
    parts = _Parts()
    for alias in node.names:
        path = dotted(alias.name)
        found = _find(work, path)
        root = path.partition(".")[0]
        written = work.code(alias).rstrip(", \t")
        if found is not None and _is_kept(work, found[0], node, alias):
            parts.kept.append(written)
        elif alias.asname is not None:
            _import_as(work, alias, path, written, parts)
        elif path in ("torch.cuda", "torch.cuda.amp", "torch.npu", "torch.npu.amp", "torch.amp"):
            if path == "torch.amp":
                parts.kept.append(written)
                continue
            work.say(work.table["torch.cuda"][0], alias, Grade.CERTAIN)
            if _has_torch(work, node, parts):
                parts.dropped += 1
            else:
                parts.new.setdefault("", []).append("import torch")
        elif root in _ROOTS:
            why = why_it_stays(work, alias, is_alone) if path == "torch_npu" else ""
            _import_root(work, alias, root, written, parts, why)
        elif found is not None and found[1].new is not None:
            work.say(found[0], alias, found[1].grade, found[1].note)
            home, _, last = found[1].new.rpartition(".")
            parts.new.setdefault(home, []).append(last if last == path else f"{last} as {path}")
        else:
            parts.kept.append(written)
            if found is not None and found[1].grade is not Grade.NEUTRAL:
                work.say(found[0], alias, found[1].grade, found[1].note)
    if not parts.new and not parts.plain and not parts.dropped:
        return []
    return _statement(work, node, "import", parts, plain)


def _has_torch(work: Work, node: Node, parts: _Parts) -> bool:
    """Whether ``import torch`` stands above, or in the same statement, so that another one is of no use."""
    if "torch" in parts.kept or "import torch" in parts.new.get("", []):
        return True
    if not is_at_top_level(work, node.names[0]):
        return False
    return any(
        binding.how == "import"
        and binding.path == "torch"
        and kind(work.parent(binding.node)) == "Import"
        and binding.node.asname is None
        and is_at_top_level(work, binding.node)
        and work.source.span(binding.node)[0] < work.source.span(node)[0]
        for binding in work.scopes.module.names.get("torch", [])
    )


def _import_as(work: Work, alias: Node, path: str, written: str, parts: _Parts) -> None:
    found = _find(work, path)
    if found is None or found[1].new is None:
        parts.kept.append(written)
        if found is not None and found[1].grade is not Grade.NEUTRAL:
            work.say(found[0], alias, found[1].grade, found[1].note)
        return
    rule, target = found
    work.say(rule, alias, target.grade, target.note)
    parts.new.setdefault("", []).append(f"import {target.new} as {alias.asname.name.value}")


def _import_root(work: Work, alias: Node, root: str, written: str, parts: _Parts, why: str) -> None:
    """``import apex`` and ``import torch_npu``: gone where every use is rewritten, and nothing says why it stays."""
    rule = work.table[root][0]
    values, left = 0, 0
    for binding in _bindings(work, alias):
        for use in work.scopes.uses.get(binding, []):
            parent = work.parent(use)
            if kind(parent) != "Attribute":
                values += 1
            elif not work.is_taken(use):
                left += 1
    if left or (values and root != "apex"):
        parts.kept.append(written)
        text = f"some names of {root} have no counterpart in xamp; see the notes below"
        work.say(rule, alias, Grade.UNSUPPORTED, text)
        return
    if why:
        parts.kept.append(written)
        work.say(rule, alias, Grade.NOTED, why)
        return
    work.say(rule, alias, Grade.CERTAIN)
    if values or (root == "apex" and not is_at_top_level(work, alias)):
        parts.new.setdefault("", []).append("import xamp.apex as apex")
    else:
        parts.dropped += 1


def _statement(work: Work, node: Node, start: str, parts: _Parts, plain: list[Node]) -> list[tuple[int, int, str]]:
    """The edit that writes a statement anew."""
    statements = [f"{start} {', '.join(parts.kept)}"] if parts.kept else []
    statements += parts.new.get("", [])
    statements += [f"from {module} import {', '.join(names)}" for module, names in parts.new.items() if module]
    line = work.parent(node)
    if parts.plain and not statements:
        plain.append(node)
        return []
    if not statements:
        return [_drop(work, node)]
    joint = "; "
    if kind(line) == "SimpleStatementLine" and len(line.body) == 1:
        offset = work.source.span(node)[0]
        indent = work.source.data[work.source.line_start(offset) : offset].decode()
        joint = work.source.newline.decode() + indent
        statements = [*_comments(work, node), *statements]
    return [(*work.source.span(node), joint.join(statements))]


def _comments(work: Work, node: Node) -> list[str]:
    """The comments inside the brackets of an import; they go above what takes its place."""
    if "#" not in work.code(node):
        return []
    return [f"#{line.partition('#')[2]}".rstrip() for line in work.code(node).splitlines() if "#" in line]


def _drop(work: Work, node: Node) -> tuple[int, int, str]:
    """Take a statement out, and the ``if`` or ``try`` that guards nothing else with it."""
    line = work.parent(node)
    start, end = work.source.span(node)
    if kind(line) != "SimpleStatementLine" or len(line.body) != 1:
        return start, end, "pass"
    while (guard := _guard_of(work, line)) is not None:
        line = guard
    block = work.parent(line)
    start, end = work.source.span(line)
    if kind(block) == "Module" or len(block.body) > 1:
        return work.source.line_start(start), work.source.next_line(end - 1), ""
    return start, end, "pass"


def _guard_of(work: Work, line: Any) -> Any:
    """The ``if`` whose test only looks, or the ``try``, in which a line stands alone; None where there is more."""
    block = work.parent(line)
    guard = work.parent(block)
    if kind(block) != "IndentedBlock" or len(block.body) != 1:
        return None
    if kind(guard) == "If":
        is_elif = kind(work.parent(guard)) == "If"
        return None if guard.orelse is not None or is_elif or not _only_looks(work, guard.test) else guard
    is_try = kind(guard) in ("Try", "TryStar") and guard.body is block
    return guard if is_try and guard.orelse is None and guard.finalbody is None else None


def _only_looks(work: Work, test: Any) -> bool:
    """Whether a test does nothing but look: it calls nothing, or reads a version."""
    waiting = [test]
    while waiting:
        each = waiting.pop()
        if kind(each) == "Call" and work.code(each.func).rpartition(".")[2] not in _READS:
            return False
        waiting += work.source.children(each)
    return True


_READS = ("parse", "Version", "LooseVersion", "StrictVersion", "int", "float", "split", "startswith", "hasattr")


def _import_xamp(work: Work, plain: list[Node]) -> list[tuple[int, int, str]]:
    """Makes sure that ``import xamp`` comes before its first use, once."""
    edits: list[tuple[int, int, str]] = []
    wanted = sorted(module for module in work.needs if not _has(work, module))
    if any(module.startswith("xamp.") for module in wanted) and work.root == "xamp":
        wanted = [module for module in wanted if module != "xamp"]
    first = min((work.needs[module] for module in wanted), default=len(work.source.data))
    text = [
        f"import {each}" if each != "xamp" or work.root == "xamp" else f"import xamp as {work.root}" for each in wanted
    ]
    home = next((node for node in plain if work.source.span(node)[0] < first), None)
    for node in plain:
        start, end = work.source.span(node)
        if node is home and text:
            edits.append((start, end, work.source.newline.decode().join([*_comments(work, node), *text])))
        else:
            edits.append(_drop(work, node))
    if home is None and text:
        at = _place(work, first)
        newline = work.source.newline.decode()
        edits.append((at, at, "".join(f"{each}{newline}" for each in text)))
    return edits


def _has(work: Work, module: str) -> bool:
    """Whether the file imports the module before its first use already."""
    for binding in work.scopes.module.names.get(work.root, []):
        alias = binding.node
        if binding.how == "import" and is_at_top_level(work, alias) and kind(work.parent(alias)) == "Import":
            before = work.source.span(alias)[0] < work.needs[module]
            path = dotted(alias.name)
            if before and (path == module or path.startswith(f"{module}.")):
                return True
    return False


def _place(work: Work, first: int) -> int:
    """Where to put ``import xamp``: after torch's import, or another one, before the first use."""
    after_torch = after_any = start = None
    for line in work.source.tree.body:
        at, end = work.source.span(line)
        if at >= first or kind(line) in ("FunctionDef", "ClassDef"):
            break
        below = work.source.next_line(end)
        if below > first or kind(line) != "SimpleStatementLine":
            continue
        what = kind(line.body[0])
        is_future = (
            what == "ImportFrom" and line.body[0].module is not None and dotted(line.body[0].module) == "__future__"
        )
        is_magic = what == "Pass" and f"{MARK}%%" in work.source.text_of_line(work.source.line(at))  # first in its cell
        if is_future or is_magic or (what == "Expr" and start is None and "String" in kind(line.body[0].value)):
            start = below
        elif what in ("Import", "ImportFrom"):
            after_any = below
            if "torch" in work.code(line.body[0]):
                after_torch = below
    found = next((place for place in (after_torch, after_any, start) if place is not None), None)
    if found is not None:
        return found
    body = work.source.tree.body
    if not body:
        return 0
    decorators = getattr(body[0], "decorators", ())
    return work.source.line_start(work.source.span(decorators[0] if decorators else body[0])[0])
