"""The kernels that only a GPU has, against slow implementations."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.numerics import adapted_losses
from tests.support.numerics.adamw_rows import assert_stepped, by_torch, is_same, make_rows, state, steps_of
from tests.support.numerics.few_products import EPS, FewProduct
from tests.support.numerics.given_logits import logits_for, losses_of, requests_of_every_kind
from tests.support.numerics.random_adapters import SHAPES, gradients_one_by_one, one_by_one, operands, segments_of
from tests.support.numerics.random_delta import ROWS, WRITES, RandomDelta
from tests.support.numerics.random_pages import RandomPages
from tests.support.numerics.random_steps import RandomStep
from tests.support.numerics.slow_pages import slow_pages
from workers.bank.entries import RowNorms
from workers.contract.messages import AdamParams
from workers.contract.settings import EngineSettings
from workers.model.attention import Attend
from workers.model.delta_rule import DeltaShape
from workers.model.few_rows import ROWS_MAX
from workers.model.fixed_order import fixed_order, prepare
from workers.model.frozen_products import BLOCK_ROWS
from workers.model.fused_runs import ForwardRun, TrainingRun
from workers.model.gpu_attention import (
    FlashKernel,
    SdpaAttention,
    Sequences,
    VarlenAttention,
    attend_packed_for,
    short_gradients,
)
from workers.model.gpu_operations import has_kernels
from workers.model.library_delta import rule_of_library
from workers.sampling.attention.pages import (
    PagedAttention,
    PageKernel,
    PageReads,
    flash_pages,
    page_kernel_for,
    takes_tables,
    triton_pages,
)
from workers.sampling.kv_cache import PAGE_TOKENS
from workers.selftest.library_delta import problem_of
from workers.selftest.loading import load_base_model
from workers.selftest.row_invariance import are_blocks_invariant
from workers.training.optim import NonFiniteStepError, StepNorms, adamw_steps

pytestmark = pytest.mark.gpu

LENGTHS = [5, 130, 130, 1, 333, 64]
NUM_ROWS = 672
"""With nine rows of padding."""
BF16 = 2.0**-7
"""Tolerance relative to the largest value: two roundings to 8 bits."""


def close(actual: Tensor, expected: Tensor) -> bool:
    expected = expected.float()
    return float((actual.float() - expected).abs().max()) <= BF16 * float(expected.abs().max())


def run(
    attend: Attend,
    dtype: torch.dtype,
    window: int | None,
    num_heads: tuple[int, int],
    head_dim: int,
    *,
    has_sinks: bool = False,
    by_head: bool = False,
) -> list[Tensor]:
    """Return output of the rows of sequences (T, H, E) and gradients of queries, keys and values (heads, T, E).

    `by_head`: operands lie head by head in memory, not row by row.
    """
    generator = torch.Generator().manual_seed(1)
    by_row = [
        torch.randn(1, NUM_ROWS, heads, head_dim, generator=generator).to("cuda", dtype).transpose(1, 2)
        for heads in (num_heads[0], num_heads[1], num_heads[1])
    ]
    query, key, value = ((rows.contiguous() if by_head else rows).requires_grad_() for rows in by_row)
    sinks = torch.linspace(-3, 3, num_heads[0], device="cuda") if has_sinks else None
    out = attend(0, query, key, value, scaling=head_dim**-0.5, sliding_window=window, sinks=sinks)
    assert out.isfinite().all()
    total = sum(LENGTHS)
    weights = torch.randn(out.shape, generator=generator).to("cuda", dtype)
    weights[:, total:] = 0
    gradients = torch.autograd.grad((out * weights).sum(), (query, key, value))
    return [out[0, :total], *(gradient[0, :, :total] for gradient in gradients)]


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("num_heads", "head_dim"), [((4, 4), 64), ((8, 2), 128), ((4, 1), 256)])
@pytest.mark.parametrize("counts", [None, [2, 1, 3]])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("by_head", [False, True])
def test_flash_attention_is_that_of_each_sequence(
    window: int | None,
    num_heads: tuple[int, int],
    head_dim: int,
    counts: list[int] | None,
    *,
    has_sinks: bool,
    by_head: bool,
) -> None:
    """A call with 333 tokens is the library's both ways; two of the three calls by request have a backward of ours."""
    shape = window, num_heads, head_dim
    expected = run(SdpaAttention(LENGTHS), torch.float32, *shape, has_sinks=has_sinks)
    attend = VarlenAttention(FlashKernel(has_own=True), LENGTHS, counts)
    actual = run(attend, torch.bfloat16, *shape, has_sinks=has_sinks, by_head=by_head)
    for mine, theirs in zip(actual, expected, strict=True):
        assert close(mine, theirs)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("num_heads", "head_dim"), [((4, 4), 64), ((8, 2), 128), ((4, 1), 256)])
def test_gradients_of_short_sequences_have_the_bits_of_each_solo(
    window: int | None, num_heads: tuple[int, int], head_dim: int
) -> None:
    """Given the results of the forward."""
    prepare()
    generator = torch.Generator().manual_seed(2)
    lengths, (heads, keys) = [5, 130, 64, 1, 256, 65], num_heads
    query, key, value, dout = (
        torch.randn(sum(lengths), number, head_dim, generator=generator).to("cuda", torch.bfloat16)
        for number in (heads, keys, keys, heads)
    )

    def sequences_of(own: list[int]) -> Sequences:
        ends = torch.tensor([0, *itertools.accumulate(own)], dtype=torch.int32, device="cuda")
        return Sequences(ends=ends, longest=max(own), scaling=head_dim**-0.5, window=window)

    together = sequences_of(lengths)
    out, (log_sums, *_) = FlashKernel().forward(query, key, value, together)
    gradients = short_gradients(dout, (query, key, value), out, log_sums, together)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        own = query[rows], key[rows], value[rows]
        solo = short_gradients(dout[rows], own, out[rows], log_sums[:, rows].contiguous(), sequences_of([length]))
        for whole, alone in zip(gradients, solo, strict=True):
            assert torch.equal(whole[rows], alone)
        start += length


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_key_heads", [2, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_by_request_in_a_fixed_order_has_the_bits_of_the_request_solo(
    head_dim: int, num_key_heads: int, dtype: torch.dtype
) -> None:
    """By flash attention, and in fp32 by memory-efficient attention, where no heads share keys."""
    prepare()
    generator = torch.Generator().manual_seed(2)
    tensors = [
        torch.randn(1, sum(LENGTHS), heads, head_dim, generator=generator).to("cuda", dtype).transpose(1, 2)
        for heads in (8, num_key_heads, num_key_heads, 8)
    ]
    attend_packed = attend_packed_for(torch.device("cuda"), dtype, 8, head_dim, exact=True)

    def outputs(start: int, stop: int, lengths: list[int], counts: list[int]) -> list[Tensor]:
        query, key, value = (tensor[:, :, start:stop].detach().requires_grad_() for tensor in tensors[:3])
        attend = attend_packed(lengths, counts)
        out = attend(0, query, key, value, scaling=0.1, sliding_window=None)
        dout = tensors[3][:, :, start:stop].transpose(1, 2)
        with fixed_order():
            gradients = torch.autograd.grad(out, (query, key, value), dout)
        return [out[0], *(gradient[0].transpose(0, 1) for gradient in gradients)]

    together = outputs(0, sum(LENGTHS), LENGTHS, [2, 1, 3])
    start = 0
    for lengths in (LENGTHS[:2], LENGTHS[2:3], LENGTHS[3:]):
        stop = start + sum(lengths)
        solo = outputs(start, stop, lengths, [len(lengths)])
        for whole, own in zip(together, solo, strict=True):
            assert torch.equal(whole[start:stop], own)
        start = stop


PAGE_KERNELS = [
    pytest.param(flash_pages, marks=pytest.mark.skipif(not takes_tables(), reason="this torch takes no tables")),
    triton_pages,
]


@pytest.mark.parametrize("kernel", PAGE_KERNELS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("num_heads", "head_dim"), [((2, 2), 64), ((8, 2), 128), ((4, 1), 256)])
def test_attention_over_pages_is_that_of_each_sequence_and_reads_nothing_beyond(
    num_heads: tuple[int, int], head_dim: int, kernel: PageKernel, *, is_causal: bool
) -> None:
    pages = RandomPages.of(
        num_heads, head_dim, torch.bfloat16, [1, 9, 200, 4], [1, 300, PAGE_TOKENS, 2777], device="cuda"
    )
    reads = pages.reads(is_causal=is_causal)
    whole = kernel(pages.query, pages.keys, pages.values, reads, 0.1)
    exact = pages.to(torch.float32)
    expected = slow_pages(exact.query, exact.keys, exact.values, reads, 0.1)
    assert close(whole[0], expected[0])
    assert close(whole[1], expected[1])
    for number in range(len(pages.counts)):
        rows, reads = pages.rows(number), pages.reads(slice(number, number + 1), is_causal=is_causal)
        out, sums = kernel(pages.query[rows], pages.keys, pages.values, reads, 0.1)
        assert torch.equal(out, whole[0][rows]), "bits depend on the other sequences of a call"
        assert torch.equal(sums, whole[1][:, rows])


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_over_pages_in_a_window_is_that_row_by_row(*, is_causal: bool) -> None:
    pages = RandomPages.of((8, 2), 128, torch.bfloat16, [1, 9, 200, 4], [1, 300, PAGE_TOKENS, 2777], device="cuda")
    reads = pages.reads(is_causal=is_causal)
    exact = pages.to(torch.float32)
    for window in (1, 70, 1500):
        actual = triton_pages(pages.query, pages.keys, pages.values, reads, 0.1, window)
        expected = slow_pages(exact.query, exact.keys, exact.values, reads, 0.1, window)
        assert close(actual[0], expected[0])
        assert close(actual[1], expected[1])


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_model_of_the_usual_form_samples_by_layers_in_few_kernels(
    even_models: dict[str, Path], architecture: str
) -> None:
    """The probe compares them with the model's own code."""
    model = load_base_model(EngineSettings(model_path=str(even_models[architecture]), device="cuda"))
    assert model.sampling_layers is not None
    assert page_kernel_for(model) is (flash_pages if takes_tables() else triton_pages)


@pytest.mark.parametrize("kernel", PAGE_KERNELS)
@pytest.mark.parametrize("has_norms", [False, True])
def test_attention_of_projections_is_that_of_separate_operations(kernel: PageKernel, *, has_norms: bool) -> None:
    """Of the same queries and keys, rotated and rounded to bf16: softmax turns their rounding into more."""

    def slowly(
        query: Tensor, keys: Tensor, values: Tensor, reads: PageReads, scaling: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        out, log_sums = slow_pages(query.float(), keys.float(), values.float(), reads, scaling, window)
        return out.to(query.dtype), log_sums

    results = []
    for own in (kernel, slowly):
        step = RandomStep.of((8, 2), 128, torch.bfloat16, has_norms=has_norms, device="cuda")
        results.append(PagedAttention(step.cache, own, step.tables).projected(0, step.projected))
    assert close(*results)


@pytest.mark.parametrize("group", [0, 1])
def test_the_forward_of_adapters_of_any_rank_is_their_own_products(group: int) -> None:
    segments, (x, ys) = segments_of(torch.bfloat16, "cuda"), operands(group, torch.bfloat16, "cuda")
    expected = one_by_one(segments, group, x, ys)
    solo = [y.clone() for y in ys]
    ForwardRun.of(segments).forward(group, x, ys)
    ForwardRun.of(segments[1:2]).forward(group, x, solo)
    for y, right, own in zip(ys, expected, solo, strict=True):
        assert close(y, right)
        assert torch.equal(y[1:8], own[1:8]), "bits depend on the other rows"


@pytest.mark.parametrize("way", ["alone", "bias", "norm", "added", "gated"])
@pytest.mark.parametrize("num_rows", [1, 17, ROWS_MAX])
@pytest.mark.parametrize(("d_in", "d_out"), [(1000, 1024), (4096, 6144)])
def test_products_of_few_rows_are_those_of_separate_operations(d_in: int, d_out: int, num_rows: int, way: str) -> None:
    product = FewProduct.of(num_rows, torch.bfloat16, way, d_in, d_out, "cuda")
    whole = product.run()
    assert close(whole, product.one_by_one())
    assert torch.equal(whole[:1], product.of_rows(slice(0, 1)).run()), "bits depend on the other rows"


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("way", ["norm", "added"])
def test_products_of_few_rows_shrink_for_adapters_beside(group: int, way: str) -> None:
    segments, shape = segments_of(torch.bfloat16, "cuda")[:3], SHAPES[group]  # of the first nine rows
    product = FewProduct.of(12, torch.bfloat16, way, shape.d_in, sum(shape.d_outs), "cuda")
    run = ForwardRun.of(segments)
    xa = product.shrunk(run, group, len(shape.d_outs))
    rows = product.x if product.norm is None else F.rms_norm(product.x, product.norm.shape, product.norm, EPS)
    expected = run.shrunk(group, rows, len(shape.d_outs)).sum(0)
    for segment in segments:
        if (views := segment.adapter.groups[group]) is not None:
            own = (slice(segment.start, segment.stop), slice(len(views.A)))
            assert close(xa[own], expected[own])


@pytest.mark.parametrize("group", [0, 1])
def test_the_gradients_of_adapters_of_any_rank_are_their_own(group: int) -> None:
    segments, (x, dys) = segments_of(torch.bfloat16, "cuda"), operands(group, torch.bfloat16, "cuda")
    dx = torch.randn(x.shape, device="cuda", dtype=torch.bfloat16)
    expected, gradients = gradients_one_by_one(segments, group, x, dys, dx)
    run = TrainingRun.of(segments)
    kept = run.forward(group, x, [torch.zeros_like(dy) for dy in dys])
    assert kept is not None
    run.backward(group, kept, x, dys, dx)
    assert close(dx, expected)
    for segment in segments:
        views = segment.adapter.groups[group]
        if views is not None:
            assert views.A_grad is not None
            for gradient, right in zip((views.A_grad, *views.B_grads), gradients[id(segment.adapter)], strict=True):
                assert close(gradient, right)


STEP_LENGTHS = (1, 63, 2048, 2049, 5_000_001)
"""The last in parts of several blocks."""


def test_optimizer_steps_are_those_of_torch_and_have_the_same_bits_alone_and_with_copies() -> None:
    assert has_kernels(torch.device("cuda", 0))
    rows, solo, kept = (make_rows(STEP_LENGTHS, device="cuda") for _ in range(3))
    for number in range(3):
        steps = steps_of(rows, num_steps=1 + number)
        expected = [by_torch(step) for step in steps]
        outcomes = adamw_steps(steps)
        for step, norms, right in zip(steps, outcomes, expected, strict=True):
            assert_stepped(step, norms, right)
        alone = [adamw_steps([step])[0] for step in steps_of(solo, num_steps=1 + number)]
        for row in kept:
            row.norms = RowNorms(math.inf, math.inf)  # so that nothing is known of the new weights
        with_copies = adamw_steps(steps_of(kept, num_steps=1 + number))
        assert outcomes == alone == with_copies
        for own, others in zip(rows, zip(solo, kept, strict=True), strict=True):
            assert all(is_same(state(own), state(other)) for other in others)
            for row in (own, *others):
                assert row.grad is not None
                row.grad.copy_(torch.linspace(-2, 3, len(row.grad)))


@pytest.mark.parametrize(("gradient", "learning_rate"), [(torch.nan, 0.1), (1.0, 3e38)])
def test_optimizer_step_that_is_not_finite_changes_no_weights_and_no_neighbour(
    gradient: float, learning_rate: float
) -> None:
    rows, sound = (make_rows(STEP_LENGTHS, device="cuda") for _ in range(2))
    assert rows[4].grad is not None
    rows[4].grad[4_999_999] = gradient
    before, steps = state(rows[4]), steps_of(rows)
    steps[4] = replace(steps[4], params=AdamParams(learning_rate=learning_rate))
    outcomes, expected = adamw_steps(steps), adamw_steps(steps_of(sound))
    assert isinstance(outcomes[4], NonFiniteStepError)
    assert is_same(state(rows[4])[:3], before[:3])
    for index in range(4):
        assert isinstance(outcomes[index], StepNorms)
        assert outcomes[index] == expected[index]
        assert is_same(state(rows[index]), state(sound[index]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_losses_by_kernels_are_those_of_torch(dtype: torch.dtype) -> None:
    requests = requests_of_every_kind(151_936)
    logits = logits_for(requests, 151_936, dtype, "cuda")
    expected, actual = (losses_of(requests, logits, has_kernels=has_kernels) for has_kernels in (False, True))
    apart = (actual.gradient.float() - expected.gradient.float()).abs().amax(1)
    assert (apart <= BF16 * expected.gradient.float().abs().amax(1)).all()
    for index, (part, theirs) in enumerate(zip(actual.parts, expected.parts, strict=True)):
        torch.testing.assert_close(part.logprobs, theirs.logprobs, rtol=1e-6, atol=1e-4)
        alone = losses_of(requests[index : index + 1], logits[part.start : part.stop], has_kernels=True)
        assert torch.equal(alone.gradient, actual.rows(index)), "bits depend on the other rows"


@pytest.mark.parametrize("num_targets", [None, 40])
def test_losses_add_adapters_of_the_unembedding(num_targets: int | None) -> None:
    vocab_size = 50_021
    requests = adapted_losses.requests_of(vocab_size, num_targets)
    adapters = adapted_losses.adapters_of(vocab_size, torch.bfloat16, "cuda")
    hidden = adapted_losses.hidden_for(requests, torch.bfloat16, "cuda")
    expected, actual = (
        adapted_losses.losses_of(requests, adapters, hidden, vocab_size, has_kernels=has_kernels)
        for has_kernels in (False, True)
    )
    adapted_losses.assert_close(actual, expected, 2.0**-5)


def test_a_request_has_the_same_bits_with_neighbours_that_adapt_the_unembedding_and_alone() -> None:
    vocab_size = 50_021
    requests = adapted_losses.requests_of(vocab_size)
    adapters = adapted_losses.adapters_of(vocab_size, torch.bfloat16, "cuda")
    hidden = adapted_losses.hidden_for(requests, torch.bfloat16, "cuda")
    together = adapted_losses.losses_of(requests, adapters, hidden, vocab_size, has_kernels=True, exact=True)
    for index, part in enumerate(together.parts):
        own, rows = slice(index, index + 1), slice(part.start, part.stop)
        alone = adapted_losses.losses_of(
            requests[own], adapters[own], hidden[rows], vocab_size, has_kernels=True, exact=True
        )
        assert torch.equal(alone.parts[0].logprobs, part.logprobs)
        assert torch.equal(alone.dhidden, together.dhidden[rows])
        for mine, theirs in zip(alone.gradients[0], together.gradients[index], strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_have_the_same_bits_at_every_position_of_a_block(dtype: torch.dtype) -> None:
    weights = [torch.randn(shape, device="cuda", dtype=dtype) for shape in ((1024, 1024), (3072, 1024), (4096, 12288))]
    assert are_blocks_invariant(weights, BLOCK_ROWS)


@pytest.mark.skipif(find_spec("fla") is None, reason="the extra tinkerpool[gpu] has fla; it is not installed here")
def test_linear_attention_by_fla_passes_its_trial(even_models: dict[str, Path]) -> None:
    model = load_base_model(EngineSettings(model_path=str(even_models["qwen3.5"]), device="cuda"))
    rule = rule_of_library(model.device, model.dtype)
    assert rule is not None
    assert problem_of(model, rule) == ""


@pytest.mark.parametrize("shape", [DeltaShape(2, 4, 16, 16, 3), DeltaShape(16, 32, 128, 128, 3)], ids=str)
def test_a_step_of_linear_attention_is_that_of_separate_operations_and_each_sequences_own(shape: DeltaShape) -> None:
    given = RandomDelta.of(shape, torch.bfloat16, "cuda")
    whole = given.by_kernel()
    for mine, right in zip(whole, given.by_operations(), strict=True):
        assert close(mine, right)
    for number, (row, slot) in enumerate(zip(ROWS, WRITES, strict=True)):
        solo = given.only([number]).by_kernel()
        for together, alone, place in zip(whole, solo, (row, slot, slot), strict=True):
            assert torch.equal(together[place], alone[place])
