"""Progress of a run: a bar with rich, where it is installed and stdout is a terminal; else plain lines."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any, Self

OnMetrics = Callable[[int, Mapping[str, float]], None]
"""Gets the number of steps done, from 1, and the metrics of the last one. Not every step has the same metrics."""

WIDTH = 12


class Progress:
    """Reports steps: to the given function, or as rows of a table that grows a column for each new metric."""

    def __init__(self, start: int, num_steps: int, on_metrics: OnMetrics | None = None) -> None:
        """`start`: the number of steps that were done before."""
        self._num_steps = num_steps
        self._on_metrics = on_metrics or self.row
        self._columns: list[str] = []
        self._bar: Any = None
        if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
            self._bar = importlib.import_module("rich.progress").Progress(transient=True)
            self._task = self._bar.add_task("training", total=num_steps, completed=start)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report that `step` steps are done."""
        self._on_metrics(step, metrics)
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a row, and the header if it has new columns."""
        new = [name for name in metrics if name not in self._columns]
        if new:
            self._columns += new
            self.say("".join(["step".rjust(WIDTH), *(f" {name:>{WIDTH}}" for name in self._columns)]))
        cells = [f"{metrics[name]:.4g}" if name in metrics else "" for name in self._columns]
        widths = [max(WIDTH, len(name)) for name in self._columns]
        row = "".join(f" {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        self.say(f"{step}/{self._num_steps}".rjust(WIDTH) + row)

    def say(self, text: str) -> None:
        """Print a line, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)
