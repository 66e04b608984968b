"""The official OpenAI package, unmodified, against the shipped model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

import tinkerpool
from tests.support.served_pool import ServedPool, shipped_pool

pytestmark = pytest.mark.slow

WAIT_S = 100
MODEL = "kjv-2m"
PROMPT = "And the LORD said unto"
MESSAGES: Any = [{"role": "system", "content": "Speak."}, {"role": "user", "content": "Who art thou?"}]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    with shipped_pool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture(scope="module")
def key(pool: ServedPool) -> str:
    return pool.key("alice")


@pytest.fixture(params=["/v1", pytest.param("/oai/api/v1", marks=pytest.mark.long)], scope="module")
def client(pool: ServedPool, key: str, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=pool.http_url + request.param, api_key=key, max_retries=0, timeout=WAIT_S) as client:
        yield client


@pytest.fixture(scope="module")
def ours(pool: ServedPool, key: str) -> Iterator[tinkerpool.ServiceClient]:
    with tinkerpool.ServiceClient(base_url=pool.url, api_key=key) as client:
        yield client


def test_the_same_seed_gives_the_same_text_through_both_doors(
    client: openai.OpenAI, ours: tinkerpool.ServiceClient
) -> None:
    training = ours.create_lora_training_client(MODEL, rank=8, seed=5)
    tokenizer = training.get_tokenizer()
    tokens = tokenizer.encode(PROMPT)
    datum = tinkerpool.Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)})
    for _ in range(3):
        training.train_step([datum], "cross_entropy", tinkerpool.AdamParams(learning_rate=1e-2))
    path = training.save_weights_for_sampler("few").result(WAIT_S).path
    params = tinkerpool.SamplingParams(max_tokens=24, seed=11, temperature=0.8, top_p=0.9)
    for model, sampler in (
        (MODEL, ours.create_sampling_client(base_model=MODEL)),
        (path, ours.create_sampling_client(model_path=path)),
        (training.model_id, ours.create_sampling_client(model_path=path)),
    ):
        sampled = sampler.sample(tinkerpool.ModelInput.from_ints(tokens), 3, params).result(WAIT_S).sequences
        response = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=24, seed=11, temperature=0.8, top_p=0.9, n=3, logprobs=0
        )
        assert [c.text for c in response.choices] == [
            tokenizer.decode(s.tokens, skip_special_tokens=True) for s in sampled
        ]
        for choice, sequence in zip(response.choices, sampled, strict=True):
            assert choice.logprobs is not None
            assert np.array_equal(
                np.array(choice.logprobs.token_logprobs, np.float32), np.array(sequence.logprobs, np.float32)
            )
        assert response.model == (path if model != MODEL else MODEL)


def test_a_conversation_is_rendered_by_the_models_template(client: openai.OpenAI) -> None:
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in MESSAGES)
    plain = client.completions.create(
        model=MODEL, prompt=text + "<|im_start|>assistant\n", max_tokens=20, seed=3, temperature=0.7
    )
    response = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, seed=3, temperature=0.7)
    assert response.choices[0].message.role == "assistant"
    assert response.choices[0].message.content == plain.choices[0].text
    assert response.usage == plain.usage


def test_a_streamed_completion_equals_the_whole_one(client: openai.OpenAI) -> None:
    values: dict[str, Any] = {"model": MODEL, "max_tokens": 30, "seed": 4, "n": 2}
    whole = client.chat.completions.create(messages=MESSAGES, **values)
    chunks = list(
        client.chat.completions.create(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **values)
    )
    texts = ["", ""]
    reasons: list[str | None] = [None, None]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 10
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    values: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 60, "seed": 2}
    free = client.completions.create(**values).choices[0].text
    stop = free[len(free) // 2 :][:5]
    stopped = client.completions.create(stop=[stop, "never said"], **values)
    streamed = client.completions.create(stop=stop, stream=True, **values)
    assert stopped.choices[0].text == free[: free.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].text for chunk in streamed) == stopped.choices[0].text
    assert stopped.usage is not None
    assert 0 < stopped.usage.completion_tokens < 60


def test_a_batch_of_prompts_equals_each_prompt_by_itself(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "In the beginning", "Thus saith"]
    values: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "seed": 6, "n": 2}
    together = client.completions.create(prompt=prompts, **values)
    separately = [choice.text for p in prompts for choice in client.completions.create(prompt=p, **values).choices]
    assert [choice.text for choice in together.choices] == separately
    assert [choice.index for choice in together.choices] == list(range(6))


def test_greedy_needs_no_seed(client: openai.OpenAI) -> None:
    values: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    first, second = (client.completions.create(**values).choices[0].text for _ in range(2))
    assert first == second


def test_an_echoed_prompt_has_the_log_probabilities_that_compute_logprobs_gives(
    client: openai.OpenAI, ours: tinkerpool.ServiceClient
) -> None:
    response = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
    sampler = ours.create_sampling_client(base_model=MODEL)
    tokens = sampler.get_tokenizer().encode(PROMPT)
    expected = sampler.compute_logprobs(tinkerpool.ModelInput.from_ints(tokens)).result(WAIT_S)
    [choice] = response.choices
    assert choice.text == PROMPT
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == expected
    assert "".join(choice.logprobs.tokens or ()) == PROMPT


def test_a_prompt_that_fills_the_context_is_scored(client: openai.OpenAI, ours: tinkerpool.ServiceClient) -> None:
    [num_tokens] = [each.max_context_length for each in ours.get_server_capabilities().supported_models]
    tokens = [5, 6] * (num_tokens // 2)
    response = client.completions.create(model=MODEL, prompt=tokens, max_tokens=0, echo=True, logprobs=0)
    sampler = ours.create_sampling_client(base_model=MODEL)
    expected = sampler.compute_logprobs(tinkerpool.ModelInput.from_ints(tokens)).result(WAIT_S)
    [choice] = response.choices
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == expected


async def test_an_async_client_gets_the_same_text_for_concurrent_calls(pool: ServedPool, key: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{pool.http_url}/v1", api_key=f"tml-{key}", timeout=WAIT_S) as client:
        values: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12}
        responses = await asyncio.gather(*(client.completions.create(seed=seed, **values) for seed in range(8)))
        for seed in (0, 7):
            stream = await client.completions.create(seed=seed, stream=True, **values)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == responses[seed].choices[0].text
        assert (await client.models.list()).data[0].id == MODEL


def test_refusals_are_raised_as_openais_exceptions(pool: ServedPool, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4o", prompt=PROMPT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, presence_penalty=1.0)
    assert unsupported.value.param == "presence_penalty"
    wrong = openai.OpenAI(base_url=f"{pool.http_url}/v1", api_key="sk-wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_top_logprobs_come_with_each_token(client: openai.OpenAI) -> None:
    values: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    completion = client.completions.create(prompt=PROMPT, logprobs=3, echo=True, **values)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    for index in range(len(logprobs.tokens) - 6, len(logprobs.tokens)):
        assert max(logprobs.top_logprobs[index].values()) == logprobs.token_logprobs[index]  # greedy sampling
    assert all(len(each) in (3, 4) for each in logprobs.top_logprobs[1:])
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **values)
    streamed = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, stream=True, **values)
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content
    assert all(each.top_logprobs[0].logprob == each.logprob and len(each.top_logprobs) == 3 for each in content)
    pieces = [chunk.choices[0].logprobs for chunk in streamed]
    assert [each for piece in pieces if piece for each in piece.content or ()] == content
