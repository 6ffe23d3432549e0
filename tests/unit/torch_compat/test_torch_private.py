"""The private names of torch: the torch that is there has those that the table says, and the adapters bind its own.

Covers: xamp.torch_compat.torch_private.*, backends.torch_private.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gathering import cases

import xamp.backends.npu.emulation.torch_private
import xamp.backends.torch_private
from xamp.torch_compat import torch_private
from xamp.torch_compat.torch_private import late
from xamp.torch_compat.torch_private.names import NAMES, NEEDED, Name

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
BUILT_WITH = {
    "": lambda: True,
    "cuDNN": torch.backends.cudnn.is_available,
    "distributed": torch.distributed.is_available,
}


def what(name: str) -> Any:
    """What a dotted name stands for; the longest beginning that is a module is imported."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def is_torchs(value: Any, torchs: Any) -> bool:
    """Whether it is torch's own, or that with turns, which fp8 that was used in this process has its callers take."""
    return any(each is torchs or each == torchs for each in (value, callable(value) and inspect.unwrap(value)))


def is_here(line: Name) -> bool:
    """Whether the table says that this torch has it."""
    return tuple(map(int, line.since.split("."))) <= RELEASE and BUILT_WITH[line.build]()


def test_torch_has_what_the_table_says_and_lacks_the_rest() -> None:
    with cases() as case:
        for line in NAMES:
            with case(line.name):
                if is_here(line):
                    what(line.name)
                    continue
                assert line.without not in ("", NEEDED)
                with pytest.raises((AttributeError, ImportError)):
                    what(line.name)


def test_what_is_public_too_is_the_same_object() -> None:
    named = [line for line in NAMES if line.public]
    assert len(named) == 9
    with cases() as case:
        for line in named:
            with case(line.name):
                assert is_torchs(what(line.public), what(line.name))


def test_each_has_one_line() -> None:
    names = [line.name for line in NAMES]
    assert names == sorted(set(names))
    assert all(line.used_by.split() == sorted(set(line.used_by.split())) for line in NAMES)


ADAPTERS = [
    *(f"{torch_private.__name__}.{module.name}" for module in pkgutil.iter_modules(torch_private.__path__)),
    xamp.backends.torch_private.__name__,
    xamp.backends.npu.emulation.torch_private.__name__,
]


def bound(adapter: str) -> Iterator[tuple[str, Any]]:
    """Each name that an adapter exports and that is not its own function or constant."""
    module = importlib.import_module(adapter)
    for name in module.__all__:
        value = getattr(module, name)
        own = isinstance(value, types.FunctionType) and value.__module__ == adapter
        if callable(value) and not own and getattr(value, "__module__", None) != adapter:
            yield name, value


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters_bind_torchs_own_objects(adapter: str) -> None:
    torchs = [what(line.name) for line in NAMES if is_here(line)]
    strange = [name for name, value in bound(adapter) if not any(is_torchs(value, each) for each in torchs)]
    assert strange == []


def test_a_late_name_imports_its_module_when_it_is_asked_for() -> None:
    assert late.if_imported("torch.no_such_module.name") is None
    assert late.imported("torch.compiler.is_compiling") is torch.compiler.is_compiling
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        late.imported("torch.no_such_module.name")
    with pytest.raises(AttributeError, match="no_such_name"):
        late.if_imported("torch.compiler.no_such_name")
