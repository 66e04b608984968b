"""Measure the cost of loading and evicting adapters, and of a thousand registered adapters.

    python -m scripts.bench.swap --quick
    python -m scripts.bench.swap
    python -m scripts.bench.swap --models 27m --ranks 8 64

swap        one trained adapter (weights and both moments) is evicted from its bank slot and loaded again, against
            copies of the same number of bytes between two allocated buffers
registered  8 tenants (1 x 64 tokens) step on an engine with 1,000 trained adapters and 16 bank slots, and on an engine
            with only these 8, alternating

Prints Markdown tables.
"""

from __future__ import annotations

import argparse

from scripts.bench.common import Column, Effort, Results, Row, measure_alternating, parser, shown_ratio, shown_time
from scripts.bench.models import Case, Model, add_model_options, chosen_models, open_models
from scripts.bench.sides.training import Fused, Memcpy

NUM_SLOTS = 16
VECTORS_SWAPPED = 3
"""Weights and two moments. A gradient exists only between a pass and its step."""
REGISTERED_BYTES_MAX = 4 << 30
"""Host memory for the registered adapters. A model whose adapters need more is left out."""


def measure_swap(model: Model, rank: int, args: argparse.Namespace) -> Row:
    """Evict and load one adapter, against copies."""
    fused = Fused(model, [rank], args.threads, num_slots=NUM_SLOTS)
    fused.give(Case(num_tenants=1, num_seqs=1, num_tokens=16).data(model.vocab_size))
    fused.step()  # so that the moments are not zero
    bank, key = fused.engine.bank, fused.keys[0]
    memcpy = Memcpy(VECTORS_SWAPPED * bank.entry(key).layout.num_values)

    sides = {
        "evict": lambda: bank.evict(key),
        "copy_evicted": memcpy.step,
        "load": lambda: bank.acquire([key]),
        "copy_loaded": memcpy.step,
    }
    timings = measure_alternating(sides, args.effort, in_order=True)
    return {
        "model": model.name,
        "rank": rank,
        "bytes": memcpy.num_bytes,
        "evict_over_copy": timings["evict"].ratio_to(timings["copy_evicted"]),
        "load_over_copy": timings["load"].ratio_to(timings["copy_loaded"]),
        **{name: timing.summary() for name, timing in timings.items()},
    }


def measure_registered(model: Model, many: Fused, num_active: int, args: argparse.Namespace) -> Row:
    """Compare a few tenants on an engine with many idle adapters, and on an engine without."""
    few = Fused(model, [8] * num_active, args.threads, num_slots=NUM_SLOTS)
    data = Case(num_tenants=num_active, num_seqs=1, num_tokens=64).data(model.vocab_size)
    many.give(data)
    few.give(data)
    timings = measure_alternating({"many": many.step, "few": few.step}, args.effort)
    return {
        "model": model.name,
        "registered": len(many.keys),
        "active": num_active,
        "tokens": 64 * num_active,
        "speed": timings["few"].ratio_to(timings["many"]),
        **{name: timing.summary() for name, timing in timings.items()},
    }


def engine_with_trained(model: Model, number: int, args: argparse.Namespace) -> Fused | None:
    """Return an engine with this many trained adapters; None if their states would need too much memory."""
    fused = Fused(model, [8], args.threads, num_slots=NUM_SLOTS)
    state_bytes = 4 * VECTORS_SWAPPED * fused.engine.bank.entry(fused.keys[0]).layout.num_values
    if number * state_bytes > REGISTERED_BYTES_MAX:
        return None
    for _ in range(number - 1):
        fused.install(8)
    for first in range(0, number, NUM_SLOTS):
        num_tenants = min(NUM_SLOTS, number - first)
        fused.give(Case(num_tenants=num_tenants, num_seqs=1, num_tokens=16).data(model.vocab_size), first)
        fused.step()
    return fused


def measure(results: Results, models: list[Model], args: argparse.Namespace) -> None:
    """Measure both tables."""
    swap = results.table(
        "swap",
        (
            Column("model", lambda r: r["model"]),
            Column("rank", lambda r: str(r["rank"])),
            Column("MB", lambda r: f"{r['bytes'] / 1e6:.1f}"),
            Column("evict", lambda r: shown_time(r["evict"])),
            Column("load", lambda r: shown_time(r["load"])),
            Column("memcpy", lambda r: shown_time(r["copy_loaded"])),
            Column("evict / memcpy", lambda r: shown_ratio(r["evict_over_copy"])),
            Column("load / memcpy", lambda r: shown_ratio(r["load_over_copy"])),
        ),
    )
    for model in models:
        for rank in args.ranks:
            row = measure_swap(model, rank, args)
            swap.add(row)
            what = f"{model.name}: loading an adapter of rank {rank}, against a memcpy of its bytes"
            results.goal(what, row["load_over_copy"]["median"], at_most=1.5, unit=" x")
    registered = results.table(
        "swap-registered",
        (
            Column("model", lambda r: r["model"]),
            Column("registered", lambda r: f"{r['registered']:,}"),
            Column("active", lambda r: str(r["active"])),
            Column("a step with all", lambda r: shown_time(r["many"])),
            Column("a step with the active ones only", lambda r: shown_time(r["few"])),
            Column("speed with all / with the active only", lambda r: shown_ratio(r["speed"])),
        ),
    )
    for model in models:
        many = engine_with_trained(model, args.registered, args)
        if many is None:
            print(f"\n{model.name}: {args.registered:,} adapters would need more than {REGISTERED_BYTES_MAX >> 30} GiB")
            continue
        row = measure_registered(model, many, min(8, args.registered), args)
        registered.add(row)
        what = (
            f"{model.name}: speed of {row['active']} tenants with {row['registered']:,} registered, against only these"
        )
        results.goal(what, row["speed"]["median"], at_least=0.97, unit=" x")


def main() -> None:
    """Read the command line, measure, print."""
    command = parser(__doc__)
    add_model_options(command)
    command.add_argument("--ranks", type=int, nargs="+", help="default: 8 32")
    command.add_argument("--registered", type=int, help="registered adapters; default: 1000")
    command.add_argument("--seconds", type=float, default=5.0, help="for each row (at least 5 rounds)")
    args = command.parse_args()
    args.effort = Effort(seconds=0, rounds_min=3, rounds_max=3) if args.quick else Effort(seconds=args.seconds)
    args.registered = args.registered or (20 if args.quick else 1000)
    args.ranks = args.ranks or ([8] if args.quick else [8, 32])
    with open_models(chosen_models(args)) as models, Results("swap", args) as results:
        measure(results, models, args)


if __name__ == "__main__":
    main()
