"""Measure the time from a training step until its weights can be sampled.

    python -m scripts.bench.publish --quick
    python -m scripts.bench.publish
    python -m scripts.bench.publish --models 27m --seconds 60

Each round trains a step, calls `save_weights_and_get_sampling_client` through gRPC and Ray, and samples one token with
a prompt of 16: the time until the call returns, and until the token arrives. In the same rounds, on an engine in this
process: publishing, a copy of the adapter's row, with the removal of the previous version; and a memcpy of the same
bytes. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import itertools
import time

from coordinator.base_models import DEFAULT_MODEL
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
from scripts.bench.models import Case, Model, add_model_options, chosen_models, open_models
from scripts.bench.sides.pools import Tenants, serve_arguments
from scripts.bench.sides.training import Fused, Memcpy
from scripts.embedded_pool import embedded_pool
from tinkerpool import ServiceClient, types

RANK = 8
CASE = Case(num_tenants=1, num_seqs=4, num_tokens=64)
PROMPT = types.ModelInput.from_ints(list(range(1, 17)))


def measure(model: Model, args: argparse.Namespace) -> Row:
    """Measure one model's row."""
    data = CASE.data(model.vocab_size)
    fused = Fused(model, [RANK], args.threads)
    fused.give(data)
    fused.step()
    bank, key = fused.engine.bank, fused.keys[0]
    memcpy = Memcpy(bank.entry(key).layout.num_values)
    versions = itertools.count()
    call_s: list[float] = []
    with (
        embedded_pool(serve_arguments(model, args)) as pool,
        ServiceClient(pool.url, pool.admin_key) as client,
    ):
        tenants = Tenants([client], model.name, RANK, data)
        [training] = tenants.trainings
        params = types.SamplingParams(max_tokens=1, temperature=0.0)

        def publish_row() -> None:
            number = next(versions)
            bank.publish(key, f"version-{number}")
            bank.remove(f"version-{number - 1}")

        def publish() -> None:
            begin_s = time.perf_counter()
            sampling = training.save_weights_and_get_sampling_client()
            call_s.append(time.perf_counter() - begin_s)
            [_] = sampling.sample_stream(PROMPT, 1, params)

        sides = {
            "train": tenants.step,
            "first_token": publish,
            "row": publish_row,
            "copy": memcpy.step,
        }
        timings = measure_alternating(sides, args.effort, in_order=True)
    timings["call"] = Timing(tuple(call_s[args.effort.warm_up :]))
    return {
        "model": model.name,
        "bytes": memcpy.num_bytes,
        "row_over_copy": timings["row"].ratio_to(timings["copy"]),
        "first_token_p99_s": timings["first_token"].quantile(0.99),
        **{name: timing.summary() for name, timing in timings.items()},
    }


def main() -> None:
    """Read the command line, measure, print."""
    command = parser(__doc__)
    add_model_options(command)
    command.add_argument("--pool", choices=("ray", "local"), default="ray", help="local: threads stand in for Ray")
    command.add_argument("--seconds", type=float, default=15.0, help="for each row (at least 5 rounds)")
    args = command.parse_args()
    args.effort = Effort(seconds=0, rounds_min=2, rounds_max=2) if args.quick else Effort(seconds=args.seconds)
    with open_models(chosen_models(args)) as models, Results("publish", args) as results:
        table = results.table(
            "publish",
            (
                Column("model", lambda r: r["model"]),
                Column("MB", lambda r: f"{r['bytes'] / 1e6:.1f}"),
                Column("copying the row", lambda r: shown_time(r["row"])),
                Column("copy / memcpy", lambda r: shown_ratio(r["row_over_copy"])),
                Column("until the call returns", lambda r: shown_time(r["call"])),
                Column("until the first token", lambda r: shown_time(r["first_token"])),
                Column("p99", lambda r: shown_ms(r["first_token_p99_s"])),
                Column("rounds", lambda r: str(r["call"]["rounds"])),
            ),
        )
        for model in models:
            row = measure(model, args)
            table.add(row)
            what = f"{model.name}: milliseconds to publish an adapter to the sampler, in the engine"
            results.goal(what, 1e3 * row["row"]["median_s"], at_most=1.0, unit=" ms")
            if model.name == DEFAULT_MODEL:
                what = f"{model.name}: milliseconds from publishing an adapter to its first token, gRPC and Ray"
                results.goal(what, 1e3 * row["first_token"]["median_s"], at_most=50.0, unit=" ms")


if __name__ == "__main__":
    main()
