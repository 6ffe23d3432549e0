"""Findings about a backend, and settings that change arithmetic: what ``doctor`` reports beside cause and cure."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Container, Iterator, Mapping

from xamp.contract import Setting

__all__ = ["DEFECT", "NOTE", "WARNING", "Finding", "environment_settings", "torch_settings"]

DEFECT = "defect"  # something is broken: exit code 1
WARNING = "warning"  # works, but not as one would expect
NOTE = "note"  # good to know


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something about a backend that its users should know.

    Attributes:
        severity: :data:`DEFECT`, :data:`WARNING` or :data:`NOTE`.
        text: what was found, one line.
        cure: what to do about it; empty where nothing needs to be done.
    """

    severity: str
    text: str
    cure: str = ""


def environment_settings(
    table: Mapping[str, tuple[str, str, bool]],
    environment: Mapping[str, str] | None = None,
    narrowing: Container[str] = (),
) -> Iterator[Setting]:
    """A setting for each variable of ``table`` that is set.

    Args:
        table: maps the name of a variable to three things: the values that have no effect (lower case, separated by
            spaces), the effect of other values, and True where the setting is a note instead of a warning.
        environment: the environment variables; None means those of this process.
        narrowing: names of the variables that take digits from float32.
    """
    variables = os.environ if environment is None else environment
    for name, (harmless, effect, expected) in table.items():
        value = variables.get(name, "").strip()
        if value and value.lower() not in harmless.split():
            yield Setting(f"{name} (environment)", value, effect, f"unset {name}", expected, name in narrowing)


def torch_settings() -> Iterator[Setting]:
    """The settings in force for every device: torch's own switches, not those of a backend."""
    import torch

    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        yield Setting(
            "torch.get_float32_matmul_precision()",
            repr(precision),
            "float32 products may be computed with fewer digits than float32 has, at every level, O0 too",
            'torch.set_float32_matmul_precision("highest")',
        )
    if torch.get_default_dtype() != torch.float32:
        yield Setting(
            "torch.get_default_dtype()",
            str(torch.get_default_dtype()),
            "modules are made in it, and levels start from float32 parameters",
            "torch.set_default_dtype(torch.float32)",
        )
    if torch.are_deterministic_algorithms_enabled():
        yield Setting(
            "torch.use_deterministic_algorithms",
            "True",
            "other algorithms are used, often slower ones; operators that have none raise or warn",
            "torch.use_deterministic_algorithms(False)",
            expected=True,
        )
