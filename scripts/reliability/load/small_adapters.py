"""Many small adapters: what a neighbour of them waits, what share they get, and what moving them costs.

Three cases on the shipped model, with its clients on the same cores. One tenant trains 48, then 128 adapters with steps
of two tokens, on 64 slots; a neighbour's step takes longer, at most by its part of a cycle. The same tenant against one
with a single adapter and long sequences, with as many requests as the pool can do: *steps finished x seconds of such a
step while its tenant is alone* are equal, whatever the pool itself counts. 200 tenants with an adapter each on 64 slots
against 64 of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from scripts.bench.common import Column, Results, shown_ms
from scripts.reliability.load.clients import ClientPlan
from scripts.reliability.load.figures import p99_s
from scripts.reliability.load.pool import LoadedPool
from scripts.reliability.load.run import CYCLE_S_MAX, Phase, run_phase

SLOTS, CYCLE_TOKENS = 64, 2560
MANY, ONE, NEIGHBOUR = "many", "one", "neighbour"
NUM_ADAPTERS = (48, 128)
SMALL_TOKENS, STEP_TOKENS = 2, 64
LONG_TOKENS, LONG_SEQUENCES = 256, 8
"""A step of the large tenant: more than its part of a cycle, so that it always has a chunk queued. Twice as long, three
or four would end in a round, and whole ones are counted."""
STEPS_AHEAD, STEPS_AHEAD_SHARES = 2, 6
"""Steps in flight of each adapter; more where two tenants are to have something queued all the time."""
CROWD = 200
ALONE_S, BESIDE_S, QUICK_S = 40.0, 120.0, 10.0
"""Seconds of the neighbour alone, and beside each number of adapters: some hundred steps, so that their 99th percentile
is not the longest of them."""
WARM_UP_S = 5.0
DEVIATION_MAX, THROUGHPUT_MIN = 0.1, 0.8
ROUNDS, ROUND_S = 6, 15.0
"""Times that the two tenants are measured alone and together, and how long each: the speed of a machine drifts."""
CROWD_ROUNDS, CROWD_S, CROWD_WARM_UP = 3, 30.0, 0.2
"""Times that the two crowds are measured, and how long each; and the part of that in which their new adapters have
their first steps, which is not counted."""

NEIGHBOUR_COLUMNS = (
    Column("small adapters beside it", lambda r: str(r["adapters"])),
    Column("the neighbour's step, p50 / p99", lambda r: f"{shown_ms(r['p50_s'])} / {shown_ms(r['p99_s'])}"),
    Column("2 x alone + its part of a cycle", lambda r: shown_ms(r["bound_s"]) if r["adapters"] else ""),
    Column("longest", lambda r: shown_ms(r["longest_s"])),
    Column("steps", lambda r: str(r["num"])),
)
SHARE_COLUMNS = (
    Column("tenant", lambda r: r["name"]),
    Column("alone, steps/s", lambda r: f"{r['alone_per_s']:.1f}"),
    Column("together, steps/s", lambda r: f"{r['together_per_s']:.1f}"),
    Column("seconds of its steps alone, in a second", lambda r: f"{r['part']:.3f}"),
)
CROWD_COLUMNS = (
    Column("tenants, an adapter each", lambda r: str(r["tenants"])),
    Column("tokens of a step", lambda r: str(r["tokens"])),
    Column("steps/s", lambda r: f"{r['per_s']:.1f}"),
)


def measure_small_adapters(args: argparse.Namespace, results: Results) -> None:
    """Run the three cases."""
    crowd = [f"tenant-{number}" for number in range(CROWD)]
    weights = dict.fromkeys([MANY, ONE, NEIGHBOUR, *crowd], 1.0)
    options = ["--pool", "ray", "--slots", str(SLOTS)]
    with LoadedPool(weights, is_timed=False, options=options) as pool:
        run_phase(pool, _plans(pool, MANY, NUM_ADAPTERS[0], SMALL_TOKENS), WARM_UP_S, print)
        _measure_neighbour(pool, results, is_quick=args.quick)
        _measure_crowd(pool, crowd, results, rounds=1 if args.quick else CROWD_ROUNDS)
    with LoadedPool(weights, is_timed=False, options=[*options, "--cycle-tokens", str(CYCLE_TOKENS)]) as pool:
        _measure_shares(pool, results, rounds=1 if args.quick else ROUNDS)


def _measure_neighbour(pool: LoadedPool, results: Results, *, is_quick: bool) -> None:
    table = results.table("load-neighbour", NEIGHBOUR_COLUMNS)
    plan = ClientPlan(name=NEIGHBOUR, key=pool.keys[NEIGHBOUR], trains=True, num_tokens=STEP_TOKENS)
    solo_s = 0.0
    for number in (0, *NUM_ADAPTERS):
        seconds = QUICK_S if is_quick else BESIDE_S if number else ALONE_S
        phase = run_phase(pool, [plan, *_plans(pool, MANY, number, SMALL_TOKENS)], seconds, print)
        latencies = sorted(phase.record.latencies_s[NEIGHBOUR])
        solo_s = solo_s or p99_s(latencies)
        row = {
            "adapters": number,
            "num": len(latencies),
            "p50_s": latencies[len(latencies) // 2],
            "p99_s": p99_s(latencies),
            "longest_s": latencies[-1],
            "bound_s": 2 * solo_s + CYCLE_S_MAX / 2,
        }
        table.add(row)
        if number:
            what = f"load: a neighbour of {number} small adapters, p99 over 2 x alone + half of a cycle's budget"
            results.goal(what, row["p99_s"] / row["bound_s"], at_most=1.0, unit=" x")


def _measure_shares(pool: LoadedPool, results: Results, rounds: int) -> None:
    plans = {
        MANY: _plans(pool, MANY, NUM_ADAPTERS[0], SMALL_TOKENS, in_flight=STEPS_AHEAD_SHARES),
        ONE: _plans(pool, ONE, 1, LONG_TOKENS, LONG_SEQUENCES, in_flight=STEPS_AHEAD_SHARES),
    }
    alone, together = dict.fromkeys(plans, 0.0), dict.fromkeys(plans, 0.0)
    for _ in range(rounds):
        for name, each in plans.items():
            alone[name] += _steps_per_s(run_phase(pool, each, ROUND_S, print), name) / rounds
        phase = run_phase(pool, [plan for each in plans.values() for plan in each], ROUND_S, print)
        for name in plans:
            together[name] += _steps_per_s(phase, name) / rounds
    table = results.table("load-small-shares", SHARE_COLUMNS)
    parts = {name: together[name] / alone[name] for name in plans}
    for name in plans:
        row = {"name": name, "alone_per_s": alone[name], "together_per_s": together[name], "part": parts[name]}
        table.add(row)
    what = "load: 48 small adapters against one large: deviation of their parts from each other"
    results.goal(what, abs(parts[MANY] / parts[ONE] - 1.0), at_most=DEVIATION_MAX)


def _measure_crowd(pool: LoadedPool, crowd: Sequence[str], results: Results, rounds: int) -> None:
    table = results.table("load-crowd", CROWD_COLUMNS)
    for tokens in (SMALL_TOKENS, STEP_TOKENS):
        per_s = dict.fromkeys((SLOTS, len(crowd)), 0.0)
        for each_round in range(rounds):
            for number in sorted(per_s, reverse=bool(each_round % 2)):
                plans = [plan for name in crowd[:number] for plan in _plans(pool, name, 1, tokens)]
                phase = run_phase(pool, plans, CROWD_S, print, CROWD_WARM_UP)
                per_s[number] += sum(_steps_per_s(phase, name) for name in crowd[:number]) / rounds
        for number in per_s:
            table.add({"tenants": number, "tokens": tokens, "per_s": per_s[number]})
        what = f"load: {CROWD} tenants on {SLOTS} slots, steps of {tokens} tokens: throughput over that of {SLOTS}"
        results.goal(what, per_s[CROWD] / per_s[SLOTS], at_least=THROUGHPUT_MIN, unit=" x")


def _plans(
    pool: LoadedPool, tenant: str, number: int, tokens: int, sequences: int = 1, in_flight: int = STEPS_AHEAD
) -> list[ClientPlan]:
    """Return clients of a tenant, each with an adapter and always a step queued."""
    plan = ClientPlan(
        name=tenant,
        key=pool.keys[tenant],
        trains=True,
        num_tokens=tokens,
        num_sequences=sequences,
        in_flight=in_flight,
    )
    return [plan] * number


def _steps_per_s(phase: Phase, name: str) -> float:
    """Return the steps of a tenant per second between the two readings of the usage."""
    counted = phase.last.steps.get(name, 0) - phase.first.steps.get(name, 0)
    return counted / phase.seconds
