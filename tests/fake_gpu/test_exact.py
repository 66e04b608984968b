"""Exact mode on a GPU."""

from __future__ import annotations

import pytest

from tests.support.fake_cuda.processes import FakeCudaProcess

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fake_gpu")]  # one process, so that torch is imported once


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("exact", [False, True])
def test_backwards_of_exact_mode_add_in_a_fixed_order_whichever_kernel_attends(
    fake_gpu: FakeCudaProcess, dtype: str, *, exact: bool
) -> None:
    scenario = "tests.support.fake_cuda.scenarios:orders_of_a_backward"
    assert fake_gpu.call(scenario, dtype=dtype, exact=exact) == [exact, exact]
