"""Errors of a GPU: those of one request, and those that end the worker."""

from __future__ import annotations

import pytest

from tests.support.fake_cuda.processes import FakeCudaProcess

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fake_gpu")]  # one process, so that torch is imported once

SCENARIO = "tests.support.fake_cuda.scenarios:failing_kernel"
SPOILED = RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("what", ["batch", "sample"])
def test_a_device_that_refuses_all_work_ends_the_worker_and_fails_no_request(
    fake_gpu: FakeCudaProcess, what: str
) -> None:
    assert fake_gpu.call(SCENARIO, SPOILED, spoils_device=True, what=what) == f"raised {SPOILED}"


@pytest.mark.parametrize("what", ["batch", "sample"])
@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("CUDA error: invalid configuration argument", "INTERNAL"),
        ("CUDA error: out of memory", "OUT_OF_MEMORY"),
    ],
)
def test_an_error_that_leaves_the_device_working_is_the_requests_own(
    fake_gpu: FakeCudaProcess, what: str, message: str, code: str
) -> None:
    assert fake_gpu.call(SCENARIO, RuntimeError(message), spoils_device=False, what=what) == code
