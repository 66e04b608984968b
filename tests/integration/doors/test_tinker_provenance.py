"""Recorded samples through the official SDK: record_stability_info, sequence ids, provenance, stable_reinforce."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

import tinkerpool
from tests.support.doors.sdk import LEAKS, sdk
from tests.support.served_pool import ServedPool
from workers.contract.messages import PassItem

pytestmark = [LEAKS, pytest.mark.slow]

PROMPT = [1, 2, 3]
WAIT_S = 30


@pytest.fixture(scope="module")
def service(pool: ServedPool) -> Iterator[tinker.ServiceClient]:
    with sdk(pool.http_url, pool.key()) as service:
        yield service


@pytest.fixture
def client(service: tinker.ServiceClient) -> Any:
    return service.create_lora_training_client("toy", rank=8).result(WAIT_S)


def draw(sampler: Any, library: Any, seed: int = 1) -> list[Any]:
    prompt = library.ModelInput.from_ints(PROMPT)
    params = library.SamplingParams(max_tokens=6, temperature=0.5, seed=seed)
    sequences: list[Any] = sampler.sample(prompt, 2, params).result(WAIT_S).sequences
    return sequences


def datum(library: Any, sequence: Any) -> Any:
    """Return the datum of a sequence, as the cookbook's rl_loop makes it: the targets of the prompt are token 0."""
    tokens, num_before, name = PROMPT + list(sequence.tokens), len(PROMPT) - 1, sequence.sequence_id
    prompt_span, sampled_span = library.PromptProvenanceSpan, library.SampledProvenanceSpan
    inputs = {
        "target_tokens": np.array([0] * num_before + list(sequence.tokens)),
        "logprobs": np.array([0.0] * num_before + list(sequence.logprobs), np.float32),
        "advantages": np.array([0.0] * num_before + [1.0] * len(sequence.tokens), np.float32),
    }
    return library.Datum(model_input=library.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs).with_provenance(
        model_input=[
            prompt_span(sequence_id=name, length=len(PROMPT)),
            sampled_span(sequence_id=name, length=len(sequence.tokens) - 1),
        ],
        loss_fn_inputs=[
            prompt_span(sequence_id=name, offset=1, length=num_before),
            sampled_span(sequence_id=name, length=len(sequence.tokens)),
        ],
    )


def temperatures_at_the_worker(pool: ServedPool, num_datums: int) -> list[list[float]]:
    """Return the temperatures of the last datums that the worker has run."""
    batches = pool.pool.engines["w0"][-1].batches
    passes = [item for batch in batches for item in batch.items if isinstance(item, PassItem)]
    items = [item for item in passes if item.loss_fn == "stable_reinforce"]
    return [each.loss_inputs["temperatures"].tolist() for item in items for each in item.data][-num_datums:]


def test_every_kind_of_sampling_client_records_and_the_samples_train(
    pool: ServedPool, service: Any, client: Any
) -> None:
    path = client.save_weights_for_sampler("recorded").result(WAIT_S).path
    samplers = [
        service.create_sampling_client(base_model="toy", record_stability_info=True).result(WAIT_S),
        service.create_sampling_client(path, record_stability_info=True).result(WAIT_S),
        client.create_sampling_client(path, record_stability_info=True).result(WAIT_S),
        client.save_weights_and_get_sampling_client(record_stability_info=True).result(WAIT_S),
        client.save_weights_and_get_sampling_client(record_stability_info=True, kind="inflight").result(WAIT_S),
    ]
    sequences = [sequence for sampler in samplers for sequence in draw(sampler, types)]
    assert len({sequence.sequence_id for sequence in sequences}) == len(sequences)
    output = client.forward_backward([datum(types, each) for each in sequences], "stable_reinforce").result(WAIT_S)
    assert len(output.loss_fn_outputs) == len(sequences)
    expected = [[0, 0, *[0.5] * len(each.tokens)] for each in sequences]
    assert temperatures_at_the_worker(pool, len(expected)) == expected


def test_other_losses_ignore_provenance_as_the_cookbook_sends_it_with_every_loss(client: Any, service: Any) -> None:
    sampler = service.create_sampling_client(base_model="toy").result(WAIT_S)
    data = [datum(types, each) for each in draw(sampler, types)]
    assert client.forward_backward(data, "ppo").result(WAIT_S).metrics["tokens:sum"] > 0


def test_a_sequence_without_a_record_fails_as_its_own_future_and_says_what_to_do(client: Any, service: Any) -> None:
    sampler = service.create_sampling_client(base_model="toy").result(WAIT_S)
    data = [datum(types, each) for each in draw(sampler, types)]
    with pytest.raises(tinker.RequestFailedError, match="sample with record_stability_info=True"):
        client.forward_backward(data, "stable_reinforce").result(WAIT_S)


def test_our_own_client_records_and_trains_with_the_same_names(pool: ServedPool) -> None:
    with tinkerpool.ServiceClient(pool.url, pool.key()) as service:
        client = service.create_lora_training_client("toy", rank=8).result(WAIT_S)
        path = client.save_weights_for_sampler("own").result(WAIT_S).path
        first = service.create_sampling_client(base_model="toy", record_stability_info=True)
        samplers = [
            first,
            pickle.loads(pickle.dumps(first)),
            tinkerpool.SamplingClient.from_sampler_handle(first.get_sampler_handle(), api_key=pool.key()),
            client.create_sampling_client(path, record_stability_info=True),
            client.save_weights_and_get_sampling_client(record_stability_info=True),
            client.save_weights_and_get_sampling_client("named", record_stability_info=True),
        ]
        sequences = [sequence for sampler in samplers for sequence in draw(sampler, tinkerpool)]
        client.forward_backward([datum(tinkerpool, each) for each in sequences], "stable_reinforce").result(WAIT_S)
        expected = [[0, 0, *[0.5] * len(each.tokens)] for each in sequences]
        assert temperatures_at_the_worker(pool, len(expected)) == expected
        plain = draw(service.create_sampling_client(base_model="toy"), tinkerpool, seed=2)
        with pytest.raises(tinkerpool.errors.FailedPrecondition, match="sample with record_stability_info=True"):
            client.forward([datum(tinkerpool, each) for each in plain], "stable_reinforce").result(WAIT_S)
