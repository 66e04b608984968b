"""Show where a training step's time goes, kind of work by kind of work.

    python -m scripts.bench.profile --quick
    python -m scripts.bench.profile
    python -m scripts.bench.profile --models 27m --tenants 8 --sequences 4

A step of the engine is a forward_backward and an optimizer step of every tenant. torch's profiler counts the time of
every operator without that of those it calls; what no operator accounts for is Python, dispatch and waiting. Next to
it, without a profiler and turn about: the engine, PEFT, and the base model's own matmuls. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from scripts.bench.common import (
    Column,
    Effort,
    Results,
    Row,
    check_losses,
    parser,
    shown_ms,
    shown_ratio,
    shown_time,
    turn_about,
)
from scripts.bench.models import Case, Model, add_model_options, chosen_models, open_models
from scripts.bench.sides.training import Fused, Limit, SequentialPeft

# isort: split
from scripts.bench.kinds import RANK, TRAINING_KINDS, profiled  # after bench_models, which sets torch's threads up

COLUMNS = (
    Column("step", lambda r: r["case"]),
    Column("kind of work", lambda r: r["kind"]),
    Column("time", lambda r: shown_ms(r["seconds"])),
    Column("share", lambda r: f"{r['share']:.1%}"),
)
SIDE_COLUMNS = (
    Column("step", lambda r: r["case"]),
    Column("engine", lambda r: shown_time(r["fused"])),
    Column("PEFT", lambda r: shown_time(r["peft"])),
    Column("matmuls alone (limit)", lambda r: shown_time(r["limit"])),
    Column("fused / PEFT", lambda r: shown_ratio(r["over_peft"])),
    Column("... if the engine ran at the limit", lambda r: shown_ratio(r["limit_over_peft"])),
    Column("fraction of limit", lambda r: shown_ratio(r["of_limit"])),
    Column("matmuls alone, packed", lambda r: shown_time(r["packed"])),
    Column("fraction of packed", lambda r: shown_ratio(r["of_packed"])),
)


def measure(results: Results, model: Model, cases: Sequence[Case], args: argparse.Namespace) -> None:
    """The two tables of one model."""
    sides = results.table(f"profile-{model.name}-sides", SIDE_COLUMNS)
    kinds = results.table(f"profile-{model.name}", COLUMNS)
    rows: list[Row] = []
    for case in cases:
        data = case.data(model.vocab_size)
        ranks = [RANK] * case.num_tenants
        fused = Fused(model, ranks, args.threads)
        peft = SequentialPeft(model, ranks, fused.weights())
        limit, packed = Limit(fused), Limit(fused, of_engine=True)
        for side in (fused, peft):
            side.give(data)
        for matmuls in (limit, packed):
            matmuls.give(case.total_tokens)
        check_losses(fused.step(), peft.step())
        sides_of_case = {"fused": fused.step, "peft": peft.step, "limit": limit.step, "packed": packed.step}
        timings = turn_about(sides_of_case, args.effort)
        row: Row = {
            "case": str(case),
            "over_peft": timings["peft"].ratio_to(timings["fused"]),
            "limit_over_peft": timings["peft"].ratio_to(timings["limit"]),
            "of_limit": timings["limit"].ratio_to(timings["fused"]),
            "of_packed": timings["packed"].ratio_to(timings["fused"]),
        }
        sides.add(row | {name: timing.summary() for name, timing in timings.items()})
        num_steps = args.effort.rounds_min
        seconds, _, whole_s = profiled(partial(_steps, fused, num_steps), TRAINING_KINDS)
        rows += [
            {"case": str(case), "kind": kind, "seconds": spent_s / num_steps, "share": spent_s / whole_s}
            for kind, spent_s in sorted(seconds.items(), key=lambda item: -item[1])
        ]
    for row in rows:
        kinds.add(row)


def _steps(fused: Fused, num_steps: int) -> None:
    for _ in range(num_steps):
        fused.step()


def main() -> None:
    """Read the command line, measure, print."""
    command = parser(__doc__)
    add_model_options(command)
    command.add_argument("--tenants", type=int, nargs="+", default=[8, 16])
    command.add_argument("--sequences", type=int, nargs="+", default=[4, 1], help="of each tenant, one per --tenants")
    args = command.parse_args()
    if len(args.tenants) != len(args.sequences):
        command.error("give as many --sequences as --tenants")
    args.effort = Effort(seconds=0, rounds_min=2, rounds_max=2) if args.quick else Effort(seconds=20)
    pairs = zip(args.tenants, args.sequences, strict=True)
    cases = [Case(num_tenants=tenants, num_seqs=sequences, num_tokens=64) for tenants, sequences in pairs]
    with Results("profile", args) as results, open_models(chosen_models(args)) as models:
        for model in models:
            measure(results, model, cases, args)


if __name__ == "__main__":
    main()
