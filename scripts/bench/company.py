"""Measure what company costs on one engine: many adapters against one, 32 tenants against 16, a newcomer's first step.

    python -m scripts.bench.company --quick
    python -m scripts.bench.company
    python -m scripts.bench.company --models 27m --seconds 20

mixed      8 adapters of ranks 4, 8, 16 and 32 against one adapter (rank 16) that brings the same tokens; then both by
           kind of work, under torch's profiler
crowd      32 tenants against 16, both 1 x 64 tokens each: tokens per second must not fall
newcomers  8 tenants (rank 8, 1 x 64) step all the while; tenants of ranks and lengths that the engine has not seen yet
           join one after another, for a few steps each. A newcomer's first step, its installation included (its
           weights are drawn, and a row of the bank is filled), against its later ones: nobody may have to wait for
           something to be prepared.

Both sides of a ratio take turns. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

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
from scripts.bench.models import Case, Model, add_model_options, chosen_models, open_models, random_data
from scripts.bench.sides.training import Fused

# isort: split
from scripts.bench.kinds import TRAINING_KINDS, profiled  # after bench_models, which sets torch's threads up
from workers.rows import rank_class

MIXED_RANKS = (4, 8, 16, 32) * 2
ONE_RANK = 16
NEWCOMERS = ((16, 100), (32, 257), (4, 33), (64, 411), (128, 190), (8, 77), (16, 300), (32, 48))
"""Rank (or the most that the model takes) and tokens of one sequence: a rank or length that nobody before had."""
STALL_MAX = 1.5
"""A first step that takes longer than so many later ones is a stall."""


def measure_mixed(model: Model, num_seqs: int, num_tokens: int, args: argparse.Namespace) -> tuple[Row, list[Row]]:
    """Mixed ranks against one adapter with all the sequences; and both by kind of work."""
    many = Case(num_tenants=len(MIXED_RANKS), num_seqs=num_seqs, num_tokens=num_tokens)
    alone = Case(num_tenants=1, num_seqs=many.num_tenants * num_seqs, num_tokens=num_tokens)
    mixed, single = Fused(model, MIXED_RANKS, args.threads), Fused(model, [ONE_RANK], args.threads)
    mixed.give(many.data(model.vocab_size))
    single.give(alone.data(model.vocab_size))
    timings = turn_about({"mixed": mixed.step, "single": single.step}, args.effort)
    row = {
        "model": model.name,
        "case": str(many),
        "tokens": many.total_tokens,
        "ratio": timings["single"].ratio_to(timings["mixed"]),
        **{name: timing.summary() for name, timing in timings.items()},
    }
    kinds_mixed, kinds_single = _kinds_of_step(mixed, args.effort), _kinds_of_step(single, args.effort)
    kinds = sorted({*kinds_mixed, *kinds_single}, key=lambda kind: -kinds_mixed.get(kind, 0.0))
    seconds = [(kind, kinds_mixed.get(kind, 0.0), kinds_single.get(kind, 0.0)) for kind in kinds]
    head = {"model": model.name, "case": str(many)}
    return row, [{**head, "kind": kind, "mixed_s": ours, "single_s": theirs} for kind, ours, theirs in seconds]


def _kinds_of_step(fused: Fused, effort: Effort) -> dict[str, float]:
    """Seconds of a step by kind of work, under the profiler."""
    num_steps = effort.rounds_min
    ranks = sorted({rank_class(rank) for rank in (*MIXED_RANKS, ONE_RANK)})
    profile = profiled(partial(_steps, fused, num_steps), TRAINING_KINDS, ranks)
    return {kind: spent_s / num_steps for kind, spent_s in profile.seconds.items()}


def _steps(fused: Fused, num_steps: int) -> None:
    for _ in range(num_steps):
        fused.step()


def measure_crowd(model: Model, fewer: int, args: argparse.Namespace) -> Row:
    """Twice as many tenants against `fewer`; the ratio is of tokens per second."""
    sides, tokens = {}, {}
    for name, num_tenants in (("fewer", fewer), ("more", 2 * fewer)):
        case = Case(num_tenants=num_tenants, num_seqs=1, num_tokens=64)
        fused = Fused(model, [8] * num_tenants, args.threads)
        fused.give(case.data(model.vocab_size))
        sides[name], tokens[name] = fused.step, case.total_tokens
    timings = turn_about(sides, args.effort)
    ratio = timings["fewer"].ratio_to(timings["more"])
    return {
        "model": model.name,
        "tenants": [fewer, 2 * fewer],
        "tokens": tokens,
        "ratio": {"median": 2 * ratio["median"], "quartiles": [2 * value for value in ratio["quartiles"]]},
        **{name: timing.summary() for name, timing in timings.items()},
    }


def measure_newcomers(model: Model, num_later: int, args: argparse.Namespace) -> list[Row]:
    """Each newcomer's first step and its later ones, in the company of eight."""
    company = Case(num_tenants=8, num_seqs=1, num_tokens=64).data(model.vocab_size)
    fused = Fused(model, [8] * 8, args.threads, num_slots=32)
    rows = []
    ranks = [min(rank, fused.engine.info.max_rank) for rank, _ in NEWCOMERS]
    for rank, (_, num_tokens) in zip(ranks, NEWCOMERS, strict=True):
        fused.give(company)
        before = Timing(tuple(_timed_step(fused) for _ in range(-(-num_later // 3))))
        began_s = time.perf_counter()
        tenant = fused.install(rank)
        fused.add_work(tenant, random_data(tenant, [num_tokens], model.vocab_size))
        bank, key = fused.engine.bank, fused.keys[tenant]
        bank.read(key)
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
                "company_s": before.median_s,
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
    """All tables."""
    mixed = results.table(
        "company-mixed",
        (
            Column("model", lambda r: r["model"]),
            Column("tenants x sequences x tokens", lambda r: r["case"]),
            Column("8 adapters, ranks 4 to 32", lambda r: shown_time(r["mixed"])),
            Column("one adapter, rank 16", lambda r: shown_time(r["single"])),
            Column("speed of mixed / one", lambda r: shown_ratio(r["ratio"])),
        ),
    )
    kind_rows = []
    for model in models:
        for num_seqs in (1,) if args.quick else (1, 4):
            row, rows_by_kind = measure_mixed(model, num_seqs, 64, args)
            mixed.add(row)
            kind_rows += rows_by_kind
            what = f"{model.name}: speed with 8 mixed adapters against one at equal tokens, {row['case']}"
            results.goal(what, row["ratio"]["median"], at_least=0.95, unit=" x")
    kinds = results.table(
        "company-kinds",
        (
            Column("model", lambda r: r["model"]),
            Column("tenants x sequences x tokens", lambda r: r["case"]),
            Column("kind of work", lambda r: r["kind"]),
            Column("8 adapters, ranks 4 to 32", lambda r: shown_ms(r["mixed_s"])),
            Column("one adapter, rank 16", lambda r: shown_ms(r["single_s"])),
            Column("more by", lambda r: shown_ms(r["mixed_s"] - r["single_s"])),
        ),
    )
    for row in kind_rows:
        kinds.add(row)
    crowd = results.table(
        "company-crowd",
        (
            Column("model", lambda r: r["model"]),
            Column("tenants", lambda r: " and ".join(map(str, r["tenants"]))),
            Column("tokens/s with fewer", lambda r: f"{r['tokens']['fewer'] / r['fewer']['median_s']:,.0f}"),
            Column("tokens/s with more", lambda r: f"{r['tokens']['more'] / r['more']['median_s']:,.0f}"),
            Column("speed of more / fewer", lambda r: shown_ratio(r["ratio"])),
        ),
    )
    for model in models:
        row = measure_crowd(model, 2 if args.quick else 16, args)
        crowd.add(row)
        fewer, more = row["tenants"]
        results.goal(
            f"{model.name}: speed with {more} tenants against {fewer}", row["ratio"]["median"], at_least=1, unit=" x"
        )
    newcomers = results.table(
        "company-newcomers",
        (
            Column("model", lambda r: r["model"]),
            Column("newcomer", lambda r: f"rank {r['rank']}, {r['num_tokens']} tokens"),
            Column("step without it", lambda r: shown_ms(r["company_s"])),
            Column("its first step", lambda r: shown_ms(r["first_s"])),
            Column("of it: drawing its weights", lambda r: shown_ms(r["draw_s"])),
            Column("its row of the bank", lambda r: shown_ms(r["fill_s"])),
            Column("the step itself", lambda r: shown_ms(r["step_s"])),
            Column("its later steps", lambda r: shown_time(r["later"])),
            Column("first / later", lambda r: f"{r['ratio']:.2f}"),
        ),
    )
    for model in models:
        rows = measure_newcomers(model, 2 if args.quick else 15, args)
        for row in rows:
            newcomers.add(row)
        worst = max(row["ratio"] for row in rows)
        results.goal(f"{model.name}: a newcomer's first step, the worst", worst, at_most=STALL_MAX, unit=" x")


def main() -> None:
    """Read the command line, measure, print."""
    command = parser(__doc__)
    add_model_options(command)
    command.add_argument("--seconds", type=float, default=6.0, help="for each row (at least 5 rounds in any case)")
    args = command.parse_args()
    args.effort = Effort(seconds=0, rounds_min=2, rounds_max=2) if args.quick else Effort(seconds=args.seconds)
    with open_models(chosen_models(args)) as models, Results("company", args) as results:
        measure(results, models, args)


if __name__ == "__main__":
    main()
