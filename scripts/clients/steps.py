"""One training step on a few tokens, through the official SDK and through the pool's own client."""

from __future__ import annotations

import os
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import tinker

import tinkerpool

TOKENS = list(range(10, 26))
WEIGHTS = [1.0] * (len(TOKENS) - 1)


def sdk_step(client: Any) -> None:
    """Submit both operations through the SDK, then wait for both."""
    inputs: Any = {"target_tokens": TOKENS[1:], "weights": WEIGHTS}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)
    passed = client.forward_backward([datum], "cross_entropy")
    stepped = client.optim_step(tinker.AdamParams(learning_rate=1e-4))
    passed.result()
    stepped.result()


def own_step(client: tinkerpool.TrainingClient) -> None:
    """Submit both operations through the pool's own client, then wait for both."""
    inputs = {"target_tokens": TOKENS[1:], "weights": WEIGHTS}
    passed = client.forward_backward([tinkerpool.Datum(TOKENS[:-1], inputs)], "cross_entropy")
    stepped = client.optim_step(tinkerpool.AdamParams(learning_rate=1e-4))
    passed.result()
    stepped.result()
