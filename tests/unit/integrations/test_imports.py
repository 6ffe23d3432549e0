"""The adapters import no library before it is used, and say which one is missing.

Covers: xamp.integrations.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from forked_python import python

from xamp import integrations
from xamp.integrations import lightning, transformers

LIBRARIES = ("lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers", "wandb", "tensorboard")


def test_importing_the_adapters_imports_no_library() -> None:
    parts = ", ".join(f"xamp.integrations.{name}" for name in integrations.__all__)
    code = f"import sys, {parts}; sys.exit(str([name for name in {LIBRARIES} if name in sys.modules] or 0))"
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, "0")


def test_the_package_has_its_parts_by_name() -> None:
    assert integrations.lightning is lightning
    with pytest.raises(AttributeError, match=r"'xamp\.integrations' has no attribute 'keras'"):
        _ = integrations.keras


@pytest.mark.parametrize("name", ["TrainerPrecision", "FabricPrecision"])
def test_what_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in LIBRARIES[:3]:
        for module in [found for found in sys.modules if found.partition(".")[0] == library]:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        ModuleNotFoundError, match=rf"xamp\.integrations\.lightning\.{name} needs lightning: pip install"
    ):
        getattr(lightning, name)


def test_other_names_are_attribute_errors() -> None:
    for module in (lightning, transformers):
        found: Any = module
        with pytest.raises(AttributeError, match="has no attribute 'Other'"):
            _ = found.Other
