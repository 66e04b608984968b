"""A program that trains adapters in a loop, each of a tenant of its own, and prints every step as a line of JSON.

Run on a host of the cluster, by the path of this file, so that it imports the client of the checkout under test:

    python tests/cluster/client.py URL NAME=KEY ...

Each adapter has a thread. A step is a line with `adapter`, `step`, `loss` (a hexadecimal float), `begin_s` and `end_s`
(of the system's monotonic clock, which all hosts share); an error is a line with `adapter` and `error`, and ends that
adapter's loop. The loops end, after the step under way, when standard input is closed.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from typing import Any

import tinkerpool

PACE_S = 0.2
"""Seconds between the beginnings of two steps, at least: the hosts share the machine's cores."""
NUM_TOKENS = 65
"""Of a step: as many as a short sentence or two has."""
TOKEN_RANGE = (5, 200)
"""Token ids that the shipped base model has."""


class Training:
    """One adapter. Its data and seed are those of its name, so its losses are the same wherever it is trained."""

    def __init__(self, service: tinkerpool.ServiceClient, name: str) -> None:
        """Create the adapter."""
        self._name = name
        self._client = service.create_lora_training_client(rank=4, seed=sum(name.encode()))
        self.model_id = self._client.model_id

    def step(self, number: int) -> str:
        """Train for step `number`, the next one from 0 on; return the loss."""
        draw = random.Random(f"{self._name}/{number}")
        tokens = [draw.randint(*TOKEN_RANGE) for _ in range(NUM_TOKENS)]
        loss_inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (NUM_TOKENS - 1)}
        datum = tinkerpool.Datum(tinkerpool.ModelInput.from_ints(tokens[:-1]), loss_inputs)
        adam = tinkerpool.AdamParams(learning_rate=1e-3)
        done = self._client.train_step([datum], "cross_entropy", adam).result()
        return float(done.forward_backward.metrics["loss:sum"]).hex()


def main(url: str, *tenants: str) -> None:
    stopping, writing = threading.Event(), threading.Lock()

    def say(**fields: Any) -> None:
        with writing:
            print(json.dumps(fields), flush=True)

    def train(name: str, key: str) -> None:
        try:
            with tinkerpool.ServiceClient(base_url=url, api_key=key) as service:
                training, number = Training(service, name), 0
                say(adapter=name, model_id=training.model_id)
                while not stopping.is_set():
                    begin_s = time.monotonic()
                    loss = training.step(number)
                    say(adapter=name, step=number, loss=loss, begin_s=begin_s, end_s=time.monotonic())
                    number += 1
                    stopping.wait(begin_s + PACE_S - time.monotonic())
        except Exception as error:  # noqa: BLE001  # the test fails with it
            say(adapter=name, error=f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=train, args=tenant.split("=", 1)) for tenant in tenants]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stopping.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
