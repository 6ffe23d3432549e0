"""The rules, in the order in which they look at a place: what is more special comes first."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from xamp.errors import PolicyError
from xamp.port.rule import Rule

__all__ = ["GROUP", "built_in", "load"]

GROUP = "xamp.port_rules"
_MODULES = (
    "builds",
    "one_vendor",
    "environment",
    "defaults",
    "clipping",
    "guards",
    "branches",
    "annotations",
    "apex_amp",
    "apex_parts",
    "torch_cuda_amp",
    "torch_amp",
    "torch_cuda",
    "npu",
    "map_location",
    "device_method",
    "torch_device",
    "device_format",
    "device_text",
    "comparisons",
    "backend_names",
    "tensor_types",
    "remarks",
    "mentions",
)


def built_in() -> list[Rule]:
    """The rules of xamp itself."""
    modules = [importlib.import_module(f"{__name__}.{name}") for name in _MODULES]
    return [rule for module in modules for rule in module.RULES]


def load() -> list[Rule]:
    """All rules: those of other packages first, so that they can take places over.

    Raises:
        PolicyError: an entry point does not lead to a list of rules; the message names it.
    """
    found: list[Rule] = []
    for point in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        try:
            given = point.load()
            rules = list(given() if callable(given) else given)
        except Exception as error:
            raise PolicyError(
                f"entry point {point.name!r} of {GROUP} ({point.value}) cannot be loaded: {error!r}. Mend that "
                f"package, or "
                "uninstall it."
            ) from error
        if not all(isinstance(rule, Rule) for rule in rules):
            raise PolicyError(f"entry point {point.name!r} of {GROUP} must lead to a list of xamp.port.Rule objects.")
        found += rules
    return found + built_in()
