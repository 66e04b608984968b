"""Durations and moments as people type them: `90d`, `2026-11-26`. Does not depend on what a command does with them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import typer

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(\d{1,10})([smhd]?)")
_DAY = re.compile(r"(\d{4})(-?)(\d\d)\2(\d\d)")
SINCE_METAVAR = "DAY|DURATION"
"""Of an option that `moment_of` reads."""


def seconds_of(text: str) -> int:
    """Return the seconds of a duration such as `90d`, `12h`, `30m` or `45s`. Raises typer.BadParameter."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"expected a duration such as 90d, 12h, 30m or 45s, not {text!r}")
    return int(match[1]) * _UNITS[match[2] or "s"]


def moment_of(text: str) -> datetime:
    """Return the beginning, in UTC, of a day such as `2026-11-26` or `20261126`; or so long ago as `7d` or `12h` says.

    A number without a unit is no duration: it may be meant as a day. Raises typer.BadParameter.
    """
    try:
        if (day := _DAY.fullmatch(text)) is not None:
            return datetime(int(day[1]), int(day[3]), int(day[4]), tzinfo=UTC)
        if not text.isdecimal():
            return datetime.now(UTC) - timedelta(seconds=seconds_of(text))
    except (ValueError, OverflowError, typer.BadParameter):
        pass
    raise typer.BadParameter(
        f"expected a day such as 2026-11-26 or 20261126, or a duration such as 7d or 12h, not {text!r}"
    )
