"""Sampling parameters of a Tinker client, converted to the contract's."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.doors.tinker.sampling import sampling_params
from coordinator.doors.tinker.schemas import SamplingParams


@pytest.mark.parametrize(
    ("stop", "strings", "tokens"),
    [
        ("\n\n", ["\n\n"], []),
        (["Q:", "A:"], ["Q:", "A:"], []),
        ([7, 0], [], [7, 0]),
        ([], [], []),
    ],
)
def test_a_stop_is_a_text_or_texts_or_token_ids_or_empty(stop: Any, strings: list[str], tokens: list[int]) -> None:
    params = sampling_params(SamplingParams(stop=stop))
    assert params.HasField("stop")
    assert (list(params.stop.strings), list(params.stop.tokens)) == (strings, tokens)


def test_without_a_stop_the_models_end_token_stops_a_sample() -> None:
    assert not sampling_params(SamplingParams(stop=None)).HasField("stop")
    assert not sampling_params(SamplingParams()).HasField("stop")
