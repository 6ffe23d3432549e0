"""What is in inside/ runs where a card is emulated, as the commands of the tests out here."""

from __future__ import annotations

import os

_IS_INSIDE = bool(os.environ.get("XAMP_EMULATED_SOC"))
collect_ignore = [] if _IS_INSIDE else ["inside"]
collect_ignore_glob = ["test_*.py"] if _IS_INSIDE else []
