"""Measure the fused engine against sequential PEFT, one process per tenant, and the base model's own matmuls.

    python -m scripts.bench.engine --quick                        # a smoke test of some seconds
    python -m scripts.bench.engine                                # three models, all cells: half an hour
    python -m scripts.bench.engine --models 4m --tenants 1 8 --tokens 64 256
    python -m scripts.bench.engine --models 4m path/to/SmolLM2-135M

One step is a forward_backward and an optimizer step of every tenant. The sides alternate, step by step, on the same
tokens. Engine and PEFT start with the same adapters, so their losses must agree; otherwise the script stops.

limit       only the base model's matmuls at that number of tokens, forward, and backward to the inputs, by torch's
            matmul as in the model itself and in PEFT
packed      the same matmuls as the engine computes them, faster on a CPU
fused       the engine: one pass for all tenants
PEFT        one process, one base model, `set_adapter`, an AdamW per tenant; one tenant after another
processes   one process per tenant, all at once, with 1 thread or 2, whichever is faster

Tokens per tenant are one sequence up to 64, and four sequences above. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence

from scripts.bench.common import (
    Column,
    Effort,
    Results,
    Row,
    Table,
    check_losses,
    measure_alternating,
    parser,
    shown_ratio,
    shown_time,
)
from scripts.bench.models import Case, Model, add_model_options, chosen_models, open_models
from scripts.bench.sides.processes import ProcessPerTenant, num_processes_that_fit
from scripts.bench.sides.training import Fused, Limit, SequentialPeft
from workers.contract.messages import Datum

RANK = 8
CELL_COST_MAX = 1.4e11
"""Largest parameters x tokens of a cell. Larger cells take minutes and are left out, unless a goal needs them."""
GOAL_CELLS = ((1, 64), (1, 256), (8, 256), (16, 64))
"""Tenants and tokens per tenant in the goals' cells."""


def _shown_processes(row: Row) -> str:
    if "processes" not in row:
        return ""
    speed = row["tokens"] / row["processes"]["median_s"]
    megabytes = row["process_bytes"] / row["tenants"] / 1e6
    return f"{speed:,.0f} ({row['process_threads']}, {megabytes:.0f})"


COLUMNS = (
    Column("tenants x sequences x tokens", lambda r: r["case"]),
    Column("fused, median (quartiles)", lambda r: shown_time(r["fused"])),
    Column("tokens/s", lambda r: f"{r['tokens'] / r['fused']['median_s']:,.0f}"),
    Column("PEFT, tokens/s", lambda r: f"{r['tokens'] / r['peft']['median_s']:,.0f}"),
    Column("processes, tokens/s (threads, MB each)", _shown_processes),
    Column("fused / PEFT", lambda r: shown_ratio(r["over_peft"])),
    Column("fused / processes", lambda r: shown_ratio(r["over_processes"]) if "processes" in r else ""),
    Column("GFLOP/s", lambda r: f"{r['flops'] / r['fused']['median_s'] / 1e9:.0f}"),
    Column("limit, GFLOP/s", lambda r: f"{r['limit_flops'] / r['limit']['median_s'] / 1e9:.0f}"),
    Column("fraction of limit", lambda r: shown_ratio(r["of_limit"])),
    Column("packed, GFLOP/s", lambda r: f"{r['limit_flops'] / r['packed']['median_s'] / 1e9:.0f}"),
    Column("fraction of packed", lambda r: shown_ratio(r["of_packed"])),
)


def cells_of(model: Model, tenants: Sequence[int], tokens: Sequence[int]) -> dict[int, list[int]]:
    """Return the cells that are small enough: tokens per tenant by number of tenants."""

    def is_measured(num_tenants: int, num_tokens: int) -> bool:
        is_small = model.num_matmul_params * num_tenants * num_tokens <= CELL_COST_MAX
        return is_small or (num_tenants, num_tokens) in GOAL_CELLS

    return {n: chosen for n in tenants if (chosen := [t for t in tokens if is_measured(n, t)])}


def case_of(num_tenants: int, tokens_per_tenant: int) -> Case:
    """Return a tenant's number of sequences: one up to 64 tokens, four above."""
    num_seqs = 1 if tokens_per_tenant <= 64 else 4
    return Case(num_tenants=num_tenants, num_seqs=num_seqs, num_tokens=tokens_per_tenant // num_seqs)


def measure_model(results: Results, model: Model, cells: dict[int, list[int]], args: argparse.Namespace) -> None:
    """Measure the table of one base model."""
    if not cells:
        print(f"\n{model.name}: no cell has at most {CELL_COST_MAX:.1e} parameters x tokens; ask for fewer --tokens")
        return
    table = results.table(f"engine-{model.name}", COLUMNS)
    num_processes = min(max(cells), args.processes, num_processes_that_fit(model))
    print(f"\n{model.name}: {model.num_matmul_params / 1e6:.1f}M parameters in matmuls, rank {RANK}")
    with contextlib.ExitStack() as stack:
        processes = None
        for num_tenants, tokens in cells.items():
            fused = Fused(model, [RANK] * num_tenants, args.threads)
            initial = fused.weights()
            peft = SequentialPeft(model, [RANK] * num_tenants, initial)
            if processes is None and num_processes:
                files = (initial * num_processes)[:num_processes]
                processes = stack.enter_context(ProcessPerTenant(model, RANK, files))
            for num_tokens in tokens:
                case = case_of(num_tenants, num_tokens)
                peers = processes if num_tenants <= num_processes else None
                table.add(measure_cell(model, case, fused, peft, peers, args))
    add_goals(results, table, model)


def measure_cell(
    model: Model,
    case: Case,
    fused: Fused,
    peft: SequentialPeft,
    processes: ProcessPerTenant | None,
    args: argparse.Namespace,
) -> Row:
    """Measure all sides of one case, alternating."""
    data = case.data(model.vocab_size)
    limit, packed = Limit(fused), Limit(fused, of_engine=True)
    for side in (fused, peft):
        side.give(data)
    for matmuls in (limit, packed):
        matmuls.give(case.total_tokens)
    sides: dict[str, Callable[[], object]] = {
        "fused": fused.step,
        "peft": peft.step,
        "limit": limit.step,
        "packed": packed.step,
    }
    row: Row = {
        "model": model.name,
        "case": str(case),
        "tenants": case.num_tenants,
        "tokens_per_tenant": case.num_seqs * case.num_tokens,
        "tokens": case.total_tokens,
        "flops": case.total_tokens * model.flops_per_token(case.num_tokens),
        "limit_flops": case.total_tokens * 4 * model.num_matmul_params,
        "loss_difference": check_losses(fused.step(), peft.step()),
    }
    if processes is not None:
        sides["processes"] = processes.step
        row["process_threads"] = better_threads(processes, data, args.threads)
    timings = measure_alternating(sides, args.effort if case.num_tenants > 1 else args.lone_effort)
    row |= {name: timing.summary() for name, timing in timings.items()}
    row["over_peft"] = timings["peft"].ratio_to(timings["fused"])
    row["of_limit"] = timings["limit"].ratio_to(timings["fused"])
    row["of_packed"] = timings["packed"].ratio_to(timings["fused"])
    if processes is not None:
        row["over_processes"] = timings["processes"].ratio_to(timings["fused"])
        row["process_bytes"] = processes.memory_bytes()
    return row


def better_threads(processes: ProcessPerTenant, data: Sequence[tuple[Datum, ...]], num_threads: int) -> int:
    """Choose one thread per process, or the engine's number, whichever is faster in two rounds."""
    best_s = {}
    for threads in sorted({1, num_threads}):
        processes.give(data, threads)
        timing = measure_alternating({"side": processes.step}, Effort(seconds=0, rounds_min=2, rounds_max=2))["side"]
        best_s[threads] = min(timing.seconds)
    chosen = min(best_s, key=lambda threads: best_s[threads])
    processes.give(data, chosen)
    return chosen


def add_goals(results: Results, table: Table, model: Model) -> None:
    """Compare the table's cells with the goals."""
    rows = {(row["tenants"], row["tokens_per_tenant"]): row for row in table.rows}
    lone = [row["over_peft"]["median"] for (tenants, _), row in rows.items() if tenants == 1]
    if lone:
        what = f"{model.name}: one tenant against PEFT, the worst of {len(lone)} cells"
        results.goal(what, min(lone), at_least=1.0, unit=" x")
    is_small = model.num_matmul_params < 100e6
    floors = {(16, 64): 3.0, (8, 256): 1.3} if is_small else {(8, 256): 1.1}
    for cell, floor in floors.items():
        if cell in rows:
            what = f"{model.name}: {rows[cell]['case']} against sequential PEFT"
            results.goal(what, rows[cell]["over_peft"]["median"], at_least=floor, unit=" x")
    if model.name == "27m" and (16, 64) in rows:
        row = rows[16, 64]
        results.goal(f"27m: {row['case']}, fraction of the limit", row["of_limit"]["median"], at_least=0.75)


def main() -> None:
    """Read the command line, measure, print."""
    command = parser(__doc__)
    add_model_options(command)
    command.add_argument("--tenants", type=int, nargs="+", help="default: 1 2 4 8 16 32")
    command.add_argument("--tokens", type=int, nargs="+", help="tokens per tenant; default: 16 64 256 1024")
    command.add_argument("--processes", type=int, default=8, help="most tenants with a process each; 0: none")
    command.add_argument("--seconds", type=float, default=0.5, help="for each cell (at least 5 rounds)")
    command.add_argument(
        "--lone-seconds", type=float, default=8.0, help="for each cell of one tenant, whose sides differ little"
    )
    args = command.parse_args()
    args.effort, args.lone_effort = Effort(seconds=args.seconds), Effort(seconds=args.lone_seconds)
    if args.quick:
        args.effort = args.lone_effort = Effort(seconds=0, rounds_min=2, rounds_max=2)
        args.processes = min(args.processes, 2)
    tenants = args.tenants or ([1, 2] if args.quick else [1, 2, 4, 8, 16, 32])
    tokens = args.tokens or ([16, 128] if args.quick else [16, 64, 256, 1024])
    with open_models(chosen_models(args)) as models, Results("engine", args) as results:
        for model in models:
            measure_model(results, model, cells_of(model, tenants, tokens), args)


if __name__ == "__main__":
    main()
