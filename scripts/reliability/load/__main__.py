"""Put 500 clients of 100 tenants on one pool for ten minutes, and show what it does with them: `make load`.

    python -m scripts.reliability.load                            # a quarter of an hour
    python -m scripts.reliability.load --quick                    # a smoke test: numbers without meaning
    python -m scripts.reliability.load --minutes 1 --tenants 30
    python -m scripts.reliability.load --real                     # the shipped model: how many clients it carries
    python -m scripts.reliability.load --small-adapters           # many small adapters and their neighbours
    python -m scripts.reliability.load --overload                 # impatient clients, far above their rates

The pool is `tinkerpool serve` in a process of its own, with gRPC and its log; its engine takes the time of the shipped
model and computes nothing, so that the machine's cores are left to the coordinator and to the clients, which share
them. Three phases: a small tenant alone; the same beside a hog that trains and samples as much as it can; then all
tenants, three clients of each training and two sampling, all with more requests than the pool can do. Measured: errors,
refusals, the coordinator's memory over time, the committed tokens of each tenant. Returns 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import sys

from scripts.bench.common import Column, Results, Row, parser, shown_ms
from scripts.reliability.load.figures import p99_s, shares_of
from scripts.reliability.load.overload import measure_overload
from scripts.reliability.load.pool import SAMPLING, TRAINING, LoadedPool
from scripts.reliability.load.real import measure_real
from scripts.reliability.load.run import (
    CYCLE_S_MAX,
    HEAVY,
    HEAVY_WEIGHT,
    HOG,
    SMALL,
    Phase,
    all_plans,
    hog_plans,
    run_phase,
    small_plans,
    tenants,
)
from scripts.reliability.load.small_adapters import measure_small_adapters
from scripts.terminal import interrupt_at_sigterm

TENANTS, MINUTES = 100, 10.0
SOLO_PART, HOG_PART = 0.05, 0.2
"""Parts of the main phase's time that the small tenant is alone, and beside the hog."""
CYCLES_MIN = 100
DEVIATION_MAX = 0.1
GROWTH_MAX = 1.1
"""Most memory in the last third of the time, over that in the first third: caches fill, queues do not grow."""

LOAD_COLUMNS = (
    Column("clients (tenants)", lambda r: f"{r['clients']} ({r['tenants']})"),
    Column("seconds", lambda r: f"{r['seconds']:.0f}"),
    Column("cycles", lambda r: f"{r['cycles']:,}"),
    Column("steps, samples", lambda r: f"{r['steps']:,}, {r['samples']:,}"),
    Column("tokens/s trained, sampled", lambda r: f"{r['trained_per_s']:,.0f}, {r['sampled_per_s']:,.0f}"),
    Column("errors", lambda r: str(r["errors"])),
    Column("refusals, repeated", lambda r: str(sum(r["refusals"].values()))),
    Column(
        "memory: idle, most in the first and last third",
        lambda r: ", ".join(f"{r[name] >> 20}" for name in ("idle_bytes", "first_bytes", "last_bytes")) + " MiB",
    ),
)
SHARES_COLUMNS = (
    Column("kind", lambda r: r["kind"]),
    Column("tokens of a tenant, mean", lambda r: f"{r['mean']:,.0f}"),
    Column("largest deviation of an equal tenant", lambda r: f"{100 * r['spread']:.1f} %"),
    Column(f"tenant with weight {HEAVY_WEIGHT:g}", lambda r: f"{r['weighted']:.2f} x"),
)
SMALL_COLUMNS = (
    Column("the small tenant", lambda r: r["name"]),
    Column("alone, p50 / p99", lambda r: f"{shown_ms(r['solo_p50_s'])} / {shown_ms(r['solo_p99_s'])}"),
    Column("beside the hog, p50 / p99", lambda r: f"{shown_ms(r['p50_s'])} / {shown_ms(r['p99_s'])}"),
    Column("2 x alone + one cycle's budget", lambda r: shown_ms(r["bound_s"])),
    Column("requests", lambda r: str(r["num"])),
)


def load_row(phase: Phase, num_clients: int, num_tenants: int) -> Row:
    """Return the row of the main phase."""
    tokens = {kind: sum(phase.last.since(phase.first, kind).values()) for kind in (TRAINING, SAMPLING)}
    return {
        "clients": num_clients,
        "tenants": num_tenants,
        "seconds": phase.seconds,
        "cycles": phase.num_cycles,
        "steps": phase.record.num_done["trains"],
        "samples": phase.record.num_done["samples"],
        "trained_per_s": tokens[TRAINING] / phase.seconds,
        "sampled_per_s": tokens[SAMPLING] / phase.seconds,
        "errors": phase.record.num_errors,
        "refusals": dict(phase.record.refusals),
        "idle_bytes": phase.memory.idle_bytes,
        "first_bytes": phase.memory.third(0),
        "last_bytes": phase.memory.third(2),
        "readings_bytes": phase.memory.readings[::10],
    }


def small_rows(solo: Phase, beside: Phase) -> list[Row]:
    """Return the rows of the small tenant, for training and for sampling."""
    rows: list[Row] = []
    for name in ("small trains", "small samples"):
        alone, crowded = (sorted(phase.record.latencies_s[name]) for phase in (solo, beside))
        rows.append(
            {
                "name": name.removeprefix("small "),
                "num": len(crowded),
                "solo_p50_s": alone[len(alone) // 2],
                "solo_p99_s": p99_s(alone),
                "p50_s": crowded[len(crowded) // 2],
                "p99_s": p99_s(crowded),
                "bound_s": 2 * p99_s(alone) + CYCLE_S_MAX,
                "cycles_s": beside.cycles_s,
            }
        )
    return rows


def measure(args: argparse.Namespace, results: Results) -> None:
    """Run the three phases and add their tables and goals."""
    seconds, errors = 60 * args.minutes, []
    with LoadedPool(tenants(args.tenants), is_timed=True) as pool:
        print(f"a small tenant alone, then beside a hog, {(SOLO_PART + HOG_PART) * seconds:.0f} s", flush=True)
        solo = run_phase(pool, list(small_plans(pool)), SOLO_PART * seconds, _show)
        beside = run_phase(pool, [*small_plans(pool), *hog_plans(pool)], HOG_PART * seconds, _show)
        plans = list(all_plans(pool))
        print(f"{len(plans)} clients of {args.tenants} tenants, {seconds:.0f} s", flush=True)
        crowd = run_phase(pool, plans, seconds, _show)
        for phase in (solo, beside, crowd):
            errors += phase.record.errors
        if "Traceback" in pool.log_text():
            errors.append(f"the pool's log has an exception: {pool.log_tail()}")
    for error in errors:
        print(f"ERROR: {error}")
    table = results.table("load", LOAD_COLUMNS)
    table.add(load_row(crowd, len(plans), args.tenants))
    num_errors = len(errors)
    results.goal("load: errors other than refusals that waiting clears", float(num_errors), at_most=0, unit="")
    growth = "load: memory in the last third of the time, over that in the first third"
    results.goal(growth, crowd.memory.growth, at_most=GROWTH_MAX, unit=" x")
    results.goal("load: cycles over which shares are counted", crowd.num_cycles, at_least=CYCLES_MIN)
    shares, busy = results.table("load-shares", SHARES_COLUMNS), tenants(args.tenants).keys() - {SMALL, HOG}
    for kind in (TRAINING, SAMPLING):
        counted = crowd.last.since(crowd.first, kind)
        found = shares_of({name: counted.get(name, 0) for name in busy}, HEAVY)
        shares.add({"kind": kind, "mean": found.mean, "spread": found.spread, "weighted": found.weighted})
        what = f"load: {kind}: largest deviation of an equal tenant's tokens"
        results.goal(what, found.spread, at_most=DEVIATION_MAX)
        what = f"load: {kind}: deviation of a tenant with weight {HEAVY_WEIGHT:g} from {HEAVY_WEIGHT:g} x"
        results.goal(what, abs(found.weighted / HEAVY_WEIGHT - 1.0), at_most=DEVIATION_MAX)
    small = results.table("load-small", SMALL_COLUMNS)
    for row in small_rows(solo, beside):
        small.add(row)
        what = f"load: a small tenant {row['name']} beside a hog, p99 over 2 x alone + {CYCLE_S_MAX:g} s"
        results.goal(what, row["p99_s"] / row["bound_s"], at_most=1.0, unit=" x")


def _show(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    """Read the command line, run, print."""
    interrupt_at_sigterm()
    command = parser(__doc__)
    command.add_argument("--tenants", type=int, help=f"default: {TENANTS}, of five clients each")
    command.add_argument("--minutes", type=float, help=f"of the main phase; default: {MINUTES:g}")
    command.add_argument("--real", action="store_true", help="the shipped model, with more and more clients")
    command.add_argument("--small-adapters", action="store_true", help="many small adapters and their neighbours")
    command.add_argument("--overload", action="store_true", help="impatient clients, far above their tenants' rates")
    args = command.parse_args()
    args.tenants = args.tenants or (4 if args.quick else TENANTS)
    args.minutes = args.minutes or (0.1 if args.quick else MINUTES)
    cases = {"real": measure_real, "small_adapters": measure_small_adapters, "overload": measure_overload}
    case = next((name for name in cases if getattr(args, name)), "")
    with Results(f"load_{case}" if case else "load", args) as results:
        cases.get(case, measure)(args, results)
    return 0 if all(goal.is_met for goal in results.goals) else 1


if __name__ == "__main__":
    sys.exit(main())
