"""Runs what takes too long for each commit, in parts, each of which goes on where it was cut off.

Without names all parts run. A part that came to its end is kept as long as the content that it tests is the same.
What came of each stands in ci/nightly/kept/, with a hash of that content. Exit code 1 where a part failed, was cut
off or killed, 2 for wrong use, 130 or 143 where a signal ended the run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.nightly.content import hash_of
from ci.nightly.parts import Part, parts
from ci.stages import summary
from ci.stages.command import ROOT, add_options, follow, say, unknown
from ci.stages.log import Log
from ci.stages.runner import Runner, surroundings
from ci.stages.stage import Stage

KEPT = ROOT / "ci" / "nightly" / "kept"


def _show(found: Sequence[Mapping[str, Any]]) -> None:
    summary.show("by night", found)


def main(
    words: Sequence[str],
    table: Callable[[int], Sequence[Part]] = parts,
    kept: Path = KEPT,
    show: Callable[[Sequence[Mapping[str, Any]]], None] = _show,
) -> int:
    """Run what is asked for; see the module.

    Args:
        words: the options.
        table: makes the parts, for so many workers.
        kept: the folder of what came of each.
        show: prints the table of what came of those that were chosen.
    """
    args = _parsed(words)
    every = {part.stage.name: part for part in table(args.jobs)}
    if wrong := unknown(args.stages, [part.stage for part in every.values()]):
        return say("ci/nightly.sh", 2, wrong)
    # Several parts are about one content.
    known = {content: hash_of(ROOT, content) for content in {tuple(part.content) for part in every.values()}}
    hashes = {name: known[tuple(part.content)] for name, part in every.items()}
    chosen = _changed(args.stages, hashes, kept) if args.changed else [*(args.stages or every)]
    if not chosen:
        return 0
    code, found = _run(args, [every[name] for name in every if name in chosen], hashes, kept)
    show(found)
    return code


def _changed(names: Sequence[str], hashes: Mapping[str, str], kept: Path) -> list[str]:
    """Say what is kept of all parts; of those that are named, the ones that have not passed on the content as it is."""
    for line in _compared(kept, hashes):
        print(line, flush=True)
    return [name for name in names if not _is_true(_read(kept, name), hashes[name])]


def _run(
    args: argparse.Namespace, chosen: Sequence[Part], hashes: Mapping[str, str], kept: Path
) -> tuple[int, list[dict[str, Any]]]:
    """The exit code, and what came of each part."""
    args.out.mkdir(parents=True, exist_ok=True)
    runner = Runner(Log(args.out / "nightly.log"), ROOT, surroundings(ROOT), time.monotonic() + 60 * args.minutes)
    parts_of = {part.stage.name: part for part in chosen}
    for name in parts_of:
        runner.log.about(name, hashes[name])

    def write(stage: Stage) -> None:
        part = parts_of[stage.name]
        if hash_of(ROOT, part.content) != hashes[stage.name]:
            print(f"== {stage.name}: its content was changed while it ran, so nothing is kept", flush=True)
            runner.forget(stage)
            return
        _keep(kept, part, runner.log, hashes[stage.name])

    stages = [part.stage for part in chosen]
    code = follow(args, runner, stages, write)
    return code, [{**summary.of(part.stage, runner.log.of(part.stage.name)), **part.about} for part in chosen]


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ci/nightly.sh", description=(__doc__ or "").partition("\n")[0])
    text = "compare what is kept of all parts with the content as it is, and run those that are named if it differs"
    parser.add_argument("--changed", action="store_true", help=text)
    add_options(parser)
    return parser.parse_args(words)


def _keep(folder: Path, part: Part, log: Log, content: str) -> None:
    name = part.stage.name
    about = summary.of(part.stage, log.of(name))
    failed = list(summary.failures(name, log.of(name)))
    when = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ")
    versions = {"python": platform.python_version(), **part.about}
    found = {**about, "failures": failed, "content": content, "when": when, **versions}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _read(folder: Path, name: str) -> Mapping[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _is_true(kept: Mapping[str, Any], content: str) -> bool:
    """Whether a part has passed on the content as it is."""
    return bool(kept) and kept["outcome"] == "passed" and kept["content"] == content


def _compared(folder: Path, hashes: Mapping[str, str]) -> Iterator[str]:
    for name, content in hashes.items():
        found = _read(folder, name)
        if not found:
            yield f"{name}: never run"
        else:
            of = "the content as it is" if found["content"] == content else "other content"
            yield f"{name}: {found['outcome']} on {found['when'][:10]}, on {of}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
