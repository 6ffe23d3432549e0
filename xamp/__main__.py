"""``python -m xamp``: the same as the command ``xamp``."""

import sys

from xamp.cli import main

if __name__ == "__main__":
    sys.exit(main())
