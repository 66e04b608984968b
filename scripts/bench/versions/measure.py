"""Measure one item of the version that PYTHONPATH names, and print its seconds as JSON.

python -m scripts.bench.versions.measure engine --seconds 5
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.bench.versions.layout import attribute, module

MODEL = "4m"
RANK = 8
ENGINE_CASES = ((16, 1, 64), (8, 4, 64), (1, 1, 64))
"""Tenants, sequences of each, tokens of a sequence."""
SERVICE_CASES = ((1, 4, 64), (16, 1, 64))
NUM_TENANTS_PLANNED = 1000
"""Each with 10 operations."""
OPERATION_TOKENS = 64
BUDGETS = (2048, 16384)
NUM_SAMPLING, NUM_SEQS = 8, 4
PROMPT_TOKENS, DRAWN_TOKENS = 32, 32
ROUNDS_MIN = 3

Measured = dict[str, float]
"""Median seconds by case."""
Side = Callable[[], object]


def medians(sides: Mapping[str, Side], seconds: float, clock: Callable[[], float] = time.perf_counter) -> Measured:
    """Alternate all sides for this long, after a warm-up; return the median of each."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side()
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
    with module("models").open_models([name]) as [model]:
        yield model


def engine(seconds: float, num_threads: int) -> Measured:
    """Measure steps of the engine."""
    with base_model() as model:
        sides: dict[str, Side] = {}
        for num_tenants, num_seqs, num_tokens in ENGINE_CASES:
            case = module("models").Case(num_tenants=num_tenants, num_seqs=num_seqs, num_tokens=num_tokens)
            fused = module("training").Fused(model, [RANK] * num_tenants, num_threads)
            fused.give(case.data(model.vocab_size))
            sides[f"engine step, {case}"] = fused.step
        return medians(sides, seconds)


def decode(seconds: float, num_threads: int) -> Measured:
    """Measure the decoding of sequences of several tenants in one batch."""
    with base_model() as model:
        samplers = module("samplers")
        prompts = samplers.Prompts(model.vocab_size)
        sampler = samplers.EngineSampler(model, NUM_SAMPLING, num_threads)

        def sample() -> None:
            sampler.sample(
                [
                    samplers.Ask(prompt=prompts.draw(PROMPT_TOKENS), num_tokens=DRAWN_TOKENS, tenant=tenant)
                    for tenant in range(NUM_SAMPLING)
                    for _ in range(NUM_SEQS)
                ]
            )

        return medians({f"decode, {NUM_SAMPLING} x {NUM_SEQS} sequences": sample}, seconds)


def planner(seconds: float, num_threads: int) -> Measured:
    """Measure the processor time of planning a cycle."""
    module("models")
    own = module("planner")
    make_ready_set = attribute("planner", "make_ready_set", "make_roster")
    queues = {"10 passes": own.PASSES, "5 pairs": own.PAIRS, "10 optimizer steps": own.STEPS}
    sides = {
        f"plan, {queue}, budget {budget}": own.Cycle(
            make_ready_set(NUM_TENANTS_PLANNED, kinds, OPERATION_TOKENS), budget
        ).run
        for queue, kinds in queues.items()
        for budget in BUDGETS
    }
    return medians(sides, seconds / len(sides), time.thread_time)


def service(seconds: float, num_threads: int) -> Measured:
    """Measure a step of all tenants through gRPC and Ray."""
    import tinkerpool

    with base_model() as model:
        tenants, pools = module("tenants"), module("pool")
        arguments = ["--model", f"{model.name}={model.path}", "--threads", str(num_threads), "--pool", "ray"]
        measured: Measured = {}
        with pools.embedded_pool([*arguments, "--slots", "32"]) as pool:
            for num_tenants, num_seqs, num_tokens in SERVICE_CASES:
                case = module("models").Case(num_tenants=num_tenants, num_seqs=num_seqs, num_tokens=num_tokens)
                keys = [pools.create_key(pool, f"tenant-{num_tenants}-{number}") for number in range(num_tenants)]
                with contextlib.ExitStack() as stack:
                    clients = [stack.enter_context(tinkerpool.ServiceClient(pool.url, key)) for key in keys]
                    group = tenants.Tenants(clients, model.name, RANK, case.data(model.vocab_size))
                    measured |= medians({f"gRPC and Ray step, {case}": group.step}, seconds)
        return measured


ITEMS = {"engine": engine, "decode": decode, "planner": planner, "service": service}


def main() -> int:
    """Read the command line, measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("item", choices=ITEMS)
    parser.add_argument("--seconds", type=float, required=True, help="for each case")
    parser.add_argument("--threads", type=int, required=True, help="of the engine")
    args = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):
        measured = ITEMS[args.item](args.seconds, args.threads)
        import coordinator

        folder = Path(next(iter(coordinator.__path__))).parent
    print(json.dumps({"folder": str(folder), "seconds": measured}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
