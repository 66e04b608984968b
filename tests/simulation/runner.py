"""Runs histories, one seed after another or on all cores, and adds up their figures.

Does not depend on the parts of a history. A history's result depends on its seed alone while PYTHONHASHSEED is 0:
`require_fixed_hashes` starts the program again if it is not.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulation.determinism import collect_garbage, deterministic
from tests.simulation.history import History

SHARED_MEMORY = Path("/dev/shm")
COLLECT_EVERY = 20


@dataclass(slots=True)
class Result:
    """The result of one history."""

    seed: int
    digest: str
    virtual_s: float
    error: str = ""
    """Empty if the history passed."""
    details: str = ""
    faults: Counter[str] = field(default_factory=Counter)
    work: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Figures:
    """The sums over many histories."""

    num_histories: int = 0
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    work: Counter[str] = field(default_factory=Counter)
    failed: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Add one history."""
        self.num_histories += 1
        self.virtual_s += result.virtual_s
        self.faults += result.faults
        self.work += result.work
        if result.error:
            self.failed.append(result)


def run_seed(seed: int, on_event: Callable[[str], None] | None = None) -> Result:
    """Run one history. `on_event` receives every line of its trace."""
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="tinkerpool-sim-", dir=parent))
    error = details = ""
    try:
        with deterministic(seed):
            history = History(seed, folder / "data", on_event)
            try:
                history.run()
            except Exception as failure:  # noqa: BLE001 (it is the result)
                error, details = f"{type(failure).__name__}: {failure}", traceback.format_exc()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    world = history.world
    return Result(seed, world.digest(), world.now, error, details, world.faults, world.work)


def run_seeds(seeds: Iterable[int], num_jobs: int, failures_max: int) -> Iterator[Result]:
    """Yield results as histories end, in no particular order if `num_jobs` is above 1.

    Stops after `failures_max` failures.
    """
    logging.disable(logging.CRITICAL)
    num_failures = 0
    for result in _results(seeds, num_jobs):
        yield result
        num_failures += bool(result.error)
        if num_failures == failures_max:
            return


def _results(seeds: Iterable[int], num_jobs: int) -> Iterator[Result]:
    if num_jobs == 1:
        for seed in seeds:
            yield _run_and_tidy(seed)
        return
    with multiprocessing.get_context("fork").Pool(num_jobs) as pool:
        yield from pool.imap_unordered(_run_and_tidy, seeds, chunksize=COLLECT_EVERY)


def _run_and_tidy(seed: int) -> Result:
    result = run_seed(seed)
    if seed % COLLECT_EVERY == 0:
        collect_garbage()
    return result


def require_fixed_hashes() -> None:
    """Start this program again with PYTHONHASHSEED=0, unless it runs with that."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})


def report(figures: Figures, seconds: float) -> str:
    """Format the figures as text."""
    per_minute = figures.num_histories / max(seconds, 1e-9) * 60
    lines = [
        f"{figures.num_histories} histories in {seconds:.1f} s ({per_minute:,.0f} a minute), "
        f"{figures.virtual_s / 3600:,.1f} hours of virtual time",
        "injected faults:",
        *(f"  {count:>9,}  {kind}" for kind, count in sorted(figures.faults.items())),
        "what the service did:",
        *(f"  {count:>9,}  {kind}" for kind, count in sorted(figures.work.items())),
    ]
    return "\n".join(lines)


def add_up(results: Iterator[Result], num_seeds: int) -> Figures:
    """Add up results, with a line of progress on a terminal."""
    figures, started, shown = Figures(), time.monotonic(), 0.0
    for result in results:
        figures.add(result)
        if result.error:
            print(f"\nseed {result.seed} failed: {result.error}", flush=True)
            print(f"  to repeat it with every event: make sim SEED={result.seed}", flush=True)
        now = time.monotonic()
        if sys.stderr.isatty() and now - shown > 0.2:
            shown = now
            rate = figures.num_histories / (now - started) * 60
            line = f"\r{figures.num_histories:,} of {num_seeds:,} histories, {rate:,.0f} a minute, "
            print(f"{line}{len(figures.failed)} failed ", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return figures
