"""The Tinker HTTP protocol by hand: order, repetition, refusals, and error messages."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import hypothesis
import numpy as np
import pytest
import zstandard
from hypothesis import strategies as st

from coordinator.base.config import Limits
from coordinator.base.errors import MESSAGE_LENGTH_MAX
from coordinator.doors.http.calls import SMALL_BYTES_MAX
from coordinator.doors.http_app import HANDLERS
from coordinator.storage.access.audit import Act
from tests.support.doors.sdk import API, Wire, pass_of
from tests.support.served_pool import ServedPool, restartable_pool
from tinkerpool.compat import tinker_pb2 as wire
from tinkerpool.convert import to_tensor
from tinkerpool.v1 import training_pb2, training_pb2_grpc, types_pb2

POLL_S = 0.2
LIMITS = Limits(pending_operations_max=6, message_bytes_max=2 << 20)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    data_dir = tmp_path_factory.mktemp("pool") / "data"
    with restartable_pool(data_dir, poll_s=POLL_S, message_bytes_max=LIMITS.message_bytes_max, limits=LIMITS) as pool:
        yield pool


@pytest.fixture
def model(wired: Wire) -> str:
    return wired.model(wired.session())


def step(model: str, seq: int, **values: Any) -> dict[str, Any]:
    return {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 1e-3}, "type": "optim_step", **values}


def test_a_cross_entropy_without_weights_is_through_every_door_the_request_with_weights_of_one(
    pool: ServedPool, wired: Wire, model: str
) -> None:
    spelled, without = pass_of(model, 1, [1, 2, 3]), pass_of(model, 1, [1, 2, 3])
    del without.data[0].loss_fn_inputs["weights"]
    tensor = {"dtype": "int64", "data": [1, 2, 3], "shape": [3]}
    chunk = {"type": "encoded_text", "tokens": [1, 2, 3]}
    json_datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {"target_tokens": tensor}}
    json_pass = {"forward_backward_input": {"data": [json_datum], "loss_fn": "cross_entropy"}}
    promises = [
        wired.binary(spelled).json()["request_id"],
        wired.binary(without).json()["request_id"],
        wired.ok("/forward_backward", {**json_pass, "model_id": model, "seq_id": 1})["request_id"],
    ]
    tokens = to_tensor(np.array([1, 2, 3], np.int32))
    request = training_pb2.ForwardBackwardRequest(
        adapter_id=model,
        seq=1,
        data=[types_pb2.Datum(tokens=tokens, loss_inputs={"target_tokens": tokens})],
        loss_function=types_pb2.LOSS_FUNCTION_CROSS_ENTROPY,
    )
    with grpc.insecure_channel(pool.url.removeprefix("http://")) as channel:
        stub = training_pb2_grpc.TrainingServiceStub(channel)
        key = (("authorization", f"Bearer {pool.key()}"),)
        promises.append(stub.ForwardBackward(request, metadata=key).operation.name)
    assert promises == [f"{model}:1"] * 4
    assert wired.result(f"{model}:1")["metrics"]["tokens:sum"] == 3


def test_repeated_creations_of_models_and_sessions_create_one(wired: Wire) -> None:
    body = {"tags": [], "sdk_version": "0.38.0"}
    keys = {"x-idempotency-key": "stainless-python-retry-1"}
    sessions = {wired.post("/create_session", body, **keys).json()["session_id"] for _ in range(2)}
    assert len(sessions) == 1
    session = sessions.pop()
    assert wired.model(session, 4) == wired.model(session, 4) == f"{session}:train:4"
    other = {"session_id": session, "model_seq_id": 4, "base_model": "toy", "lora_config": {"rank": 16}}
    assert wired.post("/create_model", other).status_code == 400
    asked = {"session_id": session, "sampling_session_seq_id": 2, "base_model": "toy"}
    samplers = {wired.ok("/create_sampling_session", asked)["sampling_session_id"] for _ in range(2)}
    assert samplers == {f"{session}:sample:2"}


@pytest.mark.parametrize("compressed", [False, True])
def test_a_refused_request_consumes_its_seq_and_the_next_one_runs(wired: Wire, model: str, compressed: bool) -> None:
    bad = pass_of(model, 1, [1])
    bad.loss_fn = "custom"
    body = zstandard.compress(bad.SerializeToString()) if compressed else None
    headers = {"content-encoding": "zstd"} if compressed else {}
    promises = {wired.binary(bad, body, **headers).json()["request_id"] for _ in range(2)}
    assert promises == {f"{model}:1"}
    failure = wired.result(promises.pop())
    assert failure["category"] == "user"
    assert "use forward_backward_custom" in failure["error"]
    dimuon = step(model, 2, adam_params=None, optimizer_params={"type": "dimuon", "learning_rate": 1.0})
    assert "adam_params" in wired.result(wired.ok("/optim_step", dimuon)["request_id"])["error"]
    wired.binary(pass_of(model, 3, [1]))
    assert wired.result(wired.ok("/optim_step", step(model, 4))["request_id"])["metrics"]["num_datums:sum"] == 1


UNREADABLE = [
    ("/optim_step", {"adam_params": {"learning_rate": "steep"}}, "learning_rate"),
    ("/save_weights", {"overwrite": False}, "path: Field required"),
    ("/save_weights", {"path": "a", "ttl_seconds": 0}, "ttl_seconds"),
    ("/save_weights_for_sampler", {"path": "a", "kind": "moving"}, "kind"),
    ("/save_weights_external", {"age_encryption_recipients": 1}, "path: Field required"),
    ("/load_weights", {"optimizer": True}, "path: Field required"),
    ("/forward_backward", {"forward_backward_input": {"data": 1, "loss_fn": "ppo"}}, "data"),
    ("/forward_backward", {"loss": "ppo"}, "forward_backward_input"),
]


@pytest.mark.parametrize(("path", "body", "told"), UNREADABLE)
def test_a_malformed_body_consumes_its_seq(wired: Wire, model: str, path: str, body: dict[str, Any], told: str) -> None:
    promises = {wired.ok(path, {**body, "model_id": model, "seq_id": 1})["request_id"] for _ in range(2)}
    assert promises == {f"{model}:1"}
    failure = wired.result(promises.pop())
    assert told in failure["error"]
    assert failure["category"] == "user"
    wired.ok("/optim_step", step(model, 2))  # ends the gradient window that a failed pass closed
    wired.binary(pass_of(model, 3, [1]))
    assert wired.result(wired.ok("/optim_step", step(model, 4))["request_id"])["metrics"]["num_datums:sum"] == 1


@pytest.mark.parametrize("compressed", [False, True])
def test_a_too_large_pass_consumes_its_seq(wired: Wire, model: str, compressed: bool) -> None:
    large = pass_of(model, 1, [1])
    large.data[0].loss_fn_inputs["padding"].dense = bytes(LIMITS.message_bytes_max)
    body = zstandard.compress(large.SerializeToString()) if compressed else None
    response = wired.binary(large, body, **({"content-encoding": "zstd"} if compressed else {}))
    assert response.json() == {"request_id": f"{model}:1"}
    failure = wired.result(f"{model}:1")
    assert "REQUEST_TOO_LARGE" in failure["error"]
    assert failure["category"] == "user"
    assert "WINDOW_CLOSED" in wired.result(wired.ok("/optim_step", step(model, 2))["request_id"])["error"]


def test_truncated_or_too_large_bodies_consume_their_seq_if_they_name_it(wired: Wire, model: str) -> None:
    begun = step(model, 1, adam_params={"learning_rate": "x" * SMALL_BYTES_MAX})
    assert wired.post("/optim_step", begun).json() == {"request_id": f"{model}:1"}
    cut = b'{"model_id": "%s", "seq_id": 2, "adam_params": {"learn' % model.encode()
    assert wired.request("POST", "/optim_step", content=cut).json() == {"request_id": f"{model}:2"}
    unsure = b'{"model_id": "%s", "seq_id": 3' % model.encode()  # it may have been 31
    assert wired.request("POST", "/optim_step", content=unsure).status_code == 400
    damaged = pass_of(model, 3, [1]).SerializeToString() + b"\xff"
    assert wired.binary(pass_of(model, 3), damaged).json() == {"request_id": f"{model}:3"}
    packed = zstandard.compress(pass_of(model, 4, [1]).SerializeToString()) + b"more"
    response = wired.binary(pass_of(model, 4), packed, **{"content-encoding": "zstd"})
    assert response.json() == {"request_id": f"{model}:4"}
    assert [wired.result(f"{model}:{seq}")["category"] for seq in range(1, 5)] == ["user"] * 4


@pytest.mark.parametrize(
    ("chunk", "told"),
    [
        ({"type": "hologram"}, "has a chunk of type 'hologram': "),
        ({"type": "image", "data": "x"}, "has a chunk of type 'image': "),
        ({"type": "encoded_text"}, "has a chunk of type 'encoded_text' without tokens: "),
    ],
)
def test_a_chunk_that_is_not_text_is_refused_by_its_own_type_and_with_the_one_that_is_taken(
    wired: Wire, model: str, chunk: dict[str, Any], told: str
) -> None:
    passed = {"data": [{"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {}}], "loss_fn": "cross_entropy"}
    promise = wired.ok("/forward_backward", {"forward_backward_input": passed, "model_id": model, "seq_id": 1})
    sampler = {"session_id": model.rsplit(":", 2)[0], "sampling_session_seq_id": 0, "base_model": "toy"}
    sample = {"sampling_session_id": wired.ok("/create_sampling_session", sampler)["sampling_session_id"]}
    refused = wired.post("/asample", {**sample, "seq_id": 0, "prompt": {"chunks": [chunk]}, "sampling_params": {}})
    for message in (wired.result(promise["request_id"])["error"], refused.json()["detail"]):
        assert told in message
        assert "'encoded_text'" in message


def test_a_refused_json_forward_closes_no_gradient_window(wired: Wire, model: str) -> None:
    wired.binary(pass_of(model, 1, [1]))
    image = {"model_input": {"chunks": [{"type": "image"}]}, "loss_fn_inputs": {}}
    given = {"forward_input": {"data": [image], "loss_fn": "cross_entropy"}}
    wired.ok("/forward", {**given, "model_id": model, "seq_id": 2})
    too_many = {"forward_input": {"data": 7, "loss_fn": "cross_entropy"}}
    wired.ok("/forward", {**too_many, "model_id": model, "seq_id": 3})
    token = {"dtype": "int64", "data": [1 << 70]}
    overflow = {"model_input": {"chunks": []}, "loss_fn_inputs": {"target_tokens": token}}
    given = {"forward_input": {"data": [overflow], "loss_fn": "cross_entropy"}}
    wired.ok("/forward", {**given, "model_id": model, "seq_id": 4})
    assert all(wired.result(f"{model}:{seq}")["category"] == "user" for seq in (2, 3, 4))
    assert wired.result(wired.ok("/optim_step", step(model, 5))["request_id"])["metrics"]["num_datums:sum"] == 1


def test_a_refusals_quotes_of_the_request_are_shortened_before_they_are_stored(
    pool: ServedPool, wired: Wire, model: str
) -> None:
    requests = [pass_of(model, seq, [1]) for seq in (1, 2)]
    requests[0].data[0].loss_fn_inputs["weights"].shape[:] = [7]
    for name in ("x" * 100_000, "y" * 100_000):
        for request in requests:
            request.data[0].loss_fn_inputs[name].CopyFrom(request.data[0].loss_fn_inputs["weights"])
    for request in requests:
        failure = wired.result(wired.binary(request).json()["request_id"])
        assert 20 < len(failure["error"]) < 2 * MESSAGE_LENGTH_MAX
    kept = [pool.pool.log_of(model).operations[seq] for seq in (1, 2)]
    assert max(len(operation.outcome.error.message) for operation in kept if operation.outcome) <= MESSAGE_LENGTH_MAX


def test_a_retryable_refusal_consumes_no_seq(pool: ServedPool, wired: Wire, model: str) -> None:
    for seq in range(3, 3 + LIMITS.pending_operations_max):
        wired.ok("/optim_step", step(model, seq))
    refused = wired.binary(pass_of(model, 2, [1]))
    assert refused.status_code == 429
    assert int(refused.headers["retry-after-ms"]) > 0
    assert refused.json()["reason"] == "QUEUE_FULL"
    unreadable = wired.post("/save_weights", {"model_id": model, "seq_id": 2})
    assert (unreadable.status_code, unreadable.json()["reason"]) == (429, "QUEUE_FULL")
    assert 2 not in pool.pool.log_of(model).operations


def test_a_poll_is_held_open_and_then_returns_try_again(wired: Wire, model: str) -> None:
    promise = wired.ok("/optim_step", step(model, 2))["request_id"]
    begin = time.monotonic()
    response = wired.post("/retrieve_future", {"request_id": promise, "allow_metadata_only": True})
    assert time.monotonic() - begin >= POLL_S * 0.9
    assert response.status_code == 408
    assert response.json() == {"type": "try_again", "request_id": promise, "queue_state": "active"}


def test_a_poll_of_a_tenant_on_probation_says_why_it_waits(pool: ServedPool, wired: Wire, model: str) -> None:
    promise = wired.ok("/optim_step", step(model, 2))["request_id"]
    probation, tenant_id = pool.pool.core.probation, pool.pool.log_of(model).tenant_id

    async def convict() -> None:
        probation.record_kill(tenant_id, f"{model}:1")

    async def release() -> None:
        await probation.release(tenant_id, Act(at=0.0, act="tenant.release", subject="test"))

    pool.run(convict())
    waiting = wired.post("/retrieve_future", {"request_id": promise}).json()
    pool.run(release())
    assert (waiting["type"], waiting["queue_state"]) == ("try_again", "paused_rate_limit")
    assert waiting["queue_state_reason"].startswith(f"{model}:1 ended its worker, so all operations of this tenant run")


def test_a_queued_operation_is_cancelled_and_an_unknown_one_ignored(wired: Wire, model: str) -> None:
    promise = wired.ok("/optim_step", step(model, 2))["request_id"]
    wired.ok("/cancel_future", {"request_id": promise})
    wired.ok("/cancel_future", {"request_id": "unknown:7"})
    wired.binary(pass_of(model, 1, [1]))
    assert "CANCELLED" in wired.result(promise)["error"]


@pytest.mark.parametrize("request_id", ["unknown:1", "", "x", "a:b:0", "create_modelx"])
def test_an_unknown_promise_is_gone(wired: Wire, request_id: str) -> None:
    response = wired.post("/retrieve_future", {"request_id": request_id})
    assert response.status_code == 410
    assert "promised" in response.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/audit", 404),
        ("GET", "/nonsense", 404),
        ("DELETE", "/create_session", 404),
        ("OPTIONS", "/create_session", 404),
        ("GET", "/samplers/a:sample:0", 404),
    ],
)
def test_unknown_paths_and_objects_are_refused_in_json(wired: Wire, method: str, path: str, status: int) -> None:
    response = wired.request(method, path)
    assert response.status_code == status
    assert response.json()["detail"]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/create_model", {"session_id": "s"}, "model_seq_id: Field required"),
        ("/optim_step", {"model_id": "m", "seq_id": 0}, "seq_id: Input should be greater"),
        ("/asample", {"prompt": {"chunks": []}, "sampling_params": {}}, "sampling_session_id"),
        ("/load_weights", {"path": "tinker://x"}, "model_id to load into"),
        ("/save_weights", {"model_id": "m", "seq_id": 1, "path": "a", "ttl_seconds": 1 << 70}, "ttl_seconds"),
    ],
)
def test_a_malformed_body_is_refused_by_field(wired: Wire, path: str, body: dict[str, Any], told: str) -> None:
    response = wired.post(path, body)
    assert response.status_code == 400
    assert told in response.json()["detail"]


def test_malformed_bodies_without_a_seq_are_refused(wired: Wire) -> None:
    request = pass_of("unknown:train:0", 1, [1])
    for body, headers, told in (
        (b"\xff\xff\xff", {}, "not a forward_backward request"),
        (b"not packed", {"content-encoding": "zstd"}, "not zstd"),
        (zstandard.compress(request.SerializeToString())[:-1], {"content-encoding": "zstd"}, "frame is incomplete"),
        (zstandard.compress(request.SerializeToString()) + b"more", {"content-encoding": "zstd"}, "bytes follow it"),
        (None, {"content-encoding": "br"}, "send zstd"),
        (b"{}", {"content-type": "text/plain"}, "content-type"),
    ):
        response = wired.binary(request, body, **headers)
        assert response.status_code == 400
        assert told in response.json()["detail"]
    assert wired.request("POST", "/create_session", content=b"[1").json()["detail"]


@pytest.mark.parametrize(("num_bytes", "is_packed"), [(1, False), (1, True), (20 << 20, True)])
def test_a_body_above_the_limit_is_refused_also_if_it_is_compressed(
    wired: Wire, num_bytes: int, is_packed: bool
) -> None:
    large = bytes(LIMITS.message_bytes_max + num_bytes)
    headers = {"content-encoding": "zstd"} if is_packed else {}
    body = zstandard.compress(large) if is_packed else large
    response = wired.binary(wire.ForwardBackwardRequest(), body, **headers)
    assert response.status_code == 413
    assert "bytes" in response.json()["detail"]


@pytest.mark.parametrize("path", ["/optim_step", "/create_session", "/telemetry", "/retrieve_future"])
def test_a_call_without_data_has_a_small_limit(wired: Wire, path: str) -> None:
    assert wired.post(path, {"user_metadata": {"a": "b" * SMALL_BYTES_MAX}}).status_code == 413


def test_health_client_settings_and_models_are_served(wired: Wire) -> None:
    assert wired.get("/healthz").json() == {"status": "ok"}
    config = wired.ok("/client/config", {"sdk_version": "0.38.0"})
    assert config["fwdbwd_max_chunk_len"] == LIMITS.datums_max
    assert wired.ok("/client/dynamic_config", {"sdk_version": "0.38.0"})["sample_cancel_enabled"] is True
    assert wired.ok("/telemetry", {"events": []}) == {"status": "accepted"}
    [model] = wired.get("/get_server_capabilities").json()["supported_models"]
    assert model == {"model_name": "toy", "max_context_length": 64, "trainable": True, "sampleable": True}


def test_a_finished_session_ends_the_heartbeats(wired: Wire) -> None:
    session = wired.session()
    wired.ok("/session_heartbeat", {"session_id": session})
    wired.ok(f"/sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    assert wired.post("/session_heartbeat", {"session_id": session}).status_code == 410
    assert wired.post("/session_heartbeat", {"session_id": "unknown"}).status_code == 403


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/create_model", {"model_seq_id": 0, "base_model": "toy"}),
        ("/create_sampling_session", {"sampling_session_seq_id": 0, "base_model": "toy"}),
        ("/load_weights", {"model_seq_id": 0, "path": "tinker://a:train:0/weights/b"}),
    ],
)
def test_another_tenants_session_is_forbidden(
    wire: Callable[[str], Wire], wired: Wire, path: str, body: dict[str, Any]
) -> None:
    stranger = wire("mallory")
    for session in (stranger.session(), "unknown"):
        response = wired.post(path, {**body, "session_id": session})
        assert response.status_code == 403
        assert f"no session {session!r}" in response.json()["detail"]


@pytest.mark.slow
def test_two_hundred_polls_are_held_open_without_a_thread_each(tmp_path: Path) -> None:
    with restartable_pool(tmp_path / "data") as pool:
        wired = Wire(pool.http_url, pool.key())
        session = wired.session()
        models = [wired.model(session, index) for index in range(2)]
        seqs = range(2, 7)
        promises = [wired.ok("/optim_step", step(model, seq))["request_id"] for model in models for seq in seqs]
        before = threading.active_count()
        num_held, num_threads = 0, 0

        async def poll_all() -> list[int]:
            nonlocal num_held, num_threads
            limits = httpx.Limits(max_connections=None)
            headers = {"x-api-key": f"tml-{pool.key()}"}
            async with httpx.AsyncClient(verify=False, timeout=60, limits=limits, headers=headers) as http:
                url = f"{pool.http_url}{API}/retrieve_future"
                polls = [asyncio.create_task(http.post(url, json={"request_id": name})) for name in promises * 20]
                async with asyncio.timeout(60):
                    while num_held < len(polls):  # there is no event for it
                        await asyncio.sleep(0.01)
                        num_held = len(pool.pool.core.in_flight._open_queues)
                num_threads = threading.active_count()
                for model in models:
                    await asyncio.to_thread(wired.binary, pass_of(model, 1, [1]))
                return [response.status_code for response in await asyncio.gather(*polls)]

        assert asyncio.run(poll_all()) == [200] * 200
        assert num_held == 200
        assert num_threads <= before + 2
        wired.close()


def sparse_targets(shape: list[int], dtype: str = "int64") -> dict[str, Any]:
    """Return sparse targets of a sample without an entry."""
    return {"dtype": dtype, "shape": shape, "data": [], "sparse_crow_indices": [0, 0, 0], "sparse_col_indices": []}


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (sparse_targets([2, 1 << 30]), "has more than"),
        (sparse_targets([3]), "of shape (3,): send int64 token ids of shape (2, k)"),
        (sparse_targets([2, 1], dtype="float32"), "is float32 of shape (2, 1): send int64"),
        ({"data": [[1]], "dtype": "int64"}, "target_prompt_logprobs.data"),
        ({"data": [1], "dtype": "int8"}, "target_prompt_logprobs.dtype"),
    ],
)
def test_targets_that_do_not_match_the_prompt_are_refused(wired: Wire, targets: dict[str, Any], told: str) -> None:
    session = wired.session()
    wired.ok("/create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"})
    response = wired.post("/asample", sample_body(session, target_prompt_logprobs=targets))
    assert response.status_code == 400
    assert told in response.json()["detail"]


def sample_body(session: str, **values: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    body = {"sampling_session_id": f"{session}:sample:0", "seq_id": 0, "prompt": prompt}
    return body | {"sampling_params": {"max_tokens": 1}} | values


def test_clients_that_read_json_get_top_tokens_of_a_prompt(wired: Wire) -> None:
    session = wired.session()
    wired.ok("/create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"})
    promise = wired.ok("/asample", sample_body(session, topk_prompt_logprobs=2))
    answered = wired.result(promise["request_id"])
    assert answered["topk_prompt_logprobs"] == [None, [[2, -2.0], [3, -3.0]], [[3, -2.0], [4, -3.0]]]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
POSTS = sorted(path for method, path, *_ in HANDLERS if method == "POST" and "{" not in path)


def bodies(session: str) -> st.SearchStrategy[dict[str, Any]]:
    """Draw bodies whose fields have the right names and sometimes the right contents, of existing objects."""
    right = {
        "session_id": session,
        "model_id": f"{session}:train:0",
        "seq_id": 1,
        "model_seq_id": 0,
        "path": f"tinker://{session}:train:0/weights/a",
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
        "sampling_session_id": f"{session}:sample:0",
        "target": {"sampling_session_id": f"{session}:sample:0"},
        "prev_cursor": 1 << 32,
        "timeout": 0.0,
        "lora_config": {"rank": 8},
        "base_model": "toy",
        "request_id": f"{session}:train:0:1",
        "forward_backward_input": {"data": [], "loss_fn": "cross_entropy"},
        "ttl_seconds": 3600,
        "user_metadata": {"a": "b"},
    }
    return st.fixed_dictionaries({}, optional={name: st.just(value) | JSON for name, value in right.items()})


@pytest.mark.slow
@pytest.mark.parametrize("path", POSTS)
def test_no_json_body_causes_an_internal_error_or_a_refusal_without_a_reason(wired: Wire, path: str) -> None:
    session = wired.session()
    wired.model(session)
    wired.ok("/create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"})

    @hypothesis.settings(max_examples=25, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(bodies(session) | JSON)
    def post(body: Any) -> None:
        response = wired.post(path, body)
        assert response.status_code < 500, response.text
        assert response.status_code < 400 or response.status_code == 408 or response.json()["detail"]

    post()


@hypothesis.settings(max_examples=60, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(content=st.binary(max_size=200), is_cut=st.booleans())
def test_no_binary_body_causes_an_internal_error(wired: Wire, content: bytes, is_cut: bool) -> None:
    valid = pass_of("unknown:train:0", 1, [1, 2]).SerializeToString()
    body = valid[: len(content)] + content if is_cut else content
    response = wired.binary(wire.ForwardBackwardRequest(), body)
    assert response.status_code in (400, 404)
    assert response.json()["detail"]
