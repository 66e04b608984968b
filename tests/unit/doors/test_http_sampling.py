"""What a Tinker client asks of a sample, as the contract has it."""

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
def test_a_stop_is_a_text_or_texts_or_token_ids_or_nothing_at_all(
    stop: Any, strings: list[str], tokens: list[int]
) -> None:
    params = sampling_params(SamplingParams(stop=stop))
    assert params.HasField("stop")
    assert (list(params.stop.strings), list(params.stop.tokens)) == (strings, tokens)


def test_no_stop_leaves_the_models_own_end() -> None:
    assert not sampling_params(SamplingParams(stop=None)).HasField("stop")
    assert not sampling_params(SamplingParams()).HasField("stop")
