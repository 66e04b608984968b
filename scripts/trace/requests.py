"""The requests that are traced, through both doors: a step of training and a sample."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tinker

import tinkerpool
from scripts.clients.steps import TOKENS, own_step, sdk_step
from scripts.trace.processes import TracedPool

STEP = "forward_backward + optim_step"
SAMPLE = "sample"
NUM_DRAWN = 4
RANK = 8

Requests = dict[str, Callable[[], object]]
"""By name."""


@contextlib.contextmanager
def own_requests(pool: TracedPool) -> Iterator[Requests]:
    """Connect the pool's own client, with an adapter and published weights; yield the requests, ready to be sent."""
    with tinkerpool.ServiceClient(pool.serving.url, pool.admin_key) as own:
        training = own.create_lora_training_client(pool.serving.models[0], rank=RANK)
        sampling = training.save_weights_and_get_sampling_client()
        yield {STEP: lambda: own_step(training), SAMPLE: lambda: own_sample(sampling)}


@contextlib.contextmanager
def sdk_requests(pool: TracedPool) -> Iterator[Requests]:
    """Do the same with the official SDK. Its sampling client begins with the first sample: from then on it polls."""
    with tinker.ServiceClient(base_url=pool.serving.http_url, api_key=f"tml-{pool.admin_key}") as sdk:
        training: Any = sdk.create_lora_training_client(pool.serving.models[0], rank=RANK).result()
        sampling = functools.cache(lambda: training.save_weights_and_get_sampling_client().result())
        yield {STEP: lambda: sdk_step(training), SAMPLE: lambda: sdk_sample(sampling())}


DOORS: Mapping[str, Callable[[TracedPool], contextlib.AbstractContextManager[Requests]]] = {
    "gRPC": own_requests,
    "HTTP": sdk_requests,
}
"""The requests through each door, in the order in which to send them. Open one door at a time: the SDK polls."""


def own_sample(client: tinkerpool.SamplingClient) -> None:
    """Draw a sample through the pool's own client."""
    params = tinkerpool.SamplingParams(max_tokens=NUM_DRAWN, seed=1)
    client.sample(tinkerpool.ModelInput.from_ints(TOKENS), 1, params).result()


def sdk_sample(client: Any) -> None:
    """Draw a sample through the official SDK."""
    params = tinker.SamplingParams(max_tokens=NUM_DRAWN, seed=1)
    client.sample(prompt=tinker.ModelInput.from_ints(TOKENS), num_samples=1, sampling_params=params).result()
