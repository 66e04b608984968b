"""From a block of logits to log-probabilities and to the gradient, in Triton; the operations are in `kernel_scores`.

Where adapters of the unembedding are not in the logits yet, each kernel adds them to what it reads: so logits are
written once, by the product, and read for adapters by no kernel of their own. The kernel that writes the gradient
multiplies it by B while it has it. Imported by the first launch alone (`workers.model.gpu_operations`): a CPU has no
Triton.

Main invariants: a program reads and writes rows of one tile, which have one adapter, or the values of one request. A
row's results depend on that row and its adapter alone. Values are computed in fp32 and rounded once. Sums have a fixed
order: nothing is added atomically. A block has less than 2^31 logits (`device_logits`), so their places are of 32 bits.

Dimensions: B rows of a block, V vocabulary, P parts of it, K targets of a row, S requests, R padded rank.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.model.adapter_kernels import ALIGNED_BYTES, RANK_MIN, add_parts, padded_rank, plus_product
from workers.model.gpu_operations import TRAINING_TILE_ROWS, blocks_of, power_of_two
from workers.training.kernel_scores import LOGITS_AT_ONCE, PART_COLUMNS, TARGETS_AT_ONCE, num_parts_of

STAGES = tl.constexpr(3)
"""Blocks of these less one are being read while one is computed."""
VALUES = 1024
"""Losses of a request that a program holds at a time."""
LOWEST = tl.constexpr(-1e30)
"""Below every finite logit of a model. Not -inf, whose differences are not numbers."""
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _tile(tiles, addresses, ranks, num_rows, ROWS: tl.constexpr, HAS_ADAPTERS: tl.constexpr):
    """Return the first row of this program's tile, its number of rows, and the address and the rank of its B^T.

    Rank 0: nothing is to be added.
    """
    tile = tl.program_id(0)
    start, address, rank = tile * ROWS, tl.zeros((), tl.int64), tile * 0
    count = tl.minimum(num_rows - start, ROWS)
    if HAS_ADAPTERS:
        start, count, adapter = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
        address = tl.load(addresses + 4 * adapter + 1)
        rank = tl.where(address != 0, tl.load(ranks + adapter), 0)
    return start, count, address, rank


@triton.jit
def _ranks_of(xa, rows, is_row, rank, xa_stride, RANK: tl.constexpr, HAS_ADAPTERS: tl.constexpr):
    """Return xa[rows of a tile] in fp32, filled up with zeros."""
    if HAS_ADAPTERS:
        depth = tl.arange(0, RANK)
        own = tl.load(
            xa + rows[:, None] * xa_stride + depth[None, :], mask=is_row[:, None] & (depth < rank)[None, :], other=0.0
        )
    else:
        own = rank
    return own


@triton.jit
def _columns_of(logits, address, rank, columns, vocab_size, RANK: tl.constexpr, HAS_ADAPTERS: tl.constexpr):
    """Return B^T[:, some columns], filled up with zeros."""
    if HAS_ADAPTERS:
        B = tl.multiple_of(address.to(tl.pointer_type(logits.dtype.element_ty)), ALIGNED_BYTES)
        depth = tl.arange(0, RANK)
        matrix = tl.load(
            B + depth[:, None] * vocab_size + columns[None, :],
            mask=(depth < rank)[:, None] & (columns < vocab_size)[None, :],
            other=0.0,
        )
    else:
        matrix = rank
    return matrix


@triton.jit
def _sum_of_columns(values, ROWS: tl.constexpr, LEVELS: tl.constexpr):
    """Return the sums (ROWS,) of 2^LEVELS columns in one order, however threads hold them.

    Programs with adapters and programs without hold them otherwise, and a row may be in either.
    """
    for _ in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(values, (ROWS, values.shape[1] // 2, 2)))
        values = left + right
    return tl.reshape(values, (ROWS,))


@triton.jit
def _sum_logits(
    parts, logprobs, logits, xa, addresses, tiles, ranks, targets, places, scales,
    first_value, num_rows, vocab_size, row_stride, xa_stride,
    PART: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LEVELS: tl.constexpr, TARGETS: tl.constexpr,
    HAS_ONE_TARGET: tl.constexpr, RANK: tl.constexpr, HAS_ADAPTERS: tl.constexpr,
):  # fmt: skip
    """Set parts[part, rows of a tile] to the norms of one part of the vocabulary.

    And logprobs of targets in it to their logits: those that are in the sums, for (logit - highest) may be scaled by
    much. Grid: tiles, parts.
    """
    start, count, address, rank = _tile(tiles, addresses, ranks, num_rows, ROWS, HAS_ADAPTERS)
    part = tl.program_id(1)
    rows, is_row = start + tl.arange(0, ROWS), tl.arange(0, ROWS) < count
    scale = tl.load(scales + rows, mask=is_row, other=1.0)
    begin = tl.load(places + rows, mask=is_row, other=0) - first_value
    end = tl.load(places + rows + 1, mask=is_row, other=0) - first_value
    target, most = tl.load(targets + begin, mask=is_row, other=-1), tl.max(end - begin, 0)
    own = _ranks_of(xa, rows, is_row, rank, xa_stride, RANK, HAS_ADAPTERS)
    highest, total = tl.full((ROWS,), LOWEST, tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(part * PART, tl.minimum((part + 1) * PART, vocab_size), COLUMNS, num_stages=STAGES):
        columns = first + tl.arange(0, COLUMNS)
        mask = is_row[:, None] & (columns < vocab_size)[None, :]
        x = tl.load(logits + (rows[:, None] * row_stride + columns[None, :]), mask=mask, other=-INFINITY).to(tl.float32)
        if HAS_ADAPTERS:
            x = plus_product(x, own, _columns_of(logits, address, rank, columns, vocab_size, RANK, HAS_ADAPTERS))
        before = highest
        highest = tl.maximum(before, tl.max(x, 1))
        added = tl.exp((x - highest[:, None]) * scale[:, None])
        total = tl.fma(total, tl.exp((before - highest) * scale)[:, None], added)
        if HAS_ONE_TARGET:
            found += tl.where(target[:, None] == columns[None, :], x, 0.0)
        else:
            for each in range(0, most, TARGETS):
                value = begin[:, None] + each + tl.arange(0, TARGETS)[None, :]
                named = tl.load(targets + value, mask=value < end[:, None], other=-1)
                if _any_in(named, first, COLUMNS):
                    for number in range(each, tl.minimum(each + TARGETS, most)):
                        target = tl.load(targets + begin + number, mask=begin + number < end, other=-1)
                        logit = tl.sum(tl.where(target[:, None] == columns[None, :], x, 0.0), 1)
                        is_here = (target >= first) & (target < first + COLUMNS)
                        tl.store(logprobs + begin + number, logit, mask=is_here)
    out = parts + 2 * (part * num_rows + rows)
    tl.store(out, highest, mask=is_row)
    tl.store(out + 1, _sum_of_columns(total, ROWS, LEVELS), mask=is_row)
    if HAS_ONE_TARGET:
        is_here = (target >= part * PART) & (target < (part + 1) * PART)
        tl.store(logprobs + begin, tl.sum(found, 1), mask=is_here)


@triton.jit
def _any_in(named, first, COLUMNS: tl.constexpr):
    """Return whether any of some targets (ROWS, TARGETS) is among the columns from `first` on."""
    return tl.max(tl.max(((named >= first) & (named < first + COLUMNS)).to(tl.int32), 1), 0) > 0


@triton.jit
def _score_targets(
    logprobs, norms, parts, places, scales, first_value, num_rows,
    PARTS: tl.constexpr, ALL_PARTS: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    """Set the norms of a row from those of its parts, and logits of its targets to log-probabilities. Grid: rows."""
    row = tl.program_id(0)
    scale, part = tl.load(scales + row), tl.arange(0, ALL_PARTS)
    own, is_part = parts + 2 * (part * num_rows + row), part < PARTS
    highest_of_part = tl.load(own, mask=is_part, other=LOWEST)
    total_of_part = tl.load(own + 1, mask=is_part, other=0.0)
    highest = tl.max(highest_of_part, 0)
    log_total = tl.log(tl.sum(total_of_part * tl.exp((highest_of_part - highest) * scale), 0))
    tl.store(norms + 2 * row, highest)
    tl.store(norms + 2 * row + 1, log_total)
    begin, end = tl.load(places + row) - first_value, tl.load(places + row + 1) - first_value
    for first in range(begin, end, TARGETS):
        value = first + tl.arange(0, TARGETS)
        x = tl.load(logprobs + value, mask=value < end, other=0.0)
        tl.store(logprobs + value, (x - highest) * scale - log_total, mask=value < end)


@triton.jit
def _add_losses(sums, slopes, losses, ends, first_value, num_values, VALUES: tl.constexpr):
    """Add the losses of a request to its sums; make its slopes zeros if not all are finite. Grid: requests."""
    request = tl.program_id(0)
    begin = tl.maximum(tl.load(ends + request) - first_value, 0)
    end = tl.minimum(tl.load(ends + request + 1) - first_value, num_values)
    losses_sum, slopes_sum = tl.zeros((VALUES,), tl.float64), tl.zeros((VALUES,), tl.float32)
    for start in range(begin, end, VALUES):
        value = start + tl.arange(0, VALUES)
        losses_sum += tl.load(losses + value, mask=value < end, other=0.0).to(tl.float64)
        slopes_sum += tl.load(slopes + value, mask=value < end, other=0.0)
    total = tl.load(sums + 3 * request) + tl.sum(losses_sum, 0)
    is_finite = (tl.abs(total) < INFINITY) & (tl.abs(tl.sum(slopes_sum, 0)) < INFINITY)
    is_finite = is_finite & (tl.load(sums + 3 * request + 2) > 0)
    tl.store(sums + 3 * request, total)
    tl.store(sums + 3 * request + 2, is_finite.to(tl.float64))
    if is_finite == 0:
        for start in range(begin, end, VALUES):
            value = start + tl.arange(0, VALUES)
            tl.store(slopes + value, tl.zeros((VALUES,), tl.float32), mask=value < end)


@triton.jit
def _differentiate_logits(
    logits, dxa, summed, arrivals, xa, addresses, tiles, ranks, scalings, norms, targets, slopes, places, scales,
    first_value, num_rows, vocab_size, row_stride, xa_stride,
    PART: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TARGETS: tl.constexpr,
    HAS_ONE_TARGET: tl.constexpr, RANK: tl.constexpr, HAS_ADAPTERS: tl.constexpr,
):  # fmt: skip
    """Set rows of a tile, in one part of the vocabulary, to d(loss)/d(logits), and dxa to its product with B.

    It is (the sum of slopes x onehot(target) - the slopes' sum x probabilities) x the row's scale. If slopes add up to
    0 the logits are not read, so that values that are not finite stay behind. Grid: tiles, parts.
    """
    start, count, address, rank = _tile(tiles, addresses, ranks, num_rows, ROWS, HAS_ADAPTERS)
    part = tl.program_id(1)
    rows, is_row = start + tl.arange(0, ROWS), tl.arange(0, ROWS) < count
    scale = tl.load(scales + rows, mask=is_row, other=1.0)
    highest = tl.load(norms + 2 * rows, mask=is_row, other=0.0)
    log_total = tl.load(norms + 2 * rows + 1, mask=is_row, other=0.0)
    begin = tl.load(places + rows, mask=is_row, other=0) - first_value
    end = tl.load(places + rows + 1, mask=is_row, other=0) - first_value
    target, slope = tl.load(targets + begin, mask=is_row, other=-1), tl.load(slopes + begin, mask=is_row, other=0.0)
    most, total = tl.max(end - begin, 0), slope
    if not HAS_ONE_TARGET:
        for number in range(1, most):
            total += tl.load(slopes + begin + number, mask=begin + number < end, other=0.0)
    is_read = is_row & (total != 0)
    own = _ranks_of(xa, rows, is_row, rank, xa_stride, RANK, HAS_ADAPTERS)
    sums = tl.zeros((ROWS, RANK), tl.float32)
    for first in tl.range(part * PART, tl.minimum((part + 1) * PART, vocab_size), COLUMNS, num_stages=STAGES):
        columns = first + tl.arange(0, COLUMNS)
        is_column, place = columns < vocab_size, logits + (rows[:, None] * row_stride + columns[None, :])
        x = tl.load(place, mask=is_read[:, None] & is_column[None, :], other=0.0).to(tl.float32)
        matrix = _columns_of(logits, address, rank, columns, vocab_size, RANK, HAS_ADAPTERS)
        if HAS_ADAPTERS:
            x = plus_product(x, own, matrix)
        exponent = tl.fma(x - highest[:, None], scale[:, None], -log_total[:, None])
        gradient = tl.where(is_read[:, None] & is_column[None, :], -total[:, None] * tl.exp(exponent), 0.0)
        if HAS_ONE_TARGET:
            gradient += tl.where(target[:, None] == columns[None, :], slope[:, None], 0.0)
        else:
            for each in range(0, most, TARGETS):
                value = begin[:, None] + each + tl.arange(0, TARGETS)[None, :]
                named = tl.load(targets + value, mask=value < end[:, None], other=-1)
                if _any_in(named, first, COLUMNS):
                    for number in range(each, tl.minimum(each + TARGETS, most)):
                        is_value = begin + number < end
                        target = tl.load(targets + begin + number, mask=is_value, other=-1)
                        slope = tl.load(slopes + begin + number, mask=is_value, other=0.0)
                        gradient += tl.where(target[:, None] == columns[None, :], slope[:, None], 0.0)
        rounded = (gradient * scale[:, None]).to(logits.dtype.element_ty)
        tl.store(place, rounded, mask=is_row[:, None] & is_column[None, :])
        if HAS_ADAPTERS:
            sums = plus_product(sums, rounded, tl.trans(matrix))
    if HAS_ADAPTERS:
        depth = tl.arange(0, RANK)
        out = dxa + (part * num_rows + rows[:, None]) * xa_stride + depth[None, :]
        mask = is_row[:, None] & (depth < rank)[None, :]
        tl.store(out, sums * tl.load(scalings + tl.load(tiles + 3 * tl.program_id(0) + 2)), mask=mask)
        add_parts(summed, dxa, arrivals + tl.program_id(0), rows, depth, mask, num_rows, xa_stride, PARTS)


def sum_logits(
    parts: Tensor,
    logprobs: Tensor,
    logits: Tensor,
    xa: Tensor | None,
    addresses: Tensor | None,
    tiles: Tensor | None,
    ranks: Tensor | None,
    targets: Tensor,
    places: Tensor,
    scales: Tensor,
    first: int,
    has_one_target: bool,
) -> None:
    """See `kernel_scores.SUM`."""
    num_rows, vocab_size = logits.shape
    _sum_logits[_num_tiles(logits, tiles), len(parts)](
        parts, logprobs, logits, xa, addresses, tiles, ranks, targets, places, scales,
        first, num_rows, vocab_size, logits.stride(0), _width(xa),
        LEVELS=LOGITS_AT_ONCE.bit_length() - 1, HAS_ONE_TARGET=has_one_target, **_sizes(xa),
    )  # fmt: skip


def score_targets(logprobs: Tensor, norms: Tensor, parts: Tensor, places: Tensor, scales: Tensor, first: int) -> None:
    """See `kernel_scores.SCORE`."""
    _score_targets[len(norms),](
        logprobs, norms, parts, places, scales, first, len(norms),
        PARTS=len(parts), ALL_PARTS=power_of_two(len(parts)), TARGETS=TARGETS_AT_ONCE, num_warps=1,
    )  # fmt: skip


def add_losses(sums: Tensor, slopes: Tensor, losses: Tensor, ends: Tensor, first: int) -> None:
    """See `kernel_scores.ADD`."""
    _add_losses[len(sums),](sums, slopes, losses, ends, first, len(losses), VALUES=VALUES)


def differentiate_logits(
    logits: Tensor,
    dxa: Tensor | None,
    summed: Tensor | None,
    arrivals: Tensor | None,
    xa: Tensor | None,
    addresses: Tensor | None,
    tiles: Tensor | None,
    ranks: Tensor | None,
    scalings: Tensor | None,
    norms: Tensor,
    targets: Tensor,
    slopes: Tensor,
    places: Tensor,
    scales: Tensor,
    first: int,
    has_one_target: bool,
) -> None:
    """See `kernel_scores.DIFFERENTIATE`."""
    num_rows, vocab_size = logits.shape
    num_parts = num_parts_of(vocab_size)
    _differentiate_logits[_num_tiles(logits, tiles), num_parts](
        logits, dxa, summed, arrivals, xa, addresses, tiles, ranks, scalings, norms, targets, slopes, places, scales,
        first, num_rows, vocab_size, logits.stride(0), _width(xa),
        PARTS=num_parts, HAS_ONE_TARGET=has_one_target, **_sizes(xa),
    )  # fmt: skip


def _sizes(xa: Tensor | None) -> dict[str, int]:
    """Return the constants of programs that take tiles of logits, whose adapters have these rows."""
    rank = RANK_MIN if xa is None else padded_rank(xa.shape[2], 1)
    of_tile = {"PART": PART_COLUMNS, "ROWS": TRAINING_TILE_ROWS, "COLUMNS": LOGITS_AT_ONCE, "TARGETS": TARGETS_AT_ONCE}
    return of_tile | {"RANK": rank, "HAS_ADAPTERS": xa is not None}


def _num_tiles(logits: Tensor, tiles: Tensor | None) -> int:
    return blocks_of(len(logits), TRAINING_TILE_ROWS) if tiles is None else len(tiles)


def _width(xa: Tensor | None) -> int:
    return 0 if xa is None else xa.shape[2]
