"""The figures of a chaos run, as JSON and as text. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts.reliability.chaos.killer import Record, Target

WAITS = {
    "alive_s": "all processes were replaced",
    "resumed_s": "the next operation had finished",
    "all_resumed_s": "one operation of every tenant had finished",
}


def figures_of_kills(records: Sequence[Record]) -> dict[str, Any]:
    """Return kills by kind and failpoint, and the seconds until work continued."""
    return {
        "kills": len(records),
        "kills_by_kind": _counted(f"{record.target}, {record.kind}" for record in records),
        "failpoints": _counted(record.how for record in records if record.kind == "failpoint"),
        "failpoints_missed": _counted(record.missed for record in records if record.missed),
        "workers_replaced_without_kill": sum(record.num_unexplained for record in records),
        "seconds": {target.value: _waits(records, target) for target in Target},
    }


def lines(kills: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report as text."""
    yield f"{kills['kills']} kills: " + ", ".join(f"{n} {kind}" for kind, n in kills["kills_by_kind"].items())
    if kills["failpoints"]:
        yield "  failpoints: " + ", ".join(f"{point} {n}" for point, n in kills["failpoints"].items())
    if kills["failpoints_missed"]:
        yield "  not reached: " + ", ".join(f"{point} {n}" for point, n in kills["failpoints_missed"].items())
    for target, waits in kills["seconds"].items():
        for name, text in WAITS.items():
            if name in waits:
                median, longest = waits[name]["median"], waits[name]["max"]
                yield f"  {target} killed, until {text}: {median:.1f} s median, {longest:.1f} s at most"
    yield (
        f"  {run['epochs']} epochs; {kills['workers_replaced_without_kill']} workers replaced without a kill; "
        f"{run['tracebacks_in_log']} tracebacks in the log"
    )
    operations, steps = run["operations"], run["steps"]
    yield f"{sum(operations.values())} operations in {sum(steps.values())} steps of {len(steps)} tenants:"
    yield "  clients saw no error; no operation is missing or failed; three fetches of each returned equal bytes;"
    if run["dropped_before_the_end"]:
        yield f"  (except {run['dropped_before_the_end']} that were first fetched more than an hour before the end)"
    yield "  all results, and the last weights and moments, have the same bits as without kills."


def _waits(records: Sequence[Record], target: Target) -> dict[str, dict[str, float]]:
    waits: dict[str, dict[str, float]] = {}
    for name in WAITS:
        times = [getattr(r, name) for r in records if r.target == target.value and getattr(r, name) is not None]
        if times:
            waits[name] = {"median": statistics.median(times), "max": max(times)}
    return waits


def _counted(names: Iterator[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))
