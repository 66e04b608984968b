"""Trials of row invariance: from how many rows on a row's bits do not depend on the other rows of a product.

A library chooses kernels by the number of rows, and kernels may treat the last rows of a product differently. So each
kind of product that a base model computes is tried with random values, for several numbers of rows and places of a row.

Depends on matmuls and elementwise kernels of the library; not on adapters or tenants.

Main invariant: no result is assumed. If the products of a base model pass no trial, its fingerprint says so, and exact
mode is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from workers.model.base_model import BaseModel
from workers.model.frozen_products import FrozenProducts, PackedProducts, PlainProducts, can_pack
from workers.model.lora.grouped import VALUES_MULTIPLE
from workers.model.numerics import ROWS_MIN, Numerics
from workers.model.pretrained import UnsupportedModelError
from workers.selftest.batch_invariance import can_batch_segments
from workers.selftest.kernels import Kernel, is_large

ROWS_MIN_CANDIDATES = (16, 32, 48, 64, 96, 128, 192, 240)
MULTIPLES = (1, 2, 3, 4, 5, 7, 8, 11, 16)
EXTRA_ROWS = (1, 5, 9)
MOVES = (1, 8, 37)
"""By how many rows a trial of exact mode moves the same rows down in a block."""


Elementwise = tuple[int, Callable[[Tensor], Tensor]]
"""Values per row, and a function of each value alone."""


def find_numerics(base_model: BaseModel) -> Numerics:
    """Return how a base model computes its products so that a row's bits do not depend on other rows.

    On a GPU without exact mode nothing is tried. Raises UnsupportedModelError if exact mode is not possible.
    """
    groups = [group.weights for group in base_model.groups]
    weights = [weight for group in groups for weight in group]
    numerics = base_model.numerics
    if numerics.block_rows is not None:
        # Rows of logits must begin alike in memory, or a GPU's softmax adds them up in different orders.
        is_aligned = base_model.device.type == "cpu" or base_model.vocab_size % VALUES_MULTIPLE == 0
        if not (is_aligned and are_blocks_invariant(weights, numerics.block_rows)):
            raise UnsupportedModelError(
                "exact mode is not possible with this model on this device: in products of "
                f"{numerics.block_rows} rows a row's bits depend on its place; load it without exact"
            )
        return numerics
    if base_model.device.type == "cuda":
        return numerics
    elementwise = _elementwise(base_model)
    rows_min = find_rows_min(groups, elementwise, is_packed=True) if can_pack(groups) else None
    is_packed = rows_min is not None
    if rows_min is None:
        rows_min = find_rows_min(groups, elementwise, is_packed=False)
    can_batch = can_batch_segments(weights, rows_min or ROWS_MIN)
    return Numerics(rows_min=rows_min, is_packed=is_packed, can_batch=can_batch)


def _elementwise(base_model: BaseModel) -> list[Elementwise]:
    """Return the transcendental functions that layers apply to all rows at once: activation and rotary embedding."""
    config = base_model.config
    activation = ACT2FN[getattr(config, "hidden_activation", None) or config.hidden_act]
    widths = {shape.d_outs[0] for shape in base_model.group_shapes if shape.kind == "mlp"}

    def derivative(values: Tensor) -> Tensor:
        with torch.enable_grad():
            values = values.clone().requires_grad_()
            return torch.autograd.grad(activation(values).sum(), values)[0]

    functions = [(width, function) for width in widths for function in (activation, derivative)]
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
