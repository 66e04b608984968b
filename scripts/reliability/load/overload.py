"""What refusals cost under overload: clients that send many times what their tenants may, and wait for no delay.

Depends on a pool whose tenants have a low rate. Measured: how long a refusal takes, and the coordinator's memory.
"""

from __future__ import annotations

import argparse

from scripts.bench.common import Column, Results, Row, shown_ms
from scripts.reliability.load.clients import ClientPlan
from scripts.reliability.load.figures import p99_s
from scripts.reliability.load.pool import LoadedPool
from scripts.reliability.load.run import DRAWN_TOKENS, PASS_TOKENS, PROMPT_TOKENS, run_phase

TENANTS, QUICK_TENANTS = 100, 4
CLIENTS = 3
SECONDS, QUICK_S = 120.0, 4.0
RATE = 1
"""Operations a second that a tenant may send."""
IMPATIENCE_S = 0.2
"""Pause of a client before it sends a refused request again, whatever the refusal says."""
REFUSED_S_MAX = 1.0
"""Most seconds of the p99 of a refusal: clients and pool share the machine's cores."""
GROWTH_MAX = 1.1

COLUMNS = (
    Column("clients (tenants)", lambda r: f"{r['clients']} ({r['tenants']})"),
    Column("accepted, refused a second", lambda r: f"{r['accepted_per_s']:,.0f}, {r['refused_per_s']:,.0f}"),
    Column("a refusal, p50 / p99", lambda r: f"{shown_ms(r['refused_p50_s'])} / {shown_ms(r['refused_p99_s'])}"),
    Column("errors", lambda r: str(r["errors"])),
    Column(
        "memory: idle, most in the first and last third",
        lambda r: ", ".join(f"{r[name] >> 20}" for name in ("idle_bytes", "first_bytes", "last_bytes")) + " MiB",
    ),
)


def measure_overload(args: argparse.Namespace, results: Results) -> None:
    """Let every tenant send without a pause, far above its rate."""
    num_tenants, seconds = (QUICK_TENANTS, QUICK_S) if args.quick else (TENANTS, SECONDS)
    tenants = {f"tenant-{number}": 1.0 for number in range(num_tenants)}
    limit = f"operations_per_s={RATE}"
    with LoadedPool(tenants, is_timed=True, options=("--tenant-limit", limit)) as pool:
        plans = list(plans_of(pool))
        phase = run_phase(pool, plans, seconds, print)
    refused_s = sorted(phase.record.refused_s)
    row: Row = {
        "clients": len(plans),
        "tenants": num_tenants,
        "accepted_per_s": sum(phase.record.num_done.values()) / seconds,
        "refused_per_s": len(refused_s) / seconds,
        "refused_p50_s": refused_s[len(refused_s) // 2],
        "refused_p99_s": p99_s(refused_s),
        "refusals": dict(phase.record.refusals),
        "errors": phase.record.num_errors,
        "idle_bytes": phase.memory.idle_bytes,
        "first_bytes": phase.memory.third(0),
        "last_bytes": phase.memory.third(2),
    }
    for error in phase.record.errors:
        print(f"ERROR: {error}")
    results.table("load-overload", COLUMNS).add(row)
    results.goal("overload: errors other than refusals that waiting clears", row["errors"], at_most=0, unit="")
    results.goal("overload: p99 of a refusal", row["refused_p99_s"], at_most=REFUSED_S_MAX, unit=" s")
    growth = "overload: memory in the last third of the time, over that in the first third"
    results.goal(growth, phase.memory.growth, at_most=GROWTH_MAX, unit=" x")


def plans_of(pool: LoadedPool) -> list[ClientPlan]:
    """Return three impatient clients of each tenant: two train, one samples."""
    return [
        ClientPlan(
            name="trains" if index else "samples",
            key=key,
            trains=bool(index),
            num_tokens=PASS_TOKENS[0] if index else PROMPT_TOKENS,
            num_drawn=DRAWN_TOKENS,
            impatience_s=IMPATIENCE_S,
        )
        for key in pool.keys.values()
        for index in range(CLIENTS)
    ]
