"""AdamW on a GPU: two kernels in Triton for the steps of any number of rows.

Imported by the first launch alone (`workers.model.gpu_operations`): a CPU has no Triton. The operations, their tables
and the parts of a row are described in `adamw_launches`.

Main invariants: a program reads and writes one part of one row, and nothing is added atomically. The order of a row's
sums depends on its length alone, so the bits of a step depend on its own row alone. If a step is not taken, nothing of
its row is written.

Dimensions: S steps, C most parts of a row, P values of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.training.adamw_launches import ALIGNED_BYTES, BOUND_MAX, NUMBERS, PART_MULTIPLE, PARTS_MAX, ROW_FIELDS

ALIGNED = tl.constexpr(ALIGNED_BYTES)
INFINITE = tl.constexpr(float("inf"))
LEAST = tl.constexpr(1e-12)
"""Added to norms before they bound anything: squares of values below 1e-19 are zero in fp32."""
NUM_FIELDS, NUM_NUMBERS = tl.constexpr(len(ROW_FIELDS)), tl.constexpr(len(NUMBERS))
SQUARES_BLOCK, UPDATE_BLOCK = 2048, 1024
"""Values that a program reads of a vector at once: eight and four for each thread. `PART_MULTIPLE` is a multiple."""
NUM_WARPS = 8


@triton.jit
def _vector(row, field, first):
    """Return the address of a value of one of the row's vectors in fp32."""
    address = tl.load(row + field).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(address, ALIGNED) + first


@triton.jit
def _part_values(num_values, MULTIPLE: tl.constexpr, PARTS: tl.constexpr):
    """Return the values of each part of a row but the last, as `adamw_launches.part_values`."""
    return tl.cdiv(num_values, MULTIPLE * PARTS) * MULTIPLE


@triton.jit
def _bounded_square(exp_avg, exp_avg_sq, BOUND: tl.constexpr):
    """Return the square of the first moment; infinite where the second is no number from 0 to the largest square."""
    is_bounded = (exp_avg_sq >= 0) & (exp_avg_sq <= BOUND * BOUND)
    return tl.where(is_bounded, exp_avg * exp_avg, INFINITE)


@triton.jit(do_not_specialize=["width"])
def _squares(
    squares, rows, numbers, width,
    BLOCK: tl.constexpr, MULTIPLE: tl.constexpr, PARTS: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """Write the sums of squares of one part: of the gradient; of weights and first moment if no norms are known.

    Grid: S, C.
    """
    step, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = rows + step * NUM_FIELDS
    num_values = tl.load(row + 5)
    size = _part_values(num_values, MULTIPLE, PARTS)
    first = part * size
    if first < num_values:
        count = tl.minimum(size, num_values - first).to(tl.int32)
        is_known = tl.load(numbers + step * NUM_NUMBERS + 9) >= 0
        weights, exp_avg = _vector(row, 0, first), _vector(row, 1, first)
        exp_avg_sq, gradient = _vector(row, 2, first), _vector(row, 3, first)
        block = tl.arange(0, BLOCK)
        total, of_weights, of_moment = (tl.zeros((BLOCK,), tl.float32),) * 3
        whole = count // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            own = tl.load(gradient + start + block)
            total += own * own
        rest = whole + block
        own = tl.load(gradient + rest, mask=rest < count, other=0.0)
        total += own * own
        if not is_known:
            for start in range(0, count, BLOCK):
                place = start + block
                is_place = place < count
                own = tl.load(weights + place, mask=is_place, other=0.0)
                of_weights += own * own
                first_moment = tl.load(exp_avg + place, mask=is_place, other=0.0)
                second_moment = tl.load(exp_avg_sq + place, mask=is_place, other=0.0)
                of_moment += _bounded_square(first_moment, second_moment, BOUND)
        out = squares + step * 3 * width + part
        tl.store(out, tl.sum(total, 0))
        if not is_known:
            tl.store(out + width, tl.sum(of_weights, 0))
            tl.store(out + 2 * width, tl.sum(of_moment, 0))


@triton.jit
def _root_of_sums(sums, num_parts, PARTS: tl.constexpr):
    """Return the root of the sum of a row's parts."""
    part = tl.arange(0, PARTS)
    return tl.sqrt_rn(tl.sum(tl.load(sums + part, mask=part < num_parts, other=0.0), 0))


@triton.jit
def _stepped(
    weights, exp_avg, exp_avg_sq, gradient, copy, place, is_place, has_copy, scale,
    decay, beta1, rest1, beta2, rest2, step_size, root, eps, BOUND: tl.constexpr,
):  # fmt: skip
    """Take the step of some values; return the squares of the change, the new weights and the new first moment."""
    old = tl.load(weights + place, mask=is_place, other=0.0)
    slope = tl.load(gradient + place, mask=is_place, other=0.0) * scale
    first = beta1 * tl.load(exp_avg + place, mask=is_place, other=0.0) + rest1 * slope
    second = beta2 * tl.load(exp_avg_sq + place, mask=is_place, other=0.0) + rest2 * (slope * slope)
    divisor = tl.div_rn(tl.sqrt_rn(second), root) + eps
    new = (old - decay * old) - tl.div_rn(step_size * first, divisor)
    tl.store(weights + place, new, mask=is_place)
    tl.store(exp_avg + place, first, mask=is_place)
    tl.store(exp_avg_sq + place, second, mask=is_place)
    if has_copy:
        tl.store(copy + place, new.to(tl.bfloat16), mask=is_place)
    change = tl.where(is_place, new - old, 0.0)
    new = tl.where(is_place, new, 0.0)
    moment = tl.where(is_place, _bounded_square(first, second, BOUND), 0.0)
    return change * change, new * new, moment


@triton.jit(do_not_specialize=["width"])
def _update(
    results, squares, rows, numbers, width,
    BLOCK: tl.constexpr, MULTIPLE: tl.constexpr, PARTS: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """Take the step of one part, unless the row's gradient is not finite or its new weights may not be. Grid: S, C."""
    step, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = rows + step * NUM_FIELDS
    num_values = tl.load(row + 5)
    size = _part_values(num_values, MULTIPLE, PARTS)
    first = part * size
    if first < num_values:
        own = numbers + step * NUM_NUMBERS
        decay, beta1, rest1 = tl.load(own), tl.load(own + 1), tl.load(own + 2)
        beta2, rest2, step_size = tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
        root, eps, limit = tl.load(own + 6), tl.load(own + 7), tl.load(own + 8)
        weights_norm, moment_norm, is_checked = tl.load(own + 9), tl.load(own + 10), tl.load(own + 11) != 0
        sums, num_parts = squares + step * 3 * width, tl.cdiv(num_values, size)
        norm = _root_of_sums(sums, num_parts, PARTS)
        if weights_norm < 0:
            weights_norm = _root_of_sums(sums + width, num_parts, PARTS)
            moment_norm = _root_of_sums(sums + 2 * width, num_parts, PARTS)
        # The norm of the new first moment is at most beta1 |moment| + rest1 |gradient|. It is multiplied by `step_size`
        # (which must not overflow either), and then divided by `eps` or more.
        moved = (beta1 * moment_norm + rest1 * norm + LEAST) * (step_size / tl.minimum(eps, 1.0))
        bound = (1 + decay) * (weights_norm + LEAST) + moved
        is_taken = (norm < INFINITE) & ((bound <= BOUND) | (not is_checked))  # not if the bound is no number
        changes, news, moments = (tl.zeros((BLOCK,), tl.float32),) * 3
        if is_taken:
            scale = 1.0
            if (limit > 0) & (norm > limit):
                scale = tl.div_rn(limit, norm + 1e-6)
            count = tl.minimum(size, num_values - first).to(tl.int32)
            weights, exp_avg = _vector(row, 0, first), _vector(row, 1, first)
            exp_avg_sq, gradient = _vector(row, 2, first), _vector(row, 3, first)
            address = tl.load(row + 4)
            copy = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), ALIGNED) + first
            block = tl.arange(0, BLOCK)
            all_places = tl.full((BLOCK,), 1, tl.int1)  # a mask by which a thread still stores 16 bytes at once
            whole = count // BLOCK * BLOCK
            for start in range(0, whole, BLOCK):
                change, new, moment = _stepped(
                    weights, exp_avg, exp_avg_sq, gradient, copy, start + block, all_places, address != 0, scale,
                    decay, beta1, rest1, beta2, rest2, step_size, root, eps, BOUND,
                )  # fmt: skip
                changes, news, moments = changes + change, news + new, moments + moment
            if whole < count:
                rest = whole + block
                change, new, moment = _stepped(
                    weights, exp_avg, exp_avg_sq, gradient, copy, rest, rest < count, address != 0, scale,
                    decay, beta1, rest1, beta2, rest2, step_size, root, eps, BOUND,
                )  # fmt: skip
                changes, news, moments = changes + change, news + new, moments + moment
        out = results + (step * width + part) * 4
        tl.store(out, norm)
        tl.store(out + 1, tl.sum(changes, 0))
        tl.store(out + 2, tl.where(is_taken, tl.sum(news, 0), INFINITE))
        tl.store(out + 3, tl.sum(moments, 0))


def adamw_squares(squares: Tensor, rows: Tensor, numbers: Tensor, num_values: int, num_unknown: int) -> None:
    """See `adamw_launches.SQUARES`."""
    num_steps, _, width = squares.shape
    _squares[num_steps, width](
        squares, rows, numbers, width,
        BLOCK=SQUARES_BLOCK, MULTIPLE=PART_MULTIPLE, PARTS=PARTS_MAX, BOUND=BOUND_MAX, num_warps=NUM_WARPS,
    )  # fmt: skip


def adamw_update(
    results: Tensor, squares: Tensor, rows: Tensor, numbers: Tensor, num_values: int, num_copied: int
) -> None:
    """See `adamw_launches.UPDATE`."""
    num_steps, _, width = squares.shape
    _update[num_steps, width](
        results, squares, rows, numbers, width,
        BLOCK=UPDATE_BLOCK, MULTIPLE=PART_MULTIPLE, PARTS=PARTS_MAX, BOUND=BOUND_MAX, num_warps=NUM_WARPS,
    )  # fmt: skip
