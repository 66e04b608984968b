"""Variable-length attention, with a slow kernel instead of the GPU's, is the attention of each sequence solo."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.numerics.agreement import distance, observe
from tests.support.numerics.allocations import Allocations
from tests.support.numerics.harness import Driver, make_spec
from tests.support.numerics.slow_kernel import SlowKernel
from tests.support.numerics.tenants import TENANTS
from workers.model import gpu_attention
from workers.model.attention import Attend, AttendPacked, PackedAttention
from workers.model.gpu_attention import (
    SHARED_MAX,
    SHORT_MAX,
    FlashKernel,
    SdpaAttention,
    Sequences,
    VarlenAttention,
    attend_packed_for,
)
from workers.model.packed_delta import PackedDelta
from workers.model.segments import Segment

LENGTHS = [5, 12, 12, 1, 33]
NUM_ROWS = 70
"""With seven rows of padding."""


SINKS = torch.tensor([-3.0, 0.0, 1.5, 4.0])


def run(
    attend: Attend, window: int | None, num_heads: tuple[int, int] = (4, 2), sinks: Tensor | None = None
) -> list[Tensor]:
    """Return output of the rows of sequences (57, H, E), finite also in the padding, and gradients (heads, 57, E)."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(1, heads, NUM_ROWS, 16, generator=generator).requires_grad_()
        for heads in (num_heads[0], num_heads[1], num_heads[1])
    )
    out = attend(0, query, key, value, scaling=0.3, sliding_window=window, sinks=sinks)
    assert out.shape == (1, NUM_ROWS, num_heads[0], 16)
    assert out.isfinite().all()
    total = sum(LENGTHS)
    weights = torch.randn(out.shape, generator=generator)
    weights[:, total:] = 0
    gradients = torch.autograd.grad((out * weights).sum(), (query, key, value))
    return [out[0, :total], *(gradient[0, :, :total] for gradient in gradients)]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("num_heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("counts", [None, [2, 3], [1] * 5])
def test_varlen_attention_is_that_of_each_sequence(
    window: int | None, num_heads: tuple[int, int], counts: Sequence[int] | None
) -> None:
    expected = run(PackedAttention(LENGTHS), window, num_heads)
    for attend in (VarlenAttention(SlowKernel(), LENGTHS, counts), SdpaAttention(LENGTHS, counts)):
        for mine, theirs in zip(run(attend, window, num_heads), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("counts", [None, [2, 3]])
def test_sinks_take_a_part_of_the_weight_in_outputs_and_gradients(
    window: int | None, counts: Sequence[int] | None
) -> None:
    expected = run(VarlenAttention(SlowKernel(), LENGTHS), window, sinks=SINKS)
    for attend in (PackedAttention(LENGTHS, counts), SdpaAttention(LENGTHS, counts)):
        for mine, theirs in zip(run(attend, window, sinks=SINKS), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4, 40])
def test_attention_reports_whether_it_makes_masks(window: int | None) -> None:
    for attend in (VarlenAttention(SlowKernel(), LENGTHS), SdpaAttention(LENGTHS), PackedAttention(LENGTHS)):
        run(attend, window)
        assert bool(getattr(attend, "_masks", {})) == (attend.makes_masks and window == 4)


def test_a_call_covers_all_sequences_or_those_of_one_request() -> None:
    together, apart = SlowKernel(), SlowKernel()
    run(VarlenAttention(together, LENGTHS), None)
    run(VarlenAttention(apart, LENGTHS, [2, 3]), None)
    assert together.ends == [[0, 5, 17, 29, 30, 63, 70]]
    assert apart.ends == [[0, 5, 17], [0, 12, 13, 46], [0, 7]]


@pytest.mark.parametrize("window", [None, 4])
def test_requests_of_short_sequences_share_a_call_without_a_window(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so many sequences that their keys are not divided between processors."""
    monkeypatch.setattr(gpu_attention, "SHARED_MAX", 12)
    kernel, counts = SlowKernel(), [1, 2, 1, 1]
    expected = run(PackedAttention(LENGTHS), window)
    actual = run(VarlenAttention(kernel, LENGTHS, counts, sequences_min=6), window)
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    if window is None:
        assert kernel.ends == [[0, 5, 17, 29, 30, 30, 30], [0, 33], [0, 7, 7, 7, 7, 7, 7]]
    else:
        assert kernel.ends == [[0, 5], [0, 12, 24], [0, 1], [0, 33], [0, 7]]


def test_one_call_has_all_requests_unless_one_has_a_long_sequence() -> None:
    kernel = SlowKernel()
    assert VarlenAttention(kernel, [SHARED_MAX, 3], [1, 1], sequences_min=9).fewest_sequences == 9
    assert VarlenAttention(kernel, [SHARED_MAX + 1, 3], [1, 1], sequences_min=9).fewest_sequences is None
    assert VarlenAttention(kernel, [3, 3], [1, 1]).fewest_sequences is None, "they share none"
    assert VarlenAttention(kernel, [SHARED_MAX + 1, 3]).fewest_sequences == 1


@pytest.mark.parametrize(
    ("longest", "is_ordered", "has_own", "is_own"),
    [
        (SHORT_MAX, False, True, True),
        (SHORT_MAX + 1, False, True, False),
        (9, True, True, False),
        (9, False, False, False),
    ],
)
def test_a_backward_is_our_own_for_short_sequences_outside_exact_mode(
    monkeypatch: pytest.MonkeyPatch, longest: int, *, is_ordered: bool, has_own: bool, is_own: bool
) -> None:
    calls: list[Sequences] = []
    monkeypatch.setattr(gpu_attention, "short_gradients", lambda *given: calls.append(given[-1]))
    rows, sums = (
        torch.empty(longest, 4, 16, dtype=torch.bfloat16, device="meta"),
        torch.empty(4, longest, device="meta"),
    )
    ends = torch.empty(2, dtype=torch.int32, device="meta")
    sequences = Sequences(ends=ends, longest=longest, scaling=0.3, window=None)
    kernel = FlashKernel(is_ordered=is_ordered, has_own=has_own)
    kernel.backward(rows, (rows, rows, rows), rows, (sums, ends, ends), sequences)
    assert calls == [sequences] * is_own


def test_a_bucket_attends_by_the_kernel_of_its_model() -> None:
    """In exact mode requests of other lengths would have other bits by another one."""
    kernel, all_ends = SlowKernel(), [0, 5, 17, 29, 30, 63, 70]
    own = VarlenAttention(kernel, [1])
    run(VarlenAttention.between(own, torch.tensor(all_ends, dtype=torch.int32), NUM_ROWS, max(LENGTHS)), None)
    assert kernel.ends == [all_ends]


@pytest.mark.parametrize("counts", [None, [2, 3]])
@pytest.mark.parametrize("has_backward", [False, True])
def test_memory_of_a_pass_is_free_at_once(counts: Sequence[int] | None, has_backward: bool) -> None:
    """Without the garbage collector, which does not run for a few objects with much memory."""
    gc.collect()
    gc.disable()
    try:
        with Allocations() as allocations:
            attend = VarlenAttention(SlowKernel(), LENGTHS, counts)
            if has_backward:
                run(attend, None)
            else:
                rows = torch.randn(1, 4, NUM_ROWS, 16, requires_grad=True)
                assert attend(0, rows, rows, rows, scaling=0.3, sliding_window=None).requires_grad
                del rows
            assert allocations.num_bytes > 0, "ends of sequences"
            del attend
            assert allocations.num_bytes == 0
    finally:
        gc.enable()


@pytest.mark.usefixtures("own_base_models")
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["off", "on"])
@pytest.mark.parametrize("is_by_request", [False, True])
def test_model_with_gpu_attention_gives_the_same_results_and_gradients(
    qwen3: Path, recompute: str, is_by_request: bool
) -> None:
    driver = Driver(qwen3, recompute=recompute)
    driver.engine.base_model.attend_packed = lambda lengths, counts: VarlenAttention(
        SlowKernel(), lengths, counts if is_by_request else None
    )
    apart = distance(observe(driver, TENANTS), observe(Driver(qwen3), TENANTS))
    assert 0 < apart.logprobs < 1e-4
    assert apart.gradients < 1e-4


@pytest.mark.parametrize("attention", [partial(VarlenAttention, SlowKernel()), SdpaAttention])
def test_backward_copies_no_tensor_of_all_rows_to_take_off_the_batch(
    model_directory: Path, attention: AttendPacked
) -> None:
    """The backward of `tensor[0]` fills a tensor of all rows with zeros and copies the gradient into it."""
    driver = Driver(model_directory)
    driver.install(make_spec("a"))
    (row,) = driver.engine.bank.acquire(["a"])
    tokens, positions = torch.zeros(9, dtype=torch.long), torch.arange(9)
    model, recur = driver.engine.base_model, PackedDelta([9], tokens.device)
    hidden = model.forward(tokens, positions, [Segment(0, 9, row.groups)], attention([9], [1]), recur)
    nodes = [hidden.grad_fn]
    for node in nodes:
        assert node is not None
        nodes += [before for before, _ in node.next_functions if before is not None and before not in nodes]
    names = {type(node).__name__ for node in nodes}
    assert "SqueezeBackward1" in names
    assert "SelectBackward0" not in names
    driver.engine.base_model.reset()


@pytest.mark.parametrize("window", [None, 4])
def test_flash_kernel_is_called_as_this_torch_declares_it(window: int | None) -> None:
    """Checks the call only, because the kernel needs a GPU (tests/gpu)."""
    query = torch.empty(20, 4, 16, dtype=torch.bfloat16, device="meta")
    key, value = (torch.empty(20, 2, 16, dtype=torch.bfloat16, device="meta") for _ in range(2))
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    sequences = Sequences(ends=ends, longest=9, scaling=0.3, window=window)
    kernel = FlashKernel()
    out, saved = kernel.forward(query, key, value, sequences)
    gradients = kernel.backward(torch.empty_like(out), (query, key, value), out, saved, sequences)
    assert out.shape == query.shape
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "kind"),
    [
        ("cuda", torch.bfloat16, 128, VarlenAttention),
        ("cuda", torch.bfloat16, 20, SdpaAttention),
        ("cuda", torch.bfloat16, 512, SdpaAttention),
        ("cuda", torch.float32, 128, SdpaAttention),
        ("cpu", torch.float32, 128, PackedAttention),
        ("cpu", torch.bfloat16, 128, PackedAttention),
    ],
)
def test_attention_suits_device_dtype_and_head_dimension(
    device: str, dtype: torch.dtype, head_dim: int, kind: type[Any]
) -> None:
    attend_packed = attend_packed_for(torch.device(device), dtype, 4, head_dim, exact=False)
    assert isinstance(attend_packed([3, 4], [1, 1]), kind)
