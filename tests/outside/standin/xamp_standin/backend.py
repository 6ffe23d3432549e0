"""What xamp is told of the stand-in: what is told of the real device. Importing this makes it known to torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from xamp_abacus import device

from xamp.backends.native import ModuleBackend
from xamp_standin import copies, gaps, moves, queue, runtime
from xamp_standin.facts import facts

__all__ = ["StandinBackend"]

NAME = "standin"


def _install() -> None:
    device.install(NAME, runtime, facts().autocast)
    gaps.install(NAME)
    queue.install()
    copies.install()
    moves.install(NAME)


_install()


class StandinBackend(ModuleBackend):
    """A device of torch's own kind, whose gaps xamp has to find out."""

    fast_dtypes = ("bfloat16", "float16")
    process_group = "abacus_ccl"
    # Recurrent layers call kernels, which autocast lowers: to one dtype, where the facts have one.
    op_rules: Mapping[str, str] = dict.fromkeys(gaps.RECURRENT, facts().recurrent or "same")

    def dtypes(self, device: torch.device | None = None) -> tuple[str, ...]:
        """As the driver says, not by trial."""
        return tuple(facts().dtypes)

    def versions(self) -> Mapping[str, str]:
        """See :meth:`xamp.contract.Backend.versions`."""
        return {"torch": torch.__version__, **{f"recorded {key}": text for key, text in facts().about.items()}}
