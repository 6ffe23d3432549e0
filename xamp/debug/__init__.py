"""Where precision is lost: the first inf or nan, a model at a level against fp32, and traces of two runs compared.

Nothing of this runs, or is imported, until it is called for.

Modules: where precision is lost. ``nonfinite`` sees every operator of a block: ``places`` knows in which module it
runs, ``origins`` which inf is meant, ``finding`` is the answer. ``profiling`` asks ``runs`` to run a batch on copies
of a model, compares what they ``measured``, and gives a ``profile_result``. ``recorder`` is ``xamp.trace``:
``sample`` takes the statistics of a step, ``mail`` brings them to the host, ``trace_file`` is the format.
``alignment`` lines up the ``series`` of two files and says by ``turned`` where numbers end, its answer is a
``comparison``; ``page`` (with ``plots``) and ``picture`` draw it. ``ranges`` is the range of a tensor.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xamp.debug.alignment import compare
    from xamp.debug.comparison import Comparison, Parting
    from xamp.debug.finding import Finding
    from xamp.debug.measured import Row
    from xamp.debug.nonfinite import NonFinite, find_nonfinite
    from xamp.debug.profile_result import Advice, Profile
    from xamp.debug.profiling import profile
    from xamp.debug.ranges import Range
    from xamp.debug.trace_file import Run, read

_HOME_OF = {  # no name is a submodule's, for the submodule would take its place
    "Advice": "profile_result",
    "Comparison": "comparison",
    "Finding": "finding",
    "NonFinite": "nonfinite",
    "Parting": "comparison",
    "Profile": "profile_result",
    "Range": "ranges",
    "Row": "measured",
    "Run": "trace_file",
    "compare": "alignment",
    "find_nonfinite": "nonfinite",
    "profile": "profiling",
    "read": "trace_file",
}

__all__ = [
    "Advice",
    "Comparison",
    "Finding",
    "NonFinite",
    "Parting",
    "Profile",
    "Range",
    "Row",
    "Run",
    "compare",
    "find_nonfinite",
    "profile",
    "read",
]


if not TYPE_CHECKING:  # with it, mypy and pyright would take each misspelt name for one that is there

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from xamp.registry.registry import require_torch

        require_torch(f"{__name__}.{name}")  # raises an error that says what to install, instead of an ImportError
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
