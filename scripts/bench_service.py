"""Measure the whole service: many tenants train at once, and every tenant's step should take about one cycle.

    python scripts/bench_service.py                         # the shipped model, 1, 4 and 16 tenants
    python scripts/bench_service.py --tenants 1 64 --seqs 4 --tokens 128

Starts a pool as `make demo` does. Every tenant has a key, an adapter and a pipelined loop of its own: the next
forward_backward and optim_step are submitted before the last ones are awaited. The first steps are not counted. These
are the engine's figures after gRPC, the durable log and the way to a process of Ray's. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from coordinator.models import DEFAULT_MODEL
from demo import create_key, embedded_pool
from tinkerpool import ServiceClient, TrainingClient, types

NUM_WARM_UP = 3
ADAM = types.AdamParams(learning_rate=1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the steps of all tenants cost together."""

    tokens_per_s: float
    step_s: float
    """Mean over tenants, of the time from one step's result to the next one's."""
    cycles_per_step: float
    """Median over tenants, of the cycles that went by per step, others' included."""


async def tenant(
    training: TrainingClient, batch: list[types.Datum], num_steps: int
) -> tuple[float, float, float, float]:
    """One pipelined loop; returns first and last moment and first and last cycle of the counted steps."""
    waiting: deque[Any] = deque()
    moments, cycles = [], []
    for step in range(NUM_WARM_UP + num_steps + 1):
        if step < NUM_WARM_UP + num_steps:
            waiting.append((training.forward_backward(batch, "cross_entropy"), training.optim_step(ADAM)))
        if step > 0:
            output, stepped = waiting.popleft()
            await output
            cycles.append((await stepped).metrics["clock_cycle:unique"])
            moments.append(time.perf_counter())
    return moments[NUM_WARM_UP - 1], moments[-1], cycles[NUM_WARM_UP - 1], cycles[-1]


async def measure(trainings: list[TrainingClient], batch: list[types.Datum], num_steps: int) -> Cost:
    """All tenants at once."""
    spans = await asyncio.gather(*(tenant(training, batch, num_steps) for training in trainings))
    num_tokens = sum(datum.model_input.length for datum in batch)
    seconds = max(last for _, last, _, _ in spans) - min(first for first, _, _, _ in spans)
    return Cost(
        tokens_per_s=len(trainings) * num_steps * num_tokens / seconds,
        step_s=statistics.mean(last - first for first, last, _, _ in spans) / num_steps,
        cycles_per_step=statistics.median(last - first for _, _, first, last in spans) / num_steps,
    )


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seqs", type=int, default=1, help="sequences per tenant and step")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    with embedded_pool(["--model", args.model]) as pool, contextlib.ExitStack() as clients:
        admin = clients.enter_context(ServiceClient(pool.url, pool.api_key))
        served = admin.get_server_capabilities().supported_models[0]
        batch = []
        for _ in range(args.seqs):
            tokens = rng.integers(0, served.vocab_size, args.tokens + 1)
            inputs = {"target_tokens": tokens[1:], "weights": np.ones(args.tokens, np.float32)}
            batch.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs))
        print("| tenants x sequences x tokens | tokens/s | ms per step of a tenant | cycles per step |")
        print("|---|---|---|---|")
        for num_tenants in args.tenants:
            keys = [create_key(pool, f"bench-{index}") for index in range(num_tenants)]
            services = [clients.enter_context(ServiceClient(pool.url, key)) for key in keys]
            trainings = [s.create_lora_training_client(served.model_name, rank=args.rank).result() for s in services]
            cost = asyncio.run(measure(trainings, batch, args.steps))
            print(
                f"| {num_tenants} x {args.seqs} x {args.tokens} | {cost.tokens_per_s:,.0f} | {1e3 * cost.step_s:.0f} "
                f"| {cost.cycles_per_step:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
