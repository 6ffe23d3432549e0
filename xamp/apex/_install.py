"""Answers ``import apex``, ``import amp_C`` and ``import apex_C`` of unmodified scripts with modules of xamp.

:func:`install` puts a finder in front of Python's. It answers only the names in :data:`xamp.apex._modules.MODULES`,
each with a module that hands every attribute over to the module of xamp. For a compiled module of Apex that xamp does
without it raises an error that says what to use. Whether it answers at all is decided when a
script first imports one of the names: only then the script's own folder is on the path. A second finder, behind
Python's, says the same of ``xamp.apex`` and a name that is left out. This module needs no torch.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from xamp.apex import _modules, _real
from xamp.errors import PolicyError

__all__ = ["choice", "install", "is_installed", "tell_left_out", "uninstall"]

_TOP = ("apex", "amp_C", "apex_C")
_PREFER = ("real", "xamp")
_log = logging.getLogger("xamp")


class _Served(ModuleType):
    """A module of Apex. Attributes are those of the module of xamp, and are set there."""

    def __getattr__(self, name: str) -> Any:
        target = self.__dict__.get("_xamp_target")
        if target is None:  # while it is being imported
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        own, value = f"{self.__name__}.{name}", getattr(target, name)
        if isinstance(value, ModuleType) and own in _modules.MODULES:
            return importlib.import_module(own)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, _Served):  # the import system stores a submodule in its parent
            target = self.__dict__.get("_xamp_target")
            # apex.parallel.LARC is a module and a class of the same name: there the class wins, as in Apex.
            if target is None or isinstance(getattr(target, name, value), ModuleType):
                self.__dict__[name] = value
        elif name.startswith("__") or "_xamp_target" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__["_xamp_target"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["_xamp_target"], name)

    def __dir__(self) -> list[str]:
        return dir(self.__dict__["_xamp_target"])


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Served(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        _require_torch(module.__name__)
        target = importlib.import_module(_modules.MODULES[module.__name__])
        module.__dict__["_xamp_target"] = target
        module.__dict__["__doc__"] = target.__doc__


class _Finder(importlib.abc.MetaPathFinder):
    """The finder of one :func:`install`.

    Attributes:
        prefer: see :func:`install`.
        real: the installed package that was found at the first import; None before, and where there is none.
        answers: whether xamp answers; None before the first import.
    """

    def __init__(self, prefer: str) -> None:
        self.prefer = prefer
        self.real: _real.Installed | None = None
        self.answers: bool | None = None
        self._loader = _Loader()

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if name in _modules.EXTENSIONS:
            if importlib.machinery.PathFinder.find_spec(name) is not None:
                return None  # a module of the script has that name
        elif name.partition(".")[0] not in _TOP:
            return None
        if not self._decide():
            return None
        if name in _modules.LEFT_OUT or name in _modules.EXTENSIONS:
            _refuse(name)
            return None
        if name not in _modules.MODULES:
            return None
        package = any(other.startswith(f"{name}.") for other in (*_modules.MODULES, *_modules.LEFT_OUT))
        return importlib.machinery.ModuleSpec(name, self._loader, is_package=package)

    def _decide(self) -> bool:
        if self.answers is None:
            self.real = _real.find()
            self.answers = self.prefer == "xamp" or self.real is None or not self.real.is_apex
            if self.real is not None:
                _log.warning(_told(self.real, self.answers))
        return self.answers


class _LeftOut(importlib.abc.MetaPathFinder):
    """Raises what :func:`xamp.apex._modules.left_out` says for ``import xamp.apex.transformer`` and its like."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        top, _, rest = name.partition(".")
        if top == "xamp" and rest in _modules.LEFT_OUT:
            _refuse(rest)
        return None


def _refuse(name: str) -> None:
    """Raise for the import of a name that is left out; return where a script asks by ``importlib.util.find_spec``."""
    if sys._getframe(3).f_globals.get("__name__") != "importlib.util":
        raise _modules.left_out(name)


_left_out = _LeftOut()


def tell_left_out() -> None:
    """Put the finder for names of ``xamp.apex`` behind Python's, which find none of them."""
    if _left_out not in sys.meta_path:
        sys.meta_path.append(_left_out)


def _told(real: _real.Installed, answers: bool) -> str:
    if not answers:
        rest = " It has no apex.amp." if not real.has_amp else ""
        return f"import apex: the installed {real.says} is used.{rest} For xamp.apex in its place: --prefer xamp."
    if real.is_apex:
        return f"import apex: xamp.apex is used, as asked for, and not the installed {real.says}."
    return f"import apex: xamp.apex is used. What is installed under the name is {real.says}."


_finder: _Finder | None = None
_before: dict[str, ModuleType] = {}
_holds: list[str] = []
_lock = threading.RLock()


def install(prefer: str = "real") -> None:
    """Answer ``import apex``, ``amp_C`` and ``apex_C`` with xamp, until as many calls of :func:`uninstall`.

    Nothing is imported here. Names that xamp leaves out raise an ImportError that says what to use.

    Args:
        prefer: ``"real"`` leaves an Apex that is installed in its place; ``"xamp"`` answers before it, from now on
            and until its :func:`uninstall`, whatever other calls say. A package of another project that has the name
            is never taken for Apex.

    Raises:
        PolicyError: ``prefer`` is neither.
    """
    global _finder
    if prefer not in _PREFER:
        raise PolicyError(f"install(prefer={prefer!r}): must be one of {', '.join(map(repr, _PREFER))}.")
    with _lock:
        _holds.append(prefer)
        if _finder is None:
            _finder = _Finder("real")
            sys.meta_path.insert(0, _finder)
        if prefer == "xamp" and _finder.prefer != "xamp":
            _finder.prefer = "xamp"
            if not _finder.answers:
                # What a process has imported already is put aside, else Python would not ask the finder.
                _before.update(_take_out())
                _finder.answers = None


def uninstall() -> None:
    """End the newest :func:`install`. The last one takes the finder and its modules out, and puts back what stood."""
    global _finder
    with _lock:
        if _finder is None:
            return
        _holds.pop()
        if "xamp" in _holds or (_holds and _finder.prefer == "real"):
            return
        if _finder.answers:
            _take_out()
        sys.modules.update(_before)
        _before.clear()
        if _holds:  # those that are left leave an Apex that is installed in its place
            _finder.prefer, _finder.answers = "real", None
        else:
            sys.meta_path.remove(_finder)
            _finder = None


def is_installed() -> bool:
    """Whether a finder stands in front of Python's."""
    return _finder is not None


def choice() -> tuple[bool | None, _real.Installed | None]:
    """Whether xamp answers (None: nobody asked yet), and the package that is installed, if any."""
    return (None, None) if _finder is None else (_finder.answers, _finder.real)


def _take_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] in _TOP]
    return {name: sys.modules.pop(name) for name in names}


def _require_torch(name: str) -> None:
    from xamp.registry.registry import require_torch

    require_torch(name)
