"""Writes docs/settings.md: each argument of ``initialize``, what it means, its default by level, and when it is of use.

Meanings are read from the docstring of ``xamp.initialize``, defaults from ``xamp.policy.Request`` and from what
``compile_policy`` makes of it at each level. What stands here is :data:`USE`, a row for each argument: whoever adds one
adds its row. With ``--check`` nothing is written: it fails where the page is not what would be, or a row is missing.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import xamp
from xamp.casting.ops import OP_POLICIES
from xamp.policy import LEVELS, Policy, Request, compile_policy

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "settings.md"
COMMAND = ".venv/bin/python ci/settings_page.py"

# By argument: when it is of use, as the end of "of use when". One that 0.1.0 did not have ends with its first version.
USE: dict[str, str] = {
    "level": "always",
    "loss_scale": "a run in fp16 is to keep one scale, or one in bf16 is to notice inf and nan",
    "dtype": "a level's way of casting is wanted in the other lower dtype",
    "keep_batchnorm_fp32": "batch norm's kernel for mixed dtypes is slow, or its statistics lose digits",
    "keep_fp32": "one layer overflows or loses digits and the others do not",
    "master_weights": "memory matters more than small updates, or the other way round",
    "cast_model_inputs": "an argument must keep its digits: boxes, coordinates, targets, times",
    "cast_model_outputs": "the loss is to be computed in the lower dtype, or outputs are large",
    "methods": "a script calls more of the model than the model itself, such as `generate`",
    "num_losses": "losses of one model differ much in size",
    "init_scale": "the first steps are skipped, or are too precious for that",
    "growth_factor": "the scale moves in too large steps",
    "backoff_factor": "it takes too many skipped steps until the scale fits",
    "growth_interval": "a run is short",
    "min_loss_scale": "a run should end in an error, not go on with a small scale",
    "max_loss_scale": "the scale grows until steps are skipped for nothing",
    "on_static_overflow": "no nan may reach the weights in bf16 or fp32, or no step may be skipped",
    "op_policy": "results are to be those of `torch.autocast` on this device, or of Apex",
    "fused": "the fused implementation of an optimizer is to be kept out, or insisted on",
    "fp8": "layers are wide and the hardware multiplies in fp8: [guide](guides/fp8.md)",
    "keep_bf16": "a layer loses by fp8 and the others gain, or a small model is to rehearse it: `()`",
    "models": "always",
    "optimizers": "training",
    "backend": "several backends serve the device, or Apex's op lists are wanted",
    "process_group": "other ranks must skip together, as in pipelines",
    "delegate": "a vendor's `apex.amp` is installed and is to do the work",
    "enabled": "a script has a switch for mixed precision",
    "verbosity": "the log of a run should tell less",
    "opt_level": "a script that was written for Apex calls `initialize`",
}

# Where the policy keeps what an argument decides, if not under its name.
KEPT_AS = {"cast_model_inputs": "input_dtype", "cast_model_outputs": "output_dtype", "on_static_overflow": "checks"}

HEAD = f"""# Settings

Every argument of `xamp.initialize`. `xamp.session(model).policy` is what came of them. `{COMMAND}`
makes this page of the docstring of `initialize`.

"""


class MissingError(Exception):
    """An argument of which the page would not tell everything."""


def page() -> str:
    """The whole page.

    Raises:
        MissingError: an argument has no meaning, or no row in :data:`USE`; or a row has no argument.
    """
    shaping = [field.name for field in dataclasses.fields(Request)]
    signature = inspect.signature(xamp.initialize).parameters
    names = [*shaping, *(name for name in signature if name not in shaping)]
    meanings = read_meanings(inspect.getdoc(xamp.initialize) or "")
    check_whole(names, meanings)
    policies = {name: compile_policy(Request(), row, tuple(OP_POLICIES)) for name, row in LEVELS.items()}
    by_level = [name for name in shaping if name != "level" and differs(name, policies)]

    def default(name: str) -> str:
        if name in by_level:
            return "[by level](#defaults-by-level)"
        given = getattr(Request, name) if name in shaping else signature[name].default
        return "-" if given is inspect.Parameter.empty else f"`{given!r}`".replace("'", '"')

    def about(chosen: Sequence[str]) -> Iterator[str]:
        rows = [[f"`{name}`", meanings[name], default(name), USE[name]] for name in chosen]
        return table(("setting", "meaning", "default", "of use when"), rows)

    return "".join(
        (
            HEAD,
            "## What shapes the policy\n\n",
            *about(shaping),
            "\n## Defaults by level\n\nFor each setting whose default is the level's own.\n\n",
            *table(("setting", *LEVELS), [[f"`{name}`", *shown(name, policies)] for name in by_level]),
            "\n## The rest of the call\n\n",
            *about(names[len(shaping) :]),
        )
    )


def check_whole(names: Sequence[str], meanings: Mapping[str, str]) -> None:
    """See :func:`page`."""
    for name in names:
        if not meanings.get(name):
            raise MissingError(f"{name}: the docstring of xamp.initialize does not say what it means. Add it to Args.")
        if name not in USE:
            raise MissingError(f"{name}: there is no row for it in USE, of ci/settings_page.py. Add one.")
    if gone := [name for name in USE if name not in names]:
        raise MissingError(f"{', '.join(gone)}: in USE, of ci/settings_page.py, but no argument. Take it out.")


def read_meanings(docstring: str) -> dict[str, str]:
    """The text of each argument in the section Args of a docstring in Google's style, in Markdown."""
    section = docstring.partition("\nArgs:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        start = re.match(r"    (\w+): (.*)", line)
        if start:
            name, found[start[1]] = start[1], start[2]
        elif name:
            found[name] += f" {line.strip()}"
    return {name: cell(text.replace("``", "`").strip()) for name, text in found.items()}


def cell(text: str) -> str:
    """``text`` for a table, in which a bar would end it."""
    return text.replace("|", "/")


def value_in(name: str, policy: Policy) -> Any:
    """What an argument came to."""
    return getattr(policy, KEPT_AS.get(name, name))


def differs(name: str, policies: Mapping[str, Policy]) -> bool:
    """Whether what an argument comes to depends on the level, or is not what it says."""
    values = {repr(value_in(name, policy)) for policy in policies.values()}
    return len(values) > 1 or (getattr(Request, name) is None and values != {"None"})


def shown(name: str, policies: Mapping[str, Policy]) -> list[str]:
    """What an argument came to at each level, in a word or two."""
    return [in_words(name, value_in(name, policy), policy.dynamic) for policy in policies.values()]


def in_words(name: str, value: Any, dynamic: bool) -> str:
    """``value``, for a reader."""
    if name == "on_static_overflow":
        return "the scale is dynamic" if dynamic else "checked" if value else "not checked"
    if value is None:
        return "by op policy" if name == "keep_batchnorm_fp32" else "as they come"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value).removeprefix("torch.")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table of Markdown, line by line."""
    yield f"| {' | '.join(heads)} |\n"
    yield "|" + "---|" * len(heads) + "\n"
    for row in rows:
        yield f"| {' | '.join(row)} |\n"


def main(words: Sequence[str]) -> int:
    """Writes the page, or checks it; returns the exit status."""
    try:
        made = page()
    except MissingError as error:
        print(f"docs/settings.md cannot be made: {error}")
        return 1
    if "--check" not in words:
        PAGE.write_text(made, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != made:
        print(f"docs/settings.md is not what the code says. Run: {COMMAND}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
