"""How many clients the shipped model carries: each trains or samples, one request after another, in rising numbers.

Depends on a pool with real passes; the clients share its cores. A number of clients is carried if their p99 is at most
`CARRIED_S` and none sees an error.
"""

from __future__ import annotations

import argparse

from scripts.bench.common import Column, Results, shown_ms
from scripts.reliability.load.clients import ClientPlan
from scripts.reliability.load.figures import p99_s
from scripts.reliability.load.pool import SAMPLING, TRAINING, LoadedPool
from scripts.reliability.load.run import DRAWN_TOKENS, PASS_TOKENS, PROMPT_TOKENS, run_phase

CLIENTS = (5, 10, 20, 40, 80)
QUICK_CLIENTS = (2,)
SECONDS, QUICK_S = 40.0, 3.0
WARM_UP_S = 5.0
"""The first step of each size prepares kernels: it is not counted."""
CARRIED_S = 2.0
"""The longest p99 of a step of 64 tokens or a sample of 24 that a person at a notebook would call interactive."""

COLUMNS = (
    Column("clients", lambda r: str(r["clients"])),
    Column("a step, p50 / p99", lambda r: f"{shown_ms(r['train_p50_s'])} / {shown_ms(r['train_p99_s'])}"),
    Column("a sample, p50 / p99", lambda r: f"{shown_ms(r['sample_p50_s'])} / {shown_ms(r['sample_p99_s'])}"),
    Column("tokens/s trained, sampled", lambda r: f"{r['trained_per_s']:,.0f}, {r['sampled_per_s']:,.0f}"),
    Column("errors", lambda r: str(r["errors"])),
    Column("memory", lambda r: f"{r['most_bytes'] >> 20} MiB"),
)


def measure_real(args: argparse.Namespace, results: Results) -> None:
    """Run rising numbers of clients, every second one of which samples."""
    table = results.table("load-real", COLUMNS)
    numbers, seconds = (QUICK_CLIENTS, QUICK_S) if args.quick else (CLIENTS, SECONDS)
    with LoadedPool({f"tenant-{number}": 1.0 for number in range(max(numbers))}, is_timed=False) as pool:
        run_phase(pool, plans_of(pool, max(numbers)), WARM_UP_S, print)
        for number in numbers:
            phase = run_phase(pool, plans_of(pool, number), seconds, print)
            trained, sampled = (sorted(phase.record.latencies_s[name]) for name in ("trains", "samples"))
            tokens = {kind: sum(phase.last.since(phase.first, kind).values()) for kind in (TRAINING, SAMPLING)}
            table.add(
                {
                    "clients": number,
                    "train_p50_s": trained[len(trained) // 2],
                    "train_p99_s": p99_s(trained),
                    "sample_p50_s": sampled[len(sampled) // 2],
                    "sample_p99_s": p99_s(sampled),
                    "trained_per_s": tokens[TRAINING] / phase.seconds,
                    "sampled_per_s": tokens[SAMPLING] / phase.seconds,
                    "errors": phase.record.num_errors,
                    "refusals": dict(phase.record.refusals),
                    "most_bytes": max(phase.memory.readings),
                }
            )
    carried = [
        row["clients"]
        for row in table.rows
        if not row["errors"] and max(row["train_p99_s"], row["sample_p99_s"]) <= CARRIED_S
    ]
    what = f"load: clients that the shipped model carries with a p99 of at most {CARRIED_S:g} s"
    results.goal(what, max(carried, default=0), at_least=0 if args.quick else 20)


def plans_of(pool: LoadedPool, number: int) -> list[ClientPlan]:
    """Return clients of as many tenants, of which every second one samples."""
    return [
        ClientPlan(
            name="samples" if index % 2 else "trains",
            key=pool.keys[f"tenant-{index}"],
            trains=not index % 2,
            num_tokens=PROMPT_TOKENS if index % 2 else PASS_TOKENS[0],
            num_drawn=DRAWN_TOKENS,
        )
        for index in range(number)
    ]
