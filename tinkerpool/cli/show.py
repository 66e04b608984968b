"""Formats for the terminal: tables, durations, sizes, JSON, and the error of a command.

Depends on no command and no network.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

console = Console(highlight=False, width=None if sys.stdout.isatty() or os.environ.get("COLUMNS") else 200)
"""Wide unless it is a terminal or COLUMNS is set, so that `grep` finds whole lines."""
TEXT_WIDTH = 16
"""Spare columns but the last one are left out before a longer text is wrapped into fewer characters than these."""
TEXT_WIDTH_MIN = 8
"""Fewest characters of a column that texts are wrapped into."""
_GAP = 2
"""Between two columns."""


class CliError(Exception):
    """Ends the command with exit code 1. The message says in a sentence what is wrong, and how to mend it."""


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    right: str = "",
    whole: Collection[str] = (),
    spare: Sequence[str] = (),
) -> None:
    """Print a table; `right` names the columns of numbers, separated by spaces.

    Columns of `whole` are never cut or wrapped, because people copy ids and paths: where the console has no room for
    them, lines are longer than it. Before that, columns of `spare` are left out, in their order, with a note, and then
    other cells are wrapped.
    """
    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    widths = {
        column: max([cell_len(column), *(row[number].cell_len for row in cells)])
        for number, column in enumerate(columns)
    }
    left_out: list[str] = []
    for column in spare:
        is_last = column == spare[-1]
        if _total_width(widths, whole, TEXT_WIDTH_MIN if is_last else TEXT_WIDTH) <= console.width:
            break
        left_out.append(column)
        del widths[column]
    total_width = _total_width(widths, whole, TEXT_WIDTH_MIN)
    numbers = set(right.split())
    shown = Table(
        title=Text(title), title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False
    )
    for column, width in widths.items():
        is_whole = column in whole
        shown.add_column(
            column,
            justify="right" if column in numbers else "left",
            overflow="fold",
            no_wrap=is_whole,
            min_width=width if is_whole else min(width, TEXT_WIDTH_MIN),
        )
    for row in cells:
        shown.add_row(*(cell for column, cell in zip(columns, row, strict=True) if column in widths))
    if total_width > console.width:
        shown.width = total_width
    console.print(shown, crop=False)
    if left_out:
        note(f"Not shown in {console.width} columns: {', '.join(left_out)}. A wider terminal shows them.")


def _total_width(widths: Mapping[str, int], whole: Collection[str], text_width: int) -> int:
    """Return the least width of a table whose texts are wrapped into at least `text_width` characters."""
    least = (width if column in whole else min(width, text_width) for column, width in widths.items())
    return sum(least) + _GAP * (len(widths) - 1)


def say(text: str) -> None:
    """Print a line as it is."""
    console.print(Text(text), soft_wrap=True)


def note(text: str) -> None:
    """Print a line for people on stderr, out of the way of scripts that read stdout."""
    print(text, file=sys.stderr)


def json_message(*messages: Message) -> None:
    """Print a message as JSON, with the contract's field names; of several messages the fields together."""
    fields: dict[str, Any] = {}
    for message in messages:
        fields |= MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    print(json.dumps(fields, indent=2))


def json_line(message: Message) -> None:
    """Print a message as one line of JSON."""
    fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    print(json.dumps(fields), flush=True)


def duration(seconds: float) -> str:
    """Return a duration as `0 s`, `850 us`, `12 ms`, `3.4 s`, `5 min`, `3.2 h` or `12 days`."""
    if seconds == 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    for limit, divisor, unit in ((60, 1, "s"), (3600, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            value = seconds / divisor
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def age(timestamp: Timestamp) -> str:
    """Return the time since a moment, `5 min ago`."""
    return f"{duration(max(0.0, time.time() - timestamp.ToNanoseconds() / 1e9))} ago"


def moment(timestamp: Timestamp) -> str:
    """Return a moment as local date and time of day, in seconds."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp.seconds))


def clock_time(timestamp: Timestamp) -> str:
    """Return a moment as local time of day, with milliseconds."""
    seconds = timestamp.ToNanoseconds() / 1e9
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f".{int(seconds * 1000) % 1000:03d}"


def size(num_bytes: int) -> str:
    """Return a size as `512 B`, `3.4 kB`, `12 MB` or `1.2 GB`."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.1f} {unit}" if unit != "B" and value < 10 else f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def count(number: float) -> str:
    """Return a whole number with thousands separated."""
    return f"{number:,.0f}"
