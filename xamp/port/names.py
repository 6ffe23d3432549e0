"""Renames what rules list in their tables: chains of names where they are used, and the imports behind them."""

from __future__ import annotations

from xamp.port.imports import is_at_top_level
from xamp.port.rule import Grade, Rule, Target
from xamp.port.scopes import Binding, Ref, dotted
from xamp.port.source import Node, kind
from xamp.port.work import Work

__all__ = ["choose_forms", "rename"]


def choose_forms(work: Work) -> set[Binding]:
    """The imports ``from apex import amp`` that become ``import xamp``, with each ``amp.x`` written ``xamp.x``.

    Where the name is used as a value, is bound twice, or stands under a condition, ``import xamp as amp`` is written.
    """
    chosen = set()
    for binding, uses in work.scopes.uses.items():
        if binding.how != "import" or binding.path != "apex.amp" or not is_at_top_level(work, binding.node):
            continue
        if work.is_exported(_name(binding)):
            continue
        if len(work.scopes.module.names.get(_name(binding), [])) == 1 and all(_moves(work, use) for use in uses):
            chosen.add(binding)
    return chosen


def _name(binding: Binding) -> str:
    alias = binding.node
    name: str = alias.asname.name.value if alias.asname is not None else alias.name.value
    return name


def _moves(work: Work, use: Node) -> bool:
    """Whether a use is ``amp.x`` with a name ``x`` that xamp has."""
    parent = work.parent(use)
    if kind(parent) != "Attribute" or work.is_kept(Rule(), use):
        return False
    found = work.target(f"apex.amp.{parent.attr.value}")
    return found is not None and found[1].new is not None


def rename(work: Work, node: Node, renamed: set[Binding]) -> None:
    """Rename a chain of names where a table says so."""
    parent = work.parent(node)
    if (kind(parent) == "Attribute" and parent.value is node) or work.is_claimed(node):
        return
    if kind(node) == "Name" and not work.scopes.is_use(node):
        return
    ref = _known(work, work.resolve(node))
    found = work.target(ref.path) if ref else None
    if ref is None:
        _free(work, node)
    if ref is None or found is None:
        return
    rule, target, start = found
    if target.imports_only or work.is_kept(rule, node) or work.is_taken(node):
        return
    if not ref.bindings:
        _from_star(work, node, ref, found)
        return
    base = next(each.path for each in ref.bindings if each.path and ref.path.startswith(each.path))
    moved = work.target(base) if base else None
    is_moved = moved is not None and moved[1].new is not None and moved[2] in (base, str(base).rpartition(".")[0])
    is_moved = is_moved and work.kept.isdisjoint(ref.bindings)
    if target.new is None:
        if target.grade is Grade.NEUTRAL:
            work.say(rule, node, target.grade, inline=False)
        elif base != ref.path:  # an import of the very name is reported at the import
            work.say(rule, node, target.grade, target.note)
        return
    new = target.new + ref.path[len(start) :]
    if any(binding in renamed for binding in ref.bindings):
        _write(work, node, ref, start, target.new)
        work.say(rule, node, target.grade, target.note)
    elif base == ref.path and is_moved:
        return  # the import says it all
    elif is_moved and moved is not None and f"{moved[1].new}{ref.path[len(str(base)) :]}" == new:
        if not ref.certain and not _all_move(work, ref):
            work.say(
                rule, node, Grade.NOTED, f"{ref.root.value} is bound in other ways too; see that it is xamp's here"
            )
        else:
            work.say(rule, node, Grade.CERTAIN)
    elif not ref.certain:
        work.say(
            rule, node, Grade.NOTED, f"{ref.root.value} is bound in other ways too; where it is torch's, write {new}"
        )
    else:
        _write(work, node, ref, start, target.new)
        work.say(rule, node, target.grade, target.note)


def _from_star(work: Work, node: Node, ref: Ref, found: tuple[Rule, Target, str]) -> None:
    """A name that nothing in the file binds: it comes from a star import, or from another cell."""
    rule, target, start = found
    if ref.certain and target.new is not None:
        _write(work, node, ref, start, target.new)
        work.say(rule, node, target.grade, target.note)
    elif ref.certain and target.grade is not Grade.NEUTRAL:
        work.say(rule, node, target.grade, target.note)
    elif not ref.certain and target.new is not None and ref.path.startswith("torch.") and "torch" in work.scopes.stars:
        new = target.new + ref.path[len(start) :]
        work.say(rule, node, Grade.NOTED, f"this comes from a star import; where it is torch's, write {new}")


def _free(work: Work, node: Node) -> None:
    """``amp.initialize`` where a star import of another file brings ``amp``."""
    parts = dotted(node).split(".")
    if len(parts) < 2 or parts[0] != "amp" or not work.scopes.stars:
        return
    root = node
    while kind(root) == "Attribute":
        root = root.value
    if work.scopes.bindings(root):
        return
    found = work.table.get(".".join(["apex", *parts[:2]]))
    if found is not None:
        work.say(found[0], node, Grade.NOTED, "amp comes from a star import; where it is Apex's, import xamp as amp")


def _known(work: Work, ref: Ref | None) -> Ref | None:
    """Of a name that several imports bind, such as one of Apex and one of torch, the meaning that has a counterpart."""
    if ref is None:
        return ref
    found = work.target(ref.path)
    if ref.certain and (found is None or found[1].new is not None):
        return ref
    rest = (
        ref.path[len(next(each.path for each in ref.bindings if each.path and ref.path.startswith(each.path))) :]
        if ref.bindings
        else ""
    )
    for binding in ref.bindings:
        found = work.target(f"{binding.path}{rest}") if binding.path else None
        if found is not None and found[1].new is not None:
            return ref._replace(path=f"{binding.path}{rest}")
    return ref


def _all_move(work: Work, ref: Ref) -> bool:
    for binding in ref.bindings:
        found = work.target(binding.path) if binding.path else None
        if not binding.fallback and (found is None or found[1].new is None):
            return False
    return True


def _write(work: Work, node: Node, ref: Ref, start: str, new: str) -> None:
    """Write ``new`` in place of the part of the chain that stands for ``start``."""
    for _ in range(ref.path.count(".") - start.count(".")):
        node = node.value
    if "#" in work.code(node):  # a comment between the parts of a chain
        work.say(Rule(), node, Grade.NOTED, f"write {new} by hand: there is a comment inside the name")
        return
    work.replace(node, work.name(new, node))
