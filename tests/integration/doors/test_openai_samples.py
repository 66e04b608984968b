"""OpenAI's door on a real coordinator with toy engines: its samples, samplers and sessions."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from coordinator.base.config import Limits
from coordinator.base.tenant_limits import TenantLimits
from coordinator.doors.openai import weights
from tests.support.database import query
from tests.support.served_pool import ServedPool, restartable_pool
from tests.support.waiting import until, wait_until
from tinkerpool.convert import from_tensor
from tinkerpool.v1 import operations_pb2 as ops_pb

WAIT_S = 30


def toy_tokenizer() -> bytes:
    """Return a tokenizer of a hundred words, w0 to w99; the first one ends a text."""
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(100)}, unk_token="w99"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    text: str = tokenizer.to_str()
    return text.encode()


FILES = {
    "tokenizer.json": toy_tokenizer(),
    "chat_template.jinja": b"{% for m in messages %}{{ m.content }} {% endfor %}",
}


@contextmanager
def pool_of_words(data_dir: Path, **options: Any) -> Iterator[ServedPool]:
    with restartable_pool(data_dir, tokenizer_files=FILES, **options) as pool:
        yield pool


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ServedPool]:
    with pool_of_words(tmp_path / "data") as pool:
        yield pool


@contextmanager
def client_of(pool: ServedPool, tenant: str = "alice", **options: Any) -> Iterator[openai.OpenAI]:
    settings: dict[str, Any] = {"max_retries": 0, "timeout": WAIT_S} | options
    with openai.OpenAI(base_url=f"{pool.http_url}/v1", api_key=pool.key(tenant), **settings) as client:
        yield client


def rows(pool: ServedPool, sql: str) -> list[Any]:
    return list(query(pool.pool.core.config.data_dir, sql))


def outcome_of(pool: ServedPool) -> ops_pb.Operation:
    """Return the operation of the only sample."""
    [row] = rows(pool, "SELECT outcome FROM operations LEFT JOIN outcomes USING (target_id, seq) WHERE kind = 'sample'")
    return ops_pb.Operation.FromString(row["outcome"] or b"")


def save(pool: ServedPool, name: str, adapter: str, seq: int) -> str:
    """Save an adapter's weights for sampling under a name; return the path."""
    return pool.run(pool.pool.publish(adapter, seq, name)).save_weights_for_sampler.path


def test_many_requests_share_one_session_and_a_sampler_for_each_model(pool: ServedPool) -> None:
    adapter = pool.run(pool.pool.adapter())
    paths = [save(pool, name, adapter, seq) for seq, name in enumerate(("a", "b"), start=1)]
    with client_of(pool) as client, ThreadPoolExecutor(16) as threads:
        complete = partial(client.completions.create, prompt="w1", max_tokens=2)
        responses = list(threads.map(lambda model: complete(model=model), ["toy", *paths] * 20))
    assert all(len(response.choices[0].text.split()) == 2 for response in responses)
    assert len(rows(pool, "SELECT * FROM samplers")) == 3
    sessions = rows(pool, "SELECT * FROM sessions WHERE user_metadata LIKE '%openai%'")
    assert len(sessions) == 1


def test_an_adapters_name_stands_for_its_newest_saved_weights(pool: ServedPool) -> None:
    adapter = pool.run(pool.pool.adapter())
    with client_of(pool) as client:
        with pytest.raises(openai.BadRequestError, match="save_weights_for_sampler") as refused:
            client.completions.create(model=adapter, prompt="w1", max_tokens=1)
        assert refused.value.code == "no_saved_weights"
        path = ""
        for seq, name in enumerate(("a", "b", "c", "d"), start=1):
            if name in "bc":
                path = pool.run(pool.pool.save(adapter, seq, name)).save_state.path
            else:
                path = save(pool, name, adapter, seq)
            assert client.completions.create(model=adapter, prompt="w1", max_tokens=1).model == path
        assert [model.id for model in client.models.list()][:2] == ["toy", adapter]
        assert client.models.retrieve(path).id == path


def test_deleted_overwritten_and_foreign_checkpoints_are_never_sampled_from(pool: ServedPool) -> None:
    adapter = pool.run(pool.pool.adapter())
    path = save(pool, "a", adapter, 1)

    def sampled(client: openai.OpenAI) -> str:
        return client.completions.create(model=path, prompt="w1", max_tokens=8, seed=1).choices[0].text

    async def train() -> None:
        await pool.pool.forward_backward(adapter, 2, 4)
        await pool.pool.optim_step(adapter, 3)

    with client_of(pool) as client, client_of(pool, "bob") as bob:
        before = sampled(client)
        with pytest.raises(openai.NotFoundError):
            sampled(bob)
        pool.run(pool.pool.delete_checkpoint(path))
        with pytest.raises(openai.NotFoundError, match="no such checkpoint"):
            sampled(client)
        pool.run(train())
        assert save(pool, "a", adapter, 4) == path
        assert sampled(client) != before


def ask_and_leave(pool: ServedPool, headers: dict[str, str] | None = None, **values: Any) -> None:
    """Request a completion, and disconnect once its sample is submitted."""
    own = {"authorization": f"Bearer {pool.key()}"} | (headers or {})
    body = {"model": "toy", "prompt": "w1", "max_tokens": 60} | values

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=pool.http_url, headers=own) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: pool.pool.core.samples.num_samples)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(ask())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_cancels_its_samples(pool: ServedPool, stream: bool) -> None:
    pool.pool.hold()
    ask_and_leave(pool, stream=stream)
    wait_until(lambda: outcome_of(pool).state == ops_pb.OPERATION_STATE_FAILED)
    assert outcome_of(pool).error.reason == "CANCELLED"
    pool.release()


def test_a_stream_that_waits_for_the_whole_sample_is_sent_no_tokens(
    pool: ServedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = pool.pool.core.samples.streams
    sent = Mock(wraps=streams.send_token)
    monkeypatch.setattr(streams, "send_token", sent)
    num_tokens = {}
    with client_of(pool) as client:
        for logprobs in (None, 0, 2):
            asked = client.completions.create(
                model="toy", prompt="w1", max_tokens=20, seed=1, logprobs=logprobs, stream=True
            )
            num_tokens[logprobs] = len("".join(chunk.choices[0].text for chunk in asked).split())
            assert sent.call_count == (num_tokens[logprobs] if logprobs != 2 else 0)
            sent.reset_mock()
    assert num_tokens == dict.fromkeys((None, 0, 2), 20)


def test_a_request_with_an_idempotency_key_continues_after_its_client_disconnects(pool: ServedPool) -> None:
    pool.pool.hold()
    ask_and_leave(pool, {"idempotency-key": "mine"})
    time.sleep(0.3)
    pool.release()
    wait_until(lambda: outcome_of(pool).state == ops_pb.OPERATION_STATE_SUCCEEDED)
    with client_of(pool) as client:
        response = client.completions.create(
            model="toy", prompt="w1", max_tokens=60, extra_headers={"Idempotency-Key": "mine"}
        )
    sampled = outcome_of(pool).sample.sequences[0]
    assert response.choices[0].text.split() == [f"w{token}" for token in from_tensor(sampled.tokens).tolist()]


def test_a_request_with_an_idempotency_key_runs_once_across_a_restart(tmp_path: Path) -> None:
    with pool_of_words(tmp_path / "data") as pool, client_of(pool) as client:
        pool.pool.hold()
        ask: Any = lambda: client.completions.create(  # noqa: E731
            model="toy", prompt=["w1", "w2"], max_tokens=8, extra_headers={"Idempotency-Key": "mine"}
        )
        with ThreadPoolExecutor(1) as threads:
            lost = threads.submit(ask)
            wait_until(lambda: pool.pool.core.samples.num_samples == 2)
            pool.stop()
            with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
                lost.result(WAIT_S)
        pool.start()
        first, again = ask(), ask()
        assert [c.text for c in first.choices] == [c.text for c in again.choices]
        assert len(rows(pool, "SELECT * FROM operations WHERE kind = 'sample'")) == 2
        assert len(rows(pool, "SELECT * FROM samplers")) == 1
        with pytest.raises(openai.BadRequestError, match="Idempotency-Key"):
            client.completions.create(
                model="toy", prompt=["w1", "w3"], max_tokens=8, extra_headers={"Idempotency-Key": "mine"}
            )


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_request_with_an_idempotency_key_can_be_repeated_as_long_as_results_are_kept(
    tmp_path: Path, is_queued: bool
) -> None:
    settings: dict[str, Any] = {"session_timeout_s": 0.3, "sweep_interval_s": 0.05}
    with pool_of_words(tmp_path / "data", **settings) as pool, client_of(pool) as client:
        ask: Any = lambda timeout: client.completions.create(  # noqa: E731
            model="toy", prompt="w1", max_tokens=8, extra_headers={"Idempotency-Key": "mine"}, timeout=timeout
        )
        texts = list[str]()
        if is_queued:
            pool.pool.hold()
            with pytest.raises(openai.APITimeoutError):
                ask(0.2)
        else:
            texts.append(ask(WAIT_S).choices[0].text)
        idle = pool.run(pool.pool.session("bob"))
        ended = f"SELECT * FROM sessions WHERE session_id = '{idle}' AND ended_at IS NOT NULL"
        wait_until(lambda: rows(pool, ended))
        pool.release()
        texts.append(ask(WAIT_S).choices[0].text)
        assert len(set(texts)) == 1
        assert len(rows(pool, "SELECT * FROM operations WHERE kind = 'sample'")) == 1


def test_a_stop_of_the_pool_cancels_no_samples(tmp_path: Path) -> None:
    with pool_of_words(tmp_path / "data") as pool, client_of(pool) as client:
        pool.pool.hold()
        with ThreadPoolExecutor(1) as threads:
            lost = threads.submit(client.completions.create, model="toy", prompt="w1", max_tokens=8)
            wait_until(lambda: pool.pool.core.samples.num_samples)
            pool.stop()
            with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
                lost.result(WAIT_S)
        pool.start()
        wait_until(lambda: outcome_of(pool).state == ops_pb.OPERATION_STATE_SUCCEEDED)


@pytest.mark.slow
def test_the_session_of_the_door_stays_live_while_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "HEARTBEAT_S", 0.1)
    settings: dict[str, Any] = {"session_timeout_s": 0.6, "fetched_retention_s": 0.6, "sweep_interval_s": 0.1}
    with pool_of_words(tmp_path / "data", **settings) as pool, client_of(pool) as client:
        pool.pool.hold()
        threading.Timer(2.0, pool.release).start()
        assert client.completions.create(model="toy", prompt="w1", max_tokens=2).choices[0].text
        live = "SELECT * FROM sessions WHERE ended_at IS NULL"
        assert len(rows(pool, live)) == 1
        wait_until(lambda: not rows(pool, live))
        assert client.completions.create(model="toy", prompt="w1", max_tokens=2).choices[0].text


def test_a_session_of_the_door_whose_row_was_deleted_is_replaced(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ended_retention_s": 0.0, "result_retention_s": 1.0, "sweep_interval_s": 0.1}
    of_the_door = "SELECT session_id FROM sessions WHERE user_metadata LIKE '%openai%'"
    with pool_of_words(tmp_path / "data", **settings) as pool, client_of(pool) as client:
        assert client.completions.create(model="toy", prompt="w1", max_tokens=2).choices[0].text
        [row] = rows(pool, of_the_door)
        pool.run(pool.pool.finish_session(row["session_id"]))
        wait_until(lambda: not rows(pool, of_the_door))
        assert client.completions.create(model="toy", prompt="w1", max_tokens=2).choices[0].text


def test_a_full_queue_is_refused_with_a_retry_delay(tmp_path: Path) -> None:
    limits = Limits(pending_operations_max=1)
    with pool_of_words(tmp_path / "data", limits=limits) as pool, client_of(pool) as client:
        pool.pool.hold()
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(client.completions.create, model="toy", prompt="w1", max_tokens=2)
            wait_until(lambda: pool.pool.core.samples.num_samples)
            with pytest.raises(openai.RateLimitError) as refused:
                client.completions.create(model="toy", prompt="w1", max_tokens=2)
            assert refused.value.response.headers["retry-after"] == "1"
            with client_of(pool, max_retries=10) as patient:
                waiting = threads.submit(patient.completions.create, model="toy", prompt="w2", max_tokens=2)
                pool.release()
                assert running.result(WAIT_S).choices
                assert waiting.result(WAIT_S).choices


def test_a_rate_is_a_429_with_both_headers_and_a_budget_a_403_without(tmp_path: Path) -> None:
    with (
        pool_of_words(tmp_path / "rate", tenant_limits=TenantLimits(operations_per_s=0.3)) as pool,
        client_of(pool) as client,
    ):
        # Its session, its sampler and its sample are the three operations that may come at once.
        assert client.completions.create(model="toy", prompt="w1", max_tokens=2).choices
        with pytest.raises(openai.RateLimitError) as limited:
            client.completions.create(model="toy", prompt="w1", max_tokens=2)
        headers = limited.value.response.headers
        assert limited.value.code == "rate_limit_exceeded"
        assert (int(headers["retry-after"]), 1000 < int(headers["retry-after-ms"]) <= 3334) == (4, True)
    with (
        pool_of_words(tmp_path / "budget", tenant_limits=TenantLimits(tokens_per_month=1)) as pool,
        client_of(pool) as client,
    ):
        with pytest.raises(openai.PermissionDeniedError, match="tokens_per_month=NUMBER") as refused:
            client.completions.create(model="toy", prompt="w1", max_tokens=2)
        assert refused.value.code == "insufficient_quota"
        assert not {"retry-after", "retry-after-ms"} & refused.value.response.headers.keys()


@pytest.mark.parametrize("stream", [False, True])
def test_a_partly_refused_batch_leaves_no_sample_running(tmp_path: Path, stream: bool) -> None:
    limits = Limits(pending_operations_max=2)
    with pool_of_words(tmp_path / "data", limits=limits) as pool, client_of(pool) as client:
        pool.pool.hold()
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="toy", prompt=["w1", "w2", "w3"], max_tokens=60, stream=stream)
        wait_until(lambda: not pool.pool.core.samples.num_samples)


def test_a_stream_that_a_stop_interrupts_ends_with_an_error(tmp_path: Path) -> None:
    with pool_of_words(tmp_path / "data") as pool:
        engine = pool.pool.engines["w0"][-1]
        headers = {"authorization": f"Bearer {pool.key()}"}
        body = {"model": "toy", "prompt": "w1", "max_tokens": 60, "n": 2, "stream": True}
        decode = engine.decode_step

        def one_step() -> Any:
            engine.may_decode, events = False, decode()
            return events

        engine.decode_step = one_step  # type: ignore[method-assign]
        with httpx.stream("POST", f"{pool.http_url}/v1/completions", json=body, headers=headers, timeout=WAIT_S) as got:
            lines = got.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]
            threading.Thread(target=lambda: pool.run(pool.pool.core.samples.stop())).start()
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
