"""The official SDK and our own client on the shipped model: the same data and seeds give the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tinker

import tinkerpool
from tests.support.doors.sdk import LEAKS, sdk
from tests.support.served_pool import ServedPool, shipped_pool

pytestmark = [LEAKS, pytest.mark.slow]
WAIT_S = 100
TEXTS = ("In the beginning God created the heaven and the earth.\n", "The LORD is my shepherd.\n")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    with shipped_pool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


def run(library: Any, client: Any) -> tuple[list[bytes], list[list[int]], list[list[float]]]:
    """Train and sample: one program for both libraries, which have the same names."""
    client = client.result(WAIT_S) if hasattr(client, "result") else client
    tokenizer = client.get_tokenizer()
    tokens = [tokenizer.encode(text) for text in TEXTS]
    data = [
        library.Datum(
            library.ModelInput.from_ints(row[:-1]),
            {"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        if library is tinkerpool
        else library.Datum(
            model_input=library.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        for row in tokens
    ]
    bits = []
    for _ in range(3):
        passed = client.forward_backward(data, "cross_entropy")
        client.optim_step(library.AdamParams(learning_rate=5e-3, eps=1e-8))
        bits += [as_bytes(d["logprobs"]) for d in passed.result(WAIT_S).loss_fn_outputs]
    sampler = client.save_weights_and_get_sampling_client()
    sampler = sampler.result(WAIT_S) if hasattr(sampler, "result") else sampler
    params = library.SamplingParams(max_tokens=12, seed=11, temperature=0.8, top_p=0.9, top_k=40)
    sampled = sampler.sample(library.ModelInput.from_ints(tokens[0][:4]), 3, params).result(WAIT_S).sequences
    return bits, [list(s.tokens) for s in sampled], [list(s.logprobs) for s in sampled]


def as_bytes(tensor: Any) -> bytes:
    data: bytes = np.asarray(tensor.to_numpy(), np.float32).tobytes()
    return data


def test_both_libraries_get_the_same_bits(pool: ServedPool) -> None:
    with pool.client("ours") as ours:
        expected = run(tinkerpool, ours.create_lora_training_client("kjv-2m", rank=8, seed=5))
    with sdk(pool.http_url, pool.key("theirs")) as theirs:
        got = run(tinker, theirs.create_lora_training_client("kjv-2m", rank=8, seed=5))
    assert got[0] == expected[0]
    assert got[1] == expected[1]
    assert np.array_equal(np.array(got[2], np.float32), np.array(expected[2], np.float32))


@pytest.mark.parametrize("library", [tinkerpool, tinker], ids=["ours", "theirs"])
def test_a_cross_entropy_without_weights_has_weights_of_one(pool: ServedPool, library: Any) -> None:
    service = pool.client("ones") if library is tinkerpool else sdk(pool.http_url, pool.key("ones"))
    with service as made:
        client: Any = made.create_lora_training_client("kjv-2m", rank=4, seed=2)
        client = client.result(WAIT_S) if hasattr(client, "result") else client
        tokens = client.get_tokenizer().encode(TEXTS[0])
        outputs = []
        for given in ({}, {"weights": [1.0] * (len(tokens) - 1)}):
            model_input, inputs = library.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], **given}
            data = [library.Datum(model_input=model_input, loss_fn_inputs=inputs)]
            outputs.append(client.forward(data, "cross_entropy").result(WAIT_S))
    assert outputs[0].metrics["loss:sum"] == outputs[1].metrics["loss:sum"] > 0
    assert as_bytes(outputs[0].loss_fn_outputs[0]["logprobs"]) == as_bytes(outputs[1].loss_fn_outputs[0]["logprobs"])


def test_a_custom_loss_gives_the_gradient_of_the_built_in_one(pool: ServedPool) -> None:
    def negative_logprobs(_data: Any, logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        return -sum(values.sum() for values in logprobs), {}

    with sdk(pool.http_url, pool.key("custom")) as service:
        losses = []
        for is_custom in (False, True):
            client: Any = service.create_lora_training_client("kjv-2m", rank=4, seed=2).result(WAIT_S)
            tokens = client.get_tokenizer().encode(TEXTS[0])
            datum = tinker.Datum(
                model_input=tinker.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},  # type: ignore[dict-item]
            )
            if is_custom:
                client.forward_backward_custom([datum], negative_logprobs)
            else:
                client.forward_backward([datum], "cross_entropy")
            client.optim_step(tinker.AdamParams(learning_rate=1e-2))
            losses.append(client.forward([datum], "cross_entropy").result(WAIT_S).metrics["loss:sum"])
    assert losses[0] == losses[1]
