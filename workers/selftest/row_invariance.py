"""Trials of products: when a row's bits do not depend on other rows, and when segments can be computed as one batch.

A library chooses kernels by the number of rows, and kernels may treat the last rows of a product differently. So each
kind of product that a base model computes is tried with random values, for several numbers of rows and places of a row;
and segments of several adapters, computed as one batch, are compared with each segment solo.

Depends on matmuls and elementwise kernels of the library, and the segments' products; not on the bank or tenants.

Main invariant: no result is assumed. If the products of a base model pass no trial, its fingerprint says so, and exact
mode is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from workers.model.base_model import BaseModel
from workers.model.experts import SHARED_GATE
from workers.model.frozen_products import FrozenProducts, PackedProducts, PlainProducts, TiledProducts, can_pack
from workers.model.numerics import EXPERT_ROWS, ROWS_MIN, SUM_MAX, Numerics
from workers.model.pretrained import UnsupportedModelError, activation_of
from workers.model.segments import Run, backward_segments, forward_segments
from workers.rows import AdapterViews, GroupViews
from workers.selftest.expert_invariance import find_expert_rows
from workers.selftest.sequence_invariance import keeps_sequences

TORCH_ON_CPUS = "2.13."
"""The versions with which a CPU's bits are promised. With 2.11 one of eight adapters had other bits in another order of
a pass's rows, though every trial had passed."""
LARGE_WEIGHT = 1 << 22
"""Values of a weight from which on fewer sizes are tried."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """The properties, besides sizes, by which the library chooses a kernel. A trial runs once per process for each."""

    device: torch.device
    dtype: torch.dtype
    num_threads: int

    @classmethod
    def of(cls, weight: Tensor) -> Kernel:
        """Return the kind of kernels that products with a weight use now."""
        return cls(weight.device, weight.dtype, torch.get_num_threads())

    def values(self, num_rows: int, num_columns: int) -> Tensor:
        """Return normal values (num_rows, num_columns), the same in every process."""
        generator = torch.Generator().manual_seed(num_rows * num_columns)
        return torch.randn(num_rows, num_columns, generator=generator).to(self.device, self.dtype)


def is_large(d_out: int, d_in: int) -> bool:
    """Return whether products with a weight take long: it is a large vocabulary's, which multiplies few rows a time."""
    return d_out * d_in > LARGE_WEIGHT


BATCHED_SEGMENTS = 5


@torch.no_grad()
def shapes_unbatched(
    weights: Iterable[Tensor], rows_min: int, sum_max: int | None = None
) -> frozenset[tuple[int, int]]:
    """Return the shapes of weights for which segments computed as one batch have other bits than each solo.

    `sum_max`: see `forward_segments`.
    """
    weights = list(weights)
    kernel = Kernel.of(weights[0])

    def can_batch(shape: tuple[int, int]) -> bool:
        lengths = (rows_min, rows_min + 1, *(() if is_large(*shape) else (3 * rows_min + 5, 128)))
        ranks = (8,) if is_large(*shape) else (8, 32)
        return all(_batch_equals_singles(kernel, *shape, rank, length, sum_max) for rank in ranks for length in lengths)

    return frozenset(shape for weight in weights if not can_batch(shape := (weight.shape[0], weight.shape[1])))


@cache
def _batch_equals_singles(kernel: Kernel, d_out: int, d_in: int, rank: int, length: int, sum_max: int | None) -> bool:
    aligned = -(-d_out // 16) * 16  # as logits are
    num = BATCHED_SEGMENTS
    x = kernel.values(num * length + 1, d_in)
    dy = kernel.values(num * length + 1, aligned)[:, :d_out]
    As, Bs = (kernel.values(num * rank, width).view(num, rank, width) for width in (d_in, aligned))
    adapters = [AdapterViews((), (), slot, 2.0) for slot in range(num)]

    def compute(start: int, segments: slice) -> list[Tensor]:
        """Return y, dx, dA, dB of some segments, whose rows begin at `start`."""
        run = Run(start, length, adapters[segments])
        B = Bs[segments, :, :d_out].squeeze(0)
        views = GroupViews(A=As[segments].squeeze(0), Bs=(B,), A_grad=None, B_grads=())
        y, dx = dy.clone(), x.clone()
        xa = forward_segments(run.rows(x), [run.rows(y)], views, 2.0, sum_max)
        dA, (dB,) = backward_segments(run.rows(x), [run.rows(dy)], run.rows(dx), xa, views, 2.0, sum_max)
        return [result.view(len(run.adapters), *result.shape[-2:]) for result in (run.rows(y), run.rows(dx), dA, dB)]

    for start in (0, 1):
        together = compute(start, slice(0, num))
        for slot in range(num):
            alone = compute(start + slot * length, slice(slot, slot + 1))
            if not all(torch.equal(whole[slot], part[0]) for whole, part in zip(together, alone, strict=True)):
                return False
    return True


ROWS_MIN_CANDIDATES = (16, 32, 48, 64, 96, 128, 192, 240)
MULTIPLES = (1, 2, 3, 4, 5, 7, 8, 11, 16)
EXTRA_ROWS = (1, 5, 9)
MOVES = (1, 8, 37)
"""By how many rows a trial of exact mode moves the same rows down in a block."""
TRIED_ROWS, TRIED_PLACES = 300, ((0, 1), (1, 8), (37, 200), (255, 45))
"""Rows of a trial of tiles, and the first and the number of those that are tried alone."""
ALIGNED_VALUES = 8
"""Rows of bf16 that are multiples of so many values begin at multiples of 16 bytes."""


Elementwise = tuple[int, Callable[[Tensor], Tensor]]
"""Values per row, and a function of each value alone."""


def find_numerics(base_model: BaseModel) -> Numerics:
    """Return how a base model computes its products so that a row's bits do not depend on other rows.

    On a GPU without exact mode nothing is tried. Raises UnsupportedModelError if exact mode is not possible.
    """
    groups = [group.weights for group in base_model.groups]
    weights = [weight for group in groups for weight in group]
    numerics = base_model.numerics
    if base_model.device.type == "cuda" and not numerics.is_exact:
        return numerics
    keeps, are_alone = _sequences(base_model)
    expert_rows = find_expert_rows(base_model)
    is_tested = base_model.device.type == "cuda" or torch.__version__.startswith(TORCH_ON_CPUS)
    if numerics.is_exact:
        # Rows of logits must begin alike in memory, or a GPU's softmax adds them up in different orders.
        is_aligned = base_model.device.type == "cpu" or base_model.vocab_size % ALIGNED_VALUES == 0
        if numerics.block_rows is not None:
            are_invariant = are_blocks_invariant(weights, numerics.block_rows)
        else:
            are_invariant = are_tiles_invariant(weights)
        holds = {
            "in linear attention a sequence's bits depend on the others": keeps,
            "in products of experts a row's bits depend on the others": expert_rows is not None,
            f"its vocabulary of {base_model.vocab_size} is no multiple of {ALIGNED_VALUES}": is_aligned,
            "in products with its weights a row's bits depend on its place": are_invariant,
            f"torch {torch.__version__} keeps no bits on a CPU; {TORCH_ON_CPUS}x does": is_tested,
        }
        if broken := [reason for reason, does_hold in holds.items() if not does_hold]:
            raise UnsupportedModelError(
                f"exact mode is not possible with this model on this device: {', and '.join(broken)}; load it without "
                "exact"
            )
        return replace(numerics, expert_rows=expert_rows or EXPERT_ROWS, are_sequences_alone=are_alone)
    elementwise = _elementwise(base_model)
    rows_min = find_rows_min(groups, elementwise, is_packed=True) if can_pack(groups) else None
    is_packed = rows_min is not None
    if rows_min is None:
        rows_min = find_rows_min(groups, elementwise, is_packed=False)
    in_parts, unbatched = set[tuple[int, int]](), set[tuple[int, int]]()
    for group in groups:  # all linears of a group take parts, or none: their adapters have one product
        if shapes := shapes_unbatched(group, rows_min or ROWS_MIN):
            can_batch_parts = not shapes_unbatched(group, rows_min or ROWS_MIN, SUM_MAX)
            (in_parts if can_batch_parts else unbatched).update(shapes)
    return Numerics(
        rows_min=rows_min if keeps and expert_rows is not None and is_tested else None,
        is_packed=is_packed,
        expert_rows=expert_rows or EXPERT_ROWS,
        can_batch=not (unbatched and base_model.expert_layers),
        unbatched=frozenset(unbatched),
        in_parts=frozenset(in_parts),
        are_sequences_alone=are_alone,
    )


def _sequences(base_model: BaseModel) -> tuple[bool, bool]:
    """Return whether sequences keep their bits in linear attention, and whether only if each is computed alone."""
    if not base_model.delta_layers:
        return True, False
    weights, dtype = base_model.delta_layers[0].delta_weights, base_model.dtype
    if keeps_sequences(weights, dtype):
        return True, False
    keeps = keeps_sequences(weights, dtype, are_alone=True)
    return keeps, keeps


def _elementwise(base_model: BaseModel) -> list[Elementwise]:
    """Return the transcendental functions that layers apply to all rows at once: activation, rotations, gates."""
    activation = activation_of(base_model.config)
    widths = {shape.d_outs[0] for shape in base_model.group_shapes if shape.kind == "mlp"}

    def derivative(values: Tensor) -> Tensor:
        with torch.enable_grad():
            values = values.clone().requires_grad_()
            return torch.autograd.grad(activation(values).sum(), values)[0]

    functions = [(width, function) for width in widths for function in (activation, derivative)]
    if base_model.delta_layers:
        functions.append((base_model.num_heads * base_model.head_dim, torch.sigmoid))  # gates of full attention
    if any(name.endswith(f".{SHARED_GATE}") for shape in base_model.group_shapes for name in shape.names):
        functions.append((1, torch.sigmoid))
    return [*functions, (base_model.head_dim, torch.cos), (base_model.head_dim, torch.sin)]


@torch.no_grad()
def are_blocks_invariant(weights: Iterable[Tensor], block_rows: int) -> bool:
    """Return whether a row has the same bits at every place of a block, whatever the other rows are.

    Tries products with each of the weights (F, D) and with its transpose.
    """
    by_shape = {tuple(weight.shape): weight for weight in weights}
    return all(_is_invariant(matrix, block_rows) for weight in by_shape.values() for matrix in (weight.t(), weight))


def _is_invariant(matrix: Tensor, block_rows: int) -> bool:
    generator = torch.Generator().manual_seed(len(matrix))
    block = torch.randn(block_rows, len(matrix), generator=generator).to(matrix.device, matrix.dtype)
    expected = block @ matrix
    for move in MOVES:
        moved = torch.cat([block[:move] * 3, block[:-move]])
        if not torch.equal((moved @ matrix)[move:], expected[:-move]):
            return False
    return True


@torch.no_grad()
def are_tiles_invariant(weights: Iterable[Tensor]) -> bool:
    """Return whether a row has the same bits at every place of a tile, whatever other rows there are.

    Tries products with each of the weights (F, D) and with its transpose.
    """
    for weight in {tuple(weight.shape): weight for weight in weights}.values():
        products, generator = TiledProducts([weight], [None]), torch.Generator().manual_seed(len(weight))
        x, dy = (
            torch.randn(TRIED_ROWS, width, generator=generator).to(weight.device, weight.dtype)
            for width in reversed(weight.shape)
        )
        forward, backward = products.forward(x, [None])[0], products.backward([dy])
        for start, count in TRIED_PLACES:
            own = slice(start, start + count)
            if not torch.equal(products.forward(x[own], [None])[0], forward[own]):
                return False
            if not torch.equal(products.backward([dy[own]]), backward[own]):
                return False
    return True


@torch.no_grad()
def find_rows_min(
    groups: Sequence[Sequence[Tensor]], elementwise: Iterable[Elementwise], *, is_packed: bool
) -> int | None:
    """Return the smallest number of rows from which a row keeps its bits among any others; None: no candidate does.

    Tries products with each shape among the weights (F, D) of linears that read the same input, forward and backward,
    packed or not, softmax over F, and the elementwise functions (whose vector kernels end in scalar code that gives
    other bits), with the number of threads in use. Takes a fraction of a second for small models.
    """
    kernel = Kernel.of(groups[0][0])
    shapes = dict.fromkeys((tuple(weight.shape[0] for weight in group), group[0].shape[1]) for group in groups)
    elementwise = list(elementwise)
    for rows_min in ROWS_MIN_CANDIDATES:
        is_independent = all(
            _has_independent_products(kernel, *shape, rows_min, is_packed=is_packed) for shape in shapes
        )
        if is_independent and all(_has_independent_rows(*function, kernel, rows_min) for function in elementwise):
            return rows_min
    return None


@cache
def _has_independent_products(
    kernel: Kernel, d_outs: tuple[int, ...], d_in: int, rows_min: int, *, is_packed: bool
) -> bool:
    """Try a group's products, with the numbers of rows of passes and of blocks of logits, from the minimum up."""
    width = sum(d_outs)
    multiples = [multiple for multiple in MULTIPLES if multiple <= 4 or not is_large(width, d_in)]
    counts = [rows_min * multiple for multiple in multiples]
    weights = kernel.values(width, d_in).split(d_outs)
    x, dy = (kernel.values(counts[-1], columns) for columns in (d_in, width))
    counts += [count + extra for count in counts[:2] for extra in EXTRA_ROWS]
    nothing = [None] * len(d_outs)
    products: FrozenProducts = (PackedProducts if is_packed else PlainProducts)(weights, nothing)
    return (
        _keeps_rows(x, lambda rows: torch.cat(products.forward(rows, nothing), dim=1), counts)
        and _keeps_rows(dy, lambda rows: products.backward(rows.split(d_outs, dim=1)), counts)
        and _keeps_rows(dy, lambda rows: torch.softmax(rows, -1), counts)
    )


def _has_independent_rows(width: int, function: Callable[[Tensor], Tensor], kernel: Kernel, rows_min: int) -> bool:
    """Try an elementwise function, with the numbers of rows of passes: multiples of the minimum."""
    return _keeps_rows(kernel.values(rows_min * MULTIPLES[-1], width), function, [rows_min * m for m in MULTIPLES])


def _keeps_rows(values: Tensor, compute: Callable[[Tensor], Tensor], counts: list[int]) -> bool:
    """Return whether some rows of `values`, from two places, have the same bits as in all of them together."""
    whole = compute(values)
    for count in counts:
        for start in (0, len(values) - count):
            if not torch.equal(compute(values[start : start + count]), whole[start : start + count]):
                return False
    return True
