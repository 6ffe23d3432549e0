"""``[tool.xamp.port]`` of pyproject.toml."""

from __future__ import annotations

import dataclasses
import importlib
import os
from typing import Any

from xamp.errors import PolicyError

__all__ = ["Settings", "read"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a project has set.

    Attributes:
        include: patterns of files in folders to take.
        exclude: patterns to leave out.
        jobs: processes; 0: one for each processor.
        path: the file that says so; None where there is none.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    jobs: int = 0
    path: str | None = None


def read(start: str) -> Settings:
    """The settings of the nearest pyproject.toml at or above a file or folder.

    Raises:
        PolicyError: the file is no TOML, or a key or value of the table is wrong.
    """
    folder = os.path.abspath(start if os.path.isdir(start) else os.path.dirname(start) or ".")
    while True:
        path = os.path.join(folder, "pyproject.toml")
        if os.path.isfile(path):
            return _table(path)
        if os.path.dirname(folder) == folder:
            return Settings()
        folder = os.path.dirname(folder)


def _table(path: str) -> Settings:
    with open(path, "rb") as file:
        data = file.read()
    if b"xamp" not in data:
        return Settings()
    found = _load(data, path).get("tool", {}).get("xamp", {}).get("port", {})
    known = {field.name for field in dataclasses.fields(Settings)} - {"path"}
    for key, value in found.items():
        if key not in known:
            raise PolicyError(f"{path}: [tool.xamp.port] has no {key!r}; there are {', '.join(sorted(known))}.")
        right = isinstance(value, int) and value >= 0 if key == "jobs" else _is_texts(value)
        if not right or isinstance(value, bool):
            wanted = "a number from 0" if key == "jobs" else "a list of texts"
            raise PolicyError(f"{path}: [tool.xamp.port] {key} = {value!r} must be {wanted}.")
    values: dict[str, Any] = {key: value if key == "jobs" else tuple(value) for key, value in found.items()}
    return Settings(**values, path=path)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _load(data: bytes, path: str) -> dict[str, Any]:
    for name in ("tomllib", "tomli"):  # tomllib is in Python 3.11 and newer
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        try:
            loaded: dict[str, Any] = module.loads(data.decode("utf-8"))
            return loaded
        except ValueError as error:
            raise PolicyError(f"{path}: no TOML: {error}.") from None
    raise PolicyError(f"{path}: [tool.xamp.port] needs tomli on this Python. Run: pip install xamp[port]")
