"""The demo's measures."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.demo.tenants import kl_sample_train
from tinkerpool import types


def test_the_kl_between_sampler_and_trainer_is_the_mean_difference_over_sampled_tokens_only() -> None:
    def datum(logprobs: list[float]) -> types.Datum:
        return types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"logprobs": np.array(logprobs, np.float32)})

    def output(*logprobs: list[float]) -> types.ForwardBackwardOutput:
        tensors = [{"logprobs": types.TensorData.from_numpy(np.array(values, np.float32))} for values in logprobs]
        return types.ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=tensors, metrics={})

    # The prompt's positions are 0 and are not compared.
    data = [datum([0, -1.0, -2.0]), datum([0, 0, -3.0])]
    assert kl_sample_train(data, output([-9, -1.0, -2.0], [-9, -9, -3.0])) == 0
    assert kl_sample_train(data, output([-9, -1.25, -2.0], [-9, -9, -2.5])) == pytest.approx((0.25 + 0 - 0.5) / 3)
