"""Measure the cost of co-batching in one engine: mixed adapters, more tenants, a new tenant's first step.

    python -m scripts.bench.co_batching --quick
    python -m scripts.bench.co_batching
    python -m scripts.bench.co_batching --models 27m --seconds 20

mixed      8 adapters of ranks 4, 8, 16 and 32 against one adapter (rank 16) with the same tokens
scaling    32 tenants against 16, both 1 x 64 tokens each: tokens per second must not fall
new        8 tenants (rank 8, 1 x 64) train continuously; tenants with ranks and lengths that are new to the engine join
           one after another, for a few steps each. The first step of each, with its load (drawing the weights, filling
           a bank slot), is compared with its later ones: no step may stall on a lazy preparation.

The two sides of a ratio alternate. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import time

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
from scripts.bench.models import Case, Model, add_model_options, chosen_models, open_models, random_data
from scripts.bench.sides.training import Fused

MIXED_RANKS = (4, 8, 16, 32) * 2
ONE_RANK = 16
NEW_TENANTS = ((16, 100), (32, 257), (4, 33), (64, 411), (128, 190), (8, 77), (16, 300), (32, 48))
"""Rank (capped at the model's maximum) and tokens of one sequence: each rank or length is new to the engine."""
STALL_MAX = 1.5
"""A first step is a stall if it takes longer than this many later steps."""


def measure_mixed(model: Model, num_seqs: int, num_tokens: int, args: argparse.Namespace) -> Row:
    """Compare mixed ranks with one adapter that has all the sequences."""
    many = Case(num_tenants=len(MIXED_RANKS), num_seqs=num_seqs, num_tokens=num_tokens)
    solo = Case(num_tenants=1, num_seqs=many.num_tenants * num_seqs, num_tokens=num_tokens)
    mixed, single = Fused(model, MIXED_RANKS, args.threads), Fused(model, [ONE_RANK], args.threads)
    mixed.give(many.data(model.vocab_size))
    single.give(solo.data(model.vocab_size))
    timings = measure_alternating({"mixed": mixed.step, "single": single.step}, args.effort)
    return {
        "model": model.name,
        "case": str(many),
        "tokens": many.total_tokens,
        "ratio": timings["single"].ratio_to(timings["mixed"]),
        **{name: timing.summary() for name, timing in timings.items()},
    }


def measure_scaling(model: Model, fewer: int, args: argparse.Namespace) -> Row:
    """Compare twice as many tenants with `fewer`; the ratio is of tokens per second."""
    sides, tokens = {}, {}
    for name, num_tenants in (("fewer", fewer), ("more", 2 * fewer)):
        case = Case(num_tenants=num_tenants, num_seqs=1, num_tokens=64)
        fused = Fused(model, [8] * num_tenants, args.threads)
        fused.give(case.data(model.vocab_size))
        sides[name], tokens[name] = fused.step, case.total_tokens
    timings = measure_alternating(sides, args.effort)
    ratio = timings["fewer"].ratio_to(timings["more"])
    return {
        "model": model.name,
        "tenants": [fewer, 2 * fewer],
        "tokens": tokens,
        "ratio": {"median": 2 * ratio["median"], "quartiles": [2 * value for value in ratio["quartiles"]]},
        **{name: timing.summary() for name, timing in timings.items()},
    }


def measure_new_tenants(model: Model, num_later: int, args: argparse.Namespace) -> list[Row]:
    """Time the first step of each new tenant and its later ones, co-batched with eight others."""
    others = Case(num_tenants=8, num_seqs=1, num_tokens=64).data(model.vocab_size)
    fused = Fused(model, [8] * 8, args.threads, num_slots=32)
    rows = []
    ranks = [min(rank, fused.engine.info.max_rank) for rank, _ in NEW_TENANTS]
    for rank, (_, num_tokens) in zip(ranks, NEW_TENANTS, strict=True):
        fused.give(others)
        before = Timing(tuple(_timed_step(fused) for _ in range(-(-num_later // 3))))
        began_s = time.perf_counter()
        tenant = fused.install(rank)
        fused.add_work(tenant, random_data(tenant, [num_tokens], model.vocab_size))
        bank, key = fused.engine.bank, fused.keys[tenant]
        bank.entry(key).read()
        drawn_s = time.perf_counter()
        bank.acquire([key])
        filled_s = time.perf_counter()
        fused.step()
        ended_s = time.perf_counter()
        later = Timing(tuple(_timed_step(fused) for _ in range(num_later)))
        rows.append(
            {
                "model": model.name,
                "rank": rank,
                "num_tokens": num_tokens,
                "before_s": before.median_s,
                "draw_s": drawn_s - began_s,
                "fill_s": filled_s - drawn_s,
                "step_s": ended_s - filled_s,
                "first_s": ended_s - began_s,
                "later": later.summary(),
                "ratio": (ended_s - began_s) / later.median_s,
            }
        )
    return rows


def _timed_step(fused: Fused) -> float:
    begin_s = time.perf_counter()
    fused.step()
    return time.perf_counter() - begin_s


def measure(results: Results, models: list[Model], args: argparse.Namespace) -> None:
    """Measure all tables."""
    mixed = results.table(
        "co_batching-mixed",
        (
            Column("model", lambda r: r["model"]),
            Column("tenants x sequences x tokens", lambda r: r["case"]),
            Column("8 adapters, ranks 4 to 32", lambda r: shown_time(r["mixed"])),
            Column("one adapter, rank 16", lambda r: shown_time(r["single"])),
            Column("speed of mixed / one", lambda r: shown_ratio(r["ratio"])),
        ),
    )
    for model in models:
        for num_seqs in (1,) if args.quick else (1, 4):
            row = measure_mixed(model, num_seqs, 64, args)
            mixed.add(row)
            what = f"{model.name}: speed with 8 mixed adapters against one at equal tokens, {row['case']}"
            results.goal(what, row["ratio"]["median"], at_least=0.95, unit=" x")
    scaling = results.table(
        "co_batching-scaling",
        (
            Column("model", lambda r: r["model"]),
            Column("tenants", lambda r: " and ".join(map(str, r["tenants"]))),
            Column("tokens/s with fewer", lambda r: f"{r['tokens']['fewer'] / r['fewer']['median_s']:,.0f}"),
            Column("tokens/s with more", lambda r: f"{r['tokens']['more'] / r['more']['median_s']:,.0f}"),
            Column("speed of more / fewer", lambda r: shown_ratio(r["ratio"])),
        ),
    )
    for model in models:
        row = measure_scaling(model, 2 if args.quick else 16, args)
        scaling.add(row)
        fewer, more = row["tenants"]
        results.goal(
            f"{model.name}: speed with {more} tenants against {fewer}", row["ratio"]["median"], at_least=1, unit=" x"
        )
    new_tenants = results.table(
        "co_batching-new-tenants",
        (
            Column("model", lambda r: r["model"]),
            Column("new tenant", lambda r: f"rank {r['rank']}, {r['num_tokens']} tokens"),
            Column("step without it", lambda r: shown_ms(r["before_s"])),
            Column("its first step", lambda r: shown_ms(r["first_s"])),
            Column("of which: drawing its weights", lambda r: shown_ms(r["draw_s"])),
            Column("filling its bank slot", lambda r: shown_ms(r["fill_s"])),
            Column("the step itself", lambda r: shown_ms(r["step_s"])),
            Column("its later steps", lambda r: shown_time(r["later"])),
            Column("first / later", lambda r: f"{r['ratio']:.2f}"),
        ),
    )
    for model in models:
        rows = measure_new_tenants(model, 2 if args.quick else 15, args)
        for row in rows:
            new_tenants.add(row)
        worst = max(row["ratio"] for row in rows)
        results.goal(f"{model.name}: a new tenant's first step, the worst", worst, at_most=STALL_MAX, unit=" x")


def main() -> None:
    """Read the command line, measure, print."""
    command = parser(__doc__)
    add_model_options(command)
    command.add_argument("--seconds", type=float, default=6.0, help="for each row (at least 5 rounds)")
    args = command.parse_args()
    args.effort = Effort(seconds=0, rounds_min=2, rounds_max=2) if args.quick else Effort(seconds=args.seconds)
    with open_models(chosen_models(args)) as models, Results("co_batching", args) as results:
        measure(results, models, args)


if __name__ == "__main__":
    main()
