"""Formats for the terminal: tables, durations, sizes, JSON, and the error of a command.

Depends on no command and no network.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from rich.table import Table
from rich.text import Text

console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
"""Wide unless it is a terminal, so that `grep` finds whole lines."""


class CliError(Exception):
    """Ends the command with exit code 1. The message says in a sentence what is wrong, and how to mend it."""


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, right: str = "") -> None:
    """Print a table; `right` names the columns of numbers, separated by spaces."""
    shown = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    numbers = set(right.split())
    for column in columns:
        # Wrap cells of a table that is too wide: an id that is cut short is useless.
        shown.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    console.print(shown)


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
