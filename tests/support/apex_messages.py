"""Small calls of Apex's interface, with their answers: an error, printed lines, or a value that shows what was done.

``tests/data/apex/messages.json`` holds the answers of the last ``apex.amp``, moved to CPU tensors. Each case is a
function of the ``amp`` module; ``run`` gives the answer to one case.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import apex_messages_given
import apex_messages_o1
import apex_messages_steps
from apex_cases import CASES, FRESH, Absent, quiet
from apex_training import ONCE, heard

__all__ = ["CASES", "FRESH", "apex_messages_given", "apex_messages_o1", "apex_messages_steps", "names", "run"]


def steady(text: str) -> str:
    """``text`` with the entries of a printed set sorted, because their order changes from process to process."""
    return re.sub(r"\{('[^{}]*')\}", lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", text)


def run(amp: Any, name: str) -> dict[str, Any]:
    """The answer to a case.

    Args:
        amp: a module with Apex's interface.
        name: of ``CASES``; one of ``FRESH`` needs a process of its own.

    Returns:
        A dict with those that apply of ``raised`` (type and text), ``printed`` (lines; if the case prints ``--``, the
        lines after it) and ``returned``; or ``absent`` if a part of Apex that the case needs is missing.
    """
    found: dict[str, Any] = {}
    with heard() as out:
        try:
            returned = CASES[name](amp)
            if returned is not None:
                found["returned"] = returned
        except Absent:
            return {"absent": True}
        except Exception as error:
            found["raised"] = [type(error).__name__, steady(str(error))]
        finally:
            quiet(amp)
    lines = out.getvalue().splitlines()
    if "--" in lines:
        lines = lines[lines.index("--") + 1 :]
    if name not in FRESH:
        lines = [line for line in lines if not line.startswith(ONCE)]
    if lines:
        found["printed"] = lines
    return found


def names(*, alone: bool) -> Iterator[str]:
    """The cases that need their own process (``alone``), or the others."""
    return (name for name in CASES if (name in FRESH) == alone)
