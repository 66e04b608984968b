"""Measure what planning a cycle costs the coordinator: 1,000 tenants with 10,000 queued operations in under 20 ms.

    python -m scripts.bench.planner            # every queue 50 times
    python -m scripts.bench.planner --quick    # a smoke test

Runs the cycle loop's work over adapters and operations in each cycle, on real adapter logs, without workers or a log:
the ready set, the check of the budget, the plan of the pass, the adapters due in the step phase, and the looks at
commit and for snapshots. Then the cost of idle adapters: with and without them, alternating. Prints Markdown tables:
medians of processor time, so that other work on the machine does not count, with quartiles in brackets.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

from coordinator.operations.adapter_log import AdapterQueue
from coordinator.operations.chunks import cut_chunks
from coordinator.operations.operation import Kind, Operation
from coordinator.scheduling.planner import FairState, plan_pass
from coordinator.scheduling.quarantine import Suspects
from coordinator.scheduling.ready_set import Roster
from scripts.bench.common import (
    Column,
    Effort,
    Results,
    Row,
    Timing,
    parser,
    shown_ms,
    shown_ratio,
    shown_time,
    turn_about,
)
from workers.contract.messages import AdapterSpec

WORKERS = ("w0", "w1")
CHUNK_TOKENS = 256
GOAL_MS = 20.0
PASSES = (Kind.FORWARD_BACKWARD,) * 10
PAIRS = (Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP) * 5
STEPS = (Kind.OPTIM_STEP,) * 10


def make_adapter(index: int, kinds: Sequence[Kind], num_tokens: int) -> AdapterQueue:
    """An adapter of a tenant of its own, with these operations queued, each of one sequence."""
    name = f"adapter-{index}"
    spec = AdapterSpec(adapter_id=name, rank=8, alpha=32.0, seed=0, train_attn=True, train_mlp=True, train_unembed=True)
    adapter = AdapterQueue(f"tenant-{index}", "session", "model", spec)
    for seq, kind in enumerate(kinds, 1):
        operation = Operation(adapter.tenant_id, name, seq, kind, b"", b"", "", CHUNK_TOKENS, num_tokens)
        operation.chunks = cut_chunks([num_tokens], CHUNK_TOKENS) if kind.is_pass else ()
        adapter.add(operation)
    return adapter


def make_roster(num_tenants: int, kinds: Sequence[Kind], num_tokens: int, *, num_idle: int = 0) -> Roster:
    """A model's adapters, all of them on the workers; the idle ones have nothing queued."""
    roster = Roster(Suspects(), lambda _: False, lambda _: False)
    for index in range(num_tenants + num_idle):
        adapter = make_adapter(index, kinds if index < num_tenants else (), num_tokens)
        roster.add(adapter)
        adapter.placed(WORKERS[index % len(WORKERS)])
        roster.touch(adapter)
    assert roster.is_ready()
    return roster


class Cycle:
    """One cycle's work on a roster, part by part."""

    def __init__(self, roster: Roster, budget: int) -> None:
        self._roster = roster
        self._budget = budget
        self._fair = FairState()

    def parts(self) -> dict[str, Callable[[], object]]:
        """By name, in the loop's order."""
        return {
            "ready set": self._roster.is_ready,
            "linger": self._look,
            "the pass": self._plan,
            "the step phase": lambda: list(self._roster.due_steps()),
            "commit and snapshots": self._close,
        }

    def run(self) -> None:
        """All of it."""
        for part in self.parts().values():
            part()

    def _look(self) -> None:
        self._roster.tenants()
        self._roster.has_tokens(self._budget * len(WORKERS))

    def _plan(self) -> None:
        candidates = self._roster.candidates()
        plan, self._fair = plan_pass(candidates, self._fair, self._roster.residents(WORKERS), self._budget)
        for adapter_id in plan.num_chunks:
            self._roster.planned(adapter_id, 1)

    def _close(self) -> None:
        for adapter in self._roster.touched():
            adapter.settle()
        self._roster.ahead()


def measure_cycles(num_tenants: int, args: argparse.Namespace) -> list[Row]:
    """A row for each kind of queue and each budget, all of them turn about."""
    queues = {"10 passes": PASSES, "5 pairs": PAIRS, "10 optimizer steps": STEPS}
    cycles = {
        (name, budget): Cycle(make_roster(num_tenants, kinds, args.tokens), budget)
        for name, kinds in queues.items()
        for budget in args.budgets
    }
    rounds: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in cycles}
    for _ in range(args.rounds):
        for key, cycle in cycles.items():
            rounds[key].append({name: processor_s(part) for name, part in cycle.parts().items()})
    rows = []
    for (queue, budget), times in rounds.items():
        columns = {name: [parts[name] for parts in times] for name in times[0]}
        columns["all"] = [sum(parts.values()) for parts in times]
        summaries = {name: Timing(tuple(seconds)).summary() for name, seconds in columns.items()}
        rows.append({"tenants": num_tenants, "queue": queue, "budget": budget, **summaries})
    return rows


def part_column(name: str) -> Column:
    """The median of a part."""
    return Column(name, lambda r: shown_ms(r[name]["median_s"]))


def processor_s(work: Callable[[], object]) -> float:
    """How long it kept a processor busy."""
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s


def measure_idle(num_idle: int, args: argparse.Namespace) -> Row:
    """What registered adapters cost that have nothing to do."""
    sides = {
        "alone": Cycle(make_roster(8, PAIRS, args.tokens), args.budgets[0]),
        "beside": Cycle(make_roster(8, PAIRS, args.tokens, num_idle=num_idle), args.budgets[0]),
    }
    effort = Effort(seconds=0, rounds_min=10 * args.rounds, rounds_max=10 * args.rounds)
    timings = turn_about({name: cycle.run for name, cycle in sides.items()}, effort, clock=time.thread_time)
    return {
        "active": 8,
        "idle": num_idle,
        "ratio": timings["beside"].ratio_to(timings["alone"]),
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
    command.add_argument("--rounds", type=int, help="cycles on each queue; default: 50")
    args = command.parse_args()
    num_tenants = args.tenants or (50 if args.quick else 1000)
    args.rounds = args.rounds or (3 if args.quick else 50)
    with Results("planner", args) as results:
        parts = Cycle(make_roster(1, PASSES, args.tokens), args.budgets[0]).parts()
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
                Column("idle adapters beside", lambda r: f"{r['idle']:,}"),
                Column("a cycle without them", lambda r: shown_time(r["alone"])),
                Column("a cycle with them", lambda r: shown_time(r["beside"])),
                Column("with / without", lambda r: shown_ratio(r["ratio"])),
            ),
        )
        idle.add(measure_idle(num_tenants, args))


if __name__ == "__main__":
    main()
