"""Progress of a run: metrics in a file and for a function or as rows, tokens a second, and the time left.

At a terminal, and where rich is installed, a bar below the rows has the time; else each row has it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from tinkerpool.recipes.metrics import MetricsFile, Pace

OnMetrics = Callable[[int, Mapping[str, float]], None]
"""Gets the number of steps done, from 1, and the metrics of the last one. Not every step has the same metrics."""

WIDTH = 12
FILE_ONLY = frozenset({"tokens", "clock_cycle"})
"""Metrics that rows leave out."""


class Progress:
    """Reports steps: to the run's `metrics.jsonl`, and to a function or as rows of a table with growing columns."""

    def __init__(self, folder: Path, start: int, num_steps: int, on_metrics: OnMetrics | None = None) -> None:
        """`folder`: of the run. `start`: the number of steps that were done before. `on_metrics` replaces the rows."""
        self._folder = folder
        self._start = start
        self._num_steps = num_steps
        self._on_metrics = on_metrics or self.row
        self._columns: list[str] = []
        self._bar: Any = None
        if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
            rich = importlib.import_module("rich.progress")
            texts = [rich.TextColumn(text) for text in ("{task.completed}/{task.total}", "{task.fields[pace]}")]
            self._bar = rich.Progress(rich.TextColumn("training"), rich.BarColumn(), *texts, transient=True)
            self._task = self._bar.add_task("training", total=num_steps, completed=start, pace="")

    def __enter__(self) -> Self:
        self._file = MetricsFile(self._folder, self._start)
        self._pace = Pace(time.monotonic())
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._file.close()

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report that `step` steps are done. `tokens` is among the metrics; adds `tokens_per_s`."""
        self._pace.step(time.monotonic(), int(metrics["tokens"]))
        metrics = {**metrics, "tokens_per_s": round(self._pace.tokens_per_s(), 1)}
        self._file.write(step, metrics)
        self._on_metrics(step, metrics)
        if self._bar is not None:
            pace = f"{metrics['tokens_per_s']:,.0f} tokens/s, {self._left(step)} left"
            self._bar.update(self._task, completed=step, pace=pace)

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a row, and the header if it has new columns."""
        cells = {name: _number(value) for name, value in metrics.items() if name not in FILE_ONLY}
        if self._bar is None:
            cells["time_left"] = self._left(step)
        else:
            del cells["tokens_per_s"]
        new = [name for name in cells if name not in self._columns]
        if new:
            self._columns += new
            self.say("".join(["step".rjust(WIDTH), *(f" {name:>{WIDTH}}" for name in self._columns)]))
        widths = [max(WIDTH, len(name)) for name in self._columns]
        row = "".join(f" {cells.get(name, ''):>{width}}" for name, width in zip(self._columns, widths, strict=True))
        self.say(f"{step}/{self._num_steps}".rjust(WIDTH) + row)

    def say(self, text: str) -> None:
        """Print a line, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def _left(self, step: int) -> str:
        """Return the time that the other steps take at the recent pace: `0:12:30`."""
        return str(timedelta(seconds=round(self._pace.step_s() * (self._num_steps - step))))


def pool_metrics(passed: Mapping[str, float], stepped: Mapping[str, float]) -> dict[str, float]:
    """Return the `tokens` and the `clock_cycle` of a step from the pool's metrics of its pass and of its step."""
    return {"tokens": int(passed["tokens:sum"]), "clock_cycle": int(stepped["clock_cycle:unique"])}


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
