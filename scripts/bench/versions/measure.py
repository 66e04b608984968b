"""Measure one item of the version that PYTHONPATH names, once for each line on stdin.

    python -m scripts.bench.versions.measure engine --seconds 5

The modules of that version's `scripts`, which are imported where they are used, drive its engine, planner and pools.

First prints one line with the folder that it measures. Then each line on stdin, whatever it says, is answered with a
line of JSON: median seconds by case. Between lines the process waits, so that another version can run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

MODEL = "4m"
RANK = 8
ENGINE_CASES = ((16, 1, 64), (8, 4, 64), (1, 1, 64))
"""Tenants, sequences of each, tokens of a sequence."""
HYBRID_CASES = ((8, 1, 64), (1, 1, 1024))
SERVICE_CASES = ((1, 4, 64), (16, 1, 64))
LARGE_TOKENS, LARGE_TARGETS = 512, 1024
"""A step whose request has 4 MiB: a target id and a weight, four bytes each, for each target of each token."""
NUM_TENANTS_PLANNED, NUM_TENANTS_QUICK = 1000, 50
"""Each with 10 operations."""
OPERATION_TOKENS = 64
BUDGETS = (2048, 16384)
NUM_SAMPLING, NUM_SEQS = 8, 4
PROMPT_TOKENS, DRAWN_TOKENS = 32, 32
ROUNDS_MIN = 3

Measured = dict[str, float]
"""Median seconds by case."""
Side = Callable[[], object]
Sides = dict[str, Side]
"""What is measured, by case."""


def medians(sides: Sides, seconds: float, clock: Callable[[], float]) -> Measured:
    """Alternate all sides, each for this long; return the median of each."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    begin_s = time.perf_counter()
    while time.perf_counter() - begin_s < seconds * len(sides) or len(next(iter(times.values()))) < ROUNDS_MIN:
        for name, side in sides.items():
            start_s = clock()
            side()
            times[name].append(clock() - start_s)
    return {name: statistics.median(values) for name, values in times.items()}


@contextlib.contextmanager
def base_model(name: str = MODEL) -> Iterator[Any]:
    """Open the base model that is measured."""
    from scripts.bench.models import open_models

    with open_models([name]) as [model]:
        yield model


@contextlib.contextmanager
def engine(args: argparse.Namespace) -> Iterator[Sides]:
    """Open the engine, for its steps."""
    with base_model() as model:
        yield _steps(model, ENGINE_CASES, args)


@contextlib.contextmanager
def hybrid(args: argparse.Namespace) -> Iterator[Sides]:
    """Open the engine with a hybrid, for its steps."""
    with base_model("hybrid") as model:
        yield {f"hybrid, {name}": side for name, side in _steps(model, HYBRID_CASES, args).items()}


def _steps(model: Any, cases: Sequence[tuple[int, int, int]], args: argparse.Namespace) -> Sides:
    from scripts.bench.models import Case
    from scripts.bench.sides.training import Fused

    sides: Sides = {}
    for num_tenants, num_seqs, num_tokens in cases:
        case = Case(num_tenants=num_tenants, num_seqs=num_seqs, num_tokens=num_tokens)
        fused = Fused(model, [RANK] * num_tenants, args.threads)
        fused.give(case.data(model.vocab_size))
        sides[f"engine step, {case}"] = fused.step
    return sides


@contextlib.contextmanager
def decode(args: argparse.Namespace) -> Iterator[Sides]:
    """Open a sampler, for the decoding of sequences of several tenants in one batch."""
    with base_model() as model:
        from scripts.bench.sides import samplers

        prompts = samplers.Prompts(model.vocab_size)
        sampler = samplers.EngineSampler(model, NUM_SAMPLING, args.threads)

        def sample() -> None:
            sampler.sample(
                [
                    samplers.Ask(prompt=prompts.draw(PROMPT_TOKENS), num_tokens=DRAWN_TOKENS, tenant=tenant)
                    for tenant in range(NUM_SAMPLING)
                    for _ in range(NUM_SEQS)
                ]
            )

        yield {f"decode, {NUM_SAMPLING} x {NUM_SEQS} sequences": sample}


@contextlib.contextmanager
def planner(args: argparse.Namespace) -> Iterator[Sides]:
    """Fill queues, for the planning of a cycle."""
    from scripts.bench.planner import PAIRS, PASSES, STEPS, Cycle, make_ready_set

    num_tenants = NUM_TENANTS_QUICK if args.quick else NUM_TENANTS_PLANNED
    queues = {"10 passes": PASSES, "5 pairs": PAIRS, "10 optimizer steps": STEPS}
    yield {
        f"plan, {queue}, budget {budget}": Cycle(make_ready_set(num_tenants, kinds, OPERATION_TOKENS), budget).run
        for queue, kinds in queues.items()
        for budget in BUDGETS
    }


@contextlib.contextmanager
def service(args: argparse.Namespace) -> Iterator[Sides]:
    """Start a pool, for a step of all tenants through gRPC and Ray."""
    import tinkerpool

    with base_model() as model:
        from scripts import embedded_pool
        from scripts.bench.models import Case
        from scripts.bench.sides.pools import Tenants

        arguments = ["--model", f"{model.name}={model.path}", "--threads", str(args.threads), "--pool", "ray"]
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(embedded_pool.embedded_pool([*arguments, "--slots", "32"]))
            create_key = getattr(embedded_pool, "create_key", None) or type(pool).create_key  # once a function
            sides: Sides = {}

            def add(name: str, data: list[Any]) -> None:
                keys = [create_key(pool, f"tenant-{len(sides)}-{number}") for number in range(len(data))]
                clients = [stack.enter_context(tinkerpool.ServiceClient(pool.url, key)) for key in keys]
                sides[f"gRPC and Ray step, {name}"] = Tenants(clients, model.name, RANK, data).step

            for num_tenants, num_seqs, num_tokens in SERVICE_CASES:
                case = Case(num_tenants=num_tenants, num_seqs=num_seqs, num_tokens=num_tokens)
                add(str(case), case.data(model.vocab_size))
            add("a request of 4 MiB", [_large_data(model.vocab_size)])
            yield sides


def _large_data(vocab_size: int) -> tuple[Any, ...]:
    """Return a sequence of which each token has many targets: a large request for little computing."""
    from scripts.bench.models import random_data

    [datum] = random_data(0, [LARGE_TOKENS], vocab_size)
    shape = LARGE_TOKENS, LARGE_TARGETS
    targets = np.random.default_rng(0).integers(0, vocab_size, shape).astype(np.int32)
    weights = np.full(shape, 1 / LARGE_TARGETS, dtype=np.float32)
    return (replace(datum, loss_inputs={"target_tokens": targets, "weights": weights}),)


ITEMS = {"engine": engine, "hybrid": hybrid, "decode": decode, "planner": planner, "service": service}


def main() -> int:
    """Read the command line; measure for each line on stdin."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("item", choices=ITEMS)
    parser.add_argument("--seconds", type=float, required=True, help="for each case and line")
    parser.add_argument("--threads", type=int, required=True, help="of the engine")
    parser.add_argument("--quick", action="store_true", help="few tenants are planned: a smoke test")
    args = parser.parse_args()
    import coordinator

    answers = sys.stdout
    clock = time.thread_time if args.item == "planner" else time.perf_counter
    with contextlib.redirect_stdout(sys.stderr), ITEMS[args.item](args) as sides:
        for side in sides.values():
            side()  # warm-up
        print(Path(next(iter(coordinator.__path__))).parent, file=answers, flush=True)
        for _ in sys.stdin:
            print(json.dumps(medians(sides, args.seconds, clock)), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
