"""Where the engine waits for a GPU: nowhere but where it reads results."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from tests.support.fake_cuda.processes import FakeCudaProcess

FILE = re.compile(r"[a-z_]+\.py")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fake_gpu")]  # one process, so that torch is imported once


def waits_of(lines: Counter[str]) -> Counter[str]:
    """Return how often each file waits, without the comparison of a graph that was just captured."""
    waits: Counter[str] = Counter()
    for line, number in lines.items():
        waits.update({FILE.findall(line)[0]: number})
    del waits["graph_pool.py"]
    return waits


@pytest.mark.parametrize("settings", [{}, pytest.param({"dtype": "float32"}, marks=pytest.mark.long)], ids=str)
def test_a_decode_step_waits_for_its_tokens_alone(fake_gpu: FakeCudaProcess, settings: dict[str, Any]) -> None:
    """Not for positions, blocks, masks, plans or logits; with prompts and several versions in the step too.

    A graph that is captured is compared once, with its step.
    """
    steps = fake_gpu.call("tests.support.fake_cuda.scenarios:steps_in_which_samples_join", **settings)
    for counts in steps:
        assert waits_of(counts.waits) <= Counter({"downloads.py": 1})
    assert waits_of(steps[0].waits) == {"downloads.py": 1}, "first tokens are drawn in the step of their prompt"


def test_a_step_with_prompts_brings_their_log_probabilities_in_one_copy_each(fake_gpu: FakeCudaProcess) -> None:
    """They are of fewer rows than are held at once."""
    counts = fake_gpu.call("tests.support.fake_cuda.scenarios:step_with_prompt_logprobs", 3)
    assert waits_of(counts.waits) == {"downloads.py": 1, "prompts.py": 3}
    assert counts.to_host_bytes < 2 * 1024


def test_lists_of_tokens_come_to_the_host_without_their_rows(fake_gpu: FakeCudaProcess) -> None:
    """A row of logits of this model has 1.5 kB, and the prompt has 40."""
    first, second = fake_gpu.call("tests.support.fake_cuda.scenarios:steps_with_lists")
    assert first.to_host_bytes < 40 * 5 * 16 + 1024
    assert second.to_host_bytes < 1024
    assert waits_of(second.waits) == {"downloads.py": 1, "device_drawing.py": 1}


def test_sequences_that_get_their_slots_late_begin_in_the_drawing_of_a_step(fake_gpu: FakeCudaProcess) -> None:
    counts = fake_gpu.call("tests.support.fake_cuda.scenarios:step_with_late_slots")
    assert waits_of(counts.waits) == {"downloads.py": 1}


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_decode_step_is_two_launches(fake_gpu: FakeCudaProcess, is_reversed: bool) -> None:
    """Its layers with the logits, and its drawing, whatever the order of adapters in the pass.

    It begins before the tokens of the step before it are read, and gets them by a copy on the device.
    """
    counts = fake_gpu.call("tests.support.fake_cuda.scenarios:step_of_adapters", is_reversed=is_reversed)
    assert counts.num_operations == 2 + 1
    assert waits_of(counts.waits) == {"downloads.py": 1}
    assert counts.to_device_bytes < 4 * 1024, "the tables of adapters are on the device already"
