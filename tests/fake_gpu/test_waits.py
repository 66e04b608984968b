"""Where the engine waits for a GPU: nowhere but where it reads results."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_cuda.processes import FakeCudaProcess

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fake_gpu")]  # one process, so that torch is imported once


@pytest.mark.parametrize("settings", [{}, {"dtype": "float32"}], ids=str)
def test_a_decode_step_waits_for_its_tokens_alone(fake_gpu: FakeCudaProcess, settings: dict[str, Any]) -> None:
    """Not for positions, blocks, masks, plans or logits; with prompts and several versions in the step too.

    A graph that is captured is compared once, with its step.
    """
    steps = fake_gpu.call("tests.support.fake_cuda.scenarios:steps_in_which_samples_join", **settings)
    for counts in steps:
        of_drawing = {text: number for text, number in counts.waits.items() if "device_drawing.py" in text}
        assert sum(of_drawing.values()) <= 1, of_drawing
        of_first_tokens = [text for text in counts.waits if text not in of_drawing and "step_graphs.py" not in text]
        assert all("workers/sampling/sequences.py" in text for text in of_first_tokens), of_first_tokens
    assert not steps[-1].waits.keys() & steps[0].waits.keys(), "the last step begins no request"
