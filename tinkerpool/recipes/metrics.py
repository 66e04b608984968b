"""The metrics of a run: a line of JSON for each step in the run's folder, and how fast the steps go.

Main invariant: `metrics.jsonl` has each step at most once, in order, also after interruptions.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

METRICS = "metrics.jsonl"
OF_THE_POOL = frozenset({"tokens_per_s", "clock_cycle"})
"""Metrics that depend on who else uses the pool; the others are the same each time that a run is repeated."""
SPAN = 4
"""Steps over which a rate is measured: results of steps that were submitted together also arrive together."""
RECENT = 32
"""Steps whose rates count."""

Mark = tuple[float, int]
"""A moment in seconds, and the tokens until then."""


class MetricsFile:
    """`metrics.jsonl` in a run's folder."""

    def __init__(self, folder: Path, start: int) -> None:
        """Open the file behind the line of step `start`. Drops later lines, for the run takes their steps again."""
        path = folder / METRICS
        if path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= start]
            temporary = path.with_suffix(".new")
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of a step, so that other programs can read it at once. A value that is not finite is null."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, "time": time, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Pace:
    """How fast steps and tokens go: medians over recent steps, so that an evaluation or a pause changes little."""

    def __init__(self, now_s: float) -> None:
        """Begin before the first step."""
        self._marks: deque[Mark] = deque([(now_s, 0)], maxlen=RECENT + 1)

    def step(self, now_s: float, num_tokens: int) -> None:
        """Record that a step with this number of tokens has ended."""
        self._marks.append((now_s, self._marks[-1][1] + num_tokens))

    def step_s(self) -> float:
        """Return the seconds that a step takes. At least one step was recorded."""
        return self._median(lambda before, after, num_steps: (after[0] - before[0]) / num_steps)

    def tokens_per_s(self) -> float:
        """Return the tokens a second. At least one step was recorded."""
        return self._median(lambda before, after, _: (after[1] - before[1]) / max(after[0] - before[0], 1e-6))

    def _median(self, rate: Callable[[Mark, Mark, int], float]) -> float:
        marks = list(self._marks)
        span = min(SPAN, len(marks) - 1)
        return statistics.median(rate(*pair, span) for pair in zip(marks, marks[span:], strict=False))


def _step_of(line: str) -> float:
    """Return the step of a line; infinity for one that was cut off."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
