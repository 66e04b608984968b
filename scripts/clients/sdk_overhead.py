"""Measure what the official Tinker SDK and the HTTP door add to the engine's time of a lone tenant's step.

    .venv/bin/python -m scripts.clients.sdk_overhead

A step is a forward_backward and an optim_step sent together, with a few tokens, on the default base model. The engine's
time is the sum of pass and step phase as the cycles report them. The rest is the SDK, HTTP, JSON and protobuf,
admission, the two syncs of the log and the waits between them. The same steps also run through the pool's own
client, for comparison. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import tinker

import tinkerpool
from scripts.clients.cookbook import serving
from scripts.clients.recipe_inputs import MODEL
from scripts.clients.steps import own_step, sdk_step

WARM_UP = 10


def main() -> int:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="number of steps (default %(default)s)")
    num_steps = parser.parse_args().steps
    with (
        serving() as pool,
        tinker.ServiceClient(base_url=pool.http_url, api_key=f"tml-{pool.admin_key}") as theirs,
        tinkerpool.ServiceClient(pool.url, pool.admin_key) as ours,
    ):
        rest = ours.create_rest_client()
        sdk_client: Any = theirs.create_lora_training_client(MODEL, rank=8).result()
        report("tinker SDK over HTTP", rest, num_steps, lambda: sdk_step(sdk_client))
        own_client = ours.create_lora_training_client(MODEL, rank=8)
        report("own client over gRPC", rest, num_steps, lambda: own_step(own_client))
    return 0


def report(name: str, rest: tinkerpool.RestClient, num_steps: int, step: Callable[[], None]) -> None:
    """Run the steps and print their medians in milliseconds."""
    for _ in range(WARM_UP):
        step()
    walls = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        step()
        walls.append(time.perf_counter() - begin)
    cycles = rest.get_pool_status(num_cycles=num_steps).result().cycles
    wall = statistics.median(walls)
    engine = statistics.median(cycle.pass_seconds + cycle.step_seconds for cycle in cycles)
    rest_ms = (wall - engine) * 1e3
    print(f"{name}: a step {wall * 1e3:.1f} ms: engine {engine * 1e3:.1f} ms, rest {rest_ms:.1f} ms")


if __name__ == "__main__":
    raise SystemExit(main())
