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
def _sum_logits(
    parts, logits, xa, addresses, tiles, ranks, scales, num_rows, vocab_size, row_stride, xa_stride,
    PART: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, HAS_ADAPTERS: tl.constexpr,
):  # fmt: skip
    """Set parts[part, rows of a tile] to the norms of one part of the vocabulary. Grid: tiles, parts."""
    start, count, address, rank = _tile(tiles, addresses, ranks, num_rows, ROWS, HAS_ADAPTERS)
    part = tl.program_id(1)
    rows, is_row = start + tl.arange(0, ROWS), tl.arange(0, ROWS) < count
    scale = tl.load(scales + rows, mask=is_row, other=1.0)
    own = _ranks_of(xa, rows, is_row, rank, xa_stride, RANK, HAS_ADAPTERS)
    highest, total = tl.full((ROWS,), LOWEST, tl.float32), tl.zeros((ROWS,), tl.float32)
    for first in tl.range(part * PART, tl.minimum((part + 1) * PART, vocab_size), COLUMNS, num_stages=STAGES):
        columns = first + tl.arange(0, COLUMNS)
        mask = is_row[:, None] & (columns < vocab_size)[None, :]
        x = tl.load(logits + (rows[:, None] * row_stride + columns[None, :]), mask=mask, other=-INFINITY).to(tl.float32)
        if HAS_ADAPTERS:
            x = plus_product(x, own, _columns_of(logits, address, rank, columns, vocab_size, RANK, HAS_ADAPTERS))
        before = highest
        highest = tl.maximum(before, tl.max(x, 1))
        added = tl.sum(tl.exp((x - highest[:, None]) * scale[:, None]), 1)
        total = total * tl.exp((before - highest) * scale) + added
    out = parts + 2 * (part * num_rows + rows)
    tl.store(out, highest, mask=is_row)
    tl.store(out + 1, total, mask=is_row)


@triton.jit
def _score_targets(
    logprobs, norms, parts, logits, xa, addresses, tiles, ranks, targets, places, scales,
    first_value, num_rows, vocab_size, row_stride, xa_stride,
    PARTS: tl.constexpr, ALL_PARTS: tl.constexpr, ROWS: tl.constexpr, TARGETS: tl.constexpr,
    RANK: tl.constexpr, HAS_ADAPTERS: tl.constexpr,
):  # fmt: skip
    """Set the norms of a row, and the log-probabilities of its targets. Grid: tiles, rows of a tile."""
    start, count, address, rank = _tile(tiles, addresses, ranks, num_rows, ROWS, HAS_ADAPTERS)
    if tl.program_id(1) < count:
        row = (start + tl.program_id(1)).to(tl.int64)
        scale, part = tl.load(scales + row), tl.arange(0, ALL_PARTS)
        own_parts, is_part = parts + 2 * (part * num_rows + row), part < PARTS
        highest_of_part = tl.load(own_parts, mask=is_part, other=LOWEST)
        total_of_part = tl.load(own_parts + 1, mask=is_part, other=0.0)
        highest = tl.max(highest_of_part, 0)
        log_total = tl.log(tl.sum(total_of_part * tl.exp((highest_of_part - highest) * scale), 0))
        tl.store(norms + 2 * row, highest)
        tl.store(norms + 2 * row + 1, log_total)
        begin, end = tl.load(places + row) - first_value, tl.load(places + row + 1) - first_value
        for first in range(begin, end, TARGETS):
            value = first + tl.arange(0, TARGETS)
            is_value = value < end
            target = tl.load(targets + value, mask=is_value, other=0)
            x = tl.load(logits + row * row_stride + target, mask=is_value, other=0.0).to(tl.float32)
            if HAS_ADAPTERS:
                B = address.to(tl.pointer_type(logits.dtype.element_ty))
                depth = tl.arange(0, RANK)
                is_rank = depth < rank
                own = tl.load(xa + row * xa_stride + depth, mask=is_rank, other=0.0)
                matrix = tl.load(
                    B + depth[None, :] * vocab_size + target[:, None],
                    mask=is_value[:, None] & is_rank[None, :],
                    other=0.0,
                )
                x += tl.sum(matrix.to(tl.float32) * own[None, :], 1)
            tl.store(logprobs + value, (x - highest) * scale - log_total, mask=is_value)


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
        by_place = tl.zeros((ROWS, TARGETS), tl.float32)
        for each in range(0, most, TARGETS):
            value = begin[:, None] + each + tl.arange(0, TARGETS)[None, :]
            by_place += tl.load(slopes + value, mask=value < end[:, None], other=0.0)
        total = tl.sum(by_place, 1)
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
        probability = tl.exp((x - highest[:, None]) * scale[:, None] - log_total[:, None])
        gradient = tl.where(is_read[:, None] & is_column[None, :], -total[:, None] * probability, 0.0)
        if HAS_ONE_TARGET:
            gradient += tl.where(target[:, None] == columns[None, :], slope[:, None], 0.0)
        else:
            for each in range(0, most, TARGETS):
                value = begin[:, None] + each + tl.arange(0, TARGETS)[None, :]
                named = tl.load(targets + value, mask=value < end[:, None], other=-1)
                if tl.max(tl.max(((named >= first) & (named < first + COLUMNS)).to(tl.int32), 1), 0) > 0:
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
    logits: Tensor,
    xa: Tensor | None,
    addresses: Tensor | None,
    tiles: Tensor | None,
    ranks: Tensor | None,
    scales: Tensor,
) -> None:
    """See `kernel_scores.SUM`."""
    num_rows, vocab_size = logits.shape
    _sum_logits[_num_tiles(logits, tiles), len(parts)](
        parts, logits, xa, addresses, tiles, ranks, scales, num_rows, vocab_size, logits.stride(0), _width(xa),
        PART=PART_COLUMNS, COLUMNS=LOGITS_AT_ONCE, **_sizes(xa),
    )  # fmt: skip


def score_targets(
    logprobs: Tensor,
    norms: Tensor,
    parts: Tensor,
    logits: Tensor,
    xa: Tensor | None,
    addresses: Tensor | None,
    tiles: Tensor | None,
    ranks: Tensor | None,
    targets: Tensor,
    places: Tensor,
    scales: Tensor,
    first: int,
) -> None:
    """See `kernel_scores.SCORE`."""
    num_rows, vocab_size = logits.shape
    _score_targets[_num_tiles(logits, tiles), TRAINING_TILE_ROWS](
        logprobs, norms, parts, logits, xa, addresses, tiles, ranks, targets, places, scales,
        first, num_rows, vocab_size, logits.stride(0), _width(xa),
        PARTS=len(parts), ALL_PARTS=power_of_two(len(parts)), TARGETS=TARGETS_AT_ONCE, **_sizes(xa),
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
        PART=PART_COLUMNS, PARTS=num_parts, COLUMNS=LOGITS_AT_ONCE, TARGETS=TARGETS_AT_ONCE,
        HAS_ONE_TARGET=has_one_target, **_sizes(xa),
    )  # fmt: skip


def _sizes(xa: Tensor | None) -> dict[str, int]:
    """Return the constants of a program whose adapters have these rows."""
    rank = RANK_MIN if xa is None else padded_rank(xa.shape[2], 1)
    return {"ROWS": TRAINING_TILE_ROWS, "RANK": rank, "HAS_ADAPTERS": xa is not None}


def _num_tiles(logits: Tensor, tiles: Tensor | None) -> int:
    return blocks_of(len(logits), TRAINING_TILE_ROWS) if tiles is None else len(tiles)


def _width(xa: Tensor | None) -> int:
    return 0 if xa is None else xa.shape[2]
