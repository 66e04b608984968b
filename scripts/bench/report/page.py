"""Put the benchmarks' results into the documentation: tables, goals and pictures.

    python -m scripts.bench.report                            # docs/results -> docs/benchmarks.md and docs/images
    python -m scripts.bench.report --results DIR --page PAGE --images DIR

Reads every `<item>.json` that a benchmark has written with --results. In the page, the text between

    <!-- bench:NAME --> and <!-- /bench -->

is replaced by the table of that name, or, if NAME ends in a star, by all tables with that prefix, each under its name.
`ITEM:machine` is the line with date and machine of an item's measurement, and `goals` is one table of all goals. Marks
without a result stay unchanged. A table without marks in the page is an error.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from scripts.bench.common import Goal
from scripts.bench.report.pictures import draw

DOCS = Path(__file__).resolve().parents[3] / "docs"
MARKS = re.compile(r"(<!-- bench:(?P<name>[\w:.*-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the results by item; other files, such as the curves of the tutorial, are left out."""
    read = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    return {name: result for name, result in read.items() if "tables" in result}


def texts_of(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the texts for the page, by the name in their marks."""
    texts: dict[str, str] = {}
    goals = []
    for item, result in results.items():
        texts[f"{item}:machine"] = f"Measured {result['machine']}; {result['seconds']:.0f} s."
        texts |= {name: table["markdown"] for name, table in result["tables"].items()}
        goals += [Goal(**goal) for goal in result["goals"]]
    if goals:
        lines = [goal.line() for goal in goals]
        texts["goals"] = "\n".join(["| what | goal | measured | met |", "|---|---|---|---|", *lines])
    return texts


def filled(page: str, texts: dict[str, str]) -> str:
    """Return the page with the texts between their marks. Raises ValueError if a text has no marks."""
    names = [match["name"] for match in MARKS.finditer(page)]
    unmarked = sorted(name for name in texts if not any(fnmatchcase(name, pattern) for pattern in names))
    if unmarked:
        raise ValueError(
            f"the page has no marks for {', '.join(unmarked)}: add the lines '<!-- bench:{unmarked[0]} -->' and "
            "'<!-- /bench -->' where it belongs"
        )

    def fill(match: re.Match[str]) -> str:
        pattern = match["name"]
        found = {name: text for name, text in texts.items() if fnmatchcase(name, pattern)}
        if not found:
            return match[0]
        if pattern in found:
            return f"{match[1]}{found[pattern]}\n{match[3]}"
        parts = [f"\n**{name.removeprefix(pattern.rstrip('*'))}**\n\n{text}\n" for name, text in found.items()]
        return f"{match[1]}{''.join(parts)}\n{match[3]}"

    return MARKS.sub(fill, page)


def main() -> int:
    """Read the command line, write page and pictures. Return 1 if there are no results or a table has no marks."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--results", type=Path, default=DOCS / "results")
    command.add_argument("--page", type=Path, default=DOCS / "benchmarks.md")
    command.add_argument("--images", type=Path, default=DOCS / "images")
    args = command.parse_args()
    results = read_results(args.results)
    if not results:
        print(f"no results in {args.results}: run a benchmark with --results {args.results}", file=sys.stderr)
        return 1
    try:
        page = filled(args.page.read_text(encoding="utf-8"), texts_of(results))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    args.page.write_text(page, encoding="utf-8")
    print(args.page)
    args.images.mkdir(parents=True, exist_ok=True)
    for path in draw(results, args.images):
        print(path)
    return 0
