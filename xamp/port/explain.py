"""What rules do, as text: for ``xamp port --explain`` and docs/porting.md."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence

from xamp.errors import PolicyError
from xamp.port.rule import Rule

__all__ = ["about", "change", "in_order", "listing", "text"]


def in_order(rules: Sequence[Rule]) -> list[Rule]:
    """The rules by how often they are met, most often first."""
    return sorted(rules, key=lambda rule: -rule.met)


def about(rule: Rule) -> str:
    """The docstring of a rule."""
    return inspect.getdoc(rule) or ""


def listing(rules: Sequence[Rule]) -> str:
    """A line for each rule."""
    width = max(len(rule.name) for rule in rules)
    return "\n".join(
        f"{rule.name:{width}}  {rule.grade.value:11}  {about(rule).partition(chr(10))[0]}" for rule in in_order(rules)
    )


def text(rules: Sequence[Rule], name: str) -> str:
    """All about one rule.

    Raises:
        PolicyError: there is no such rule; the message lists those that there are.
    """
    found = next((rule for rule in rules if rule.name == name), None)
    if found is None:
        close = difflib.get_close_matches(name, [rule.name for rule in rules], n=1)
        guess = f" Did you mean {close[0]!r}?" if close else ""
        names = ", ".join(sorted(rule.name for rule in rules))
        raise PolicyError(f"--explain {name}: no such rule.{guess} There are {names}; 'all' lists them.")
    parts = [f"{found.name} ({found.grade.value})", "", about(found)]
    for example in found.examples:
        parts += ["", change(example.before, example.after)]
    if found.unchanged:
        parts += ["", "It leaves alone:"]
        parts += ["\n".join(f"    {line}" for line in each.rstrip().splitlines()) + "\n" for each in found.unchanged]
    return "\n".join(parts)


def change(before: str, after: str | None) -> str:
    """An example as a diff with all of its lines."""
    if after is None:
        return "".join(f"  {line}\n" for line in before.splitlines())
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return "\n".join(line for line in lines if not line.startswith("?"))
