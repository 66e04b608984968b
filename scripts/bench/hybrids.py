"""Measure the training of a hybrid, a model with layers of linear attention.

    python -m scripts.bench.hybrids --quick
    python -m scripts.bench.hybrids                        # four minutes
    python -m scripts.bench.hybrids --models hybrid path/to/Qwen3.5-0.8B

solo        one tenant's step in the engine against PEFT on transformers' own forward, by sequences of several lengths
together    eight tenants' steps in one pass against the same steps of the engine one after another, and against PEFT

The sides alternate, step by step, on the same tokens; their first losses must agree. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

from scripts.bench.common import (
    Column,
    Effort,
    Results,
    Row,
    check_losses,
    measure_alternating,
    parser,
    shown_ratio,
    shown_time,
)
from scripts.bench.models import HYBRID, Case, Model, add_model_options, open_models
from scripts.bench.sides.training import Fused, SequentialPeft

RANK = 8
SOLO = (Case(1, 4, 64), Case(1, 1, 1024), Case(1, 1, 64), Case(1, 16, 16))
TOGETHER = Case(8, 1, 64)
TOGETHER_ROUNDS = 15
"""Of the case with tenants, at least: its ratio is near its goal, and single rounds differ by a tenth."""
QUICK = (Case(1, 2, 16), Case(2, 1, 16))
COLUMNS = (
    Column("tenants x sequences x tokens", lambda r: r["case"]),
    Column("engine, median (quartiles)", lambda r: shown_time(r["fused"])),
    Column("PEFT", lambda r: shown_time(r["peft"])),
    Column("PEFT / engine", lambda r: shown_ratio(r["over_peft"])),
    Column("engine, one after another", lambda r: shown_time(r["apart"]) if "apart" in r else ""),
    Column("one after another / together", lambda r: shown_ratio(r["over_apart"]) if "apart" in r else ""),
)


def measure(model: Model, case: Case, args: argparse.Namespace) -> Row:
    """Measure the sides of one case, alternating."""
    data = case.data(model.vocab_size)
    fused = Fused(model, [RANK] * case.num_tenants, args.threads)
    peft = SequentialPeft(model, [RANK] * case.num_tenants, fused.weights())
    fused.give(data)
    peft.give(data)
    row: Row = {"model": model.name, "case": str(case), "loss_difference": check_losses(fused.step(), peft.step())}
    sides: dict[str, Callable[[], object]] = {"fused": fused.step, "peft": peft.step}
    if case.num_tenants > 1:
        apart = Fused(model, [RANK] * case.num_tenants, args.threads)
        sides["apart"] = lambda: apart.step_apart(data)
    effort: Effort = args.effort
    if case == TOGETHER:
        effort = replace(effort, rounds_min=TOGETHER_ROUNDS)
    timings = measure_alternating(sides, effort)
    row |= {name: timing.summary() for name, timing in timings.items()}
    row["over_peft"] = timings["peft"].ratio_to(timings["fused"])
    if "apart" in timings:
        row["over_apart"] = timings["apart"].ratio_to(timings["fused"])
    return row


def main() -> None:
    """Read the command line, measure, print."""
    command = parser(__doc__)
    add_model_options(command, [HYBRID])
    command.add_argument("--seconds", type=float, default=8.0, help="for each case (at least 5 rounds)")
    args = command.parse_args()
    args.effort = Effort(seconds=0, rounds_min=2, rounds_max=2) if args.quick else Effort(seconds=args.seconds)
    names = args.models or [HYBRID]
    with open_models([*names, *args.also]) as models, Results("hybrids", args) as results:
        for model in models:
            table = results.table(f"hybrids-{model.name}", COLUMNS)
            for case in QUICK if args.quick else (*SOLO, TOGETHER):
                row = measure(model, case, args)
                table.add(row)
                what = f"{model.name}: {case} against PEFT"
                if case in SOLO[:2]:
                    results.goal(what, row["over_peft"]["median"], at_least=1.0, unit=" x")
                if "over_apart" in row:
                    what = f"{model.name}: {case} against one after another"
                    results.goal(what, row["over_apart"]["median"], at_least=2.0, unit=" x")


if __name__ == "__main__":
    main()
