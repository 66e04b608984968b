"""Count what the engine takes on a GPU, on a machine without one: kernels, traffic, waits, memory, predicted time.

    python -m scripts.bench.gpu_count                   # all models, without weights: minutes
    python -m scripts.bench.gpu_count --models 0.6b     # one of them
    python -m scripts.bench.gpu_count --quick           # a miniature model: a smoke test
    python -m scripts.bench.gpu_count --waits           # also which lines wait for the device

The engine runs on torch's fake tensors: every operation happens but for its values, and is counted on the way by the
CUDA kernels that torch would launch for it (`tests/support/fake_cuda`). Nothing runs on a GPU, so nothing here was
measured; the predicted time is that of an H100 by the model in `tests/support/fake_cuda/hardware.py`.

A model `NAME@LAYERS` has the real shapes of a larger one and so many of its layers.

A case is one of: a training step's passes, and its optimizer steps (tenants x sequences x tokens, rank 32); the loss of
512 rows; a decode step (sequences, adapters, prompt tokens); the first step after new prompts. "A layer": the kernels
of one decoder layer. "Kept": what the forward of a pass leaves in memory for its backward. "Peak": the most that the
case holds beyond what was there before. The time of the host is that of its launches, waits and copies.

Prints Markdown, and ends with the budgets (`budgets.py`). Fails if a count is higher than it was. Needs a C++ compiler
and the build of torch for CPUs.
"""

from __future__ import annotations

import sys
from argparse import Namespace

from scripts.bench.common import Column, Results, Row, Table, parser
from scripts.bench.gpu_count.budgets import Budget, rows_with_budgets
from tests.support.fake_cuda import guard

MODELS = ("0.6b", "8b", "9b-hybrid", "30b-a3b")


def _cell(row: Row, key: str, scale: float, digits: int) -> str:
    return f"{row[key] / scale:,.{digits}f}" if key in row else ""


def column(title: str, key: str, scale: float = 1.0, digits: int = 0) -> Column:
    """Return a column of a number divided by `scale`; its cell is empty where a row has no such number."""
    return Column(title, lambda row: _cell(row, key, scale, digits))


def case_columns() -> list[Column]:
    """Return the columns of the table of cases."""
    return [
        Column("model", lambda row: row["model"]),
        Column("case", lambda row: row["case"] + (" (does not fit)" if "kernels" not in row else "")),
        column("kernels", "kernels"),
        column("a layer", "layer_kernels"),
        column("GB moved", "bytes", 1e9, 1),
        column("TFLOP", "flops", 1e12, 2),
        column("waits", "waits"),
        column("KiB to the host", "to_host_bytes", 1024),
        column("GB kept", "kept_bytes", 1e9, 1),
        column("GB peak", "peak_bytes", 1e9, 1),
        column("ms of the device", "device_s", 1e-3, 1),
        column("ms of the host", "host_s", 1e-3, 1),
        column("predicted ms", "predicted_s", 1e-3, 1),
    ]


def budget_columns() -> list[Column]:
    """Return the columns of the table of budgets."""
    return [
        Column("group", lambda row: row["group"]),
        Column("model", lambda row: row["model"]),
        Column("case", lambda row: row["case"]),
        Column("budget", lambda row: f"{row['most']:,g} {row['unit']}"),
        Column("counted", lambda row: f"{row['counted']:,.{0 if row['counted'] >= 1000 else 1}f}"),
        Column("met", lambda row: "yes" if row["is_met"] else ": ".join(["no, open", *row["reasons"]])),
    ]


def budget_row(budget: Budget, row: Row) -> Row:
    """Return the row of a budget."""
    return {
        "group": budget.group,
        "model": budget.model,
        "case": budget.case,
        "most": budget.most,
        "unit": budget.unit,
        "counted": budget.measured(row),
        "is_met": budget.is_met(row),
        "reasons": [budget.reason] if budget.reason else [],
    }


def count(args: Namespace, cases: Table) -> None:
    """Add the rows of all cases."""
    from scripts.bench.gpu_count.cases import counted, counted_quickly  # after the guard: it imports torch

    for all_rows in [counted_quickly()] if args.quick else map(counted, args.models):
        for rows in all_rows:
            for row in rows:
                waits = row.pop("waits_by_line", {})
                cases.add(row)
                for line, number in waits.items() if args.waits else ():
                    print(f"    {number} x {line}", flush=True)


def main() -> int:
    """Read the command line, count, print. Return 1 if a count rose, or without the fake device."""
    command = parser(__doc__)
    command.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    command.add_argument("--waits", action="store_true", help="print the lines that wait for the device")
    args: Namespace = command.parse_args()
    try:
        guard.load()
    except guard.NoGuardError as error:
        print(error, file=sys.stderr)
        return 1
    with Results("gpu_count", args) as results:
        cases = results.table("gpu-count", case_columns())
        count(args, cases)
        budgets = results.table("gpu-count-budgets", budget_columns())
        found = rows_with_budgets(cases.rows)
        for budget, row in found:
            budgets.add(budget_row(budget, row))
        risen = [budget for budget, row in found if budget.measured(row) > budget.today]
        for budget in risen:
            print(f"{budget.model}, {budget.case}: {budget.unit} rose above {budget.today:,g}")
        for budget, row in found:
            if not budget.is_current(row) and budget not in risen:
                print(f"{budget.model}, {budget.case}: {budget.unit} fell: lower {budget.today:,g} in budgets.py")
        print(f"\n{sum(budget.is_met(row) for budget, row in found)} of {len(found)} budgets are met")
    return 1 if risen else 0


if __name__ == "__main__":
    sys.exit(main())
