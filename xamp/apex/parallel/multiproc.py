"""``python -m apex.parallel.multiproc``: says what starts several processes today."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Say what to run instead; returns the exit status 2."""
    script = " ".join(sys.argv[1:]) or "SCRIPT"
    sys.stderr.write(
        "apex.parallel.multiproc is not part of xamp: it passed --rank and --world-size to the script. Run\n"
        f"    torchrun --nproc_per_node=N {script}\n"
        "instead, with the number of devices as N. Ranks are then in the environment (RANK, LOCAL_RANK, WORLD_SIZE).\n"
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
