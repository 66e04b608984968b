"""Measure the cost of planning a cycle: 1,000 tenants with 10,000 queued operations in under 20 ms.

    python -m scripts.bench.planner            # every load 50 times
    python -m scripts.bench.planner --quick    # a smoke test

Runs the parts of the cycle loop that iterate over adapters and operations, on real adapter logs, without workers or a
database: the ready set, the check of the budget, the plan of the pass, the adapters due in the step phase, and the
adapters to advance at commit or to snapshot. Then measures the cost of idle adapters: with and without them,
alternating. Prints Markdown tables: medians of processor time, so that other work on the machine does not count, with
quartiles in brackets.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import cast

from coordinator.base.time import SystemTime
from coordinator.checkpoints.published_weights import Publishing
from coordinator.checkpoints.snapshots import Snapshots
from coordinator.fleet.fleet import Fleet
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.operation import Kind, Operation
from coordinator.operations.registry import AdapterGroup
from coordinator.payloads.passes import cut_chunks
from coordinator.scheduling.adapter_costs import Costs
from coordinator.scheduling.planner import plan_pass
from coordinator.scheduling.probation import Probation
from coordinator.scheduling.quarantine import Quarantine
from coordinator.scheduling.ready_set import ReadySet
from coordinator.scheduling.solo_turns import SoloTurns
from coordinator.scheduling.virtual_counters import FairState
from coordinator.scheduling.worker_memory import WorkerMemory
from scripts.bench.common import (
    Column,
    Effort,
    Results,
    Row,
    Timing,
    measure_alternating,
    parser,
    shown_ms,
    shown_ratio,
    shown_time,
)
from tests.support.adapter_logs import Files, spec_named
from tests.support.classes import classes_of
from tests.support.probation import MemoryRecords
from tests.support.toy_engine import toy_worker_info

WORKERS = ("w0", "w1")
CHUNK_TOKENS = 256
GOAL_MS = 20.0
PASSES = (Kind.FORWARD_BACKWARD,) * 10
PAIRS = (Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP) * 5
STEPS = (Kind.OPTIM_STEP,) * 10


def make_adapter(index: int, kinds: Sequence[Kind], num_tokens: int) -> AdapterLog:
    """Return a new tenant's adapter with these operations queued, each of one sequence."""
    name = f"adapter-{index}"
    adapter = AdapterLog(f"tenant-{index}", "session", "model", spec_named(name))
    for seq, kind in enumerate(kinds, 1):
        chunks = cut_chunks([num_tokens], CHUNK_TOKENS) if kind.is_pass else ()
        adapter.add(Operation(adapter.tenant_id, name, seq, kind, b"", b"", "", CHUNK_TOKENS, num_tokens, chunks))
    return adapter


def make_ready_set(num_tenants: int, kinds: Sequence[Kind], num_tokens: int, *, num_idle: int = 0) -> ReadySet:
    """Return the ready set of adapters that all have a copy on a worker; idle ones have nothing queued."""
    group, files = AdapterGroup(SystemTime()), Files()
    for index in range(num_tenants + num_idle):
        adapter = make_adapter(index, kinds if index < num_tenants else (), num_tokens)
        group.add(adapter)
        adapter.place_copy(WORKERS[index % len(WORKERS)])
        group.mark_dirty(adapter)
    fleet, quarantine, snapshots, publishing = (
        Fleet(),
        Quarantine(),
        cast("Snapshots", files),
        cast("Publishing", files),
    )
    classes = classes_of(fleet)
    turns = SoloTurns("model", Probation(MemoryRecords(), 0.0), group, fleet, classes, lambda _: False)
    memory = WorkerMemory("model", fleet, group, quarantine, snapshots, publishing, classes, lambda _: False)
    for worker_id in WORKERS:
        fleet.add(toy_worker_info(worker_id))
    costs = Costs("toy", fleet)
    ready = ReadySet(group, quarantine, turns, memory, snapshots, publishing, costs, lambda _: False)
    assert ready.refresh()
    return ready


class Cycle:
    """One cycle's work on a ready set, part by part."""

    def __init__(self, ready: ReadySet, budget: int) -> None:
        self._ready = ready
        self._budget = budget
        self._fair = FairState()

    def parts(self) -> dict[str, Callable[[], object]]:
        """Return the parts by name, in the loop's order."""
        return {
            "ready set": self._ready.refresh,
            "linger": self._check_linger,
            "the pass": self._plan,
            "the step phase": lambda: list(self._ready.due_steps()),
            "commit and snapshots": self._close,
        }

    def run(self) -> None:
        """Run all parts."""
        for part in self.parts().values():
            part()

    def _check_linger(self) -> None:
        self._ready.tenants()
        self._ready.has_tokens(self._budget * len(WORKERS))

    def _plan(self) -> None:
        candidates = self._ready.candidates({})
        plan, self._fair = plan_pass(candidates, self._fair, self._ready.residents(WORKERS), self._budget)
        for adapter_id in plan.num_chunks:
            self._ready.planned(adapter_id, 1)

    def _close(self) -> None:
        for adapter in self._ready.dirty():
            adapter.take_decided()
        self._ready.past_snapshots()


def measure_cycles(num_tenants: int, args: argparse.Namespace) -> list[Row]:
    """Return a row for each kind of load and each budget, alternating."""
    loads = {"10 passes": PASSES, "5 pairs": PAIRS, "10 optimizer steps": STEPS}
    cycles = {
        (name, budget): Cycle(make_ready_set(num_tenants, kinds, args.tokens), budget)
        for name, kinds in loads.items()
        for budget in args.budgets
    }
    rounds: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in cycles}
    for _ in range(args.rounds):
        for key, cycle in cycles.items():
            rounds[key].append({name: processor_s(part) for name, part in cycle.parts().items()})
    rows = []
    for (load, budget), times in rounds.items():
        columns = {name: [parts[name] for parts in times] for name in times[0]}
        columns["all"] = [sum(parts.values()) for parts in times]
        summaries = {name: Timing(tuple(seconds)).summary() for name, seconds in columns.items()}
        rows.append({"tenants": num_tenants, "queue": load, "budget": budget, **summaries})
    return rows


def part_column(name: str) -> Column:
    """Return the column of a part's median."""
    return Column(name, lambda r: shown_ms(r[name]["median_s"]))


def processor_s(work: Callable[[], object]) -> float:
    """Return the processor time of the work."""
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s


def measure_idle(num_idle: int, args: argparse.Namespace) -> Row:
    """Measure the cost of registered adapters without operations."""
    sides = {
        "without_idle": Cycle(make_ready_set(8, PAIRS, args.tokens), args.budgets[0]),
        "with_idle": Cycle(make_ready_set(8, PAIRS, args.tokens, num_idle=num_idle), args.budgets[0]),
    }
    effort = Effort(seconds=0, rounds_min=10 * args.rounds, rounds_max=10 * args.rounds)
    timings = measure_alternating({name: cycle.run for name, cycle in sides.items()}, effort, clock=time.thread_time)
    return {
        "active": 8,
        "idle": num_idle,
        "ratio": timings["with_idle"].ratio_to(timings["without_idle"]),
        **{name: timing.summary() for name, timing in timings.items()},
    }


def main() -> None:
    """Read the command line, measure, print."""
    command = parser(__doc__)
    command.add_argument("--tenants", type=int, help="default: 1,000")
    command.add_argument("--tokens", type=int, default=64, help="tokens of one operation")
    command.add_argument(
        "--budgets", type=int, nargs="+", default=[2048, 16384], help="tokens of a cycle on one worker"
    )
    command.add_argument("--rounds", type=int, help="cycles of each load; default: 50")
    args = command.parse_args()
    num_tenants = args.tenants or (50 if args.quick else 1000)
    args.rounds = args.rounds or (3 if args.quick else 50)
    with Results("planner", args) as results:
        parts = Cycle(make_ready_set(1, PASSES, args.tokens), args.budgets[0]).parts()
        cycles = results.table(
            "planner",
            (
                Column("tenants, 10 operations each", lambda r: f"{r['tenants']:,}"),
                Column("queued by each", lambda r: r["queue"]),
                Column("budget, tokens", lambda r: f"{r['budget']:,}"),
                *map(part_column, parts),
                Column("all", lambda r: shown_time(r["all"])),
            ),
        )
        for row in measure_cycles(num_tenants, args):
            cycles.add(row)
        worst_s = max(row["all"]["median_s"] for row in cycles.rows)
        what = f"planner: processor time of a cycle of {num_tenants:,} tenants with {10 * num_tenants:,} operations"
        results.goal(f"{what} queued, the worst", 1e3 * worst_s, at_most=GOAL_MS, unit=" ms")
        idle = results.table(
            "planner-idle",
            (
                Column("tenants with 5 pairs each", lambda r: str(r["active"])),
                Column("idle adapters", lambda r: f"{r['idle']:,}"),
                Column("a cycle without them", lambda r: shown_time(r["without_idle"])),
                Column("a cycle with them", lambda r: shown_time(r["with_idle"])),
                Column("with / without", lambda r: shown_ratio(r["ratio"])),
            ),
        )
        idle.add(measure_idle(num_tenants, args))


if __name__ == "__main__":
    main()
