"""The jobs of the pipeline, from ci/devices.toml. ``python ci/devices.py matrix`` calls it.

In xamp's own pipeline every row that is ready gets its jobs; so do rows of hardware that XAMP_HARDWARE names. A job for
which there is no runner would wait for a day. A pull request gets no hardware, because anyone's code would run there.
Jobs for the night get theirs where the clock or a person starts the pipeline, and not for a commit.

Another project's pipeline says what it wants, and gets exactly that:

    XAMP_ONLY       names of rows, such as "cpu ascend-910b2 cuda"
    XAMP_TORCH      releases of torch for jobs that are not on hardware; without it the one that CI pins
    XAMP_PYTHON     versions of Python for them; without it the one on which each release is tested
    XAMP_RUNNERS    JSON: the labels of runners by the name of a row, such as {"cuda": ["self-hosted", "gpu"]}
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.devices_data import Data, Device, DevicesError, Job, load

__all__ = ["matrix", "plan", "text"]


def words_of(variables: Mapping[str, str], name: str) -> list[str]:
    """The words of a variable, with spaces or commas between them."""
    return [word for word in re.split(r"[\s,]+", variables.get(name, "")) if word]


def matrix(devices: Sequence[Device], hardware: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The pipeline's jobs on devices: one for each device and release of torch.

    Args:
        devices: the rows.
        hardware: names of rows of hardware that get their jobs.

    Raises:
        DevicesError: one of ``hardware`` is no row of hardware.
    """
    known = [row.name for row in devices if row.how == "hardware"]
    for name in hardware:
        if name not in known:
            raise DevicesError(f"XAMP_HARDWARE names {name!r}: rows of hardware are {', '.join(known)}")
    return [
        _job(row, python, torch)
        for row in devices
        if row.how != "hardware" or row.name in hardware
        for python, torch in list(zip(row.python, row.torch, strict=True)) or [("", "")]
    ]


def _job(row: Device | Job, python: str, torch: str = "") -> dict[str, Any]:
    versions = [f"{name} {version}" for name, version in (("Python", python), ("torch", torch)) if version]
    return {
        "name": row.name,
        "title": ", ".join([row.name, *versions]) if isinstance(row, Device) else row.name,
        "runner": list(row.runner),
        "python": python,
        "torch": torch,
        "index": row.index,
        "result": "-".join(filter(None, (row.name, python, torch))),
    }


def plan(path: Path, variables: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """All jobs: ``devices``, and ``jobs`` that are not about one device. The head of this file says what counts.

    Raises:
        DevicesError: the data is wrong, or a variable names what is not there.
    """
    data = load(path)
    if only := words_of(variables, "XAMP_ONLY"):
        chosen = [_chosen(name, data, variables) for name in dict.fromkeys(only)]
        return {"devices": matrix(chosen, [row.name for row in chosen if row.how == "hardware"]), "jobs": []}
    outside = variables.get("GITHUB_EVENT_NAME", "").startswith("pull_request")
    ready = [row.name for row in data.devices if row.how == "hardware" and row.ready]
    hardware = [] if outside else [*ready, *words_of(variables, "XAMP_HARDWARE")]
    by_commit = variables.get("GITHUB_EVENT_NAME", "") not in ("", "schedule", "workflow_dispatch")
    jobs = [_job(row, row.python) for row in data.jobs if not (row.nightly and by_commit)]
    return {"devices": matrix(data.devices, hardware), "jobs": jobs}


def _chosen(name: str, data: Data, variables: Mapping[str, str]) -> Device:
    """A row as another project wants it."""
    found = {row.name: row for row in data.devices}
    if name not in found:
        raise DevicesError(f"XAMP_ONLY names {name!r}: there are {', '.join(found)}")
    row = dataclasses.replace(found[name], runner=tuple(_runners(variables, found).get(name, found[name].runner)))
    if row.how == "hardware":
        return row
    # One release unless others are asked for: a project tests its script, not xamp.
    asked = words_of(variables, "XAMP_TORCH") or [data.usual.torch]
    pythons = words_of(variables, "XAMP_PYTHON")
    pairs = [(python, torch) for torch in asked for python in pythons or [data.python_of(torch)]]
    return dataclasses.replace(row, python=tuple(each[0] for each in pairs), torch=tuple(each[1] for each in pairs))


def _runners(variables: Mapping[str, str], known: Mapping[str, Device]) -> dict[str, list[str]]:
    given = variables.get("XAMP_RUNNERS", "").strip() or "{}"
    wrong = f"XAMP_RUNNERS={given}: it must be JSON, labels by name of a row: " + '{"cuda": ["self-hosted", "gpu"]}'
    try:
        found = json.loads(given)
    except ValueError as error:
        raise DevicesError(f"{wrong} ({error})") from error
    if not isinstance(found, dict) or not all(
        name in known and isinstance(labels, list) and labels and all(isinstance(each, str) for each in labels)
        for name, labels in found.items()
    ):
        raise DevicesError(f"{wrong}; rows are {', '.join(known)}")
    return found


def text(path: Path, github: bool) -> str:
    """The jobs as JSON; with ``github`` they are also written to the file that GITHUB_OUTPUT names.

    Raises:
        DevicesError: see :func:`plan`; or ``github`` outside of GitHub Actions.
    """
    found = plan(path, os.environ)
    if github:
        if not os.environ.get("GITHUB_OUTPUT"):
            raise DevicesError("--github is for a step of GitHub Actions, where GITHUB_OUTPUT names a file")
        with open(os.environ["GITHUB_OUTPUT"], "a", encoding="utf-8") as file:
            file.writelines(f"{name}={json.dumps(rows)}\n" for name, rows in found.items())
    return json.dumps(found, indent=2)
