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


OPERATIONS = "tests.support.fake_cuda.scenarios:operations_of_a_pass"
ROWS_ALONE = {
    *("embedding", "_fused_rms_norm", "cos", "sin", "mul", "neg", "cat", "copy_", "_to_copy"),
    *("fill_", "zeros", "zeros_like"),
}
"""Of the library: what works on each value, or on each row."""
IN_A_FIXED_ORDER = {"_flash_attention_forward", "_flash_attention_backward"}
"""Of the library: called for each request; see the test above."""


def test_a_pass_in_exact_mode_calls_nothing_of_the_library_that_sums_over_rows_in_its_own_order(
    fake_gpu: FakeCudaProcess,
) -> None:
    called = fake_gpu.call(OPERATIONS, "tiny", exact=True)
    assert {name for name in called if "::" not in name} <= ROWS_ALONE | IN_A_FIXED_ORDER
    assert "tinkerpool::multiply" in called


def test_outside_exact_mode_routers_alone_compute_tiles_of_one_size(fake_gpu: FakeCudaProcess) -> None:
    """Otherwise the number of rows beside a token would decide by its last bit where it goes."""
    assert "tinkerpool::multiply" not in fake_gpu.call(OPERATIONS, "tiny")
    of_two_layers = fake_gpu.call(OPERATIONS, "tiny-mixture")["tinkerpool::multiply"]
    assert of_two_layers == 2 * len(("forward", "backward"))
