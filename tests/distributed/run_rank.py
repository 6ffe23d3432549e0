"""One rank of test_run_ranks.py: the command ``xamp run`` on an old script."""

import sys

from xamp.cli import main

if __name__ == "__main__":
    script, *words = sys.argv[1:]
    sys.exit(main(["run", "--device", "cpu", script, *words]))
