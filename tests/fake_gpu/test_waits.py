"""Where the engine waits for a GPU: nowhere but where it reads results."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_cuda.processes import FakeCudaProcess

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fake_gpu")]  # one process, so that torch is imported once


@pytest.mark.parametrize("settings", [{}, {"dtype": "float32"}], ids=str)
def test_a_decode_step_waits_for_its_logits_and_log_probabilities_alone(
    fake_gpu: FakeCudaProcess, settings: dict[str, Any]
) -> None:
    """Not for positions, blocks, masks or plans; with prompts and several versions in the step too."""
    steps = fake_gpu.call("tests.support.fake_cuda.scenarios:steps_in_which_samples_join", **settings)
    waits = {text for counts in steps for text in counts.waits}
    assert {text.partition(" at ")[0] for text in waits} == {"a copy to the host", "tolist"}, waits
    assert {text.partition(" at ")[2].partition(":")[0] for text in waits} == {"workers/sampling/sample_pass.py"}
    assert max(counts.num_waits for counts in steps) == 3, "one more where a request draws its first token"
