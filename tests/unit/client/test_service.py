"""ServiceClient: the address of the pool, the session, the clients that it creates, and its imports."""

import asyncio
import gc
import inspect
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

import tinkerpool
from tests.support.doors.fake_transport import SESSION_ID, UNREACHABLE, FakePool
from tests.support.logs import logged_by
from tests.support.waiting import wait_until
from tinkerpool import ModelInput, SamplingParams, ServiceClient, TrainingClient, errors
from tinkerpool.client import sampling_client
from tinkerpool.client import session as session_module
from tinkerpool.client.calls.connection import Connection
from tinkerpool.client.calls.futures import shared_loop
from tinkerpool.client.calls.transport import Endpoint
from tinkerpool.v1 import (
    adapters_pb2,
    operations_pb2,
    sessions_pb2,
    training_pb2,
)

PROMPT = ModelInput.from_ints([1, 2])
FAILED = operations_pb2.Operation(
    name="5e55:train:0:2",
    state=operations_pb2.OPERATION_STATE_FAILED,
    error=operations_pb2.OperationError(code=errors.Code.INTERNAL, reason="INTERNAL", message="no"),
)


def test_a_broken_credentials_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "credentials.json").write_text("x")
    with pytest.raises(errors.ConfigurationError, match=r"credentials\.json"):
        ServiceClient()


def test_making_a_client_makes_no_call_and_one_session_serves_all(pool: FakePool) -> None:
    service = ServiceClient(transport=pool, user_metadata={"run": "7"})
    assert pool.calls == []
    service.create_lora_training_client()
    service.create_lora_training_client()
    service.create_sampling_client(base_model="toy")
    assert [dict(request.user_metadata) for request in pool.requests("CreateSession")] == [{"run": "7"}]
    service.close()
    service.close()
    assert [request.session_id for request in pool.requests("FinishSession")] == [SESSION_ID]
    with pytest.raises(errors.ClientClosed):
        service.get_server_capabilities()


def test_a_lost_reply_makes_no_second_session_or_adapter(pool: FakePool, service: ServiceClient) -> None:
    pool.lost_replies = {"CreateSession": 1, "CreateAdapter": 1, "CreateSampler": 1}
    service.create_lora_training_client()
    service.create_sampling_client(base_model="toy")
    for name in ("CreateSession", "CreateAdapter", "CreateSampler"):
        first, second = pool.requests(name)
        assert first.request_id
        assert first == second


def test_a_new_adapter_says_nothing_about_merging(
    pool: FakePool, service: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = adapters_pb2.Adapter(adapter_id="s:train:0", base_model="toy", trains_tied_unembedding=True)
    pool.handlers["CreateAdapter"] = lambda request: adapters_pb2.CreateAdapterResponse(adapter=adapter)
    service.create_lora_training_client("toy")
    assert logged_by("tinkerpool", caplog) == []


def test_the_session_is_kept_alive_until_it_ends(pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "HEARTBEAT_INTERVAL_S", 0.01)  # the real interval is 10 s
    ended = errors.api_error(errors.Code.FAILED_PRECONDITION, "expired", reason="SESSION_ENDED")
    pool.handlers["Heartbeat"] = lambda request: sessions_pb2.HeartbeatResponse()
    pool.faults = {"Heartbeat": [UNREACHABLE, UNREACHABLE]}
    with ServiceClient(transport=pool) as service:
        service.create_lora_training_client()
        time.sleep(0.2)
        assert len(pool.requests("Heartbeat")) > 3
        pool.faults = {"Heartbeat": [ended]}
        time.sleep(0.1)
        num_beats = len(pool.requests("Heartbeat"))
        time.sleep(0.1)
        assert len(pool.requests("Heartbeat")) == num_beats


@pytest.mark.parametrize("last", ["training client", "sampling client", "unnamed sampler", "pending future"])
def test_a_session_without_close_lives_as_long_as_what_needs_it(
    pool: FakePool, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    monkeypatch.setattr(session_module, "HEARTBEAT_INTERVAL_S", 0.01)  # the real interval is 10 s
    pool.handlers["Heartbeat"] = lambda request: sessions_pb2.HeartbeatResponse()
    service = ServiceClient(transport=pool)
    client = service.create_lora_training_client()
    kept: Any = client
    if last == "sampling client":
        kept = service.create_sampling_client(base_model="toy")
    if last == "unnamed sampler":
        kept = client.save_weights_and_get_sampling_client()
    if last == "pending future":
        pool.is_held = True
        kept = client.save_state("held")
    del service, client
    gc.collect()
    num_beats = len(pool.requests("Heartbeat"))
    wait_until(lambda: len(pool.requests("Heartbeat")) > num_beats + 1)
    assert not pool.requests("FinishSession")
    if last == "pending future":
        shared_loop().loop.call_soon_threadsafe(pool.release)
        assert kept.result(60).path
    del kept
    wait_until(lambda: gc.collect() is not None and pool.num_closed)
    assert [request.session_id for request in pool.requests("FinishSession")] == [SESSION_ID]


def test_a_session_lives_on_for_copies_of_its_sampler_in_other_processes(
    pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "HEARTBEAT_INTERVAL_S", 0.01)  # the real interval is 10 s
    monkeypatch.setattr(Connection, "endpoint", Endpoint(base_url="http://pool", api_key="key"))
    of_handles: set[Any] = set()
    monkeypatch.setattr(sampling_client, "_of_handles", of_handles)
    pool.handlers["Heartbeat"] = lambda request: sessions_pb2.HeartbeatResponse()
    pickle.dumps(ServiceClient(transport=pool).create_sampling_client(base_model="toy"))
    gc.collect()
    num_beats = len(pool.requests("Heartbeat"))
    wait_until(lambda: len(pool.requests("Heartbeat")) > num_beats + 1)
    assert not pool.requests("FinishSession")
    of_handles.clear()  # the session ends before the test does


def test_a_pool_that_is_gone_is_named_ever_less_often(
    pool: FakePool, service: ServiceClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session_module, "HEARTBEAT_INTERVAL_S", 1 / 128)  # the real interval is 10 s
    monkeypatch.setattr(session_module, "SILENCE_MAX_S", 2 / 128)
    pool.faults = {"Heartbeat": [UNREACHABLE] * 40}
    pool.handlers["Heartbeat"] = lambda request: sessions_pb2.HeartbeatResponse()
    service.create_lora_training_client()
    while len(pool.requests("Heartbeat")) < 45:
        time.sleep(0.01)
    silences = [record.args for record in caplog.records if "no reply to a heartbeat" in record.msg]
    assert [args[0] for args in silences if isinstance(args, tuple)] == [beats / 128 for beats in (2, 4, 8, 16, 32)]


def test_settings_of_an_adapter_are_sent_unchanged(pool: FakePool, service: ServiceClient) -> None:
    service.create_lora_training_client("toy", 8, 5, train_mlp=False, user_metadata={"a": "b"}, alpha=16)
    service.create_lora_training_client()
    service.create_training_client_from_state("tinker://x:train:0/weights/a")
    service.create_training_client_from_state_with_optimizer("tinker://x:train:0/weights/a")
    given, default, from_state, resumed = pool.requests("CreateAdapter")
    assert (given.base_model, given.rank, given.seed, given.alpha) == ("toy", 8, 5, 16)
    assert (given.train_mlp, given.train_attn, given.train_unembed) == (False, True, True)
    assert (default.base_model, default.rank, default.HasField("seed"), default.HasField("alpha")) == (
        "toy",
        0,
        False,
        False,
    )
    assert (from_state.from_path, from_state.with_optimizer) == ("tinker://x:train:0/weights/a", False)
    assert (resumed.with_optimizer, resumed.base_model, resumed.HasField("train_mlp")) == (True, "", False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base_model": 8}, r"base_model must be the name of a model, got 8: did you mean rank=8\?"),
        ({"base_model": ["toy"]}, r"base_model must be a string, got \['toy'\]"),
        ({"rank": "8"}, "rank must be a power of two, at least 1, got '8'"),
        ({"rank": 8.0}, "rank must be a power of two, at least 1, got 8.0"),
        ({"alpha": "x"}, "alpha must be a number, or None, got 'x'"),
        ({"seed": 1.5}, "seed must be a whole number, or None, got 1.5"),
        ({"name": 3}, "name must be a string, got 3"),
    ],
)
async def test_settings_of_another_type_are_refused_by_name(
    pool: FakePool, service: ServiceClient, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        service.create_lora_training_client(**arguments)
    with pytest.raises(ValueError, match=message):
        await service.create_lora_training_client_async(**arguments)
    assert pool.calls == []
    service.create_lora_training_client("toy", np.int64(8), np.int32(5), alpha=np.float32(16))  # type: ignore[arg-type]


def test_names_of_another_type_are_refused_where_an_adapter_or_sampler_is_made_of_a_checkpoint(
    service: ServiceClient,
) -> None:
    anything: Any = 3
    path = "tinker://x:train:0/weights/a"
    with pytest.raises(ValueError, match="base_model must be a string, got 3"):
        service.create_training_client_from_state(path, base_model=anything)
    with pytest.raises(ValueError, match="name must be a string, got 3"):
        service.create_training_client_from_state_with_optimizer(path, name=anything)
    with pytest.raises(ValueError, match="base_model must be a string, got 3"):
        service.create_sampling_client(base_model=anything)


def test_a_pool_with_several_models_requires_the_name_of_one(pool: FakePool, service: ServiceClient) -> None:
    pool.model_names = ("one", "two")
    with pytest.raises(ValueError, match="one, two"):
        service.create_lora_training_client()
    with pytest.raises(ValueError, match="one, two"):
        service.create_sampling_client()


def test_a_training_client_continues_where_another_stopped(pool: FakePool, service: ServiceClient) -> None:
    adapter = adapters_pb2.Adapter(adapter_id="x:train:0", base_model="toy", next_seq=8)
    pool.handlers["GetAdapter"] = lambda request: adapters_pb2.GetAdapterResponse(adapter=adapter)
    pool.applied = list(range(1, 8))
    service.get_training_client("x:train:0").optim_step().result(60)
    assert [request.seq for request in pool.requests("OptimStep")] == [8]


async def test_creation_has_async_twins(pool: FakePool) -> None:
    async with ServiceClient(transport=pool) as service:
        first = await service.create_lora_training_client_async()
        second = await service.create_training_client_from_state_async("tinker://x:train:0/weights/a")
        third = await service.create_training_client_from_state_with_optimizer_async("tinker://x:train:0/weights/a")
        assert [client.model_id[-1] for client in (first, second, third)] == ["0", "1", "2"]
        sampler = await service.create_sampling_client_async("tinker://x:train:0/weights/a")
        response = await sampler.sample_async(PROMPT, 1, SamplingParams(max_tokens=2))
        assert response.sequences[0].tokens == [0, 1]
        assert (await service.get_server_capabilities_async()).supported_models[0].model_name == "toy"
    assert pool.num_closed == 1


def test_public_names_are_sorted_and_exist() -> None:
    assert tinkerpool.__all__ == sorted(tinkerpool.__all__)
    assert all(hasattr(tinkerpool, name) for name in tinkerpool.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = tinkerpool.nothing  # type: ignore[attr-defined]


# Hides libraries that a user's laptop may not have, then uses the light client.
IMPORT_WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in set(sys.argv[1].split(",")):
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Absent())
import tinkerpool
assert all(hasattr(tinkerpool, name) for name in tinkerpool.__all__)
client = tinkerpool.ServiceClient("127.0.0.1:1", "key")
tinkerpool.Datum([1, 2], {"target_tokens": [2, 3], "weights": [1, 1]})
"""


def test_the_client_works_where_only_its_own_dependencies_are_installed() -> None:
    absent = "torch,ray,transformers,tokenizers,safetensors,peft,typer,rich,coordinator,workers"
    command = [sys.executable, "-c", IMPORT_WITHOUT, absent]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr


async def test_a_client_works_while_the_users_own_loop_is_blocked(pool: FakePool, service: ServiceClient) -> None:
    await asyncio.sleep(0)
    client = service.create_lora_training_client()
    assert client.optim_step().result(60).metrics == {"grad_norm:last": 1}


def test_the_names_of_the_package_are_exactly_the_public_ones() -> None:
    assert dir(tinkerpool) == sorted(tinkerpool.__all__)
    assert all(getattr(tinkerpool, name) is not None for name in dir(tinkerpool))


def test_clients_and_futures_show_their_id_base_model_and_state(pool: FakePool, service: ServiceClient) -> None:
    client = service.create_lora_training_client(rank=8)
    sampler = service.create_sampling_client(base_model="toy")
    assert repr(client) == "<TrainingClient 5e55:train:0 of toy, rank 8: next seq 1>"
    assert repr(sampler) == "<SamplingClient 5e55:sample:7 of toy: open>"
    pool.is_held = True
    running = client.optim_step()
    assert repr(running) == "<APIFuture of 5e55:train:0:1: running>"
    assert repr(client).endswith(": next seq 2>")
    assert repr(service) == "<ServiceClient of a transport of its own: open>"
    pool.handlers["OptimStep"] = lambda request: training_pb2.OptimStepResponse(operation=FAILED)
    failed = client.optim_step()
    with pytest.raises(errors.OperationFailed):
        failed.result(60)
    assert repr(failed) == "<APIFuture of 5e55:train:0:2: failed, OperationFailed: 5e55:train:0:2: no>"
    service.close()
    for each in (client, sampler, service, service.create_rest_client()):
        assert repr(each).endswith("closed>")


def test_pickling_a_client_that_cannot_travel_says_what_to_do_instead(service: ServiceClient) -> None:
    client = service.create_lora_training_client(rank=8)
    with pytest.raises(TypeError, match=r"get_training_client\('5e55:train:0'\)"):
        pickle.dumps(client)
    for each in (service, service.create_rest_client()):
        with pytest.raises(TypeError, match="make a new ServiceClient in the other process"):
            pickle.dumps(each)


def test_an_adapter_from_a_checkpoint_takes_the_base_model_where_the_sdk_has_it(
    pool: FakePool, service: ServiceClient
) -> None:
    path = "tinker://x:train:0/weights/a"
    service.create_training_client_from_state(path, "toy", {"a": "b"})
    service.create_training_client_from_state_with_optimizer(path)
    first, second = pool.requests("CreateAdapter")
    assert (first.base_model, dict(first.user_metadata), second.base_model) == ("toy", {"a": "b"}, "")


@pytest.mark.parametrize(
    "name",
    [
        "create_training_client_from_state",
        "create_training_client_from_state_async",
        "create_training_client_from_state_with_optimizer",
        "create_training_client_from_state_with_optimizer_async",
    ],
)
def test_creations_from_a_checkpoint_have_the_arguments_of_the_sdk_in_its_order(name: str) -> None:
    parameters = inspect.signature(getattr(ServiceClient, name)).parameters
    ours = [each for each, parameter in parameters.items() if parameter.kind is not parameter.KEYWORD_ONLY]
    theirs = list(inspect.signature(getattr(tinker.ServiceClient, name)).parameters)
    assert theirs[: len(ours)] == ours
    assert set(theirs[len(ours) :]) <= {"weights_access_token", "optimizer"}
    assert parameters.keys() - set(ours) == {"name", "labels"}


@pytest.mark.parametrize("path", [None, "tinker://x:train:0/weights/a"])
def test_an_adapter_has_a_name_and_labels_which_are_its_user_metadata(
    pool: FakePool, service: ServiceClient, path: str | None
) -> None:
    def create(**values: Any) -> TrainingClient:
        if path is None:
            return service.create_lora_training_client("toy", **values)
        return service.create_training_client_from_state_with_optimizer(path, **values)

    clients = [create(name="sft 3", labels={"team": "nlp"}), create(user_metadata={"team": "nlp"}), create()]
    found = [(request.name, dict(request.user_metadata)) for request in pool.requests("CreateAdapter")]
    assert found == [("sft 3", {"team": "nlp"}), ("", {"team": "nlp"}), ("", {})]
    assert [client.get_info().name for client in clients] == ["sft 3", "", ""]
    assert f"{clients[0].model_id} 'sft 3' of " in repr(clients[0])
    with pytest.raises(ValueError, match="user_metadata and labels are two names of one argument"):
        create(labels={}, user_metadata={})
    with pytest.raises(ValueError, match="map strings to strings"):
        create(labels={"team": 1})
