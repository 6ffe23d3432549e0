"""Makes one page of the results of many machines: devices and tiers, versions, what failed, what was emulated, by whom.

    python ci/report.py [RESULTS ...] [--markdown FILE] [--html FILE] [--check]
    python ci/report.py --keep FOLDER RESULTS ...    writes what is published of results that ci/device.sh made

Without RESULTS those in docs/results are taken, and the pages are docs/report.md and docs/report.html; ``--check``
fails where they are old. Every cell comes from a result. A device of ci/devices.toml without one is shown as not run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ci import report_page
from ci.devices import ROOT, DevicesError, read
from ci.results import ResultError, kept, newest
from ci.results import read as read_result

__all__ = ["main"]

RESULTS, MARKDOWN, HTML = ROOT / "docs" / "results", ROOT / "docs" / "report.md", ROOT / "docs" / "report.html"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; see the module."""
    parser = argparse.ArgumentParser(prog="ci/report.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULTS", help="files that ci/device.sh wrote")
    parser.add_argument("--markdown", type=Path, default=MARKDOWN, metavar="FILE", help="default: docs/report.md")
    parser.add_argument("--html", type=Path, default=HTML, metavar="FILE", help="default: docs/report.html")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the pages are old")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write what is published of RESULTS there")
    args = parser.parse_args(words)
    try:
        if args.keep is not None:
            return _keep(args.results, args.keep)
        return _pages(args.results or sorted(RESULTS.glob("*.json")), args)
    except (ResultError, DevicesError) as error:
        print(f"ci/report.py: {error}", file=sys.stderr)
        return 2


def _keep(files: Sequence[Path], folder: Path) -> int:
    if not files:
        raise ResultError("--keep: name the files that ci/device.sh wrote into results/")
    texts = {folder / file.name: json.dumps(kept(file), indent=1) + "\n" for file in files}
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        read_result(path)
    return 0


def _pages(files: Sequence[Path], args: argparse.Namespace) -> int:
    results = newest((file.name, read_result(file)) for file in files)
    report = report_page.Report(read(), results)
    old = []
    for path, text in ((args.markdown, report_page.markdown(report)), (args.html, report_page.html_page(report))):
        if not args.check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            old.append(path.name)
    if old:
        print(f"{' and '.join(old)} differ from docs/results: run python ci/report.py", file=sys.stderr)
    return int(bool(old))


if __name__ == "__main__":
    sys.exit(main())
