"""The base of every benchmark: alternating timing, tables printed row by row, goals, results as JSON.

Does not depend on engine, model or service, and imports no torch, so that a script without torch starts at once.

Main invariant: compared sides are measured in one run, alternating, the same number of times, and a ratio is the median
over rounds of that round's ratio, so that a slow moment of the machine slows both sides of a round.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from workers.contract.settings import num_cores

Row = dict[str, Any]
"""One measurement: raw numbers by name, as in the JSON file."""
LOSS_TOLERANCE = 1e-3
"""Largest relative difference of a tenant's loss between two sides with equal training."""
VERSIONS_OF = ("torch", "transformers", "peft", "ray", "grpcio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The time spent on one cell of a table."""

    seconds: float
    """Rounds are repeated for this long in total."""
    rounds_min: int = 5
    """Minimum number of rounds, however long they take."""
    rounds_max: int = 200
    """Maximum number of rounds."""
    warm_up: int = 1
    """Rounds before the first counted one."""

    def __post_init__(self) -> None:
        if not 1 <= self.rounds_min <= self.rounds_max:
            raise ValueError(f"rounds_min is {self.rounds_min}; it must be 1 to rounds_max, {self.rounds_max}")


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one side by round."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The median."""
        return statistics.median(self.seconds)

    def quantile(self, share: float) -> float:
        """Return a quantile, interpolated linearly; 0.99 of fewer than 100 values is about the maximum."""
        ordered = sorted(self.seconds)
        position = share * (len(ordered) - 1)
        low = math.floor(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    def summary(self) -> Row:
        """Return median, quartiles and number of rounds, for a row."""
        return {
            "median_s": self.median_s,
            "quartiles_s": [self.quantile(0.25), self.quantile(0.75)],
            "rounds": len(self.seconds),
        }

    def ratio_to(self, other: Timing) -> Row:
        """Return this time divided by the other: median and quartiles over rounds."""
        ratios = Timing(tuple(a / b for a, b in zip(self.seconds, other.seconds, strict=True)))
        return {"median": ratios.median_s, "quartiles": [ratios.quantile(0.25), ratios.quantile(0.75)]}


def measure_alternating(
    sides: Mapping[str, Callable[[], object]],
    effort: Effort,
    *,
    in_order: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Run all sides once per round, each round starting with the next side; return the timing of each.

    `in_order`: start every round with the first side, because a side prepares the next one. `clock` measures both the
    results and the effort.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    began_s = clock()
    for number in range(-effort.warm_up, effort.rounds_max):
        if number == 0:
            began_s = clock()
        if number >= effort.rounds_min and clock() - began_s >= effort.seconds:
            break
        first = 0 if in_order else number % len(names)
        for name in names[first:] + names[:first]:
            begin_s = clock()
            sides[name]()
            if number >= 0:
                times[name].append(clock() - begin_s)
    return {name: Timing(tuple(seconds)) for name, seconds in times.items()}


def check_losses(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative difference of losses. Raises RuntimeError if the sides do not train equally."""
    difference = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    if not difference <= LOSS_TOLERANCE:
        raise RuntimeError(f"two sides' losses differ by {difference:.1e}: their times cannot be compared")
    return difference


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    title: str
    show: Callable[[Row], str]


@dataclass(slots=True)
class Table:
    """Rows under a name, printed as in the documentation."""

    name: str
    columns: Sequence[Column]
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Add a row and print it at once."""
        if not self.rows:
            print("\n" + self._head(), flush=True)
        self.rows.append(row)
        print(self._line(row), flush=True)

    def markdown(self) -> str:
        """Return the whole table."""
        return "\n".join([self._head(), *map(self._line, self.rows)])

    def _head(self) -> str:
        return f"| {' | '.join(column.title for column in self.columns)} |\n{'|---' * len(self.columns)}|"

    def _line(self, row: Row) -> str:
        return f"| {' | '.join(column.show(row) for column in self.columns)} |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A goal: its target and the measured value."""

    what: str
    target: float
    is_floor: bool
    """True: at least the target; False: at most."""
    measured: float
    unit: str
    """After the number: "x", " ms", "" and so on."""

    @property
    def is_met(self) -> bool:
        """Whether the measured value reaches the target."""
        return self.measured >= self.target if self.is_floor else self.measured <= self.target

    def line(self) -> str:
        """Return a row of a Markdown table: what, goal, measured, met."""
        sign = "≥" if self.is_floor else "≤"
        verdict = "yes" if self.is_met else "**no**"
        return f"| {self.what} | {sign} {self.target:g}{self.unit} | {self.measured:.3g}{self.unit} | {verdict} |"


class Results:
    """All results of one script. As a context manager it writes the JSON file at the end, except after an error."""

    def __init__(self, item: str, args: argparse.Namespace) -> None:
        """`item` names the file: `<results>/<item>.json`; `args` as from `parser`."""
        self.item = item
        self.tables: list[Table] = []
        self.goals: list[Goal] = []
        self._folder: Path | None = args.results
        self._began_s = time.perf_counter()
        self._machine = machine_line(args.threads)
        print(self._machine, flush=True)

    def table(self, name: str, columns: Sequence[Column]) -> Table:
        """Add a table; the page shows it between `<!-- bench:NAME -->` and `<!-- /bench -->`."""
        table = Table(name, columns)
        self.tables.append(table)
        return table

    def goal(
        self, what: str, measured: float, *, at_least: float | None = None, at_most: float | None = None, unit: str = ""
    ) -> None:
        """Record a measured value with its goal, a floor or a ceiling."""
        assert (at_least is None) != (at_most is None), "a goal has one bound"
        target = at_least if at_least is not None else at_most
        assert target is not None
        self.goals.append(Goal(what=what, target=target, is_floor=at_least is not None, measured=measured, unit=unit))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        if self.goals:
            print("\n| goal | wanted | measured | met |\n|---|---|---|---|")
            print("\n".join(goal.line() for goal in self.goals), flush=True)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"{self.item}.json"
            path.write_text(json.dumps(self._content(), indent=1) + "\n", encoding="utf-8")
            print(f"\n{path}")

    def _content(self) -> dict[str, Any]:
        return {
            "item": self.item,
            "machine": self._machine,
            "seconds": round(time.perf_counter() - self._began_s, 1),
            "goals": [asdict(goal) for goal in self.goals],
            "tables": {table.name: {"markdown": table.markdown(), "rows": table.rows} for table in self.tables},
        }


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark: --quick, --threads, --results."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="few and tiny cells, seconds in total: a smoke test")
    made.add_argument(
        "--threads", type=int, default=num_cores(), help="threads of each side's kernels (default: the cores)"
    )
    made.add_argument(
        "--results",
        type=Path,
        help="folder for the results as JSON, for scripts.bench.report (default: they are only printed)",
    )
    return made


def machine_line(num_threads: int) -> str:
    """Return date, machine, library versions, and the load of the machine before the run."""
    versions = []
    for name in VERSIONS_OF:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {_processor()}, {num_threads} threads on {num_cores()} cores, "
        f"load {os.getloadavg()[0]:.1f} before; {', '.join(versions)}, Python {platform.python_version()}"
    )


def _processor() -> str:
    """Return the processor's name, on Linux from /proc/cpuinfo."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def shown_ms(seconds: float) -> str:
    """Format as milliseconds with about three digits."""
    return f"{_milliseconds(seconds)} ms"


def shown_time(summary: Row) -> str:
    """Format a median with its quartiles, from `Timing.summary`."""
    low, high = summary["quartiles_s"]
    return f"{_milliseconds(summary['median_s'])} ms ({_milliseconds(low)} - {_milliseconds(high)})"


def _milliseconds(seconds: float) -> str:
    size = abs(seconds)
    return f"{1e3 * seconds:,.{0 if size >= 0.1 else 1 if size >= 0.001 else 3}f}"


def shown_ratio(ratio: Row) -> str:
    """Format a ratio with its quartiles, from `Timing.ratio_to`."""
    low, high = ratio["quartiles"]
    return f"{ratio['median']:.2f} ({low:.2f} - {high:.2f})"
