"""The whole way on the shipped model: client, gRPC, coordinator, engine, checkpoints, PEFT; many tenants at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinkerpool
from tests.support.served_pool import SHIPPED_MODEL, ServedPool, served_pool
from workers.contract.settings import PoolConfig, PoolModel
from workers.pool.factory import make_pool

pytestmark = pytest.mark.slow

TEXT = "In the beginning God created the heaven and the earth.\n"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    config = PoolConfig(kind="local", models=(PoolModel(name="kjv-2m", path=str(SHIPPED_MODEL)),), num_slots=4)
    with served_pool(tmp_path_factory.mktemp("pool"), lambda: make_pool(config)) as served:
        yield served


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


def test_several_tenants_train_at_once_and_each_ends_as_if_alone(pool: ServedPool) -> None:
    texts = [TEXT, "The LORD is my shepherd; I shall not want.\n", "Let there be light: and there was light.\n"]

    def run(index: int, results: dict[int, Any], steps: int = 5) -> None:
        with pool.client(f"tenant{index}") as service:
            client = service.create_lora_training_client(rank=[4, 8, 16][index], seed=index)
            losses = train(client, texts[index], steps)
            results[index] = (losses, logprobs(client, [datum(client.get_tokenizer(), texts[index])])[0])

    together: dict[int, Any] = {}
    threads = [threading.Thread(target=run, args=(index, together)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    alone: dict[int, Any] = {}
    run(1, alone)
    assert all(losses[-1] < losses[0] for losses, _ in together.values())
    assert together[1][0] == alone[1][0]
    assert together[1][1].tobytes() == alone[1][1].tobytes()


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


def test_saved_state_comes_back_bit_for_bit(pool: ServedPool) -> None:
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


# PEFT warns that a tied unembedding is adapted alone; that is what `train_unembed` means.
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_an_export_loads_in_peft_and_gives_the_same_log_probabilities(pool: ServedPool, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with pool.client("alice") as service:
        client = service.create_lora_training_client(rank=8)
        train(client, TEXT, 4)
        path = client.save_weights_for_sampler("exported").result(60).path
        data = [datum(client.get_tokenizer())]
        ours = logprobs(client, data)[0]
        service.create_rest_client().export_checkpoint(path, tmp_path / "adapter").result(60)
    base = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL)
    model = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    tokens = torch.tensor([data[0].model_input.to_ints()])
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[0].log_softmax(-1)
    targets = torch.tensor(data[0].loss_fn_inputs["target_tokens"].to_numpy().astype(np.int64))
    theirs = logits.gather(-1, targets[:, None])[:, 0].numpy()
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_samples_have_the_log_probabilities_that_forward_gives_their_tokens(pool: ServedPool) -> None:
    with pool.client("alice") as service:
        client = service.create_lora_training_client(rank=8)
        train(client, TEXT, 4)
        sampler = client.save_weights_and_get_sampling_client()
        tokenizer = client.get_tokenizer()
        prompt = tokenizer.encode("And God said")
        params = tinkerpool.SamplingParams(max_tokens=12, temperature=0.8, seed=7)
        response = sampler.sample(tinkerpool.ModelInput.from_ints(prompt), 3, params).result(60)
        again = sampler.sample(tinkerpool.ModelInput.from_ints(prompt), 3, params).result(60)
        assert [s.tokens for s in response.sequences] == [s.tokens for s in again.sequences]
        for sequence in response.sequences:
            tokens = [*prompt, *sequence.tokens]
            whole = tinkerpool.Datum(
                tinkerpool.ModelInput.from_ints(tokens[:-1]),
                {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
            )
            trained = logprobs(client, [whole])[0][len(prompt) - 1 :]
            assert sequence.logprobs is not None
            np.testing.assert_allclose(sequence.logprobs, trained, atol=1e-5)


def test_what_a_sample_tells_of_its_prompt_is_what_forward_tells(pool: ServedPool) -> None:
    with pool.client("alice") as service:
        client = service.create_lora_training_client(rank=8)
        train(client, TEXT, 4)
        sampler = client.save_weights_and_get_sampling_client()
        prompt = client.get_tokenizer().encode("And God said, Let there be light")
        targets = np.stack([prompt[1:], np.arange(len(prompt) - 1)], axis=1)  # (p - 1, 2)
        whole = tinkerpool.Datum(prompt[:-1], {"target_tokens": targets, "weights": np.ones(targets.shape)})
        expected = logprobs(client, [whole])[0]  # (p - 1, 2)
        asked = targets.copy()
        asked[::3, 1] = -1
        answer = sampler.sample(
            tinkerpool.ModelInput.from_ints(prompt),
            1,
            tinkerpool.SamplingParams(max_tokens=8, temperature=0.0, stop=[]),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=5,
            topk_sample_logprobs=3,
            target_prompt_logprobs=asked,
            prompt_alt_tokens_k=2,
        ).result(60)
    assert answer.prompt_logprobs is not None
    assert answer.target_prompt_logprobs is not None
    assert answer.topk_prompt_logprobs is not None
    assert answer.prompt_alt_tokens is not None
    found = answer.target_prompt_logprobs.to_numpy()
    np.testing.assert_allclose(found, np.where(asked < 0, 0.0, expected), atol=1e-5)
    np.testing.assert_allclose(np.array(answer.prompt_logprobs[1:], np.float32), expected[:, 0], atol=1e-5)
    [sequence] = answer.sequences
    assert sequence.topk_logprobs is not None
    assert [row and row[0][0] for row in sequence.topk_logprobs] == sequence.tokens  # greedy: the likeliest of all
    assert answer.topk_prompt_logprobs[0] is None
    for position, row in enumerate(answer.topk_prompt_logprobs[1:], 1):
        assert row is not None
        assert [value for _, value in row] == sorted((value for _, value in row), reverse=True)
        assert answer.prompt_alt_tokens.tokens.tolist()[position - 1] == [row[0][0]] * 2  # greedy as well
        if prompt[position] in dict(row):
            assert dict(row)[prompt[position]] == pytest.approx(answer.prompt_logprobs[position], abs=1e-6)
