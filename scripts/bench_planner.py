"""Measure what planning a cycle costs the coordinator: 1,000 tenants with 10,000 queued operations in under 20 ms.

    python scripts/bench_planner.py            # every queue 50 times
    python scripts/bench_planner.py --quick    # a smoke test

Runs what the cycle loop runs over adapters and operations in each cycle, on real queues and without workers or a log:
who is ready, whether the budget is full, the plan of the pass, who is due in the step phase, and the looks at commit
and for snapshots. Last, what adapters cost that are registered and have nothing to do: with and without them, turn
about. Prints Markdown tables: medians, and in brackets the tenth and the ninetieth percentile, of processor time, so
that whoever else uses the machine does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

from coordinator.operations import Kind, Operation, cut_chunks
from coordinator.planner import FairState, plan_pass
from coordinator.queue import AdapterQueue
from coordinator.roster import Roster
from coordinator.suspects import Suspects
from workers.messages import AdapterSpec

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
    roster = Roster(Suspects(), lambda _: False)
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
            "who is ready": self._roster.is_ready,
            "whom to linger for": self._look,
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


def milliseconds(work: Callable[[], object]) -> float:
    """How long it took."""
    began = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - began)


def shown(samples: Sequence[float]) -> str:
    """A median with its spread."""
    ordered = sorted(samples)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return f"{statistics.median(ordered):.2f} ({low:.2f}-{high:.2f})"


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of one operation")
    parser.add_argument("--budgets", type=int, nargs="+", default=[2048, 16384], help="tokens of a cycle on one worker")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="few tenants, few rounds")
    args = parser.parse_args()
    num_tenants, rounds = (50, 3) if args.quick else (args.tenants, args.rounds)
    queues = {"10 passes": PASSES, "5 pairs": PAIRS, "10 optimizer steps": STEPS}
    cycles = {
        (name, budget): Cycle(make_roster(num_tenants, kinds, args.tokens), budget)
        for name, kinds in queues.items()
        for budget in args.budgets
    }
    names = list(next(iter(cycles.values())).parts())
    samples: dict[tuple[str, int], list[list[float]]] = {key: [] for key in cycles}
    for _ in range(rounds):
        for key, cycle in cycles.items():
            samples[key].append([milliseconds(part) for part in cycle.parts().values()])
    print(f"Milliseconds per cycle, {num_tenants} tenants with 10 operations of {args.tokens} tokens each:\n")
    print(f"| each tenant's queue | budget | {' | '.join(names)} | all | under {GOAL_MS:.0f} ms |")
    print(f"|---|---|{'---|' * len(names)}---|---|")
    for (name, budget), rows in samples.items():
        parts = " | ".join(shown(column) for column in zip(*rows, strict=True))
        totals = [sum(row) for row in rows]
        verdict = "yes" if statistics.median(totals) < GOAL_MS else "no"
        print(f"| {name} | {budget} | {parts} | {shown(totals)} | {verdict} |")
    print_idle(num_tenants, args.tokens, args.budgets[0], rounds)


def print_idle(num_idle: int, num_tokens: int, budget: int, rounds: int) -> None:
    """What registered adapters cost that have nothing to do."""
    alone = Cycle(make_roster(8, PAIRS, num_tokens), budget)
    beside = Cycle(make_roster(8, PAIRS, num_tokens, num_idle=num_idle), budget)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(10 * rounds):
        times[0].append(milliseconds(alone.run))
        times[1].append(milliseconds(beside.run))
    print(f"\n| 8 tenants with 5 pairs each | 8 adapters registered | {8 + num_idle} registered |")
    print("|---|---|---|")
    print(f"| milliseconds per cycle | {shown(times[0])} | {shown(times[1])} |")


if __name__ == "__main__":
    main()
