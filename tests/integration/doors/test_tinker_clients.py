"""Sampling clients of the official SDK: one open call for all samples, own sequence numbers for copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

from coordinator.operations.in_flight import CLIENT_SEQS
from tests.support.doors.sdk import LEAKS, Wire, sdk
from tests.support.served_pool import ServedPool, restartable_pool
from tests.support.waiting import wait_until

pytestmark = [LEAKS, pytest.mark.slow]
WAIT_S = 30
POLL_S = 0.3
PROMPT = types.ModelInput.from_ints([1, 2, 3])


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    with restartable_pool(tmp_path_factory.mktemp("pool") / "data", poll_s=POLL_S) as pool:
        yield pool


@pytest.fixture
def sampler_id(wired: Wire) -> str:
    asked = {"session_id": wired.session(), "sampling_session_seq_id": 0, "base_model": "toy"}
    return str(wired.ok("/create_sampling_session", asked)["sampling_session_id"])


def sample(wired: Wire, sampler_id: str, seq: int, **params: Any) -> str:
    body = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 3, "seed": 1, **params}}
    return str(wired.ok("/asample", {**body, "sampling_session_id": sampler_id, "seq_id": seq})["request_id"])


def finished(wired: Wire, sampler_id: str, cursor: int = 0, client: int = 0, timeout: float | None = None) -> Any:
    target = {"type": "sampling_session", "sampling_session_id": sampler_id, "cloned_sampler_id": client}
    body = {"target": target, "prev_cursor": cursor, "timeout": timeout, "retrieved_request_ids": ["any"]}
    response = wired.ok("/retrieve_futures", body)
    return [(c["state"], c["request_id"]) for c in response["completions"]], response["cursor"]


def test_finished_samples_are_listed_with_a_cursor_and_fetched_one_by_one(wired: Wire, sampler_id: str) -> None:
    assert finished(wired, sampler_id, timeout=0)[0] == []
    name = sample(wired, sampler_id, 0)
    completions, cursor = finished(wired, sampler_id)
    assert completions == [("finished", name)]
    begin = time.monotonic()
    assert finished(wired, sampler_id, cursor) == ([], cursor)
    assert time.monotonic() - begin > POLL_S * 0.9
    assert len(wired.result(name)["sequences"][0]["tokens"]) == 3
    second = sample(wired, sampler_id, 1)
    found: list[tuple[str, str]] = []
    while not found:  # a poll may end before the sample does
        found = finished(wired, sampler_id, cursor)[0]
    assert found == [("finished", second)]


def test_fetched_samples_are_not_listed_again_after_a_list_was_lost(
    pool: ServedPool, wired: Wire, sampler_id: str
) -> None:
    names = [sample(wired, sampler_id, seq) for seq in range(2)]
    for name in names:
        wired.result(name)
    sample(wired, sampler_id, 2)  # the commit of its append makes the fetches durable
    _, cursor = finished(wired, sampler_id)
    pool.pool.core.finished_samples._lists.clear()
    assert not {name for _, name in finished(wired, sampler_id, cursor, timeout=0)[0]} & set(names)


def test_a_cancelled_sample_is_listed_as_failed(pool: ServedPool, wired: Wire, sampler_id: str) -> None:
    pool.pool.hold()
    name = sample(wired, sampler_id, 0)
    wired.ok("/cancel_future", {"request_id": name})
    pool.release()
    completions: list[Any] = []
    while not completions:
        completions, _ = finished(wired, sampler_id)
    assert completions == [("failed", name)]
    assert "CANCELLED" in wired.result(name)["error"]


def test_each_client_has_its_own_sequence_numbers_and_promises(wired: Wire, sampler_id: str) -> None:
    numbers = [wired.ok("/join_sampling_session", {"sampling_session_id": sampler_id})["client_counter"] for _ in "ab"]
    assert len({0, *numbers}) == 3
    names = {client: sample(wired, sampler_id, client * CLIENT_SEQS) for client in (0, *numbers)}
    for client, name in names.items():
        assert finished(wired, sampler_id, client=client)[0] == [("finished", name)]


def test_an_ended_session_cannot_be_joined(wired: Wire, sampler_id: str) -> None:
    wired.ok(f"/sessions/{sampler_id.rsplit(':', 2)[0]}/finish", {})
    assert wired.post("/join_sampling_session", {"sampling_session_id": sampler_id}).status_code == 403


def calls_of(pool: ServedPool, monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """Record the requests of a use case from now on."""
    service, calls = pool.pool.coordinator.service, []
    use_case: Callable[..., Any] = getattr(service, name)

    def recorded(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return use_case(*args, **options)

    monkeypatch.setattr(service, name, recorded)
    return calls


def test_the_sdk_holds_one_call_for_all_its_samples(pool: ServedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = calls_of(pool, monkeypatch, "finished_operations")
    params = types.SamplingParams(max_tokens=3, seed=1)
    with sdk(pool.http_url, pool.key()) as service:
        sampler = service.create_sampling_client(base_model="toy").result(WAIT_S)
        pool.pool.hold()
        futures = [sampler.sample(PROMPT, 1, params) for _ in range(60)]
        live = pool.pool.core.in_flight
        wait_until(lambda: len(live) == 60)
        time.sleep(2 * POLL_S)
        waits_meanwhile = len(waits)
        pool.release()
        assert waits_meanwhile == 0  # no result is requested before it is listed
        responses = [future.result(WAIT_S) for future in futures]
        assert {tuple(response.sequences[0].tokens) for response in responses} == {
            tuple(responses[0].sequences[0].tokens)
        }
        assert len(waits) == 60


def test_the_sdk_is_told_to_use_the_transport_that_loses_no_cancellation(pool: ServedPool) -> None:
    with sdk(pool.http_url, pool.key()) as service:
        holder = service.holder
        assert not holder._client_config.use_pyqwest_transport  # private: the SDK shows it nowhere

        async def transports() -> set[type]:
            with holder.aclient(ClientConnectionPoolType.RETRIEVE_FUTURES) as client:
                return {type(client._client._transport)}

        assert holder.run_coroutine_threadsafe(transports()).result(WAIT_S) == {httpx.AsyncHTTPTransport}


def test_copies_of_a_client_are_numbered_by_the_pool(pool: ServedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    joins = calls_of(pool, monkeypatch, "join_sampler")
    params = types.SamplingParams(max_tokens=3, seed=1)
    with sdk(pool.http_url, pool.key()) as service:
        sampler = service.create_sampling_client(base_model="toy").result(WAIT_S)
        handle = sampler.get_sampler_handle()
        copies = [tinker.SamplingClient.from_sampler_handle(handle, api_key=f"tml-{pool.key()}") for _ in range(2)]
        clients = [sampler, *(copy.result(WAIT_S) if hasattr(copy, "result") else copy for copy in copies)]
        responses = [client.sample(PROMPT, 1, params) for client in clients for _ in range(3)]
        ids = {response.result(WAIT_S).sequences[0].sequence_id for response in responses}
        assert len(ids) == 9
        assert len(joins) == 2


def test_running_samples_survive_a_restart_of_the_pool(tmp_path: Path) -> None:
    params = types.SamplingParams(max_tokens=3, seed=1)
    with restartable_pool(tmp_path / "data", poll_s=POLL_S) as pool, sdk(pool.http_url, pool.key()) as service:
        sampler = service.create_sampling_client(base_model="toy").result(WAIT_S)
        before = sampler.sample(PROMPT, 1, params).result(WAIT_S)
        pool.pool.hold()
        futures = [sampler.sample(PROMPT, 1, params) for _ in range(5)]
        wait_until(lambda: len(pool.pool.core.in_flight) == 5)
        pool.stop()
        pool.start()
        for future in futures:
            assert future.result(WAIT_S).sequences[0].tokens == before.sequences[0].tokens
