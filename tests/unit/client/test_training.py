"""Order, retries and custom losses of a training client, over a fake pool."""

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.doors.fake_transport import UNREACHABLE, FakePool
from tests.support.waiting import wait_until
from tinkerpool import AdamParams, Datum, ModelInput, OperationFailed, ServiceClient, TrainingClient, errors
from tinkerpool.client.training import passes, sequence
from tinkerpool.convert import from_tensor
from tinkerpool.v1 import operations_pb2, training_pb2

MODEL_ID = "5e55:train:0"


@pytest.fixture
def client(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client()


def datum(*targets: int, weight: float = 1.0) -> Datum:
    return Datum([1] * len(targets), {"target_tokens": list(targets), "weights": [weight] * len(targets)})


def seqs(pool: FakePool, name: str) -> list[int]:
    return [request.seq for request in pool.requests(name)]


def test_calls_return_at_once_and_results_come_later(pool: FakePool, client: TrainingClient) -> None:
    pool.is_held = True
    future, step = client.forward_backward([datum(1, 2)], "cross_entropy"), client.optim_step()
    time.sleep(0.05)
    assert not future.done()
    # private: the fake pool belongs to the client's own loop
    client._connection._background.loop.call_soon_threadsafe(pool.release)
    assert step.result(60).metrics == {"grad_norm:last": 1}
    output = future.result(60)
    assert output.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx([-0.2, -0.3])
    assert output.metrics == {"loss:sum": pytest.approx(0.5), "clock_cycle:unique": 101}


def test_sequence_numbers_count_from_one_for_every_kind_of_operation(pool: FakePool, client: TrainingClient) -> None:
    futures: list[Any] = [
        client.forward([datum(1)], "cross_entropy"),
        client.train_step([datum(1)], "cross_entropy", AdamParams(learning_rate=0.5)),
        client.save_state("a"),
        client.load_state("tinker://x:train:0/weights/a"),
        client.load_state_with_optimizer("tinker://x:train:0/weights/a"),
        client.save_weights_for_sampler("b"),
        client.discard_gradient(),
        client.optim_step(),
    ]
    results = [future.result(60) for future in futures]
    assert pool.applied == list(range(1, 10))
    assert results[2].path == f"tinker://{MODEL_ID}/weights/a"
    assert results[5].path == f"tinker://{MODEL_ID}/sampler_weights/b"
    assert [request.with_optimizer for request in pool.requests("LoadState")] == [False, True]
    assert pool.requests("TrainStep")[0].adam.learning_rate == 0.5


def test_each_thread_keeps_its_order_and_no_sequence_number_is_used_twice(
    pool: FakePool, client: TrainingClient
) -> None:
    def work(thread: int) -> None:
        for step in range(30):
            client.forward_backward([datum(thread, step)], "cross_entropy")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.optim_step().result(60)
    assert pool.applied == list(range(1, 242))
    sent = sorted(pool.requests("ForwardBackward"), key=lambda request: request.seq)
    pairs = [from_tensor(request.data[0].loss_inputs["target_tokens"]).tolist() for request in sent]
    for i in range(8):
        assert [step for number, step in pairs if number == i] == list(range(30))


def test_requests_that_arrive_out_of_order_run_in_order(pool: FakePool, client: TrainingClient) -> None:
    pool.delay_of = lambda name, request: 0.02 if getattr(request, "seq", 0) == 1 else 0.0
    client.forward_backward([datum(1)], "cross_entropy")
    client.optim_step().result(60)
    assert [name for name, _ in pool.calls if name in {"ForwardBackward", "OptimStep"}] == [
        "OptimStep",
        "ForwardBackward",
    ]
    assert pool.applied == [1, 2]


def test_a_request_whose_reply_was_lost_is_repeated_and_applied_once(pool: FakePool, client: TrainingClient) -> None:
    pool.lost_replies = {"ForwardBackward": 2, "OptimStep": 1}
    output = client.forward_backward([datum(1, 2)], "cross_entropy")
    client.optim_step(AdamParams(learning_rate=0.25)).result(60)
    assert output.result(60).metrics["loss:sum"] == pytest.approx(0.5)
    sent = pool.requests("ForwardBackward")
    assert len(sent) == 3
    assert len({request.SerializeToString(deterministic=True) for request in sent}) == 1
    assert pool.applied == [1, 2]


def test_data_may_change_once_the_call_has_returned(pool: FakePool, client: TrainingClient) -> None:
    pool.faults = {"ForwardBackward": [UNREACHABLE]}
    tokens = np.array([1, 2])
    future = client.forward_backward([Datum(tokens, {"target_tokens": tokens, "weights": [1, 1]})], "cross_entropy")
    tokens[:] = 9
    future.result(60)
    assert {tuple(from_tensor(r.data[0].tokens)) for r in pool.requests("ForwardBackward")} == {(1, 2)}


def test_a_full_queue_and_broken_waits_only_delay_a_result(pool: FakePool, client: TrainingClient) -> None:
    full = errors.api_error(errors.Code.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL", retry_delay_s=0.01)
    pool.faults = {"ForwardBackward": [full, full], "OptimStep": [UNREACHABLE]}
    pool.wait_faults = [UNREACHABLE, UNREACHABLE]
    futures = [client.forward_backward([datum(i)], "cross_entropy") for i in range(3)]
    client.optim_step().result(60)
    assert [future.result(60).metrics["clock_cycle:unique"] for future in futures] == [101, 102, 103]


def test_a_refusal_is_raised_by_its_own_future_only(pool: FakePool, client: TrainingClient) -> None:
    pool.faults = {"OptimStep": [errors.api_error(errors.Code.INVALID_ARGUMENT, "beta1", reason="INVALID_ARGUMENT")]}
    refused = client.optim_step(AdamParams(beta1=2))
    with pytest.raises(errors.InvalidArgument, match="beta1"):
        refused.result(60)
    pool.applied.append(1)  # a refused operation consumes its sequence number
    assert client.optim_step().result(60).metrics == {"grad_norm:last": 1}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errors.Code.ALREADY_EXISTS, "WHY"),
        (errors.Code.UNAUTHENTICATED, "WHY"),
        (errors.Code.INTERNAL, "WHY"),
        (errors.Code.FAILED_PRECONDITION, "BASE_MODEL_NOT_SERVED"),
        (errors.Code.RESOURCE_EXHAUSTED, ""),  # gRPC's: the message is too large
    ],
)
def test_a_refusal_that_consumed_no_sequence_number_does_not_block_later_requests(
    pool: FakePool, client: TrainingClient, code: errors.Code, reason: str
) -> None:
    refusal = errors.api_error(code, "no", reason=reason)
    pool.faults = {"OptimStep": [refusal]}
    with pytest.raises(errors.ApiError, match="no"):
        client.optim_step().result(60)
    for _ in range(2):
        with pytest.raises(errors.OrderBroken, match=f"get_training_client.*{type(refusal).__name__}: no"):
            client.optim_step().result(60)
    assert len(pool.requests("OptimStep")) == 1


def test_a_call_that_is_given_up_after_the_users_time_raises_the_refusal_and_ends_its_client() -> None:
    pool = FakePool()
    with ServiceClient(transport=pool, retry_timeout_s=0.0) as service:
        client = service.create_lora_training_client()
        full = errors.api_error(errors.Code.RESOURCE_EXHAUSTED, "no room", reason="QUEUE_FULL", retry_delay_s=1.0)
        pool.faults = {"OptimStep": [full]}
        with pytest.raises(errors.ApiError, match="no room"):
            client.optim_step().result(60)
        with pytest.raises(errors.OrderBroken, match="get_training_client"):
            client.optim_step().result(60)


def test_the_error_of_a_failed_operation_has_its_reason_and_name(pool: FakePool, client: TrainingClient) -> None:
    name = f"{MODEL_ID}:1"
    error = operations_pb2.OperationError(
        code=errors.Code.FAILED_PRECONDITION, reason="GRADIENT_WINDOW_CLOSED", message="operation 7 failed"
    )
    failed = operations_pb2.Operation(name=name, state=operations_pb2.OPERATION_STATE_FAILED, error=error)
    pool.handlers["OptimStep"] = lambda request: training_pb2.OptimStepResponse(operation=failed)
    with pytest.raises(OperationFailed, match="operation 7 failed") as raised:
        client.optim_step().result(60)
    assert (raised.value.code, raised.value.reason) == (errors.Code.FAILED_PRECONDITION, "GRADIENT_WINDOW_CLOSED")
    assert raised.value.operation == name


def test_a_request_that_cannot_be_sent_consumes_no_sequence_number(pool: FakePool, client: TrainingClient) -> None:
    for attempt in (
        lambda: client.forward_backward([], "cross_entropy"),
        lambda: client.train_step([], "cross_entropy"),
        lambda: client.forward([datum(1)], "sft"),  # type: ignore[arg-type]
        lambda: client.forward_backward_custom([Datum([1], {})], lambda data, logprobs: (None, {})),
        lambda: client.save_weights_for_sampler(""),
        lambda: client.save_state(3),  # type: ignore[arg-type]
        lambda: client.save_weights_for_sampler(3),  # type: ignore[arg-type]
        lambda: client.save_weights_external(3),  # type: ignore[arg-type]
        lambda: client.save_weights_and_get_sampling_client(3),  # type: ignore[arg-type]
        lambda: client.save_state("a", ttl_seconds="5"),  # type: ignore[arg-type]
    ):
        refusals = (
            r"no data|unknown loss_fn|no loss_fn_inputs|name is empty|name must be a string, got 3|ttl_seconds must"
        )
        with pytest.raises(ValueError, match=refusals):
            attempt()
    client.optim_step().result(60)
    assert pool.applied == [1]


def test_a_large_batch_takes_several_sequence_numbers_and_has_one_result(
    pool: FakePool, client: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "CHUNK_DATUMS_MAX", 2)  # the real bound is 1,024
    data = [datum(i) for i in range(5)]
    merged = client.forward_backward(data, "cross_entropy").result(60)
    assert sorted(seqs(pool, "ForwardBackward")) == [1, 2, 3]
    assert [d["logprobs"].tolist() for d in merged.loss_fn_outputs] == [
        pytest.approx([-(i + 1) / 10]) for i in range(5)
    ]
    assert merged.metrics == {
        "loss:sum": pytest.approx(1.5),
        "clock_cycle:unique": 101,
        "clock_cycle:unique_1": 102,
        "clock_cycle:unique_2": 103,
    }
    assert {(r.batch.first_seq, r.batch.num_requests) for r in pool.requests("ForwardBackward")} == {(1, 3)}
    step = client.train_step(data, "cross_entropy").result(60)
    assert {(r.batch.first_seq, r.batch.num_requests) for r in pool.requests("ForwardBackward")[3:]} == {(4, 3)}
    assert pool.requests("TrainStep")[0].batch == pool.requests("ForwardBackward")[-1].batch
    assert (sorted(seqs(pool, "ForwardBackward")), seqs(pool, "TrainStep")) == ([1, 2, 3, 4, 5], [6])
    assert len(step.forward_backward.loss_fn_outputs) == 5
    assert step.optim_step.metrics == {"grad_norm:last": 1}
    assert pool.applied == list(range(1, 8))


def test_a_bounded_number_of_requests_is_sent_ahead_of_acknowledgements(pool: FakePool, client: TrainingClient) -> None:
    pool.delay_of = lambda name, request: 1.0 if getattr(request, "seq", 0) == 1 else 0.0
    futures = [client.optim_step() for _ in range(3 * sequence.WINDOW)]
    wait_until(lambda: sequence.WINDOW in seqs(pool, "OptimStep"))
    time.sleep(0.05)  # time in which more would be sent
    assert max(seqs(pool, "OptimStep")) == sequence.WINDOW
    futures[-1].result(60)
    assert pool.applied == list(range(1, 3 * sequence.WINDOW + 1))


def custom_loss_torch(data: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    loss = torch.cat([(x - 1) ** 2 for x in logprobs]).sum() / len(logprobs)
    return loss, {"mine:mean": 3.0}


def custom_loss_numpy(data: list[Datum], logprobs: list[Any]) -> tuple[float, list[Any], dict[str, float]]:
    loss = sum(float(((x - 1) ** 2).sum()) for x in logprobs) / len(logprobs)
    return loss, [2 * (x - 1) / len(logprobs) for x in logprobs], {"mine:mean": 3.0}


@pytest.mark.parametrize("way", ["torch", "numpy"])
def test_a_custom_loss_is_cross_entropy_weighted_by_its_negative_gradient(
    pool: FakePool, client: TrainingClient, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "CHUNK_DATUMS_MAX", 1)  # the real bound is 1,024
    data = [Datum([1, 1], {"target_tokens": [1, 2], "mask": [1, 1]}), datum(3)]
    if way == "torch":
        future = client.forward_backward_custom(data, custom_loss_torch)
    else:
        future = client.forward_backward_custom(data, custom_loss_numpy, with_gradients=True)
    step = client.optim_step()
    metrics = future.result(60).metrics
    step.result(60)
    assert (sorted(seqs(pool, "Forward")), sorted(seqs(pool, "ForwardBackward"))) == ([1, 2], [3, 4])
    assert seqs(pool, "OptimStep") == [5]
    assert pool.applied == [1, 2, 3, 4, 5]
    weights = {
        request.seq: from_tensor(request.data[0].loss_inputs["weights"]).tolist()
        for request in pool.requests("ForwardBackward")
    }
    assert weights == {3: pytest.approx([1.2, 1.3]), 4: pytest.approx([1.4])}
    assert all(set(r.data[0].loss_inputs) == {"target_tokens", "weights"} for r in pool.requests("Forward"))
    assert metrics["loss:sum"] == pytest.approx((1.2**2 + 1.3**2 + 1.4**2) / 2)
    assert metrics["surrogate_loss:sum"] == pytest.approx(0.2 * 1.2 + 0.3 * 1.3 + 0.4 * 1.4)
    assert (metrics["mine:mean"], metrics["clock_cycle:unique_1"]) == (3.0, 104)


def test_a_custom_loss_gets_log_probabilities_and_nothing_else(pool: FakePool, client: TrainingClient) -> None:
    client.forward_backward_custom([datum(1)], custom_loss_torch, loss_type_input="logprobs").result(60)
    with pytest.raises(ValueError, match="loss_type_input is 'logprobs' or None"):
        client.forward_backward_custom([datum(1)], custom_loss_torch, loss_type_input="logits")  # type: ignore[call-overload]
    assert pool.applied == [1, 2]


def fails(data: list[Datum], logprobs: list[Any]) -> Any:
    raise ZeroDivisionError("a bug of mine")


@pytest.mark.parametrize(
    ("loss_fn", "with_gradients", "error", "message"),
    [
        (fails, False, ZeroDivisionError, "a bug of mine"),
        (lambda data, logprobs: (logprobs[0].detach().sum(), {}), False, ValueError, "does not depend"),
        (lambda data, logprobs: (logprobs[0], {}), False, ValueError, "one element"),
        (lambda data, logprobs: (0.0, [], {}), True, ValueError, "one gradient per datum"),
        (
            lambda data, logprobs: (logprobs[0].sum() * torch.nan, {}),
            False,
            ValueError,
            r"the custom loss is nan, and its gradient for data\[0\] is not finite",
        ),
        (
            lambda data, logprobs: (logprobs[0].sum(), {"a": "x"}),
            False,
            ValueError,
            r"metrics\['a'\] of a custom loss must be a number, got 'x'",
        ),
    ],
)
def test_a_custom_loss_that_fails_consumes_its_sequence_numbers(
    pool: FakePool, client: TrainingClient, loss_fn: Any, with_gradients: Any, error: type[Exception], message: str
) -> None:
    future = client.forward_backward_custom([datum(1, 2)], loss_fn, with_gradients=with_gradients)
    step = client.optim_step()
    with pytest.raises(error, match=message):
        future.result(60)
    step.result(60)
    [empty] = pool.requests("ForwardBackward")
    assert error.__name__ in empty.abandoned
    assert (len(empty.data), empty.batch) == (0, training_pb2.Batch(first_seq=2, num_requests=1))
    assert pool.applied == [1, 2, 3]


def test_a_custom_loss_may_block_on_the_futures_of_another_client(pool: FakePool, client: TrainingClient) -> None:
    with ServiceClient(transport=FakePool()) as other_service:
        reference = other_service.create_lora_training_client()

        def against_reference(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
            base = reference.forward(data, "cross_entropy").result(60).loss_fn_outputs[0]["logprobs"].to_torch()
            return (logprobs[0] - base).sum(), {}

        assert client.forward_backward_custom([datum(1)], against_reference).result(60).metrics["loss:sum"] == 0


def test_an_unnamed_save_returns_a_sampler_of_the_saved_weights(pool: FakePool, client: TrainingClient) -> None:
    client.optim_step()
    sampler = client.save_weights_and_get_sampling_client()
    assert (sampler.sampler_id, sampler.get_base_model(), pool.applied) == ("5e55:sample:0", "toy", [1, 2])
    named = client.save_weights_and_get_sampling_client("x")
    assert pool.requests("CreateSampler")[0].model_path == f"tinker://{MODEL_ID}/sampler_weights/x"
    assert named.sampler_id == "5e55:sample:7"


def test_an_inflight_sampler_is_requested_as_such_and_has_no_name(pool: FakePool, client: TrainingClient) -> None:
    client.save_weights_and_get_sampling_client()
    client.save_weights_and_get_sampling_client(kind="inflight")
    assert [request.is_inflight for request in pool.requests("SaveWeightsForSampler")] == [False, True]
    with pytest.raises(ValueError, match="has no name"):
        client.save_weights_and_get_sampling_client("x", kind="inflight")
    with pytest.raises(ValueError, match="one of snapshot, inflight"):
        client.save_weights_and_get_sampling_client(kind="newest")  # type: ignore[arg-type]


async def test_every_method_has_an_async_twin_of_the_older_idiom(pool: FakePool, client: TrainingClient) -> None:
    future = await client.forward_backward_async([datum(1)], "cross_entropy")
    step = await client.optim_step_async()
    assert (await future).metrics["clock_cycle:unique"] == 101
    assert (await step).metrics == {"grad_norm:last": 1}
    custom = await client.forward_backward_custom_async([datum(1)], custom_loss_numpy, with_gradients=True)
    assert "surrogate_loss:sum" in (await custom).metrics
    pairs: list[Any] = [
        await client.forward_async([datum(1)], "cross_entropy"),
        await client.train_step_async([datum(1)], "cross_entropy"),
        await client.save_state_async("a"),
        await client.save_weights_for_sampler_async("a"),
        await client.load_state_async("tinker://x:train:0/weights/a"),
        await client.load_state_with_optimizer_async("tinker://x:train:0/weights/a"),
    ]
    await asyncio.gather(*pairs)
    sampler = await client.save_weights_and_get_sampling_client_async()
    assert (await sampler.get_base_model_async(), (await client.get_info_async()).model_id) == ("toy", MODEL_ID)
    assert await client is client
    assert client.result() is client
    assert ModelInput.empty().length == 0
