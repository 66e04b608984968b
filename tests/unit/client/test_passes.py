"""Cutting batches and merging results, by the SDK's rules."""

import numpy as np
import pytest

from tinkerpool import Datum, ForwardBackwardOutput, TensorData
from tinkerpool.client.training import passes


def datum(num_tokens: int = 1) -> Datum:
    return Datum(np.zeros(num_tokens, np.int32), {"weights": np.zeros(num_tokens, np.float32)})


def output(metrics: dict[str, float], num_datums: int = 1, first: int = 0) -> ForwardBackwardOutput:
    outputs = [{"logprobs": TensorData([float(first + i)])} for i in range(num_datums)]
    return ForwardBackwardOutput(loss_fn_output_type="T", loss_fn_outputs=outputs, metrics=metrics)


def test_a_chunk_has_at_most_1024_datums() -> None:
    assert [len(chunk) for chunk in passes.split([datum()] * 2049)] == [1024, 1024, 1]


def test_a_chunk_has_at_most_5_megabytes_and_keeps_the_order() -> None:
    data = [datum(250_000) for _ in range(6)]  # 2 MB each
    chunks = passes.split(data)
    assert [len(chunk) for chunk in chunks] == [2, 2, 2]
    assert [d for chunk in chunks for d in chunk] == data


def test_a_datum_above_the_limit_is_a_chunk_of_its_own() -> None:
    assert [len(chunk) for chunk in passes.split([datum(), datum(1_000_000), datum()])] == [1, 1, 1]


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="no data"):
        passes.split([])
    with pytest.raises(ValueError, match="list of Datum"):
        passes.split([[1, 2]])


def test_a_single_chunk_is_merged_too() -> None:
    assert passes.merge([output({"loss:sum": 1.5, "x:last": 1.0})]).metrics == {"loss:sum": 1.5}


def test_metrics_are_merged_with_datums_as_weights() -> None:
    assert passes.merge([output({"a:mean": 1}, 2), output({"a:mean": 4}, 1)]).metrics == {"a:mean": 2}
