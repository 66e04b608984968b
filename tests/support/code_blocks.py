"""Runs the Python blocks of a page, as a reader would who types them one after another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_page(page: str) -> dict[str, Any]:
    """Run all blocks of a page in one namespace, and return it. An error's traceback names the page and its line."""
    text = (ROOT / page).read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__page__"}
    for block in re.finditer(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        lines_before = text[: block.start(1)].count("\n")
        exec(compile("\n" * lines_before + block.group(1), str(ROOT / page), "exec"), names)  # the page's own code
    return names
