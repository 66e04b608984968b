"""Payloads: equal exactly for equal requests, decoded alike at admission and replay. Refusals name the fix."""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.base.config import Limits
from coordinator.base.errors import Code, ServiceError
from coordinator.payloads import passes as payloads
from coordinator.payloads.canonical import digest
from tests.support.memory import memory_of
from tests.support.recorded import SAMPLED_KIND, span
from tests.support.toy_engine import toy_model_info
from tests.support.toy_pool import datum, pass_request
from tinkerpool.convert import to_tensor
from tinkerpool.v1 import training_pb2, types_pb2
from workers.contract.loss_inputs import LOSS_RULES
from workers.contract.messages import UNMARKED, RequestBatch

MODEL, LIMITS = toy_model_info(), Limits(datums_max=4)
Pass = training_pb2.ForwardBackwardRequest


def floats(*values: float) -> types_pb2.Tensor:
    return to_tensor(np.array(values, np.float32))


def ints(*values: int, dtype: Any = np.int32) -> types_pb2.Tensor:
    return to_tensor(np.array(values, dtype))


def rl_datum(length: int = 3, **inputs: types_pb2.Tensor) -> types_pb2.Datum:
    tokens = ints(*range(1, length + 1))
    zeros = floats(*[0.0] * length)
    return types_pb2.Datum(
        tokens=tokens, loss_inputs={"target_tokens": tokens, "logprobs": zeros, "advantages": zeros} | inputs
    )


def request(*data: types_pb2.Datum, loss: str = "CROSS_ENTROPY", **config: float) -> Pass:
    value = getattr(types_pb2, f"LOSS_FUNCTION_{loss}")
    return Pass(adapter_id="a", seq=1, data=data or [datum(3)], loss_function=value, loss_config=config)


def payload(message: Any) -> bytes:
    return payloads.canonical_pass(message, MODEL, LIMITS)[0]


def refusal(message: Any) -> ServiceError:
    with pytest.raises(ServiceError) as raised:
        payload(message)
    assert raised.value.code is Code.INVALID_ARGUMENT
    assert raised.value.retry_delay_s is None
    return raised.value


def test_token_ids_of_either_width_are_the_same_request() -> None:
    narrow, wide = datum(5), datum(5)
    tokens = np.arange(1, 6)
    for tensor in (wide.tokens, wide.loss_inputs["target_tokens"]):
        tensor.CopyFrom(to_tensor(tokens.astype(np.int64)))
    assert wide.tokens != narrow.tokens
    assert payload(request(narrow)) == payload(request(wide))


def test_integer_weights_and_a_mask_do_not_change_the_payload() -> None:
    plain, other = datum(5), datum(5)
    other.loss_inputs["weights"].CopyFrom(ints(1, 1, 1, 1, 1))
    other.loss_inputs["mask"].CopyFrom(floats(1, 0))
    assert payload(request(plain)) == payload(request(other))


def test_seq_and_request_id_are_not_part_of_the_payload_and_everything_else_is() -> None:
    first = request(datum(3))
    second = request(datum(3))
    second.seq, second.request_id = 9, "r"
    assert payload(first) == payload(second)
    for other in (
        request(datum(4)),
        request(datum(3), datum(3)),
        request(datum(3, first=2)),
        request(rl_datum(), loss="PPO"),
        request(rl_datum(), loss="IMPORTANCE_SAMPLING"),
    ):
        assert payload(other) != payload(first)
    assert payload(request(rl_datum(), loss="PPO")) != payload(request(rl_datum(), loss="PPO", clip_low_threshold=0.9))


def test_a_batch_is_part_of_the_payload_and_names_a_range_with_the_request_in_it() -> None:
    plain, marked = request(datum(3)), request(datum(3))
    marked.seq, marked.batch.first_seq, marked.batch.num_requests = 5, 4, 3
    assert payload(marked) != payload(plain)
    assert (payloads.batch_of(plain), payloads.batch_of(marked)) == (UNMARKED, RequestBatch(4, 6))


@pytest.mark.parametrize(
    ("seq", "first", "num"), [(0, 0, 1), (0, 1, 1), (3, 4, 3), (7, 4, 3), (5, 5, 0), (5, 5, -1), (1, 0, 9)]
)
def test_a_batch_that_does_not_have_its_request_is_refused(seq: int, first: int, num: int) -> None:
    marked = request(datum(3))
    marked.seq, marked.batch.first_seq, marked.batch.num_requests = seq, first, num
    with pytest.raises(ServiceError, match=f"this request has seq {seq}"):
        payloads.batch_of(marked)


def test_a_train_step_is_the_last_request_of_its_batch() -> None:
    step = training_pb2.TrainStepRequest(seq=4, batch=training_pb2.Batch(first_seq=3, num_requests=2))
    assert payloads.batch_of(step) == RequestBatch(3, 4)
    step.batch.num_requests = 3
    with pytest.raises(ServiceError, match="the optim_step is at 5"):
        payloads.batch_of(step)


def test_the_kind_is_part_of_the_hash() -> None:
    same = payload(request())
    assert digest(same, "forward") != digest(same, "forward_backward")


def test_the_order_of_maps_does_not_change_the_payload() -> None:
    inputs = dict(rl_datum().loss_inputs)
    turned = types_pb2.Datum(tokens=rl_datum().tokens, loss_inputs=dict(reversed(inputs.items())))
    one = request(rl_datum(), loss="PPO", clip_low_threshold=0.5, clip_high_threshold=2.0)
    other = request(turned, loss="PPO", clip_high_threshold=2.0, clip_low_threshold=0.5)
    assert payload(one) == payload(other)


@st.composite
def passes(draw: st.DrawFn) -> Pass:
    """Return a valid pass of any loss, with tensors of any dtype that the contract accepts, and maps in any order."""
    loss = draw(st.sampled_from(sorted(LOSS_RULES)))
    rule = LOSS_RULES[loss]
    finite = st.floats(-1e6, 1e6, width=32)
    given = rule.required | draw(st.sets(st.sampled_from(sorted(rule.optional | rule.filled.keys() | {"mask"}))))
    is_soft = loss == "cross_entropy" and draw(st.booleans())
    data = []
    for length in draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)):
        token_type = draw(st.sampled_from([np.int32, np.int64]))
        shape = (length, 2) if is_soft else (length,)
        tokens = np.array(draw(st.lists(st.integers(0, 99), min_size=length, max_size=length)), token_type)
        inputs = {}
        for name in draw(st.permutations(sorted(given))):
            if name == "target_tokens":
                array = np.full(shape, draw(st.integers(0, 99)), token_type)
            else:
                array = np.full(shape, draw(finite), draw(st.sampled_from([np.float32, np.int32, np.int64])))
            inputs[name] = to_tensor(array)
        spans = [span(SAMPLED_KIND, "s:sample:0:1:0", 0, length)] if rule.recorded else []
        data.append(
            types_pb2.Datum(tokens=to_tensor(tokens), loss_inputs=inputs, token_spans=spans, target_spans=spans)
        )
    options = {name: draw(finite) for name in draw(st.permutations(sorted(rule.options))) if draw(st.booleans())}
    return request(*data, loss=loss.upper(), **options)


def described(decoded: payloads.DecodedPass) -> Any:
    """Return values, order of names, dtypes and layout of a decoded pass."""

    def array(value: Any) -> Any:
        flags = value.flags
        return value.tolist(), value.shape, value.dtype.str, flags.c_contiguous, flags.writeable

    data = [
        (array(each.tokens), [(name, array(value)) for name, value in each.loss_inputs.items()])
        for each in decoded.data
    ]
    return decoded.loss_fn, list(decoded.loss_config.items()), data


@pytest.mark.slow
@given(passes())
def test_a_replayed_pass_is_decoded_exactly_as_the_admitted_one(message: Pass) -> None:
    canonical, admitted = payloads.canonical_pass(message, MODEL, LIMITS)
    replayed = payloads.decode_pass(canonical)
    assert described(replayed) == described(admitted)
    assert replayed.lengths == [len(each.tokens) for each in admitted.data]
    for each in admitted.data:
        assert list(each.loss_inputs) == sorted(each.loss_inputs)
        assert not any(array.flags.writeable for array in (each.tokens, *each.loss_inputs.values()))
    again, _ = payloads.canonical_pass(Pass.FromString(canonical), MODEL, LIMITS)
    assert again == canonical


@pytest.mark.parametrize("num_targets", [1, 2])
def test_cross_entropy_without_weights_is_the_same_request_as_one_with_weights_of_one(num_targets: int) -> None:
    shape = (3,) if num_targets == 1 else (3, num_targets)
    targets = to_tensor(np.full(shape, 7, np.int32))
    without = types_pb2.Datum(tokens=ints(1, 2, 3), loss_inputs={"target_tokens": targets})
    spelled = types_pb2.Datum(
        tokens=ints(1, 2, 3), loss_inputs={"target_tokens": targets, "weights": to_tensor(np.ones(shape, np.float32))}
    )
    assert payload(request(without)) == payload(request(spelled))
    assert payload(request(without, spelled)) == payload(request(spelled, without))
    [decoded] = payloads.canonical_pass(request(without), MODEL, LIMITS)[1].data
    assert decoded.loss_inputs["weights"].tolist() == np.ones(shape).tolist()


@pytest.mark.tracemalloc
@pytest.mark.slow
@pytest.mark.parametrize(("length", "num_inputs"), [(16, 5), (64, 2), (1024, 2), (1024, 5)])
def test_the_memory_of_decoded_data_is_estimated_within_a_fifth(length: int, num_inputs: int) -> None:
    model = dataclasses.replace(MODEL, max_seq_len=length)
    names = ["target_tokens", "logprobs", "advantages", "clip_low_threshold", "clip_high_threshold"]
    tokens, values = ints(*[1] * length), floats(*[1.0] * length)
    if num_inputs == 2:
        one, loss = types_pb2.Datum(tokens=tokens, loss_inputs={"target_tokens": tokens}), "CROSS_ENTROPY"
    else:
        inputs = {name: tokens if name == "target_tokens" else values for name in names}
        one, loss = types_pb2.Datum(tokens=tokens, loss_inputs=inputs), "PPO"
    message = request(*[one] * 200, loss=loss)
    canonical, _ = payloads.canonical_pass(message, model, Limits())
    admitted = memory_of(lambda: payloads.canonical_pass(message, model, Limits())[1])
    replayed = memory_of(lambda: payloads.decode_pass(canonical))
    estimate = payloads.decode_pass(canonical).num_bytes
    assert estimate == pytest.approx(admitted, rel=0.2)
    assert estimate == pytest.approx(replayed, rel=0.2)


def test_soft_targets_have_a_second_dimension_in_cross_entropy_only() -> None:
    targets, weights = np.ones((3, 2), np.int32), np.ones((3, 2), np.float32)
    soft = datum(3)
    soft.loss_inputs["target_tokens"].CopyFrom(to_tensor(targets))
    soft.loss_inputs["weights"].CopyFrom(to_tensor(weights))
    [decoded] = payloads.canonical_pass(request(soft), MODEL, LIMITS)[1].data
    assert decoded.loss_inputs["weights"].shape == (3, 2)
    soft.loss_inputs["weights"].CopyFrom(floats(1, 1, 1))
    assert refusal(request(soft)).reason == "LENGTH_MISMATCH"
    assert "vector" in refusal(request(rl_datum(target_tokens=to_tensor(targets)), loss="PPO")).message


def changed(change: Callable[[types_pb2.Datum], Any]) -> Pass:
    one = datum(3)
    change(one)
    return request(datum(2), one)


BAD: dict[str, tuple[Pass, list[str]]] = {
    "unknown loss": (Pass(data=[datum(3)], loss_function=77), ["77", "cross_entropy"]),  # type: ignore[arg-type]
    "unset loss": (Pass(data=[datum(3)]), ["unspecified", "cross_entropy"]),
    "unknown option": (request(rl_datum(), loss="PPO", clip=0.5), ["'clip'", "clip_low_threshold"]),
    "option of another loss": (request(beta=0.5), ["'beta'", "none"]),
    "option not finite": (request(rl_datum(), loss="DRO", beta=math.nan), ["'beta'", "finite"]),
    "no data": (Pass(loss_function=types_pb2.LOSS_FUNCTION_CROSS_ENTROPY), ["data is empty"]),
    "too many sequences": (request(*[datum(1)] * 5), ["5 sequences", "at most 4"]),
    "no tokens": (changed(lambda d: d.ClearField("tokens")), ["data[1].model_input", "dtype"]),
    "empty tokens": (changed(lambda d: d.tokens.CopyFrom(ints())), ["data[1].model_input", "empty"]),
    "tokens not integers": (changed(lambda d: d.tokens.CopyFrom(floats(1, 2, 3))), ["data[1].model_input", "int32"]),
    "tokens not a vector": (
        changed(lambda d: d.tokens.CopyFrom(to_tensor(np.ones((3, 1), np.int32)))),
        ["data[1].model_input", "vector"],
    ),
    "token too large": (changed(lambda d: d.tokens.CopyFrom(ints(1, 100, 2))), ["100", "0 to 99"]),
    "token negative": (changed(lambda d: d.tokens.CopyFrom(ints(1, -5, 2))), ["-5", "0 to 99"]),
    "token beyond int32": (
        changed(lambda d: d.tokens.CopyFrom(ints(1, 2**32 + 1, 2, dtype=np.int64))),
        [str(2**32 + 1), "0 to 99"],
    ),
    "target out of range": (
        changed(lambda d: d.loss_inputs["target_tokens"].CopyFrom(ints(1, 100, 2))),
        ["target_tokens", "100"],
    ),
    "too long": (request(datum(65)), ["data[0]", "65 tokens", "at most 64"]),
    "missing input": (changed(lambda d: d.loss_inputs.pop("target_tokens")), ["data[1]", "lacks target_tokens"]),
    "unknown input": (
        changed(lambda d: d.loss_inputs["reward"].CopyFrom(floats(1, 1, 1))),
        ["data[1]", "reward", "target_tokens, weights"],
    ),
    "length mismatch": (
        changed(lambda d: d.loss_inputs["weights"].CopyFrom(floats(1, 1))),
        ["weights", "length 2", "model_input has 3 tokens"],
    ),
    "no dimensions": (
        changed(lambda d: d.loss_inputs["weights"].CopyFrom(to_tensor(np.float32(1)))),  # type: ignore[arg-type]
        ["weights", "is a scalar but model_input has 3 tokens"],
    ),
    "NaN": (changed(lambda d: d.loss_inputs["weights"].CopyFrom(floats(1, math.nan, 1))), ["weights", "element 1"]),
    "infinity": (changed(lambda d: d.loss_inputs["weights"].CopyFrom(floats(1, 1, -math.inf))), ["element 2"]),
    "bytes do not fit the shape": (changed(lambda d: d.tokens.shape.append(2)), ["data[1].model_input", "12 bytes"]),
    "negative size": (changed(lambda d: d.tokens.shape.__setitem__(0, -3)), ["negative"]),
    "huge sizes": (changed(lambda d: d.tokens.shape.extend([2**62, 2**62])), ["data[1].model_input"]),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_data_is_refused_with_its_location_and_the_expected_form(case: str) -> None:
    message, expected = BAD[case]
    text = refusal(message).message
    assert all(part in text for part in expected), text
    assert len(text) < 400


@given(
    data=st.binary(max_size=40),
    dtype=st.integers(-1, 5),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 10), max_size=4),
    name=st.sampled_from(["tokens", "target_tokens", "weights"]),
)
def test_no_malformed_tensor_passes_the_check_or_breaks_it(
    data: bytes, dtype: int, shape: list[int], name: str
) -> None:
    one = datum(3)
    tensor = one.tokens if name == "tokens" else one.loss_inputs[name]
    tensor.CopyFrom(types_pb2.Tensor(data=data, dtype=dtype, shape=shape))  # type: ignore[arg-type]
    with contextlib.suppress(ServiceError):
        [checked] = payloads.canonical_pass(request(one), MODEL, LIMITS)[1].data
        assert checked.tokens.shape[:1] == checked.loss_inputs["weights"].shape[:1]
        assert np.isfinite(checked.loss_inputs["weights"]).all()


def test_a_step_without_hyperparameters_has_the_documented_defaults() -> None:
    empty = payloads.canonical_adam("a", types_pb2.AdamParams())
    spelled = types_pb2.AdamParams(
        learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0
    )
    assert empty == payloads.canonical_adam("a", spelled)
    assert (
        payloads.decode_adam(payloads.canonical_adam("a", types_pb2.AdamParams(learning_rate=0.0))).learning_rate == 0
    )


@pytest.mark.parametrize(
    "values",
    [
        {"learning_rate": -1.0},
        {"learning_rate": math.nan},
        {"learning_rate": math.inf},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"eps": 0.0},
        {"eps": math.inf},
        {"weight_decay": -1e-9},
        {"grad_clip_norm": math.nan},
    ],
)
def test_wrong_hyperparameters_are_refused_by_name(values: dict[str, float]) -> None:
    with pytest.raises(ServiceError, match=f"adam_params.{next(iter(values))}"):
        payloads.canonical_adam("a", types_pb2.AdamParams(**values))


def test_a_seq_that_its_client_gives_up_fails_with_the_clients_reason() -> None:
    with pytest.raises(ServiceError) as raised:
        payload(Pass(abandoned="the loss raised: a bug" + "!" * 2000))
    error = raised.value
    assert (error.code, error.reason, len(error.message)) == (Code.CANCELLED, "ABANDONED", 1000)
    assert error.message.startswith("the loss raised: a bug")


def test_metadata_is_counted_in_bytes() -> None:
    payloads.check_metadata({"k": "v" * 100}, Limits(metadata_bytes_max=101))
    for metadata in ({"k": "v" * 101}, {"k": "é" * 51}):
        with pytest.raises(ServiceError, match="at most 101"):
            payloads.check_metadata(metadata, Limits(metadata_bytes_max=101))


def test_a_train_step_has_the_payload_of_its_pass() -> None:
    whole = pass_request("a", 1, [3])
    step = training_pb2.TrainStepRequest(adapter_id="a", seq=4, data=whole.data, loss_function=whole.loss_function)
    assert payload(step) == payload(whole)
