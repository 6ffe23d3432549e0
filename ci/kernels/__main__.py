"""Compiles the kernels for cards that are not there: ``python -m ci.kernels [TARGET ...] [--write]``."""

from __future__ import annotations

import argparse
import os
import sys
import time

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Send all launches through the JIT, compile those of the table, and return whether something is wrong."""
    if os.environ.pop("TRITON_INTERPRET", None) == "1":
        print("TRITON_INTERPRET=1 is left out: an interpreter has no compiler")
    from ci.kernels import driver, figures, launches  # Triton reads its variable at its first import

    parser = argparse.ArgumentParser(prog="ci/kernels.sh", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(driver.TARGETS)}")
    parser.add_argument("--write", action="store_true", help="write the counts into the table")
    parser.add_argument("--counts-differ", action="store_true", help="by another Triton: its counts are not compared")
    given = parser.parse_args(arguments)
    if unknown := {*given.targets} - {*driver.TARGETS}:
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(driver.TARGETS)}")
    rows, wrong = figures.read(), 0
    measured: dict[driver.Variant, dict[str, figures.Figures]] = {variant: {} for variant in rows}
    for target in given.targets or ["sm_90", "gfx942"]:
        began = time.monotonic()
        with driver.noted(target, rows.__contains__) as found:
            launches.make_all()
        for variant in rows:
            if found.get(variant) is None:
                wrong += _told(target, variant, ["nothing launches it: take its line out of the table"])
                continue
            strict = not given.counts_differ
            measured[variant][target], faults = figures.of_kernel(variant, found[variant], target, strict=strict)
            if not (given.write or given.counts_differ):
                faults += figures.compared(variant, target, measured[variant][target], rows[variant])
            wrong += _told(target, variant, faults)
        took, bound = time.monotonic() - began, len(found) - len(rows)
        print(f"{target}: {len(rows)} variants compiled, {bound} more bound, {took:.0f} s", flush=True)
    if given.write and not wrong:
        figures.FILE.write_text(figures.written(measured), encoding="utf-8")
    return int(wrong > 0)


def _told(target: str, variant: tuple[str, str], faults: list[str]) -> int:
    for fault in faults:
        print(f"{target}: {' '.join(variant)}: {fault}", flush=True)
    return len(faults)


if __name__ == "__main__":
    sys.exit(main())
