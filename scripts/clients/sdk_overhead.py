"""Measure what a lone tenant's step costs through the official Tinker SDK and the HTTP door, beyond the engine's time.

    .venv/bin/python -m scripts.clients.sdk_overhead

A step is a forward_backward and an optim_step sent together, its data a few tokens, on the default base model. The
engine's time is what the cycles report: pass and step phase. The rest is the SDK, HTTP, JSON and protobuf, admission,
the log's two syncs and the waits between them. The pool's own client is measured beside it. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import tinker

import tinkerpool
from scripts.clients.cookbook import MODEL, serving
from tinkerpool.credentials import read_credentials

WARM_UP = 10
TOKENS = list(range(10, 26))


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="how many (default %(default)s)")
    num_steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory(prefix="tinkerpool-overhead-") as scratch, serving(Path(scratch)) as variables:
        os.environ["TINKERPOOL_HOME"] = str(Path(scratch) / "home")
        own = read_credentials()
        assert own is not None
        url, key = variables["TINKER_BASE_URL"], variables["TINKER_API_KEY"]
        with (
            tinker.ServiceClient(base_url=url, api_key=key) as theirs,
            tinkerpool.ServiceClient(own.url, own.api_key) as ours,
        ):
            rest = ours.create_rest_client()
            sdk_client: Any = theirs.create_lora_training_client(MODEL, rank=8).result()
            report("tinker SDK over HTTP", rest, num_steps, lambda: sdk_step(sdk_client))
            own_client = ours.create_lora_training_client(MODEL, rank=8)
            report("own client over gRPC", rest, num_steps, lambda: own_step(own_client))
    return 0


def report(name: str, rest: tinkerpool.RestClient, num_steps: int, step: Callable[[], None]) -> None:
    """Run the steps, and print medians in milliseconds."""
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
    print(f"{name}: a step {wall * 1e3:.1f} ms, of it engine {engine * 1e3:.1f} ms, beyond it {rest_ms:.1f} ms")


def sdk_step(client: Any) -> None:
    """One step through the SDK."""
    inputs: Any = {"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)
    passed = client.forward_backward([datum], "cross_entropy")
    stepped = client.optim_step(tinker.AdamParams(learning_rate=1e-4))
    passed.result()
    stepped.result()


def own_step(client: tinkerpool.TrainingClient) -> None:
    """One step through the pool's own client."""
    inputs = {"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)}
    passed = client.forward_backward([tinkerpool.Datum(TOKENS[:-1], inputs)], "cross_entropy")
    stepped = client.optim_step(tinkerpool.AdamParams(learning_rate=1e-4))
    passed.result()
    stepped.result()


if __name__ == "__main__":
    raise SystemExit(main())
