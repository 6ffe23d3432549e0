"""Called by mkdocs: docstrings mark a block by two colons, which Markdown would show."""

from __future__ import annotations

from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Remove the second colon, or both where they stand alone."""
    return html.replace("<p>::</p>", "").replace("::</p>", ":</p>")
