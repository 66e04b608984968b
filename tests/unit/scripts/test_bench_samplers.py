"""Samples of different weights are not compared. No timing is tested."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from scripts.bench.sides.samplers import Generate, Prompts, check_logprobs
from workers.contract.messages import SampledSequence, SampleResult, StopReason

PROMPT = np.array([1, 2, 3], np.int32)


class FixedLogprobs:
    """Stands for PEFT: returns the same log-probability for all tokens."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def logprobs(self, prompt: NDArray[Any], drawn: NDArray[Any]) -> torch.Tensor:
        assert len(prompt) == len(PROMPT)
        assert len(drawn) == len(self.values)
        return torch.tensor(self.values)


def drawn(*logprobs: float) -> SampleResult:
    tokens = np.zeros(len(logprobs), np.int32)
    sequence = SampledSequence(tokens=tokens, logprobs=np.array(logprobs, np.float32), stop_reason=StopReason.LENGTH)
    return SampleResult(op_id="sample", sequences=(sequence,))


def test_sides_that_do_not_sample_from_the_same_weights_are_not_compared() -> None:
    peft = cast(Generate, FixedLogprobs(-1.0, -2.0))
    assert check_logprobs(drawn(-1.0, -2.0005), PROMPT, peft) == pytest.approx(5e-4, rel=1e-2)
    with pytest.raises(RuntimeError, match=r"differ by 2\.0e-03: two sides do not sample from the same model"):
        check_logprobs(drawn(-1.002, -2.0), PROMPT, peft)
    with pytest.raises(RuntimeError, match="differ by nan"):
        check_logprobs(drawn(float("nan"), -2.0), PROMPT, peft)


def test_no_prompt_occurs_twice_so_that_no_cache_has_it() -> None:
    prompts = [tuple(prompt) for prompt in Prompts(4096).draw_many(100, 8)]
    assert len(set(prompts)) == 100
    assert [tuple(prompt) for prompt in Prompts(4096).draw_many(100, 8)] == prompts, "every run has the same prompts"
