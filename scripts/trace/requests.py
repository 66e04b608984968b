"""The requests that are traced, through both doors: a step of training and a sample."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tinker

import tinkerpool
from scripts.clients.steps import TOKENS, own_step, sdk_step
from scripts.trace.processes import TracedPool

STEP = "forward_backward + optim_step"
SAMPLE = "sample"
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


def own_sample(client: tinkerpool.SamplingClient) -> None:
    """Draw a sample through the pool's own client."""
    params = tinkerpool.SamplingParams(max_tokens=NUM_DRAWN, seed=1)
    client.sample(tinkerpool.ModelInput.from_ints(TOKENS), 1, params).result()


def sdk_sample(client: Any) -> None:
    """Draw a sample through the official SDK."""
    params = tinker.SamplingParams(max_tokens=NUM_DRAWN, seed=1)
    client.sample(prompt=tinker.ModelInput.from_ints(TOKENS), num_samples=1, sampling_params=params).result()
