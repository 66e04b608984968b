"""The requests that are traced, through both doors: a step of training and a sample."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TINKER_TELEMETRY", "0")

import tinker

import tinkerpool
from scripts.trace.processes import TracedPool

STEP = "forward_backward + optim_step"
SAMPLE = "sample"
TOKENS = list(range(10, 26))
WEIGHTS = [1.0] * (len(TOKENS) - 1)
NUM_DRAWN = 4
RANK = 8

Requests = dict[tuple[str, str], Callable[[], object]]
"""By door and name."""


@contextlib.contextmanager
def open_requests(pool: TracedPool) -> Iterator[Requests]:
    """Connect a client to each door, with an adapter and published weights; yield the requests, ready to be sent."""
    model = pool.serving.models[0]
    with (
        tinkerpool.ServiceClient(pool.serving.url, pool.admin_key) as own,
        tinker.ServiceClient(base_url=pool.serving.http_url, api_key=f"tml-{pool.admin_key}") as sdk,
    ):
        own_training = own.create_lora_training_client(model, rank=RANK)
        own_sampling = own_training.save_weights_and_get_sampling_client()
        sdk_training: Any = sdk.create_lora_training_client(model, rank=RANK).result()
        sdk_sampling = sdk_training.save_weights_and_get_sampling_client().result()
        yield {
            ("gRPC", STEP): lambda: own_step(own_training),
            ("gRPC", SAMPLE): lambda: own_sample(own_sampling),
            ("HTTP", STEP): lambda: sdk_step(sdk_training),
            ("HTTP", SAMPLE): lambda: sdk_sample(sdk_sampling),
        }


def own_step(client: tinkerpool.TrainingClient) -> None:
    """Take a step through the pool's own client, both operations submitted together."""
    inputs = {"target_tokens": TOKENS[1:], "weights": WEIGHTS}
    passed = client.forward_backward([tinkerpool.Datum(TOKENS[:-1], inputs)], "cross_entropy")
    stepped = client.optim_step(tinkerpool.AdamParams(learning_rate=1e-4))
    passed.result()
    stepped.result()


def own_sample(client: tinkerpool.SamplingClient) -> None:
    """Draw a sample through the pool's own client."""
    params = tinkerpool.SamplingParams(max_tokens=NUM_DRAWN, seed=1)
    client.sample(tinkerpool.ModelInput.from_ints(TOKENS), 1, params).result()


def sdk_step(client: Any) -> None:
    """Take a step through the official SDK, both operations submitted together."""
    inputs: Any = {"target_tokens": TOKENS[1:], "weights": WEIGHTS}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)
    passed = client.forward_backward([datum], "cross_entropy")
    stepped = client.optim_step(tinker.AdamParams(learning_rate=1e-4))
    passed.result()
    stepped.result()


def sdk_sample(client: Any) -> None:
    """Draw a sample through the official SDK."""
    params = tinker.SamplingParams(max_tokens=NUM_DRAWN, seed=1)
    client.sample(prompt=tinker.ModelInput.from_ints(TOKENS), num_samples=1, sampling_params=params).result()
