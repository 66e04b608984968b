"""Client, gRPC, coordinator, engine and checkpoints together, with the shipped model and concurrent tenants."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tinkerpool
from tests.support.served_pool import ServedPool, shipped_pool

pytestmark = pytest.mark.slow

TEXT = "In the beginning God created the heaven and the earth.\n"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    with shipped_pool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


def datum(tokenizer: Any, text: str = TEXT) -> tinkerpool.Datum:
    tokens = tokenizer.encode(text)
    return tinkerpool.Datum(
        tinkerpool.ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def logprobs(client: tinkerpool.TrainingClient, data: list[tinkerpool.Datum]) -> list[np.ndarray[Any, Any]]:
    output = client.forward(data, "cross_entropy").result(60)
    return [entry["logprobs"].to_numpy() for entry in output.loss_fn_outputs]


def train(client: tinkerpool.TrainingClient, text: str, num_steps: int, learning_rate: float = 5e-3) -> list[float]:
    data = [datum(client.get_tokenizer(), text)]
    losses = []
    for _ in range(num_steps):
        passed = client.forward_backward(data, "cross_entropy")
        step = client.optim_step(tinkerpool.AdamParams(learning_rate=learning_rate))
        losses.append(passed.result(60).metrics["loss:sum"])
        assert step.result(60).metrics is not None
    return losses


def test_a_co_batched_tenant_gets_the_same_bits_as_solo(pool: ServedPool) -> None:
    texts = [TEXT, "The LORD is my shepherd; I shall not want.\n", "Let there be light: and there was light.\n"]

    def run(index: int, results: dict[int, Any], steps: int = 5) -> None:
        with pool.client(f"tenant{index}") as service:
            client = service.create_lora_training_client(rank=[4, 8, 16][index], seed=index)
            losses = train(client, texts[index], steps)
            results[index] = (losses, logprobs(client, [datum(client.get_tokenizer(), texts[index])])[0])

    co_batched: dict[int, Any] = {}
    threads = [threading.Thread(target=run, args=(index, co_batched)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    solo: dict[int, Any] = {}
    run(1, solo)
    assert all(losses[-1] < losses[0] for losses, _ in co_batched.values())
    assert co_batched[1][0] == solo[1][0]
    assert co_batched[1][1].tobytes() == solo[1][1].tobytes()


def test_a_pair_takes_one_cycle_and_an_awaited_loop_two(pool: ServedPool) -> None:
    with pool.client("alice") as service:
        client = service.create_lora_training_client(rank=4)
        data = [datum(client.get_tokenizer())]
        passed, step = client.forward_backward(data, "cross_entropy"), client.optim_step()
        paired = [f.result(60).metrics["clock_cycle:unique"] for f in (passed, step)]
        first = client.forward_backward(data, "cross_entropy").result(60).metrics["clock_cycle:unique"]
        second = client.optim_step().result(60).metrics["clock_cycle:unique"]
    assert paired[0] == paired[1]
    assert first < second


def test_a_saved_state_is_loaded_bit_for_bit(pool: ServedPool) -> None:
    with pool.client("alice") as service:
        client = service.create_lora_training_client(rank=8, seed=3)
        data = [datum(client.get_tokenizer())]
        train(client, TEXT, 3)
        saved = client.save_state("before").result(60)
        before = logprobs(client, data)[0]
        more = train(client, TEXT, 2)
        client.load_state_with_optimizer(saved.path).result(60)
        assert logprobs(client, data)[0].tobytes() == before.tobytes()
        assert train(client, TEXT, 2) == more
        resumed = service.create_training_client_from_state_with_optimizer(saved.path)
        assert logprobs(resumed, data)[0].tobytes() == before.tobytes()
        assert train(resumed, TEXT, 2) == more
