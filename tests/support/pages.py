"""The blocks of code in a page of the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the language and the code of every fenced block of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def run_page(page: str) -> dict[str, Any]:
    """Run the Python blocks of a page one after another, as a reader who types them; return their names."""
    names: dict[str, Any] = {"__name__": "__page__"}
    for language, code in blocks(page):
        if language == "python":
            exec(compile(code, page, "exec"), names)
    return names
