"""Show where a training step's time goes, kind of work by kind of work.

    python scripts/bench_profile.py --quick
    python scripts/bench_profile.py
    python scripts/bench_profile.py --models 27m --tenants 8 --sequences 4

A step of the engine is a forward_backward and an optimizer step of every tenant. torch's profiler counts the time of
every operator without that of those it calls; what no operator accounts for is Python, dispatch and waiting. Next to
it, without a profiler and turn about: the engine, PEFT, and the base model's own matmuls. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

from bench_common import Column, Effort, Results, Row, check_losses, parser, shown_ms, turn_about
from bench_models import Case, Model, add_model_options, chosen_models, open_models
from bench_sides import Fused, Limit, SequentialPeft

# isort: split
from torch.profiler import ProfilerActivity, profile  # after bench_models, which sets torch's threads up

RANK = 8
ADAPTER_WIDTHS = (RANK, 2 * RANK, 3 * RANK)
"""Of the A of one, two or three linears that read the same input."""
MATMULS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
PRODUCTS, ADAPTERS, REST = "matmuls of the base model", "matmuls of the adapters", "Python, dispatch, waiting"
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("attention",)),
    ("activation", ("silu", "gelu", "sigmoid")),
    ("norms", ("rms_norm", "native_layer_norm", "rsqrt", "pow", "mean")),
    ("loss", ("softmax", "amax", "scatter", "gather", "log")),
    ("optimizer", ("_foreach", "_fused", "lerp", "addcmul", "addcdiv", "sqrt", "linalg_vector_norm", "isfinite")),
    ("products and sums of activations", ("aten::mul", "aten::add", "aten::sub", "aten::neg", "aten::sum")),
    ("copies", ("copy", "aten::cat", "clone", "fill", "zero", "index", "embedding", "pad")),
)
"""Kinds of work, in the order of the search, and what the names of their operators contain."""
COLUMNS = (
    Column("step", lambda r: r["case"]),
    Column("kind of work", lambda r: r["kind"]),
    Column("time", lambda r: shown_ms(r["seconds"])),
    Column("share", lambda r: f"{r['share']:.1%}"),
)
SIDE_COLUMNS = (
    Column("step", lambda r: r["case"]),
    Column("engine", lambda r: shown_ms(r["fused_s"])),
    Column("PEFT", lambda r: shown_ms(r["peft_s"])),
    Column("matmuls alone (limit)", lambda r: shown_ms(r["limit_s"])),
    Column("fused / PEFT", lambda r: f"{r['peft_s'] / r['fused_s']:.2f}"),
    Column("... if the engine ran at the limit", lambda r: f"{r['peft_s'] / r['limit_s']:.2f}"),
    Column("fraction of limit", lambda r: f"{r['limit_s'] / r['fused_s']:.2f}"),
    Column("matmuls alone, packed", lambda r: shown_ms(r["packed_s"])),
    Column("fraction of packed", lambda r: f"{r['packed_s'] / r['fused_s']:.2f}"),
)


def kind_of(name: str, shapes: Iterable[Sequence[int]]) -> str:
    """The kind of work of an operator with inputs of these shapes."""
    if name.startswith("mkldnn::"):
        return PRODUCTS
    if not name.startswith("aten::"):
        return REST  # a function of autograd's that is written in Python
    if name.removesuffix("_") in MATMULS:
        return ADAPTERS if any(width in ADAPTER_WIDTHS for shape in shapes for width in shape) else PRODUCTS
    return next((kind for kind, parts in KINDS if any(part in name for part in parts)), "views and allocation")


def profiled(fused: Fused, num_steps: int) -> tuple[dict[str, float], float]:
    """Seconds per step by kind of work, and of the whole step, under the profiler."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        begin_s = time.perf_counter()
        for _ in range(num_steps):
            fused.step()
        step_s = (time.perf_counter() - begin_s) / num_steps
    seconds: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages(group_by_input_shape=True):
        seconds[kind_of(event.key, event.input_shapes)] += event.self_cpu_time_total / 1e6 / num_steps
    seconds[REST] += step_s - sum(seconds.values())
    return seconds, step_s


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
        row: Row = {"case": str(case)} | {f"{name}_s": timing.median_s for name, timing in timings.items()}
        sides.add(row)
        seconds, step_s = profiled(fused, args.effort.rounds_min)
        rows += [
            {"case": str(case), "kind": kind, "seconds": spent_s, "share": spent_s / step_s}
            for kind, spent_s in sorted(seconds.items(), key=lambda item: -item[1])
        ]
    for row in rows:
        kinds.add(row)


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
