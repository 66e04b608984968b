"""The client against a real coordinator over real gRPC, with toy engines."""

import base64
import multiprocessing
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.served_pool import ServedPool, restartable_pool
from tests.support.toy_engine import POISON_TOKEN
from tests.support.waiting import wait_until
from tinkerpool import (
    AdamParams,
    Datum,
    ModelInput,
    OperationFailed,
    RestClient,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    errors,
)
from tinkerpool.client.calls import futures

ADAM = AdamParams(learning_rate=1e-3)
PROMPT = ModelInput.from_ints([1, 2, 3])


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ServedPool]:
    with restartable_pool(tmp_path / "data") as pool:
        yield pool


@pytest.fixture
def service(pool: ServedPool) -> Iterator[ServiceClient]:
    with ServiceClient(pool.url, pool.key()) as service:
        yield service


def datum(*tokens: int) -> Datum:
    return Datum(list(tokens), {"target_tokens": list(tokens), "weights": [1.0] * len(tokens)})


def test_a_wait_shows_what_it_waits_for_and_the_history_has_it_afterwards(
    pool: ServedPool, service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "PROGRESS_S", 0.02)
    client = service.create_lora_training_client(rank=8)
    engine, shown = pool.pool.engines["w0"][-1], list[str]()
    engine.may_run.clear()
    client.forward_backward([datum(1, 2, 3)], "cross_entropy")
    step = client.optim_step(ADAM)

    def show(text: str) -> None:
        shown.append(text)
        if "behind earlier operations of its adapter (1 before it)" in text:
            engine.may_run.set()

    assert step.result(60, progress=show).metrics
    client.report_metrics(0, {"reward": 0.5}).result(60)
    first, second, reported = client.history().result(60)
    assert (first.kind, second.kind, reported.kind) == ("forward_backward", "optim_step", "report")
    assert (first.state, second.operation, reported.step) == ("succeeded", f"{client.model_id}:2", 0)
    assert "order" in {each.reason for each in second.waits}
    assert reported.metrics == {"reward": 0.5}
    assert first.arrive_time is not None
    assert second.end_time is not None
    assert first.arrive_time < second.end_time


def test_a_training_loop_runs_from_end_to_end(pool: ServedPool, service: ServiceClient) -> None:
    client = service.create_lora_training_client(rank=8, seed=3)
    engine = pool.pool.engines["w0"][-1]
    info = client.get_info()
    assert (info.model_name, info.lora_rank, info.model_id) == ("toy", 8, client.model_id)
    engine.may_run.clear()
    output = client.forward_backward([datum(1, 2, 3), datum(4)], "cross_entropy")
    step = client.optim_step(ADAM)
    wait_until(lambda: f"{client.model_id}:2" in {o.name for o in list(pool.pool.core.in_flight.all())})
    engine.may_run.set()
    assert [d["logprobs"].shape for d in output.result(60).loss_fn_outputs] == [(3,), (1,)]
    assert output.result().metrics["clock_cycle:unique"] == step.result(60).metrics["clock_cycle:unique"]
    both = client.train_step([datum(1)], "cross_entropy", ADAM).result(60)
    assert both.optim_step.metrics["num_datums:sum"] == 1
    assert client.forward([datum(5)], "cross_entropy").result(60).metrics["tokens:sum"] == 1


def test_a_failed_pass_fails_its_step_with_the_cause_and_the_next_step_succeeds(service: ServiceClient) -> None:
    client = service.create_lora_training_client(rank=8)
    failed = client.forward_backward([datum(POISON_TOKEN)], "cross_entropy")
    step = client.optim_step(ADAM)
    with pytest.raises(OperationFailed, match="not finite") as raised:
        failed.result(60)
    assert raised.value.operation == f"{client.model_id}:1"
    with pytest.raises(OperationFailed, match=f"{client.model_id}:1"):
        step.result(60)
    client.train_step([datum(1)], "cross_entropy", ADAM).result(60)


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (lambda c: c.forward_backward([datum(99999)], "cross_entropy"), ValueError, "99999"),
        (lambda c: c.load_state(f"tinker://{c.model_id}/weights/none"), LookupError, "none"),
        (lambda c: c.save_state("no/slash"), ValueError, "slash"),
    ],
)
def test_bad_input_has_a_clear_error_and_consumes_its_sequence_number(
    service: ServiceClient, attempt: Any, error: type[Exception], message: str
) -> None:
    client = service.create_lora_training_client(rank=8)
    with pytest.raises(error, match=message):
        attempt(client).result(60)
    client.forward([datum(1)], "cross_entropy").result(60)


def test_a_client_of_the_http_port_says_at_once_that_grpc_has_another(pool: ServedPool) -> None:
    with (
        ServiceClient(pool.http_url, pool.key()) as service,
        pytest.raises(errors.ConfigurationError, match="is an HTTP port, and this client speaks gRPC"),
    ):
        service.get_server_capabilities()


def test_a_rest_client_needs_no_session_and_knows_its_key_and_tenant(pool: ServedPool) -> None:
    key = pool.key()
    rest = RestClient(base_url=pool.url, api_key=key)
    holder = rest.whoami().result(60)
    assert holder.user_urn.removeprefix("urn:tinkerpool:key:") == key.split("_")[1]
    assert holder.org_urn.startswith("urn:tinkerpool:tenant:")
    assert rest.list_sessions().result(60).sessions == []


def test_weights_for_export_are_saved_and_a_sampler_is_looked_up(service: ServiceClient, tmp_path: Path) -> None:
    client = service.create_lora_training_client(rank=8)
    rest = service.create_rest_client()
    path = client.save_weights_external("final").result(60).path
    assert path == f"tinker://{client.model_id}/external_weights/final"
    assert (rest.export_checkpoint(path, tmp_path / "final").result(60) / "adapter_config.json").exists()
    named = service.create_sampling_client(client.save_weights_for_sampler("a").result(60).path)
    found = rest.get_sampler(named.sampler_id).result(60)
    assert (found.base_model, found.model_path) == ("toy", f"tinker://{client.model_id}/sampler_weights/a")
    assert service.copy_weights(client.save_state("b").result(60).path).result(60).endswith("/weights/b")


def test_another_tenants_training_run_is_not_found(service: ServiceClient, pool: ServedPool) -> None:
    client = service.create_lora_training_client(rank=8)
    with ServiceClient(pool.url, pool.key("mallory")) as stranger:
        with pytest.raises(errors.NotFound):
            stranger.get_training_client(client.model_id)
        with pytest.raises(errors.NotFound):
            stranger.create_rest_client().get_training_run(client.model_id).result(60)


def test_a_second_writer_is_refused_with_the_expected_seq(service: ServiceClient) -> None:
    first = service.create_lora_training_client(rank=8)
    second = service.get_training_client(first.model_id)
    first.optim_step(AdamParams(learning_rate=1)).result(60)
    with pytest.raises(errors.AlreadyExists) as raised:
        second.optim_step(AdamParams(learning_rate=2)).result(60)
    assert raised.value.metadata["expected_seq"] == "2"
    with pytest.raises(errors.OrderBroken):
        second.optim_step(AdamParams(learning_rate=2)).result(60)
    service.get_training_client(first.model_id).optim_step(AdamParams(learning_rate=2)).result(60)


def test_a_client_of_a_new_process_goes_on_behind_a_call_that_the_old_one_never_sent(tmp_path: Path) -> None:
    with restartable_pool(tmp_path / "data", gap_timeout_s=0.05, sweep_interval_s=0.02) as pool:
        key, is_lost = pool.key(), threading.Event()
        with ServiceClient(pool.url, key) as service, ServiceClient(pool.url, key) as later:
            client = service.create_lora_training_client(rank=8)

            def compute(_data: object, logprobs: list[Any]) -> tuple[float, list[Any], dict[str, float]]:
                is_lost.wait(60)
                return 0.0, logprobs, {}

            late = client.forward_backward_custom([datum(1, 2)], compute, with_gradients=True)
            with pytest.raises(OperationFailed, match="get_training_client") as lost:
                client.optim_step(ADAM).result(60)
            assert lost.value.reason == "SEQ_LOST"
            resumed = later.get_training_client(client.model_id)
            resumed.train_step([datum(1, 2)], "cross_entropy", ADAM).result(60)
            is_lost.set()
            with pytest.raises(errors.AlreadyExists, match="did not arrive in time"):
                late.result(60)
            resumed.train_step([datum(1, 2)], "cross_entropy", ADAM).result(60)


def test_checkpoints_are_saved_loaded_listed_exported_and_deleted(service: ServiceClient, tmp_path: Path) -> None:
    client = service.create_lora_training_client(rank=8)
    client.train_step([datum(1)], "cross_entropy", ADAM)
    path = client.save_state("one", user_metadata={"why": "test"}).result(60).path
    assert path == f"tinker://{client.model_id}/weights/one"
    client.load_state(path)
    assert client.load_state_with_optimizer(path).result(60).path == path
    with pytest.raises(OperationFailed) as taken:
        client.save_state("one").result(60)
    assert taken.value.code is errors.Code.ALREADY_EXISTS
    resumed = service.create_training_client_from_state_with_optimizer(path)
    resumed.train_step([datum(1)], "cross_entropy", ADAM).result(60)
    rest = service.create_rest_client()
    [found] = rest.list_checkpoints(client.model_id).result(60).checkpoints
    assert (found.tinker_path, found.user_metadata) == (path, {"why": "test"})
    exported = rest.export_checkpoint(path, tmp_path / "peft").result(60)
    assert {file.name for file in exported.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tinkerpool.json",
    }
    rest.delete_checkpoint_from_tinker_path(path).result(60)
    assert rest.list_user_checkpoints().result(60).checkpoints == []


def test_samples_with_a_seed_are_the_same_for_named_and_unnamed_weights_and_as_a_stream(service: ServiceClient) -> None:
    client = service.create_lora_training_client(rank=8)
    client.train_step([datum(1)], "cross_entropy", ADAM)
    sampler = client.save_weights_and_get_sampling_client()
    params = SamplingParams(max_tokens=6, seed=5, stop=[])
    response = sampler.sample(PROMPT, 2, params, include_prompt_logprobs=True).result(60)
    assert [len(sequence.tokens) for sequence in response.sequences] == [6, 6]
    assert response.prompt_logprobs == [None, -2.0, -2.0]
    assert sampler.sample(PROMPT, 2, params).result(60).sequences == response.sequences
    tokens = [t.token for t in sampler.sample_stream(PROMPT, 1, params)]
    assert tokens == response.sequences[0].tokens
    saved = client.save_weights_for_sampler("named").result(60).path
    named = service.create_sampling_client(saved)
    assert named.sample(PROMPT, 2, params).result(60).sequences == response.sequences
    base = service.create_sampling_client(base_model="toy")
    assert base.compute_logprobs(PROMPT).result(60) == [None, -2.0, -2.0]
    assert base.get_base_model() == "toy"
    assert len([base.sample(PROMPT, 1, params) for _ in range(200)][-1].result(60).sequences) == 1


def test_every_optional_output_of_a_sample_is_returned_over_grpc(service: ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="toy")
    params = SamplingParams(max_tokens=3, seed=5, stop=[])
    response = sampler.sample(
        PROMPT,
        1,
        params,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=1,
        target_prompt_logprobs=[[10, -1], [-1, 0]],
        prompt_alt_tokens_k=1,
        prompt_logprobs_last_n=1,
    ).result(60)
    assert response.topk_prompt_logprobs == [None, None, [(3, -2.0), (4, -3.0)]]
    assert response.sequences[0].topk_logprobs == [[(token, -1.0)] for token in response.sequences[0].tokens]
    assert response.target_prompt_logprobs is not None
    assert response.target_prompt_logprobs.tolist() == [[-1.0, 0.0], [0.0, 0.0]]
    assert response.prompt_alt_tokens is not None
    assert response.prompt_alt_tokens.tokens.tolist() == [[2], [3]]
    assert response.prompt_logprobs is None
    assert sampler.sample(PROMPT, 1, params).result(60).prompt_cache_hit_tokens == 2
    with pytest.raises(errors.InvalidArgument, match=r"give \(2, k\) token ids"):
        sampler.sample(PROMPT, 1, params, target_prompt_logprobs=[[1]]).result(60)


@pytest.mark.slow
def test_copies_of_a_sampling_client_in_any_process_get_samples_of_their_own(
    pool: ServedPool, service: ServiceClient
) -> None:
    sampler = service.create_sampling_client(base_model="toy")
    params = SamplingParams(max_tokens=4)  # without a seed, every request draws different tokens
    first = sampler.sample(PROMPT, 1, params).result(60)
    handle = sampler.get_sampler_handle()
    assert pool.key() not in base64.b64decode(handle).decode()
    copies = [SamplingClient.from_sampler_handle(handle, api_key=pool.key()), pickle.loads(pickle.dumps(sampler))]
    with multiprocessing.get_context("spawn").Pool(1) as processes:
        elsewhere = processes.apply(sample_tokens, (sampler, params))
    responses = [copy.sample(PROMPT, 1, params).result(60) for copy in copies]
    tokens = [response.sequences[0].tokens for response in (first, *responses)] + [elsewhere]
    assert len({tuple(row) for row in tokens}) == 4
    assert [copy.get_base_model() for copy in copies] == ["toy", "toy"]
    with pytest.raises(errors.Unauthenticated):
        SamplingClient.from_sampler_handle(handle, api_key="wrong").sample(PROMPT, 1, params).result(60)


def sample_tokens(sampler: SamplingClient, params: SamplingParams) -> list[int]:
    return sampler.sample(PROMPT, 1, params).result(60).sequences[0].tokens


def test_cycles_status_usage_and_operations_are_served(service: ServiceClient) -> None:
    rest = service.create_rest_client()
    client = service.create_lora_training_client(rank=8)
    cycles = rest.watch_cycles()
    seen: list[Any] = []
    watcher = threading.Thread(target=lambda: seen.append(next(iter(cycles))), daemon=True)
    watcher.start()
    while watcher.is_alive():
        client.train_step([datum(1)], "cross_entropy", ADAM).result(60)
    assert seen[0].entries[0].adapter_id == client.model_id
    status = rest.get_pool_status().result(60)
    assert [worker.base_model for worker in status.workers] == ["toy"]
    usage = {row.kind: row.num_operations for row in rest.get_usage().result(60).rows}
    assert usage["optim_step"] == usage["forward_backward"] >= 1
    assert rest.get_operation(f"{client.model_id}:1").result(60).cycle_id >= 1
