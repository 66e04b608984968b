"""Every limit of one tenant: default, unit and reason. The only place of these numbers.

A pool's operator may give other defaults to all tenants (`CoordinatorConfig.tenant_limits`), and an administrator other
values to one tenant (`coordinator.limits.quotas`). In requests and in the database a value is text, as people type it.

Pure. Main invariant: checked on construction; a text that `as_text` made is parsed to the same value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from coordinator.base.errors import invalid

LimitValue = int | float | tuple[str, ...] | tuple[int, ...] | None
UNLIMITED = "unlimited"
"""The text of None."""
BURST_S = 10.0
"""Seconds of a rate that a tenant may use at once."""
WEIGHT_MIN, WEIGHT_MAX = 0.01, 100.0
NUMBER_MAX = 1 << 62
"""Most that a limit can be: it fits into a signed integer of 64 bits."""
RATE_MIN = 0.001
"""The lowest rate: one operation in 17 minutes. A rate of nothing would refuse with a delay that never ends."""
_FLOATS = ("weight", "operations_per_s", "tokens_per_s")
_UNLIMITABLE = ("operations_per_s", "tokens_per_s", "tokens_per_month", "base_models", "ranks")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """The limits of one tenant. 0 allows none."""

    weight: float = 1.0
    """Share of the pool beside other tenants that are active: tokens of training and of sampling are divided by weight.
    0.01 to 100; 1 for all, so that nobody has a privilege that nobody gave."""
    sessions_max: int = 1000
    """Most live sessions. A client has one, and one that crashed leaves it for `session_timeout_s`: so a tenant may
    start a hundred clients a minute."""
    adapters_max: int = 1000
    """Most adapters that are not deleted. Each has a snapshot on disk: at rank 32 of a model of 8 billion parameters,
    about 1 GB with its moments."""
    queued_operations_max: int = 32_768
    """Most unfinished operations: eight full queues of an adapter. Without it, a tenant of 1,000 adapters could keep
    four million in memory."""
    queued_bytes_max: int = 512 << 20
    """Most bytes of unfinished requests: thirty-two of the largest size, more than a pipeline needs."""
    streams_max: int = 4096
    """Most calls at a time that wait for operations or stream: four for each of a thousand sessions. At least 1, or no
    result could be waited for. Long polls over HTTP beyond as many are answered early, and never refused."""
    samples_max: int = 32_768
    """Most continuations that are not finished: those of 32 requests of the largest number, and sixteen times the
    largest batch of the cookbook. Each one holds its tokens in memory. A larger request is accepted alone."""
    samplers_max: int = 10_000
    """Most samplers of live sessions: one for each step of a long run that samples from every one. Each one that was
    saved without a name keeps its weights on disk until its session ends."""
    checkpoints_max: int = 10_000
    """Most checkpoints, with those of unfinished imports: a hundred runs that save a hundred times."""
    stored_bytes_max: int = 1 << 40
    """Most bytes of everything that is stored: checkpoints, the states of adapters, samplers, metadata, requests until
    a snapshot replaces them, results, and records of samples. A thousand states of rank 32 of a model of 8 billion
    parameters. A tenant above it keeps what it has; only what would add to that is refused."""
    operations_per_s: float | None = 1000.0
    """Operations that are accepted a second on average, and ten times as many at once: half of what one coordinator
    acknowledges. The operation that others wait for is always accepted, and counted. So are, one each, the creations
    of sessions, adapters, samplers and uploads: each costs a sync to disk or a check, as an operation does."""
    tokens_per_s: float | None = None
    """Tokens of operations that are accepted a second on average, and ten times as many at once; a sample counts with
    the most that it may compute. Unlimited: the scheduler divides the pool by weight, and a queue has its ceilings."""
    tokens_per_month: int | None = None
    """Tokens in a calendar month, UTC. An operation that could take more fails at once. Unlimited: a pool sells
    nothing."""
    base_models: tuple[str, ...] | None = None
    """Base models on which adapters and samplers may be created, separated by commas. Unlimited: those of the pool."""
    ranks: tuple[int, ...] | None = None
    """Ranks that new adapters may have, separated by commas. Unlimited: those that the base model takes."""

    def __post_init__(self) -> None:
        for each in fields(self):
            _check(each.name, getattr(self, each.name))


LIMIT_NAMES = tuple(each.name for each in fields(TenantLimits))
"""The names of all limits, in the order of the table."""
LABELS: Mapping[str, str] = {
    "sessions_max": "live sessions of yours",
    "adapters_max": "adapters of yours",
    "queued_operations_max": "queued operations of yours",
    "queued_bytes_max": "bytes of your queued requests",
    "streams_max": "open waits and streams of yours",
    "samples_max": "unfinished samples of yours",
    "samplers_max": "samplers of yours",
    "checkpoints_max": "checkpoints of yours",
    "stored_bytes_max": "bytes that you store",
    "operations_per_s": f"operations and creations of yours within {BURST_S:g} s",
    "tokens_per_s": f"tokens of yours within {BURST_S:g} s",
    "tokens_per_month": "tokens of yours in this month (UTC), with the most that unfinished operations may take",
}
"""What each limit that refuses a call counts, for the message."""


def parse_limit(name: str, text: str) -> LimitValue:
    """Return the value of a limit from its text: `100`, `0.5`, `10GiB`, `8,16`, `unlimited`.

    Raises ServiceError INVALID_ARGUMENT.
    """
    if name not in LIMIT_NAMES:
        raise invalid(f"there is no limit {name[:80]!r}: the limits are {', '.join(LIMIT_NAMES)}", "UNKNOWN_LIMIT")
    try:
        value = _parsed(name, text)
        _check(name, value)
    except ValueError as error:
        raise invalid(f"{name}={text[:80]} is not allowed: {error}", "LIMIT_NOT_ALLOWED") from None
    return value


def as_text(name: str, value: LimitValue) -> str:
    """Return the value of a limit as text; a size in the largest unit that divides it."""
    if value is None:
        return UNLIMITED
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    for unit, size in reversed(_UNITS.items()):
        if "bytes" in name and value and value % size == 0:
            return f"{value // size}{unit}"
    return str(value)


def limits_with(defaults: TenantLimits, texts: Mapping[str, str]) -> TenantLimits:
    """Return the limits with some of them replaced. Raises ServiceError INVALID_ARGUMENT."""
    values: dict[str, Any] = {name: getattr(defaults, name) for name in LIMIT_NAMES}
    return TenantLimits(**values | {name: parse_limit(name, text) for name, text in texts.items()})


def parse_whole(text: str) -> int:
    """Return a whole number from its text: `100`, `10GiB`. Raises ValueError."""
    number, factor = text, 1
    for unit, size in _UNITS.items():
        if text.endswith(unit):
            number, factor = text.removesuffix(unit), size
    if not (number.isascii() and number.isdecimal() and len(number) < 20):
        raise ValueError("it takes a whole number, 0 or more; KiB, MiB, GiB or TiB may follow")
    return int(number) * factor


def _parsed(name: str, text: str) -> LimitValue:
    if text == UNLIMITED and name in _UNLIMITABLE:
        return None
    if name == "base_models":
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if name == "ranks":
        return tuple(parse_whole(part.strip()) for part in text.split(",") if part.strip())
    return float(text) if name in _FLOATS else parse_whole(text)


def _check(name: str, value: Any) -> None:
    """Raise ValueError if a limit cannot have this value."""
    if value is None and name in _UNLIMITABLE:
        return
    if name == "base_models":
        if not value:
            raise ValueError(f"it takes names of base models, separated by commas, or {UNLIMITED}")
    elif name == "ranks":
        if not value or min(value) < 1:
            raise ValueError(f"it takes ranks from 1 up, separated by commas, or {UNLIMITED}")
    elif name == "weight":
        if not (math.isfinite(value) and WEIGHT_MIN <= value <= WEIGHT_MAX):
            raise ValueError(f"weight must be {WEIGHT_MIN:g} to {WEIGHT_MAX:g}, not {value:g}")
    elif name in _FLOATS:
        if not (math.isfinite(value) and RATE_MIN <= value <= NUMBER_MAX):
            raise ValueError(f"a rate must be {RATE_MIN:g} or more, or {UNLIMITED}")
    elif name == "streams_max" and value < 1:
        raise ValueError("streams_max must be at least 1")
    elif not 0 <= value <= NUMBER_MAX:
        raise ValueError(f"{name} must be 0 to {NUMBER_MAX}, not {value}")
