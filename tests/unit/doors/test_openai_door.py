"""OpenAI's door with a fake service: its requests to the service, and its responses."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import httpx
import numpy as np
import pytest

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.http.calls import Call
from coordinator.doors.openai import endpoints, schemas
from coordinator.doors.openai.responses import (
    LOGPROB_MIN,
    SLICE_ENTRIES,
    ChatStyle,
    CompletionStyle,
    ResponseOptions,
    ResponseWriter,
)
from coordinator.doors.openai.samples import Event
from coordinator.doors.openai.templates import ChatTemplate
from coordinator.doors.openai.text_models import read_text_model
from coordinator.doors.openai.weights import Samplers, Weights
from coordinator.storage.store import Store
from coordinator.tenants.accounts import Accounts
from coordinator.tenants.keys import Authenticator
from coordinator.tenants.principals import Principal
from tests.support.doors.fake_service import KEY, PRINCIPAL, FakeBackend, FakeService
from tests.support.doors.open_doors import http_door
from tests.support.served_pool import SHIPPED_MODEL
from tests.support.toy_pool import FakeTime
from tinkerpool.convert import from_tensor, to_tensor
from tinkerpool.v1 import checkpoints_pb2, sampling_pb2, sessions_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb

FILES = {path.name: path.read_bytes() for path in SHIPPED_MODEL.glob("*") if path.suffix in (".json", ".jinja")}
BASE = sessions_pb2.BaseModel(
    name="kjv", vocab_size=2048, max_sequence_tokens=64, eos_token_ids=[0, 3], fingerprint="these numerics"
)
MODEL = read_text_model(BASE, FILES)
SAMPLER = "s:sample:0"
SESSION_ENDED = ServiceError(Code.FAILED_PRECONDITION, "SESSION_ENDED", "it has ended")


def tokens_of(text: str) -> list[int]:
    tokens: list[int] = MODEL.tokenizer.encode(text).ids
    return tokens


def sequence(text: str, *, is_stop: bool = False, topk: Sequence[Sequence[tuple[str, float]]] = ()) -> Any:
    """Return a sampled sequence; every token has the log-probability -0.5."""
    tokens = tokens_of(text)
    sampled = ops_pb.SampledSequence(
        tokens=to_tensor(np.array(tokens, np.int32)),
        logprobs=to_tensor(np.full(len(tokens), -0.5, np.float32)),
        stop_reason=ops_pb.STOP_REASON_STOP if is_stop else ops_pb.STOP_REASON_LENGTH,
    )
    if topk:
        sampled.topk.CopyFrom(table(topk))
    return sampled


def table(rows: Sequence[Sequence[tuple[str, float]]]) -> ops_pb.TokenLogprobs:
    """Return texts of one token and their log-probabilities at each position."""
    return ops_pb.TokenLogprobs(
        token_ids=to_tensor(np.array([[tokens_of(text)[0] for text, _ in row] for row in rows], np.int32)),
        logprobs=to_tensor(np.array([[logprob for _, logprob in row] for row in rows], np.float32)),
    )


def fake(*sequences: Any, result: ops_pb.SampleResult | None = None, **responses: Any) -> FakeService:
    """Return a service with one base model; every sample has these sequences."""
    sampled = ops_pb.SampleResult(num_cached_prompt_tokens=2)
    sampled.MergeFrom(result or ops_pb.SampleResult())
    sampled.sequences.extend(sequences)
    outcome = ops_pb.Operation(state=ops_pb.OPERATION_STATE_SUCCEEDED, sample=sampled)

    async def waited(_: Any, request: ops_pb.WaitOperationsRequest) -> AsyncIterator[ops_pb.WaitOperationsResponse]:
        for name in reversed(request.names):
            finished = ops_pb.Operation(name=name)
            finished.MergeFrom(outcome)
            yield ops_pb.WaitOperationsResponse(operation=finished)

    async def streamed(*_: Any) -> AsyncIterator[sampling_pb2.StreamSampleResponse]:
        for index, each in enumerate(sequences):
            for token in from_tensor(each.tokens).tolist():
                drawn = sampling_pb2.SampledToken(sequence_index=index, token=token, logprob=-0.5)
                yield sampling_pb2.StreamSampleResponse(token=drawn)
        yield sampling_pb2.StreamSampleResponse(operation=outcome)

    async def ended(*_: Any) -> AsyncIterator[sampling_pb2.StreamSampleResponse]:
        yield sampling_pb2.StreamSampleResponse()
        yield sampling_pb2.StreamSampleResponse(operation=outcome)

    usual: dict[str, Any] = {
        "get_capabilities": sessions_pb2.GetCapabilitiesResponse(base_models=[BASE]),
        "get_tokenizer": sessions_pb2.GetTokenizerResponse(files=FILES),
        "find_session": "",
        "create_session": sessions_pb2.CreateSessionResponse(session=sessions_pb2.Session(session_id="s")),
        "create_sampler": sampling_pb2.CreateSamplerResponse(sampler=sampling_pb2.Sampler(sampler_id=SAMPLER)),
        "sample": sampling_pb2.SampleResponse(),
        "wait_operations": waited,
        "stream_sample": streamed,
        "stream_outcome": ended,
        "cancel_operation": ops_pb.CancelOperationResponse(),
    }
    return FakeService(**usual | responses)


def requests_of(service: FakeService, use_case: str) -> list[Any]:
    """Return the requests of one use case, in order."""
    return [request for name, _, request in service.calls if name == use_case]


class Door:
    """Opens a door for each service, and calls it."""

    def __init__(self) -> None:
        self.opened = AsyncExitStack()

    async def _open(self, service: Any, keys: Any = None, key: str = KEY) -> httpx.AsyncClient:
        opening = http_door(FakeBackend(service, keys=keys), time=FakeTime(now=1234.5, wall_offset=0.0))
        door = await self.opened.enter_async_context(opening)
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=door.url, headers=headers, timeout=60, verify=False)  # loads no certificates

    async def request(self, service: Any, method: str, path: str, **options: Any) -> httpx.Response:
        async with await self._open(service) as client:
            return await client.request(method, path, **options)

    async def together(self, service: Any, path: str, bodies: Sequence[Any]) -> list[httpx.Response]:
        """POST all bodies at the same time."""
        async with await self._open(service) as client:
            return await asyncio.gather(*(client.post(path, json=body) for body in bodies))

    async def streamed_with(
        self, keys: Authenticator, key: str, service: Any, then: Callable[[], Awaitable[None]]
    ) -> str:
        """Return the events of a streamed completion with this key. `then` is called when the first has arrived."""
        body = {"model": "kjv", "prompt": "And", "stream": True}
        async with (
            await self._open(service, keys, key) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            pieces = response.aiter_text()
            first = await anext(pieces)
            await then()
            return first + "".join([piece async for piece in pieces])

    async def complete(self, service: Any, prompt: Any = "And", **values: Any) -> Any:
        """POST /v1/completions, which must succeed."""
        return await self.ok(service, "/v1/completions", prompt=prompt, **values)

    async def ok(self, service: Any, path: str, **values: Any) -> Any:
        response = await self.request(service, "POST", path, json={"model": "kjv", **values})
        assert response.status_code == 200, response.text
        return response.json()

    async def chunks(self, service: Any, path: str, **values: Any) -> list[Any]:
        """Return the events of a stream without the final [DONE]."""
        body = {"model": "kjv", "stream": True, **values}
        response = await self.request(service, "POST", path, json=body)
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        *events, end, rest = response.text.split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    door = Door()
    async with door.opened:
        yield door


async def test_a_completion_has_its_metadata_and_usage(door: Door) -> None:
    body = await door.complete(fake(sequence(" it came"), sequence(" God", is_stop=True)), n=2)
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["created"], body["model"]) == ("text_completion", 1234, "kjv")
    assert body["system_fingerprint"].startswith("fp_")
    assert [(c["index"], c["text"], c["finish_reason"], c["logprobs"]) for c in body["choices"]] == [
        (0, " it came", "length", None),
        (1, " God", "stop", None),
    ]
    num_prompt, num_sampled = len(tokens_of("And")), len(tokens_of(" it came")) + len(tokens_of(" God"))
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_parameters_of_a_call_reach_the_service(door: Door) -> None:
    service = fake(sequence("a"))
    values = {"temperature": 0.5, "top_p": 0.75, "top_k": 9, "seed": -7, "stop": "\n", "max_tokens": 5, "user": "me"}
    await door.complete(service, n=3, **values)
    [request] = requests_of(service, "sample")
    assert from_tensor(request.prompt).tolist() == tokens_of("And")
    assert (request.sampler_id, request.num_samples) == (SAMPLER, 3)
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.seed, params.max_tokens) == (0.5, 0.75, 9, -7, 5)
    assert list(params.stop.strings) == ["\n"]
    assert list(params.stop.tokens) == [0, 3], "stops are added to the end tokens"
    service = fake(sequence("a"))
    await door.ok(service, "/oai/api/v1/chat/completions", messages=[{"role": "user", "content": "Who?"}], seed=None)
    [request] = requests_of(service, "sample")
    assert MODEL.text_of(from_tensor(request.prompt).tolist()) == (
        "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not request.params.HasField("stop")
    assert not request.params.HasField("seed")
    assert (request.params.max_tokens, request.params.temperature) == (0, 1.0)


async def test_each_prompt_of_a_batch_has_its_choices_in_order(door: Door) -> None:
    service = fake(sequence("a"), sequence("b"))
    body = await door.complete(service, ["And", "Thus saith the LORD"], n=2)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "a"), (1, "b"), (2, "a"), (3, "b")]
    for prompt in ([5, 6], [[5, 6], [7]]):
        service = fake(sequence("a"))
        await door.complete(service, prompt)
        sent = [from_tensor(request.prompt).tolist() for request in requests_of(service, "sample")]
        assert sent == (prompt if isinstance(prompt[0], list) else [prompt])


async def test_a_conversation_may_have_a_developer_role_and_parts_of_text(door: Door) -> None:
    service = fake(sequence("a"))
    parts = [{"type": "text", "text": "Who"}, {"type": "text", "text": " art thou?"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    body = await door.ok(service, "/v1/chat/completions", messages=messages, max_completion_tokens=7)
    [request] = requests_of(service, "sample")
    assert MODEL.text_of(from_tensor(request.prompt).tolist()).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho art thou?<|im_end|>\n"
    )
    assert request.params.max_tokens == 7
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "a", "refusal": None}


async def test_a_completions_log_probabilities_match_its_tokens(door: Door) -> None:
    topk = [[("b", -0.1), ("a", -0.5)], [("c", -0.2), ("d", -math.inf)]]
    service = fake(sequence("ax", topk=topk))
    body = await door.complete(service, logprobs=2)
    assert requests_of(service, "sample")[0].topk_sample_logprobs == 2
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "x"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1]
    assert logprobs["top_logprobs"] == [
        {"b": pytest.approx(-0.1), "a": -0.5},
        {"c": pytest.approx(-0.2), "d": LOGPROB_MIN, "x": -0.5},
    ]
    body = await door.complete(fake(sequence("ax")), logprobs=0)
    assert body["choices"][0]["logprobs"]["top_logprobs"] is None


async def test_an_echoed_prompt_has_its_log_probabilities_too(door: Door) -> None:
    prompt = tokens_of("And God")
    result = ops_pb.SampleResult(
        prompt_logprobs=to_tensor(np.array([np.nan, *[-1.5] * (len(prompt) - 1)], np.float32)),
        topk_prompt=table([[("q", math.nan)], *[[("q", -0.25)]] * (len(prompt) - 1)]),
    )
    service = fake(sequence("ax", topk=[[("a", -0.5)]] * 2), result=result)
    body = await door.complete(service, "And God", logprobs=1, echo=True)
    [request] = requests_of(service, "sample")
    assert (request.include_prompt_logprobs, request.topk_prompt_logprobs) == (True, 1)
    choice = body["choices"][0]
    assert choice["text"] == "And Godax"
    assert "".join(choice["logprobs"]["tokens"]) == "And Godax"
    assert choice["logprobs"]["token_logprobs"] == [None, *[-1.5] * (len(prompt) - 1), -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][1]["q"] == -0.25
    assert choice["logprobs"]["text_offset"][-2:] == [7, 8]
    assert body["usage"]["completion_tokens"] == 2


async def test_a_prompt_can_be_scored_without_sampling_a_token(door: Door) -> None:
    result = ops_pb.SampleResult(prompt_logprobs=to_tensor(np.array([np.nan, -1.5], np.float32)))
    service = fake(sequence("a", is_stop=True), result=result)
    body = await door.complete(service, [5, 6], logprobs=0, echo=True, max_tokens=0)
    assert requests_of(service, "sample")[0].params.max_tokens == 1
    choice = body["choices"][0]
    assert choice["text"] == MODEL.text_of([5, 6])
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5]
    assert (choice["finish_reason"], body["usage"]["completion_tokens"]) == ("length", 0)


async def test_only_a_prompt_that_is_scored_without_a_token_may_fill_the_context(door: Door) -> None:
    full = [5] * BASE.max_sequence_tokens
    result = ops_pb.SampleResult(prompt_logprobs=to_tensor(np.array([np.nan] + [-1.5] * (len(full) - 1), np.float32)))
    service = fake(sequence("a"), result=result)
    body = await door.complete(service, full, logprobs=0, echo=True, max_tokens=0)
    assert len(body["choices"][0]["logprobs"]["token_logprobs"]) == len(full)
    for prompt, max_tokens, what in ((full, 1, "64 while max_tokens is 1:"), ([*full, 5], 0, "65:")):
        values = {"model": "kjv", "prompt": prompt, "max_tokens": max_tokens}
        response = await door.request(service, "POST", "/v1/completions", json=values)
        assert response.status_code == 400
        assert f"takes 64 tokens in all, and the prompt has {what}" in response.json()["error"]["message"]


async def test_the_log_probabilities_of_a_conversation_are_an_object_for_each_token(door: Door) -> None:
    service = fake(sequence("ax", topk=[[("b", -0.25)], [("x", -0.5)]]))
    messages = [{"role": "user", "content": "Who?"}]
    body = await door.ok(service, "/v1/chat/completions", messages=messages, logprobs=True, top_logprobs=1)
    first, second = body["choices"][0]["logprobs"]["content"]
    alternative = {"token": "b", "bytes": [98], "logprob": -0.25}
    assert first == {"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": [alternative]}
    assert second["top_logprobs"][0]["token"] == "x"


@pytest.mark.parametrize("prompt", ["And", [0, 5, 0, 6]])
async def test_offsets_count_text_that_is_held_back_and_special_tokens_of_an_echo(
    door: Door, prompt: str | list[int]
) -> None:
    tokens = tokens_of(prompt) if isinstance(prompt, str) else prompt
    logprobs = to_tensor(np.array([np.nan, *[-1.5] * (len(tokens) - 1)], np.float32))
    service = fake(sequence("xab"), result=ops_pb.SampleResult(prompt_logprobs=logprobs))
    body = await door.complete(service, prompt, logprobs=0, echo=True, stop=["xyz", "bcd"])
    choice = body["choices"][0]
    lengths = [len(MODEL.text_of([token])) for token in tokens + tokens_of("xab")]
    assert choice["logprobs"]["text_offset"] == [sum(lengths[:index]) for index in range(len(lengths))]
    assert len(choice["text"]) == sum(lengths)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_other_calls_run_while_a_response_with_many_log_probabilities_is_made(
    door: Door, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    make, threads = CompletionStyle.logprobs, list[threading.Thread]()

    def noted(*args: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return make(*args)

    monkeypatch.setattr(CompletionStyle, "logprobs", noted)
    text = "x" * 150
    each = sequence(text, topk=[[("a", -0.25)] * 8] * len(tokens_of(text)))
    base = sessions_pb2.BaseModel()
    base.CopyFrom(BASE)
    base.max_sequence_tokens = 1024
    service = fake(*[each] * 40, get_capabilities=sessions_pb2.GetCapabilitiesResponse(base_models=[base]))
    values = {"prompt": "And", "n": 40, "max_tokens": 200, "logprobs": 8, "stream": is_streamed}
    response = await door.request(service, "POST", "/v1/completions", json={"model": "kjv", **values})
    assert response.is_success, response.text
    assert len(threads) >= 40
    assert threading.current_thread() not in threads, "the event loop's"


def stream_of(num_tokens: int, num_top: int) -> tuple[AsyncGenerator[bytes], Mock]:
    """Return the stream of a finished sample, and what makes the log-probabilities of each of its tokens."""
    drawn = sequence("x" * num_tokens, is_stop=True, topk=[[("a", -0.25)] * num_top] * num_tokens)
    assert len(from_tensor(drawn.tokens)) == num_tokens
    outcome = ops_pb.Operation(state=ops_pb.OPERATION_STATE_SUCCEEDED, sample=ops_pb.SampleResult(sequences=[drawn]))
    style = ChatStyle()
    made = Mock(wraps=style.logprobs)
    call = Mock(in_turn=AsyncMock(side_effect=lambda num_bytes, make, **_: make()))
    writer = ResponseWriter(
        call=call,
        name="c",
        created_s=0,
        model_name="kjv",
        model=MODEL,
        style=Mock(wraps=style, logprobs=made, kind=style.kind, chunk_object=style.chunk_object),
        options=ResponseOptions(
            prompts=[[1]],
            echoes=None,
            num_choices=1,
            max_tokens=0,
            stops=(),
            num_top=num_top,
            is_empty=False,
            wants_usage=False,
        ),
    )

    async def no_more() -> AsyncGenerator[Event]:
        for event in list[Event]():
            yield event

    first = (0, sampling_pb2.StreamSampleResponse(operation=outcome))
    return writer.stream(first, no_more(), nullcontext()), made


async def test_a_stream_that_is_not_read_is_made_no_further_than_the_next_slice() -> None:
    stream, made = stream_of(400, num_top=8)
    sent, num_slices = await anext(stream), 0  # the role
    made.assert_not_called()
    async for each in stream:
        num_slices += 1
        assert made.call_count <= num_slices * SLICE_ENTRIES // 10
        sent += each
    events = [json.loads(event[6:]) for event in sent.decode().split("\n\n")[:-2]]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "x" * 400
    assert made.call_count == 400


async def test_other_calls_run_between_the_slices_of_a_stream_that_is_read_at_once() -> None:
    stream, made = stream_of(400, num_top=8)

    async def read() -> None:
        async for _ in stream:
            pass

    reading, num_made = asyncio.create_task(read()), 0
    while not reading.done():
        await asyncio.sleep(0)
        assert made.call_count - num_made <= SLICE_ENTRIES // 10
        num_made = made.call_count
    await reading
    assert made.call_count == 400


async def test_an_echo_of_a_long_prompt_in_many_choices_is_refused(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "ECHO_CHARACTERS_MAX", 1000)  # the model's prompts are too short for the real one
    values = {"model": "kjv", "prompt": ["And God"] * 2, "echo": True, "max_tokens": 1}
    response = await door.request(fake(), "POST", "/v1/completions", json=values | {"n": 72})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "echo")
    assert "1008 characters" in response.json()["error"]["message"]
    assert (await door.complete(fake(sequence("a")), **values | {"n": 71}))["choices"]


async def test_large_conversations_of_a_tenant_are_read_and_rendered_one_at_a_time(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most, threads = Counter[str](), Counter[str](), set[int]()

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            running[name] += 1
            most[name] = max(most[name], running[name])
            threads.add(threading.get_ident())
            time.sleep(0.02)  # so that others would run meanwhile
            try:
                return work(*arguments)
            finally:
                running[name] -= 1

        return run

    monkeypatch.setattr(schemas, "parse", noted("read", schemas.parse))
    monkeypatch.setattr(schemas, "messages_of", noted("converted", schemas.messages_of))
    monkeypatch.setattr(ChatTemplate, "render", noted("rendered", ChatTemplate.render))
    body = {"model": "kjv", "messages": [{"role": "user", "content": "a"}] * 2000}
    responses = await door.together(fake(), "/v1/chat/completions", [body] * 3)
    assert {response.status_code for response in responses} == {400}  # far too long for the model
    assert most == {"read": 1, "converted": 1, "rendered": 1}
    assert threading.get_ident() not in threads


async def test_calls_that_come_together_read_the_tokenizer_once_and_leave_threads_to_other_work(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, num_running, most = threading.Lock(), 0, 0
    render = ChatTemplate.render

    def noted(*arguments: Any) -> str:
        nonlocal num_running, most
        with lock:
            num_running += 1
            most = max(most, num_running)
        time.sleep(0.02)  # so that others would run meanwhile
        with lock:
            num_running -= 1
        return render(*arguments)

    monkeypatch.setattr(ChatTemplate, "render", noted)
    service = fake(sequence("a"))
    body = {"model": "kjv", "messages": [{"role": "user", "content": "a"}]}
    responses = await door.together(service, "/v1/chat/completions", [body] * 12)
    assert {response.status_code for response in responses} == {200}
    assert len(requests_of(service, "get_tokenizer")) == 1
    assert most <= 2


@pytest.mark.parametrize("logprobs", [None, 0, 1])
async def test_a_stream_is_the_whole_response_in_pieces(door: Door, logprobs: int | None) -> None:
    topk = [[("b", -0.25)]] * len(tokens_of(" \u20ac10 now"))
    service = fake(sequence(" \u20ac10 now", is_stop=True, topk=topk if logprobs else ()), sequence("b", topk=topk[:1]))
    values = {"prompt": ["And", "Or"], "n": 2, "logprobs": logprobs, "echo": logprobs is None}
    whole = await door.ok(service, "/v1/completions", **values)
    *chunks, last = await door.chunks(service, "/v1/completions", stream_options={"include_usage": True}, **values)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    for expected in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == expected["index"]]
        assert "".join(c["text"] for c in mine) == expected["text"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [expected["finish_reason"]]
        assert not any("\ufffd" in c["text"] for c in mine)
        if logprobs is not None:
            for name, values_of in expected["logprobs"].items():
                pieces = [c["logprobs"][name] or [] for c in mine if c["logprobs"]]
                assert [value for piece in pieces for value in piece] == (values_of or [])


async def test_a_stream_that_gets_its_last_tokens_with_the_finished_sample_has_the_whole_text(door: Door) -> None:
    whole = fake(sequence("abcd", is_stop=True))

    async def streamed(*arguments: Any) -> AsyncIterator[sampling_pb2.StreamSampleResponse]:
        events = [event async for event in whole.stream_sample(*arguments)]
        for event in (*events[:2], events[-1]):
            yield event

    chunks = await door.chunks(fake(stream_sample=streamed), "/v1/completions", prompt="And")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcd"


async def test_a_streamed_conversation_begins_with_the_role(door: Door) -> None:
    messages = [{"role": "user", "content": "Who?"}]
    chunks = await door.chunks(fake(sequence("ax", is_stop=True)), "/v1/chat/completions", messages=messages)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "a"},
        {"content": "x"},
        {},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert "usage" not in chunks[0]


CHAT = {"messages": [{"role": "user", "content": "Who?"}]}
TEXT = {"prompt": "And"}


@pytest.mark.parametrize(
    ("body", "param", "code", "expected"),
    [
        ({}, "prompt", "invalid_value", "Field required"),
        (TEXT | {"model": None}, "model", "invalid_value", "Field required"),
        (TEXT | {"temperature": 2.5}, "temperature", "invalid_value", "less than or equal to 2"),
        (TEXT | {"top_p": 0}, "top_p", "invalid_value", "greater than 0"),
        (TEXT | {"n": 0}, "n", "invalid_value", "greater than or equal to 1"),
        (TEXT | {"n": 5000}, "n", "invalid_value", "at most 2048"),
        (TEXT | {"logprobs": 21}, "logprobs", "invalid_value", "less than or equal to 20"),
        (TEXT | {"stop": ["a", "b", "c", "d", "e"]}, "stop", "invalid_value", "at most 4"),
        (TEXT | {"stop": [""]}, "stop", "invalid_value", "1 to 1000 characters"),
        (TEXT | {"best_of": 3}, "best_of", "unsupported_parameter", "choose among them"),
        (TEXT | {"suffix": "Amen"}, "suffix", "unsupported_parameter", "leave it out"),
        (TEXT | {"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter", "leave it out"),
        (TEXT | {"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter", "send 0"),
        (TEXT | {"min_p": 0.5}, "min_p", "unknown_parameter", "leave it out"),
        (TEXT | {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value", "stream=true"),
        (TEXT | {"n": 1000, "logprobs": 20}, "logprobs", "invalid_value", "336000 log-probabilities"),
        (CHAT | {"n": 300, "logprobs": True, "top_logprobs": 20}, "logprobs", "invalid_value", "choices"),
        (TEXT | {"max_tokens": 64}, "prompt", "context_length_exceeded", "64 tokens in all"),
        ({"prompt": ""}, "prompt", "invalid_value", "prompt is empty"),
        ({"prompt": []}, "prompt", "invalid_value", "non-empty"),
        ({"prompt": ["a", 1]}, "prompt", "invalid_value", r"prompt\[1\]"),
        ({"prompt": [1, 1 << 70], "echo": True}, "prompt", "invalid_value", "not a token id"),
        ({"prompt": [[1], [2, -1]], "echo": True}, "prompt", "invalid_value", "0 to 2047"),
        ({"prompt": ["a"] * 1025}, "prompt", "invalid_value", "at most 1024"),
        (CHAT | {"top_logprobs": 2}, "top_logprobs", "invalid_value", "logprobs=true"),
        (CHAT | {"tools": [{"type": "function"}]}, "tools", "unsupported_parameter", "leave it out"),
        (CHAT | {"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter", "text"),
        ({"messages": []}, "messages", "invalid_value", "at least 1"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "invalid_value", "no content"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0]", "invalid_value", "king"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]", "invalid_value", "tools are not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0]",
            "invalid_value",
            "image_url",
        ),
    ],
)
async def test_unsupported_parameters_are_refused_by_name(
    door: Door, body: dict[str, Any], param: str, code: str, expected: str
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    service = fake(sequence("a"))
    response = await door.request(service, "POST", path, json={"model": "kjv"} | body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert re.search(expected, error["message"]), error["message"]
    assert requests_of(service, "sample") == []


async def test_parameters_without_effect_are_accepted(door: Door) -> None:
    without_effect = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "frequency_penalty": 0.0,
        "presence_penalty": None,
        "store": False,
        "metadata": {"a": "b"},
        "modalities": ["text"],
    }
    await door.ok(fake(sequence("a")), "/v1/chat/completions", **CHAT, **without_effect)
    await door.complete(fake(sequence("a"), sequence("b")), n=2, best_of=2)


QUEUE_FULL = ServiceError(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "later", retry_delay_s=1.5)
SHUTTING_DOWN = ServiceError(Code.UNAVAILABLE, "SHUTTING_DOWN", "later", retry_delay_s=1.0)
INVALID = ServiceError(Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "m")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "retry_after"),
    [
        (QUEUE_FULL, 429, "rate_limit_error", "rate_limit_exceeded", "2"),
        (SHUTTING_DOWN, 503, "server_error", "shutting_down", "1"),
        (INVALID, 400, "invalid_request_error", "invalid_argument", None),
        (RuntimeError("the secret of the house"), 500, "server_error", "internal", None),
    ],
)
async def test_a_refusal_of_the_service_has_openais_form_and_status(
    door: Door, error: Exception, status: int, kind: str, code: str, retry_after: str | None, stream: bool
) -> None:
    service = fake(sample=error, stream_sample=[error])
    response = await door.request(service, "POST", "/v1/completions", json={"model": "kjv", "stream": stream} | TEXT)
    assert response.status_code == status
    received = response.json()["error"]
    assert (received["type"], received["param"], received["code"]) == (kind, None, code)
    assert response.headers.get("retry-after") == retry_after
    assert "secret" not in response.text


async def test_a_stream_ends_with_an_error_when_its_key_is_revoked(door: Door, store: Store) -> None:
    keys = Authenticator(store, Accounts(store, lambda: 1.0), lambda: 1.0)
    key, row = await keys.create_key("alice")

    async def one_token(*_: Any) -> AsyncIterator[sampling_pb2.StreamSampleResponse]:
        yield sampling_pb2.StreamSampleResponse(token=sampling_pb2.SampledToken(token=tokens_of("a")[0]))
        await asyncio.Event().wait()

    async def revoke() -> None:
        await keys.revoke_key(row.key_id)

    text = await door.streamed_with(keys, key, fake(stream_sample=one_token), revoke)
    assert "invalid_api_key" in text.split("\n\n")[-2]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_sample_is_an_error_response(door: Door, stream: bool) -> None:
    failed = ops_pb.Operation(
        name="n",
        state=ops_pb.OPERATION_STATE_FAILED,
        error=ops_pb.OperationError(code=Code.INTERNAL, reason="INTERNAL", message="the worker was lost twice"),
    )

    async def waited(_: Any, request: Any) -> AsyncIterator[ops_pb.WaitOperationsResponse]:
        failed.name = request.names[0]
        yield ops_pb.WaitOperationsResponse(operation=failed)

    drawn = sampling_pb2.StreamSampleResponse(token=sampling_pb2.SampledToken(token=tokens_of("a")[0]))
    streamed: Any = [drawn, sampling_pb2.StreamSampleResponse(operation=failed)]
    service = fake(wait_operations=waited, stream_sample=streamed)
    response = await door.request(service, "POST", "/v1/completions", json={"model": "kjv", "stream": stream} | TEXT)
    if stream:
        assert response.status_code == 200
        failure = json.loads(response.text.strip().rpartition("data: ")[2])
    else:
        assert response.status_code == 500
        failure = response.json()
    assert failure["error"]["message"] == "the worker was lost twice"


async def test_every_endpoint_needs_a_key_and_an_unknown_path_lists_the_endpoints(door: Door) -> None:
    for headers in ({"authorization": "Bearer wrong"}, {"authorization": ""}):
        service = fake()
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/anything")):
            response = await door.request(service, method, path, headers=headers)
            assert response.status_code == 401
            error = response.json()["error"]
            assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
            is_wrong = bool(headers["authorization"])
            assert error["message"].startswith("Incorrect API key provided: ") is is_wrong, "litellm tells by it"
        assert service.calls == []
    for path in ("/v1/embeddings", "/oai/api/v1/responses"):
        response = await door.request(fake(), "POST", path, json={})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")


async def test_an_unknown_model_is_refused_with_the_names_of_the_served_ones(door: Door) -> None:
    checkpoint = ServiceError(Code.NOT_FOUND, "NOT_FOUND", "no")
    for model, expected in (
        ("gpt-4o", "this pool serves kjv"),
        ("tinker://a:train:0/sampler_weights/x", "no such checkpoint"),
        ("tinker://nonsense", "three parts"),
    ):
        service = fake(get_checkpoint=checkpoint)
        response = await door.request(service, "POST", "/v1/completions", json={"model": model} | TEXT)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
        assert expected in error["message"]


async def test_a_model_without_template_or_tokenizer_is_refused_with_an_alternative(door: Door) -> None:
    bare = {"tokenizer.json": FILES["tokenizer.json"]}
    service = fake(sequence("a"), get_tokenizer=sessions_pb2.GetTokenizerResponse(files=bare))
    response = await door.request(service, "POST", "/v1/chat/completions", json={"model": "kjv"} | CHAT)
    assert response.status_code == 400
    assert "/v1/completions" in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "no_chat_template"
    service = fake(get_tokenizer=sessions_pb2.GetTokenizerResponse(files={"tokenizer.json": b"{}"}))
    response = await door.request(service, "POST", "/v1/completions", json={"model": "kjv"} | TEXT)
    assert response.status_code == 404
    assert "tokenizer.json cannot be read" in response.json()["error"]["message"]
    strict = FILES | {"chat_template.jinja": b"{{ raise_exception('Only one message') }}"}
    service = fake(get_tokenizer=sessions_pb2.GetTokenizerResponse(files=strict))
    response = await door.request(service, "POST", "/v1/chat/completions", json={"model": "kjv"} | CHAT)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert "Only one message" in response.json()["error"]["message"]


async def test_an_ended_session_is_replaced(door: Door) -> None:
    sessions = iter(("old", "new"))

    async def create_session(*_: Any) -> sessions_pb2.CreateSessionResponse:
        return sessions_pb2.CreateSessionResponse(session=sessions_pb2.Session(session_id=next(sessions)))

    async def create_sampler(_: Any, request: sampling_pb2.CreateSamplerRequest) -> sampling_pb2.CreateSamplerResponse:
        if request.session_id == "old":
            raise SESSION_ENDED
        return sampling_pb2.CreateSamplerResponse(sampler=sampling_pb2.Sampler(sampler_id="new:sample:0"))

    service = fake(sequence("a"), create_session=create_session, create_sampler=create_sampler)
    await door.complete(service)
    assert requests_of(service, "sample")[0].sampler_id == "new:sample:0"


async def test_only_the_same_idempotency_key_gives_a_sample_the_same_seq(door: Door) -> None:
    service = fake(sequence("a"))
    body = {"model": "kjv", "prompt": ["And", "Or"]}
    for key in ("one", "one", "two", ""):
        headers = {"idempotency-key": key} if key else {}
        await door.request(service, "POST", "/v1/completions", json=body, headers=headers)
    seqs = [request.seq for request in requests_of(service, "sample")]
    assert seqs[:2] == seqs[2:4]
    assert len(set(seqs)) == 6
    taken = ServiceError(Code.ALREADY_EXISTS, "SEQ_TAKEN", "no")
    headers = {"idempotency-key": "one"}
    response = await door.request(fake(sample=taken), "POST", "/v1/completions", json=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "idempotency_key_reused"


async def test_the_list_of_models_has_every_name_that_the_tenant_may_use(door: Door) -> None:
    training, sampler, external = (
        checkpoints_pb2.Checkpoint(
            path=f"tinker://a:train:0/{kind}/x", adapter_id="a:train:0", kind=value, base_model="kjv", seq=seq
        )
        for seq, (kind, value) in enumerate(
            (
                ("weights", checkpoints_pb2.CHECKPOINT_KIND_TRAINING),
                ("sampler_weights", checkpoints_pb2.CHECKPOINT_KIND_SAMPLER),
                ("external_weights", checkpoints_pb2.CHECKPOINT_KIND_EXTERNAL),
            )
        )
    )
    listed = checkpoints_pb2.ListCheckpointsResponse(checkpoints=[external, sampler, training])
    response = await door.request(fake(list_checkpoints=listed), "GET", "/v1/models")
    assert [model["id"] for model in response.json()["data"]] == ["kjv", "a:train:0", sampler.path, training.path]
    found = checkpoints_pb2.GetCheckpointResponse(checkpoint=sampler)
    response = await door.request(fake(get_checkpoint=found), "GET", f"/v1/models/{sampler.path}")
    assert (response.json()["id"], response.json()["root"]) == (sampler.path, "kjv")
    response = await door.request(fake(), "GET", "/v1/models/unknown")
    assert response.json()["error"]["code"] == "model_not_found"


async def test_a_tenant_whose_session_is_looked_up_slowly_delays_no_other_tenant() -> None:
    may_find = asyncio.Event()

    async def find_session(principal: Principal, _: object) -> str:
        if principal.tenant_id == "slow":
            await may_find.wait()
        return "found"

    samplers, service = Samplers(), fake(find_session=find_session)
    calls = [
        cast("Call", SimpleNamespace(service=service, principal=replace(PRINCIPAL, tenant_id=tenant)))
        for tenant in ("slow", "quick")
    ]
    weights = Weights(base_model=BASE, checkpoint=None)
    slow = asyncio.create_task(samplers.of(calls[0], weights))
    await asyncio.sleep(0)
    assert (await asyncio.wait_for(samplers.of(calls[1], weights), 60)).session_id == "found"
    may_find.set()
    assert (await slow).session_id == "found"
