"""Values from users are converted without loss, or refused."""

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tinker import types

from tinkerpool import AdamParams, Datum, EncodedTextChunk, ModelInput, SamplingParams, TensorData, errors
from tinkerpool.client.calls import encoding
from tinkerpool.convert import from_tensor
from tinkerpool.types import ForwardBackwardOutput, OptimStepResponse, TrainStepResponse
from tinkerpool.v1 import training_pb2, types_pb2


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2, 3], "int64"),
        ([1.0, 2.0, 3.0], "float32"),
        (np.array([1, 2, 3], np.int32), "int64"),
        (np.array([1, 2, 3], np.float64), "float32"),
        (torch.tensor([1, 2, 3]), "int64"),
        (torch.tensor([1.0, 2.0, 3.0], requires_grad=True), "float32"),
        (torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16), "float32"),
        (torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16), "float32"),
    ],
)
def test_lists_arrays_and_torch_tensors_become_the_same_tensor(values: Any, dtype: str) -> None:
    tensor = TensorData(values)
    assert (tensor.dtype, tensor.shape, tensor.tolist()) == (dtype, (3,), [1, 2, 3])
    assert tensor == TensorData(tensor.to_torch()) == TensorData(tensor.to_numpy())


def test_a_tensor_keeps_its_values_when_the_source_changes() -> None:
    source = np.ones(2, np.float32)
    tensor, torch_source = TensorData(source), torch.ones(2)
    torch_tensor = TensorData.from_torch(torch_source)
    source[0], torch_source[0] = 5, 5
    assert tensor.tolist() == torch_tensor.tolist() == [1, 1]
    with pytest.raises(ValueError, match="read-only"):
        tensor.data[0] = 5


def test_flat_data_takes_a_shape_as_in_the_sdk() -> None:
    assert TensorData(data=[1, 2, 3, 4], dtype="int64", shape=[2, 2]).tolist() == [[1, 2], [3, 4]]
    with pytest.raises(ValueError, match="do not fill the shape"):
        TensorData([1, 2, 3], shape=[2, 2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorData([1.5], "int64"), "fractions"),
        (lambda: TensorData(["a"]), "holds numbers"),
        (lambda: TensorData([1], "bfloat16"), "'int64' or 'float32'"),
        (lambda: EncodedTextChunk([1.5]), "whole numbers"),
        (lambda: EncodedTextChunk([-1]), "token ids must be from 0 to 2147483647, got -1$"),
        (lambda: EncodedTextChunk([2**31]), "token ids must be from 0 to 2147483647, got 2147483648$"),
        (lambda: EncodedTextChunk([[1]]), "one sequence"),
        (lambda: Datum([1], {"target_tokens": [0.5]}), r"loss_fn_inputs\['target_tokens'\]"),
        (
            lambda: Datum([1], {"target_tokens": "hi"}),
            r"'target_tokens'\]: .* tokens must be encoded first, with get_tok",
        ),
        (lambda: Datum([1], {"weights": None}), r"'weights'\]: a tensor holds numbers, but None is among them"),
        (lambda: Datum([1, 2], {"weights": [1, None]}), "but None is among them"),
        (lambda: encoding.adam_params(AdamParams(learning_rate="1e-3")), "learning_rate is '1e-3': give a number"),  # type: ignore[arg-type]
        (lambda: SamplingParams(max_tokens=0), "max_tokens"),
        (lambda: SamplingParams(temperature=-1), "temperature"),
        (lambda: SamplingParams(temperature=float("nan")), "temperature"),
        (lambda: SamplingParams(top_k=0), "top_k"),
        (lambda: SamplingParams(top_p=0), "top_p"),
        (lambda: SamplingParams(max_tokens="3"), "max_tokens must be a whole number, or None, got '3'"),  # type: ignore[arg-type]
        (lambda: SamplingParams(max_tokens=3.5), "max_tokens must be a whole number, or None, got 3.5"),  # type: ignore[arg-type]
        (lambda: SamplingParams(max_tokens=True), "max_tokens must be a whole number, or None, got True"),
        (lambda: SamplingParams(seed="1"), "seed must be a whole number, or None, got '1'"),  # type: ignore[arg-type]
        (lambda: SamplingParams(temperature="0"), "temperature must be a number, got '0'"),  # type: ignore[arg-type]
        (lambda: SamplingParams(top_k=1.5), "top_k must be a whole number, got 1.5"),  # type: ignore[arg-type]
        (lambda: SamplingParams(top_p=[1, 1]), r"top_p must be a number, got \[1, 1\]"),  # type: ignore[arg-type]
        (lambda: SamplingParams(stop=3), "stop must be a string, a list of strings or a list of token ids, got 3"),  # type: ignore[arg-type]
        (lambda: SamplingParams(stop=["a", 1]), "mixture"),  # type: ignore[arg-type]
        (lambda: encoding.loss_function("sft"), "cross_entropy, importance_sampling"),
        (lambda: encoding.loss_function("unspecified"), "unknown loss_fn"),
        (lambda: encoding.loss_function("custom"), "forward_backward_custom"),
        (lambda: encoding.loss_config({"beta": "x"}), "must be a number"),  # type: ignore[dict-item]
        (lambda: encoding.string_map({"a": 1}), "strings to strings"),  # type: ignore[dict-item]
    ],
)
def test_invalid_values_are_refused_before_anything_is_sent(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("whole", [3, np.int32(3), np.array(3), torch.tensor(3)])
def test_numbers_of_numpy_and_torch_are_numbers(whole: Any) -> None:
    half: Any = torch.tensor(0.5)
    params = SamplingParams(max_tokens=whole, seed=whole, top_k=whole, temperature=half, top_p=float(half))
    message = encoding.sampling_params(params)
    assert (message.max_tokens, message.seed, message.top_k, message.temperature) == (3, 3, 3, 0.5)
    rates: list[Any] = [half, np.float64(0.5), np.float32(0.5)]
    for rate in rates:
        assert encoding.adam_params(AdamParams(learning_rate=rate, eps=1)).learning_rate == 0.5


def test_a_field_of_a_part_of_a_train_step_is_refused_with_its_place() -> None:
    step = TrainStepResponse(
        forward_backward=ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=[], metrics={}),
        optim_step=OptimStepResponse(metrics={}),
    )
    with pytest.raises(AttributeError, match=r"'metrics': use .forward_backward.metrics or .optim_step.metrics$"):
        _ = step.metrics  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"no attribute 'loss'$"):
        _ = step.loss  # type: ignore[attr-defined]
    assert copy.deepcopy(step) == pickle.loads(pickle.dumps(step)) == step


def test_model_input_is_a_sequence_of_chunks() -> None:
    model_input = ModelInput.empty().append(EncodedTextChunk([1, 2])).append_int(3)
    assert (model_input.to_ints(), model_input.length, len(model_input.chunks)) == ([1, 2, 3], 3, 2)
    assert ModelInput.from_ints(np.array([1, 2])) == ModelInput.from_ints([1, 2]) != ModelInput.from_ints([1, 3])
    assert ModelInput.empty().to_ints() == []


def test_loss_inputs_get_the_types_of_the_sdk() -> None:
    datum = Datum(
        model_input=[1, 2],
        loss_fn_inputs={"target_tokens": torch.tensor([2, 3]), "weights": TensorData([1, 0]), "mask": [True, False]},
    )
    assert {name: tensor.dtype for name, tensor in datum.loss_fn_inputs.items()} == {
        "target_tokens": "int64",
        "weights": "float32",
        "mask": "int64",
    }


def test_a_datum_is_sent_with_tokens_as_int32_and_its_shapes() -> None:
    request = training_pb2.ForwardRequest()
    inputs = {"target_tokens": [[2, 3], [4, 5]], "weights": [[1, 2], [3, 4]]}
    encoding.add_datum(request.data, Datum([1, 2], inputs), "cross_entropy")
    [datum] = request.data
    assert from_tensor(datum.tokens).tolist() == [1, 2]
    assert datum.loss_inputs["target_tokens"].dtype == types_pb2.DATA_TYPE_INT32
    assert from_tensor(datum.loss_inputs["target_tokens"]).tolist() == [[2, 3], [4, 5]]
    assert from_tensor(datum.loss_inputs["weights"]).dtype == np.float32


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, None),
        ([], ([], [])),
        ("\n", (["\n"], [])),
        (["a", "b"], (["a", "b"], [])),
        ([1, np.int64(2)], ([], [1, 2])),
    ],
)
def test_stop_is_absent_empty_strings_or_tokens(stop: Any, expected: Any) -> None:
    message = encoding.sampling_params(SamplingParams(stop=stop))
    sent = (list(message.stop.strings), list(message.stop.tokens)) if message.HasField("stop") else None
    assert sent == expected


@pytest.mark.parametrize(
    ("ours", "theirs"), [(AdamParams(), types.AdamParams()), (SamplingParams(), types.SamplingParams())]
)
def test_defaults_of_parameters_are_the_sdks(ours: Any, theirs: Any) -> None:
    assert dataclasses.asdict(ours) == theirs.model_dump()


def test_a_parameter_of_zero_is_sent_and_a_missing_one_is_not() -> None:
    assert encoding.adam_params(AdamParams(learning_rate=0)).HasField("learning_rate")
    assert not encoding.sampling_params(SamplingParams()).HasField("seed")
    assert encoding.sampling_params(SamplingParams(seed=0)).HasField("seed")


def test_every_canonical_code_has_its_exception() -> None:
    for code in errors.Code:
        error = errors.api_error(code, "no", reason="WHY")
        assert isinstance(error, errors.ApiError)
        assert (error.code, error.reason) == (code, "WHY")
    assert errors.Code.of(99) is errors.Code.UNKNOWN
    assert isinstance(errors.api_error(errors.Code.INVALID_ARGUMENT, ""), ValueError)
    assert isinstance(errors.api_error(errors.Code.NOT_FOUND, ""), LookupError)
