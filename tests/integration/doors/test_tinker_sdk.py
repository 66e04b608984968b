"""The official Tinker SDK, unmodified, against a real coordinator with toy engines, over the HTTP door."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from tinker import types

import tinkerpool
from coordinator.base.config import Limits
from coordinator.doors.tinker import futures
from tests.support.doors.sdk import LEAKS, Wire, collect_leaks, datum, sdk
from tests.support.served_pool import ServedPool, restartable_pool
from tests.support.toy_engine import POISON_TOKEN
from tests.support.waiting import wait_until

pytestmark = [LEAKS, pytest.mark.slow]

ADAM = types.AdamParams(learning_rate=1e-3)
PROMPT = types.ModelInput.from_ints([1, 2, 3])
WAIT_S = 30
DATUMS_MAX = 3


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    limits = Limits(datums_max=DATUMS_MAX)
    with restartable_pool(tmp_path_factory.mktemp("pool") / "data", poll_s=0.5, limits=limits) as pool:
        yield pool


@pytest.fixture(scope="module")
def service(pool: ServedPool) -> Iterator[tinker.ServiceClient]:
    with sdk(pool.http_url, pool.key(), user_metadata={"who": "test"}) as service:
        yield service


@pytest.fixture
def client(service: tinker.ServiceClient) -> Any:
    return service.create_lora_training_client("toy", rank=8, seed=3).result(WAIT_S)


def test_a_step_sent_as_a_pair_takes_one_cycle_and_its_metrics_name_it(pool: ServedPool, client: Any) -> None:
    engine = pool.pool.engines["w0"][-1]
    engine.may_run.clear()
    passed = client.forward_backward([datum(1, 2, 3), datum(4)], "cross_entropy")
    step = client.optim_step(ADAM)
    wait_until(lambda: client.model_id + ":2" in {o.name for o in list(pool.pool.core.in_flight.all())})
    engine.may_run.set()
    output = passed.result(WAIT_S)
    assert [d["logprobs"].shape for d in output.loss_fn_outputs] == [[3], [1]]
    assert {"loss:sum", "clock_cycle:unique", "tokens:sum"} <= output.metrics.keys()
    assert step.result(WAIT_S).metrics["clock_cycle:unique"] == output.metrics["clock_cycle:unique"]


def test_a_models_id_contains_its_session_and_its_info_is_served(client: Any) -> None:
    info = client.get_info()
    session, kind, index = info.model_id.rsplit(":", 2)
    assert kind == "train"
    assert index.isdecimal()
    assert len(session) == 36
    assert (info.model_name, info.lora_rank, info.is_lora) == ("toy", 8, True)
    assert Path(info.model_data.tokenizer_id, "tokenizer.json").read_bytes() == b"{}"


def test_a_batch_of_several_requests_gives_one_result_in_order(client: Any) -> None:
    data = [datum(*range(1, size + 1)) for size in range(1, 3 * DATUMS_MAX)]
    passed = client.forward_backward(data, "cross_entropy")
    step = client.optim_step(ADAM)
    output = passed.result(WAIT_S)
    assert [d["logprobs"].shape for d in output.loss_fn_outputs] == [[size] for size in range(1, 3 * DATUMS_MAX)]
    assert output.metrics["tokens:sum"] == sum(range(1, 3 * DATUMS_MAX))
    assert step.result(WAIT_S).metrics["num_datums:sum"] == len(data)


def test_several_targets_per_token_are_sent_sparse_and_return_in_their_shape(client: Any) -> None:
    targets = torch.zeros((30, 8), dtype=torch.int64)
    weights = torch.zeros((30, 8))
    targets[29, 7], weights[29, 7] = 5, 1.0
    wide = types.Datum(
        model_input=types.ModelInput.from_ints(list(range(30))),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},  # type: ignore[dict-item]  # the SDK converts it
    )
    assert wide.loss_fn_inputs["weights"].sparse_crow_indices is not None
    output = client.forward([wide, datum(1, 2)], "cross_entropy").result(WAIT_S)
    assert [d["logprobs"].shape for d in output.loss_fn_outputs] == [[30, 8], [2]]


def test_a_large_result_is_announced_first(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "METADATA_BYTES_MIN", 10)
    data = [datum(*range(size)) for size in (1, 2, 3)]
    output = client.forward(data, "cross_entropy").result(WAIT_S)
    assert [d["logprobs"].shape for d in output.loss_fn_outputs] == [[1], [2], [3]]


def test_a_forward_adds_no_gradient(client: Any) -> None:
    assert client.forward([datum(1, 2)], "cross_entropy").result(WAIT_S).metrics["tokens:sum"] == 2
    assert client.optim_step(ADAM).result(WAIT_S).metrics["num_datums:sum"] == 0


def test_a_custom_loss_runs_in_the_client(client: Any) -> None:
    def loss(data: Any, logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        return sum((values**2).sum() for values in logprobs), {"mine": 7.0}

    passed = client.forward_backward_custom([datum(1, 2, 3), datum(4, 5)], loss)
    step = client.optim_step(ADAM)
    metrics = passed.result(WAIT_S).metrics
    assert metrics["mine"] == 7.0
    assert {"loss:sum", "surrogate_loss:sum"} <= metrics.keys()
    assert step.result(WAIT_S).metrics["num_datums:sum"] == 2


def test_samples_come_from_saved_named_and_base_weights(service: tinker.ServiceClient, client: Any) -> None:
    client.forward_backward([datum(1, 2)], "cross_entropy")
    client.optim_step(ADAM)
    path = client.save_weights_for_sampler("kept").result(WAIT_S).path
    assert path == f"tinker://{client.model_id}/sampler_weights/kept"
    params = types.SamplingParams(max_tokens=4, seed=7)
    unnamed = client.save_weights_and_get_sampling_client().result(WAIT_S)
    named = service.create_sampling_client(model_path=path).result(WAIT_S)
    base = service.create_sampling_client(base_model="toy").result(WAIT_S)
    responses = [sampler.sample(PROMPT, 2, params).result(WAIT_S) for sampler in (unnamed, named, base)]
    assert [len(response.sequences) for response in responses] == [2, 2, 2]
    tokens = [[sequence.tokens for sequence in response.sequences] for response in responses]
    assert tokens[0] == tokens[1] != tokens[2]
    for sequence in responses[0].sequences:
        assert sequence.logprobs is not None
        assert len(sequence.logprobs) == len(sequence.tokens)
    assert {sequence.sequence_id for sequence in responses[0].sequences} == {
        f"{client.model_id.rsplit(':', 2)[0]}:sample:{unnamed._sampling_session_id.rsplit(':', 1)[1]}:1:{i}"
        for i in range(2)
    }
    assert (named.get_base_model(), base.get_base_model()) == ("toy", "toy")


def test_prompt_logprobs_have_nothing_for_the_first_token(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="toy").result(WAIT_S)
    logprobs = sampler.compute_logprobs(PROMPT).result(WAIT_S)
    assert logprobs[0] is None
    assert len(logprobs) == 3
    assert all(isinstance(value, float) for value in logprobs[1:])


def test_prompt_logprobs_of_the_last_tokens_only(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="toy").result(WAIT_S)
    everything = sampler.compute_logprobs(PROMPT).result(WAIT_S)
    assert sampler.compute_logprobs(PROMPT, prompt_logprobs_last_n=1).result(WAIT_S) == [None, None, everything[2]]
    assert sampler.compute_logprobs(PROMPT, prompt_logprobs_last_n=9).result(WAIT_S) == everything


def test_top_tokens_come_for_prompt_and_samples(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="toy").result(WAIT_S)
    params = types.SamplingParams(max_tokens=4, seed=1, stop=[])
    asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3, "topk_sample_logprobs": 2}
    response = sampler.sample(PROMPT, 2, params, **asked).result(WAIT_S)  # type: ignore[arg-type]
    assert response.topk_prompt_logprobs == [None, *([(t, -2), (t + 1, -3), (t + 2, -4)] for t in (2, 3))]
    for sequence in response.sequences:
        assert sequence.topk_logprobs == [[(t, -1), (t + 1, -2)] for t in sequence.tokens]
    last = sampler.sample(PROMPT, 1, params, prompt_logprobs_last_n=1, **asked).result(WAIT_S)  # type: ignore[arg-type]
    assert last.topk_prompt_logprobs == [None, None, [(3, -2), (4, -3), (5, -4)]]
    assert last.prompt_logprobs == [None, None, -2]
    without = sampler.sample(PROMPT, 1, params).result(WAIT_S)
    assert without.topk_prompt_logprobs is None
    assert without.sequences[0].topk_logprobs is None


@pytest.mark.parametrize("is_sparse", [False, True])
def test_targets_are_scored_in_the_layout_of_the_request(service: tinker.ServiceClient, is_sparse: bool) -> None:
    prompt = types.ModelInput.from_ints(list(range(1, 13)))
    ids = torch.full((11, 4), -1, dtype=torch.int64)
    ids[0, 0], ids[4, 1], ids[4, 3], ids[10, 2] = 10, 0, 20, 30  # the toy engine draws token 0 with probability 1
    targets = types.TensorData.from_torch_sparse(ids, pad_value=-1) if is_sparse else types.TensorData.from_torch(ids)
    assert (targets.sparse_crow_indices is not None) == is_sparse
    sampler = service.create_sampling_client(base_model="toy").result(WAIT_S)
    params = types.SamplingParams(max_tokens=1)
    response = sampler.sample(prompt, 1, params, target_prompt_logprobs=targets).result(WAIT_S)
    logprobs = response.target_prompt_logprobs
    assert logprobs is not None
    assert (logprobs.dtype, logprobs.shape) == ("float32", [11, 4])
    assert logprobs.sparse_crow_indices == targets.sparse_crow_indices
    assert logprobs.sparse_col_indices == targets.sparse_col_indices
    expected = torch.where(ids < 0, 0.0, -ids / 10)
    assert torch.equal(logprobs.to_torch(), expected)


def test_alternatives_to_the_prompt_and_cache_hits_are_returned(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="toy").result(WAIT_S)
    prompt, params = types.ModelInput.from_ints([21, 22, 23, 24]), types.SamplingParams(max_tokens=1)
    first = sampler.sample(prompt, 1, params, prompt_alt_tokens_k=2).result(WAIT_S)
    assert first.prompt_alt_tokens is not None
    tokens, logprobs = first.prompt_alt_tokens.tokens, first.prompt_alt_tokens.logprobs
    assert (tokens.dtype, tokens.tolist()) == ("int64", [[22, 23], [23, 24], [24, 25]])
    assert (logprobs.dtype, logprobs.tolist()) == ("float32", [[-3, -4]] * 3)
    assert first.prompt_cache_hit_tokens == 0
    again = sampler.sample(prompt, 1, params).result(WAIT_S)
    assert again.prompt_alt_tokens is None
    assert again.prompt_cache_hit_tokens == 3


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"topk_prompt_logprobs": 101}, "topk_prompt_logprobs must be 0 .* to 100, not 101"),
        ({"topk_sample_logprobs": 101}, "topk_sample_logprobs must be 0 .* to 100, not 101"),
        ({"prompt_alt_tokens_k": 101}, "prompt_alt_tokens_k must be 0 .* to 100, not 101"),
        ({"target_prompt_logprobs": torch.ones((3, 1))}, r"of shape \(3, 1\): .* shape \(2, k\)"),
        ({"target_prompt_logprobs": torch.full((2, 1), -1)}, "names no token"),
        ({"target_prompt_logprobs": torch.full((2, 1), 100)}, "token id 100"),
    ],
)
def test_a_request_for_too_large_a_result_is_a_bad_request(
    service: tinker.ServiceClient, asked: Any, told: str
) -> None:
    sampler = service.create_sampling_client(base_model="toy").result(WAIT_S)
    if (ids := asked.get("target_prompt_logprobs")) is not None:
        asked = {"target_prompt_logprobs": types.TensorData.from_torch(ids.to(torch.int64))}
    with pytest.raises(tinker.BadRequestError, match=told):
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1), **asked).result(WAIT_S)


def test_an_inflight_sampler_follows_its_model_and_a_snapshot_does_not(client: Any) -> None:
    params = types.SamplingParams(max_tokens=6, seed=7)

    def train_and_publish(kind: str) -> Any:
        client.forward_backward([datum(1, 2)], "cross_entropy")
        client.optim_step(ADAM)
        return client.save_weights_and_get_sampling_client(kind=kind).result(WAIT_S)

    def tokens(sampler: Any) -> Any:
        return sampler.sample(PROMPT, 1, params).result(WAIT_S).sequences[0].tokens

    snapshot, inflight = train_and_publish("snapshot"), train_and_publish("inflight")
    before = tokens(snapshot), tokens(inflight)
    newer = train_and_publish("inflight")
    assert tokens(snapshot) == before[0]
    assert tokens(inflight) == tokens(newer) != before[1]


def test_a_copied_sampling_client_gets_its_own_results(service: tinker.ServiceClient, pool: ServedPool) -> None:
    sampler = service.create_sampling_client(base_model="toy").result(WAIT_S)
    params = types.SamplingParams(max_tokens=3, seed=1)
    first = sampler.sample(PROMPT, 1, params).result(WAIT_S)
    copied = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=f"tml-{pool.key()}")
    copied = copied.result(WAIT_S) if hasattr(copied, "result") else copied
    again = copied.sample(PROMPT, 1, params).result(WAIT_S)
    assert again.sequences[0].tokens == first.sequences[0].tokens
    assert again.sequences[0].sequence_id != first.sequences[0].sequence_id


def test_token_ids_stop_a_sample_and_an_empty_list_does_not(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="toy").result(WAIT_S)

    def sampled(stop: Any) -> Any:
        params = types.SamplingParams(max_tokens=40, seed=1, stop=stop)
        return sampler.sample(PROMPT, 8, params).result(WAIT_S).sequences

    assert {s.stop_reason for s in sampled([])} == {"length"}
    endings = [s for s in sampled(list(range(100))) if s.stop_reason == "stop"]
    assert [len(s.tokens) for s in endings] == [1] * 8


def test_a_state_is_loaded_into_its_model_and_into_a_new_one(service: tinker.ServiceClient, client: Any) -> None:
    client.forward_backward([datum(1, 2)], "cross_entropy")
    client.optim_step(ADAM)
    path = client.save_state("here", ttl_seconds=3600).result(WAIT_S).path
    assert path == f"tinker://{client.model_id}/weights/here"
    before = client.forward([datum(5, 6)], "cross_entropy").result(WAIT_S).metrics["loss:sum"]
    client.forward_backward([datum(3)], "cross_entropy")
    client.optim_step(ADAM)
    with pytest.warns(FutureWarning):
        loaded = client.load_state_with_optimizer(path).result(WAIT_S)
    assert loaded.path == path
    for other in (
        client,
        service.create_training_client_from_state(path).result(WAIT_S),
        service.create_training_client_from_state_with_optimizer(path).result(WAIT_S),
    ):
        assert other.forward([datum(5, 6)], "cross_entropy").result(WAIT_S).metrics["loss:sum"] == before


def test_a_used_name_fails_the_save_unless_it_overwrites(client: Any) -> None:
    client.save_state("once").result(WAIT_S)
    with pytest.raises(tinker.RequestFailedError, match="CHECKPOINT_EXISTS") as raised:
        client.save_state("once").result(WAIT_S)
    assert raised.value.category == types.RequestErrorCategory.User
    client.save_state("once", overwrite=True).result(WAIT_S)


def test_a_wrong_key_is_an_authentication_error(pool: ServedPool) -> None:
    with (
        pytest.raises(tinker.AuthenticationError, match="unknown or revoked"),
        sdk(pool.http_url, "tp_000000000000_" + "x" * 43) as service,
    ):
        service.create_lora_training_client("toy").result(WAIT_S)


def test_an_unknown_object_is_a_not_found_error(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.NotFoundError, match="it serves: toy"):
        service.create_lora_training_client("gpt-7").result(WAIT_S)
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        service.create_sampling_client(model_path="tinker://a:train:0/sampler_weights/b").result(WAIT_S)


@pytest.mark.parametrize(
    ("data", "loss", "told"),
    [
        ([datum(1000)], "cross_entropy", "TOKEN_OUT_OF_RANGE"),
        ([datum(-100)], "cross_entropy", "targets that do not count the weight 0"),
        ([datum(1, 2, targets=[1])], "cross_entropy", "LENGTH_MISMATCH"),
        ([datum(1)], "ppo", "lacks advantages, logprobs"),
        ([datum(1)], "stable_reinforce", "lacks advantages"),
        ([datum(1)], "nonsense", "use one of cross_entropy"),
        ([datum(POISON_TOKEN)], "cross_entropy", "NON_FINITE"),
        ([datum(1)] * DATUMS_MAX + [datum(1000)], "cross_entropy", "TOKEN_OUT_OF_RANGE"),
    ],
)
def test_bad_data_fails_its_own_future_and_the_next_step_runs(client: Any, data: Any, loss: str, told: str) -> None:
    failed = client.forward_backward(data, loss)
    lost = client.optim_step(ADAM)
    with pytest.raises(tinker.RequestFailedError, match=told):
        failed.result(WAIT_S)
    with pytest.raises(tinker.RequestFailedError, match="GRADIENT_WINDOW_CLOSED"):
        lost.result(WAIT_S)
    client.forward_backward([datum(1)], "cross_entropy")
    assert client.optim_step(ADAM).result(WAIT_S).metrics["num_datums:sum"] == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"])
def test_a_hyperparameter_that_is_not_finite_is_refused_though_the_sdk_sends_null(
    client: Any, name: str, value: float
) -> None:
    """The refused step says that its gradient is lost: the next one has none."""
    client.forward_backward([datum(1)], "cross_entropy").result(WAIT_S)
    with pytest.raises(tinker.TinkerError, match=f"adam_params.{name}: .*NaN.* a refused step drops its gradient"):
        client.optim_step(types.AdamParams(**{name: value})).result(WAIT_S)
    assert client.optim_step(ADAM).result(WAIT_S).metrics["num_datums:sum"] == 0


def test_a_bad_prompt_is_a_bad_request(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="toy").result(WAIT_S)
    params = types.SamplingParams(max_tokens=1000)
    with pytest.raises(tinker.BadRequestError, match=r"can be 1 to 61"):
        sampler.sample(PROMPT, 1, params).result(WAIT_S)


def test_a_sample_that_can_never_fit_is_a_bad_request(tmp_path: Path) -> None:
    engine_values = [{"num_cache_blocks": 1}]
    with (
        restartable_pool(tmp_path / "data", engine_values=engine_values) as pool,
        sdk(pool.http_url, pool.key()) as service,
    ):
        sampler = service.create_sampling_client(base_model="toy").result(WAIT_S)
        with pytest.raises(tinker.BadRequestError, match="max_tokens may be at most 1"):
            sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2)).result(WAIT_S)


def test_images_and_sound_are_refused_with_a_reason(service: tinker.ServiceClient, client: Any) -> None:
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"png", format="png", expected_tokens=1)])
    one = {"target_tokens": [1], "weights": [1.0]}
    with pytest.raises(tinker.RequestFailedError, match="text only"):
        client.forward_backward([types.Datum(model_input=image, loss_fn_inputs=one)], "cross_entropy").result(WAIT_S)  # type: ignore[arg-type]
    sampler = service.create_sampling_client(base_model="toy").result(WAIT_S)
    with pytest.raises(tinker.BadRequestError, match="text only"):
        sampler.sample(image, 1, types.SamplingParams(max_tokens=1)).result(WAIT_S)


def test_an_ended_session_accepts_nothing_more(pool: ServedPool, wired: Wire) -> None:
    with sdk(pool.http_url, pool.key()) as service:
        client = service.create_lora_training_client("toy", rank=8).result(WAIT_S)
        client.forward([datum(1)], "cross_entropy").result(WAIT_S)
        wired.ok(f"/sessions/{client.model_id.rsplit(':', 2)[0]}/finish", {"reason": {"type": "success"}})
        with pytest.raises(tinker.PermissionDeniedError, match="has ended"):
            service.create_lora_training_client("toy", rank=8).result(WAIT_S)
        with pytest.raises(tinker.PermissionDeniedError, match="has ended"):
            service.create_sampling_client(base_model="toy").result(WAIT_S)


@pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning")
@pytest.mark.parametrize("library", [tinker, tinkerpool], ids=lambda library: library.__name__)
def test_a_program_catches_the_same_classes_with_the_sdk_and_with_the_pools_own_client(
    pool: ServedPool, library: Any
) -> None:
    urls = {tinker: pool.http_url, tinkerpool: pool.url}
    prefix = "tml-" if library is tinker else ""

    def datum(token: int) -> Any:
        inputs = {"target_tokens": [token], "weights": [1.0]}
        return library.Datum(model_input=library.ModelInput.from_ints([token]), loss_fn_inputs=inputs)

    with library.ServiceClient(base_url=urls[library], api_key=prefix + pool.key()) as service:
        client = service.create_lora_training_client("toy", rank=8).result(WAIT_S)
        sampler = service.create_sampling_client(base_model="toy").result(WAIT_S)
        client.save_state("mine").result(WAIT_S)
        with pytest.raises(library.NotFoundError):
            service.create_lora_training_client("gpt-7").result(WAIT_S)
        with pytest.raises(library.BadRequestError):
            service.create_lora_training_client("toy", rank=1000).result(WAIT_S)
        with pytest.raises(library.BadRequestError):
            sampler.sample(library.ModelInput.from_ints([1000]), 1, library.SamplingParams()).result(WAIT_S)
        for failed in (
            client.save_state("mine"),
            client.load_state("tinker://a:train:0/weights/b"),
            client.optim_step(library.AdamParams(beta1=2.0)),
            client.forward([datum(1000)], "cross_entropy"),
            client.forward([datum(POISON_TOKEN)], "cross_entropy"),
        ):
            with pytest.raises(library.RequestFailedError) as raised:
                failed.result(WAIT_S)
            assert raised.value.category == library.types.RequestErrorCategory.User
            assert raised.value.request_id.startswith(client.model_id)
    with (
        pytest.raises(library.AuthenticationError),
        library.ServiceClient(base_url=urls[library], api_key=f"{prefix}tp_000000000000_{'x' * 43}") as service,
    ):
        service.create_lora_training_client("toy").result(WAIT_S)
    collect_leaks()


def test_both_doors_train_the_same_adapter(pool: ServedPool, client: Any) -> None:
    client.forward_backward([datum(1, 2)], "cross_entropy")
    client.optim_step(ADAM).result(WAIT_S)
    path = client.save_weights_for_sampler("shared").result(WAIT_S).path
    params = types.SamplingParams(max_tokens=4, seed=9)
    theirs = client.save_weights_and_get_sampling_client().result(WAIT_S).sample(PROMPT, 1, params).result(WAIT_S)
    with tinkerpool.ServiceClient(pool.url, pool.key()) as service:
        sampler = service.create_sampling_client(model_path=path)
        asked = tinkerpool.SamplingParams(max_tokens=4, seed=9)
        ours = sampler.sample(tinkerpool.ModelInput.from_ints([1, 2, 3]), 1, asked).result(WAIT_S)
    assert list(ours.sequences[0].tokens) == list(theirs.sequences[0].tokens)
