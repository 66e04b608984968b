"""What the engine takes on a GPU, counted without one."""

from __future__ import annotations

import pytest

from scripts.bench.gpu.cases import Case
from tests.support.fake_cuda.processes import FakeCudaProcess

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fake_gpu")]  # one process, so that torch is imported once


def test_a_training_step_waits_three_times_for_the_device(fake_gpu: FakeCudaProcess) -> None:
    passes, steps = fake_gpu.call("scripts.bench.gpu_count.cases:training", "0.6b@2", Case(8, 4, 64))
    assert passes.num_waits + steps.num_waits == 3
    assert passes.num_kernels <= 597


def test_many_targets_of_a_token_take_few_kernels_more_than_one(fake_gpu: FakeCudaProcess) -> None:
    one, many = (fake_gpu.call("tests.support.fake_cuda.scenarios:kernels_of_targets", number) for number in (1, 200))
    assert many - one <= 50
