"""Print a script that completes the commands and options of `xamp` in a shell.

bash: add `eval "$(xamp completion bash)"` to ~/.bashrc. zsh: add `eval "$(xamp completion zsh)"` to ~/.zshrc, after
compinit. fish: `xamp completion fish > ~/.config/fish/completions/xamp.fish`. Where no word fits, files are completed.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``xamp completion``."""
    parser.add_argument("shell", choices=sorted(_WRITERS), help="the shell that is to read it")


def run(args: argparse.Namespace) -> int:
    """Print the script. Return 0."""
    print(_WRITERS[args.shell](list(_places(args.parser, args.parser.prog))), end="")
    return 0


@dataclasses.dataclass(frozen=True)
class _Place:
    """A command, such as ``xamp policy show``.

    Attributes:
        path: its words.
        commands: the commands below it, each with its line in the help.
        options: its options, each with its line in the help.
        choices: words that it takes itself.
        values: for options that take one of some words: these words.
    """

    path: str
    commands: dict[str, str]
    options: dict[str, str]
    choices: list[str]
    values: dict[str, list[str]]

    @property
    def words(self) -> str:
        return " ".join([*self.commands, *self.choices, *self.options])


def _places(parser: argparse.ArgumentParser, path: str) -> Iterator[_Place]:
    """Yield ``parser`` and the parsers of the commands below it."""
    place = _Place(path, {}, {}, [], {})
    below: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        choices = list(map(str, action.choices or ()))
        if isinstance(action, argparse._SubParsersAction):
            below = dict(action.choices)
            place.commands.update({name: _line(below[name].description) for name in choices})
        elif not action.option_strings:
            place.choices.extend(choices)
        for option in action.option_strings:
            place.options[option] = _line(action.help)
            if choices:
                place.values[option] = choices
    yield place
    for name, each in below.items():
        yield from _places(each, f"{path} {name}")


def _line(text: str | None) -> str:
    """Return the first line of a help text, as a quoted word may hold it."""
    return (text or "").partition("\n")[0].replace("'", "").replace("\\", "").replace("%%", "%")


_BASH = """\
# xamp completion bash
_xamp() {{
    local word before=${{COMP_WORDS[COMP_CWORD-1]}} path=xamp words=
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$path $word" in
            {paths}) path+=" $word" ;;
        esac
    done
    case "$path $before" in
{values}
        *)
            case $path in
{places}
            esac
            ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _xamp xamp
"""

_ZSH = """\
#compdef xamp
# xamp completion zsh
_xamp() {{
    local word before=${{words[CURRENT-1]}} where=xamp found=
    for word in ${{words[2,CURRENT-1]}}; do
        case "$where $word" in
            {paths}) where+=" $word" ;;
        esac
    done
    case "$where $before" in
{values}
        *)
            case $where in
{places}
            esac
            ;;
    esac
    compadd -- ${{=found}}
    _files
}}
compdef _xamp xamp
"""


def _posix(template: str, variable: str, places: list[_Place]) -> str:
    values = [
        f'        "{place.path} {option}") {variable}="{" ".join(words)}" ;;'
        for place in places
        for option, words in place.values.items()
    ]
    return template.format(
        paths="|".join(f'"{place.path}"' for place in places[1:]),
        values="\n".join(values),
        places="\n".join(f'                "{place.path}") {variable}="{place.words}" ;;' for place in places),
    )


def _bash(places: list[_Place]) -> str:
    return _posix(_BASH, "words", places)


def _zsh(places: list[_Place]) -> str:
    return _posix(_ZSH, "found", places)


def _fish(places: list[_Place]) -> str:
    lines = ["# xamp completion fish"]
    for place in places:
        below = place.path.split()[1:]
        others = " ".join(place.commands)
        when = " ; and ".join(f"__fish_seen_subcommand_from {name}" for name in below)
        first = " ; and ".join(
            [*filter(None, [when]), *([f"not __fish_seen_subcommand_from {others}"] if others else [])]
        )
        for name, about in place.commands.items():
            lines.append(f"complete -c xamp -f -n '{first}' -a {name} -d '{about}'")
        if place.choices:
            lines.append(f"complete -c xamp -f -n '{when}' -a '{' '.join(place.choices)}'")
        for option, about in place.options.items():
            kind = "-l " + option[2:] if option.startswith("--") else "-s " + option[1:]
            takes = f" -x -a '{' '.join(place.values[option])}'" if option in place.values else ""
            lines.append(f"complete -c xamp -n '{when or 'true'}' {kind}{takes} -d '{about}'")
    return "\n".join(lines) + "\n"


_WRITERS: dict[str, Callable[[list[_Place]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
