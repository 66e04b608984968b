"""Products of activations with frozen weights: most of the arithmetic, for all tenants' rows at once.

On a CPU in fp32, oneDNN multiplies with weights that were reordered for its kernels. That is faster than the general
matmul except for the smallest products (`docs/benchmarks.md`), and takes two more copies of the weights: one for the
forward, one of the transposes for the backward. Otherwise torch's matmul is used.

A library chooses a kernel, and with it the order of a product's sums, by the number of rows. So in exact mode a kernel
of our own multiplies in tiles of one size, on a GPU in bf16; elsewhere the library multiplies row blocks of one size,
the last one padded with zeros.

Does not depend on adapters or passes.

Main invariants: from some number of rows on, a row's bits depend only on that row and the weights;
`selftest.row_invariance` finds that number by trying these products. In exact mode that holds for any number of rows,
provided that a kernel treats all rows of a block or a tile alike, which a trial checks with the weights in use.

Dimensions: N rows, D inputs, F outputs of a linear.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.model.gpu_operations import define
from workers.model.numerics import Numerics

MULTIPLY = "multiply(Tensor(a!) out, Tensor left, Tensor right, Tensor? bias=None, bool is_added=False)"
"""Set out (N, F) to left (N, D) times right (D, F), plus bias (F,) if given, or add it to out, rounding once.

Columns of out and left are adjacent. The order of a row's sums depends on D alone.
"""
define("workers.model.product_kernels", MULTIPLY)
TILE_ROWS, TILE_COLUMNS = 128, 128
"""Of the result, those of a program."""
BLOCK_ROWS = 256
"""Rows of a block in exact mode. On an H200 arithmetic bounds a product with bf16 weights from 184 rows on; larger
blocks compute more padding."""
PACKED_PARAMS_MAX = 500_000_000
"""Weights of a larger base model are not packed: the two copies would take more than 4 GB."""
PACKED_ROWS_MIN = 16
SIZES_PER_DOUBLING = 16
"""Numbers of rows between one power of two and the next. oneDNN compiles a kernel for each number, 0.7 ms and 0.6 MB;
with so few numbers, 3 % of the rows are padding on average."""
TOLERANCE = 1e-4
"""Largest difference from torch's matmul, as a fraction of the largest result. Rounding alone gives about 1e-6."""


class FrozenProducts(Protocol):
    """The products with the weights of linears that read the same input."""

    def forward(self, x: Tensor, outs: Sequence[Tensor | None]) -> list[Tensor]:
        """Return x W^T + b (N, F) per linear for x (N, D), in `outs` where given; an out may have gaps between rows."""

    def backward(self, dys: Sequence[Tensor]) -> Tensor:
        """Return the sum of dy W (N, D) over dys (N, F) per linear."""


class PlainProducts:
    """Implements `FrozenProducts` by torch's matmul."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._weights = weights  # (F, D) each
        self._weights_t = [weight.t() for weight in weights]
        self._biases = biases

    def forward(self, x: Tensor, outs: Sequence[Tensor | None]) -> list[Tensor]:
        """See `FrozenProducts`."""
        return [
            torch.mm(x, weight_t, out=out) if bias is None else torch.addmm(bias, x, weight_t, out=out)
            for weight_t, bias, out in zip(self._weights_t, self._biases, outs, strict=True)
        ]

    def backward(self, dys: Sequence[Tensor]) -> Tensor:
        """See `FrozenProducts`."""
        dx = torch.mm(dys[0], self._weights[0])
        for dy, weight in zip(dys[1:], self._weights[1:], strict=True):
            dx.addmm_(dy, weight)
        return dx


class ExactProducts:
    """Implements `FrozenProducts` in row blocks of one size, for exact mode."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], block_rows: int) -> None:
        self._weights = weights  # (F, D) each
        self._weights_t = [weight.t() for weight in weights]
        self._biases = biases
        self._block_rows = block_rows

    def forward(self, x: Tensor, outs: Sequence[Tensor | None]) -> list[Tensor]:
        """See `FrozenProducts`."""
        return [
            multiply_in_blocks(x, weight_t, bias, out, self._block_rows)
            for weight_t, bias, out in zip(self._weights_t, self._biases, outs, strict=True)
        ]

    def backward(self, dys: Sequence[Tensor]) -> Tensor:
        """See `FrozenProducts`."""
        return sum_in_blocks(dys, self._weights, self._block_rows)


class TiledProducts:
    """Implements `FrozenProducts` by a kernel of our own, for exact mode on a GPU."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._weights = weights  # (F, D) each
        self._biases = biases

    def forward(self, x: Tensor, outs: Sequence[Tensor | None]) -> list[Tensor]:
        """See `FrozenProducts`."""
        ys = []
        for weight, bias, out in zip(self._weights, self._biases, outs, strict=True):
            y = x.new_empty(len(x), len(weight)) if out is None else out
            torch.ops.tinkerpool.multiply(y, x, weight.t(), bias)
            ys.append(y)
        return ys

    def backward(self, dys: Sequence[Tensor]) -> Tensor:
        """See `FrozenProducts`."""
        dx = dys[0].new_empty(len(dys[0]), self._weights[0].shape[1])
        for number, (dy, weight) in enumerate(zip(dys, self._weights, strict=True)):
            torch.ops.tinkerpool.multiply(dx, dy, weight, is_added=number > 0)
        return dx


class PackedProducts:
    """Implements `FrozenProducts` by oneDNN with packed weights: fp32 on a CPU, where `can_pack` returns True.

    The weights of all linears are one product, because a call costs as much as a small product.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        weight = torch.cat(list(weights))  # (sum of F, D)
        self._widths = [part.shape[0] for part in weights]
        self._forward = _packed(weight)
        self._backward = _packed(weight.t())
        self._linear = torch.ops.mkldnn._linear_pointwise.default  # the overload: a call needs no lookup
        self._bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            filled = [
                part.new_zeros(len(part)) if bias is None else bias for part, bias in zip(weights, biases, strict=True)
            ]
            self._bias = torch.cat(filled)

    def forward(self, x: Tensor, outs: Sequence[Tensor | None]) -> list[Tensor]:
        """See `FrozenProducts`. Outputs of several linears are columns of one tensor."""
        y = self._multiply(x, self._forward, self._bias)
        ys = [y] if len(outs) == 1 else y.split(self._widths, dim=1)
        return [part if out is None else out.copy_(part) for part, out in zip(ys, outs, strict=True)]

    def backward(self, dys: Sequence[Tensor]) -> Tensor:
        """See `FrozenProducts`."""
        return self._multiply(joined(dys), self._backward, None)

    def _multiply(self, x: Tensor, packed_weight: Any, bias: Tensor | None) -> Tensor:
        num_rows = x.shape[0]
        missing = kernel_rows(num_rows, PACKED_ROWS_MIN) - num_rows
        filled = F.pad(x, (0, 0, 0, missing)) if missing else x
        y: Tensor = self._linear(filled, packed_weight, bias, "none", [], "")
        return y[:num_rows] if missing else y


def joined(columns: Sequence[Tensor]) -> Tensor:
    """Return tensors (N, F) side by side: as a view if they are neighbours in one tensor, or else as a copy."""
    if len(columns) == 1:
        return columns[0]
    first, width = columns[0], sum(part.shape[1] for part in columns)
    place = first.data_ptr()
    for part in columns:
        is_next = part.data_ptr() == place and part.stride() == (width, 1)
        if not is_next or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(columns), dim=1)
        place += part.shape[1] * part.element_size()
    return first.as_strided((len(first), width), (width, 1))


def products_of(weights: Sequence[Tensor], biases: Sequence[Tensor | None], numerics: Numerics) -> FrozenProducts:
    """Return the products with weights (F, D) and biases (F,) of linears that read the same input."""
    if numerics.is_tiled:
        return TiledProducts(weights, biases)
    if numerics.block_rows is not None:
        return ExactProducts(weights, biases, numerics.block_rows)
    return PackedProducts(weights, biases) if numerics.is_packed else PlainProducts(weights, biases)


def kernel_rows(num_rows: int, rows_min: int) -> int:
    """Return the number of rows for a product of `num_rows`: at least that many, and a multiple of `rows_min`."""
    num_steps = -(-num_rows // rows_min)
    step = rows_min << max(0, (num_steps - 1).bit_length() - SIZES_PER_DOUBLING.bit_length())
    return -(-num_rows // step) * step


@torch.no_grad()
def can_pack(groups: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether `PackedProducts` works for groups of linears with these weights (F, D); tries each shape.

    The linears of a group read the same input.
    """
    weights = [weight for group in groups for weight in group]
    is_possible = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
    if not is_possible or not torch.backends.mkldnn.is_available():
        return False
    if sum(weight.numel() for weight in weights) > PACKED_PARAMS_MAX:
        return False
    return all(
        _is_right(group) for group in {tuple(weight.shape for weight in group): group for group in groups}.values()
    )


def _is_right(weights: Sequence[Tensor]) -> bool:
    """Return whether oneDNN takes a group's weights (F, D) and gives torch's results."""
    generator = torch.Generator().manual_seed(weights[0].shape[0])
    x, *dys = (
        torch.randn(PACKED_ROWS_MIN, width, generator=generator)
        for width in (weights[0].shape[1], *(weight.shape[0] for weight in weights))
    )
    nothing = [None] * len(weights)
    plain = PlainProducts(weights, nothing)
    try:
        packed = PackedProducts(weights, nothing)
        results = [*packed.forward(x, nothing), packed.backward(dys)]
    except (RuntimeError, AttributeError):  # this build of torch lacks the operation, or this processor does
        return False
    pairs = zip([*plain.forward(x, nothing), plain.backward(dys)], results, strict=True)
    return all(float((right - left).abs().max()) <= TOLERANCE * float(left.abs().max()) for left, right in pairs)


def _packed(weight: Tensor) -> Any:
    """Return a weight (F, D) as oneDNN reads it; the order is the same for any number of rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)


def multiply_in_blocks(x: Tensor, weight_t: Tensor, bias: Tensor | None, out: Tensor | None, block_rows: int) -> Tensor:
    """Return x (N, D) times weight_t (D, F), plus bias (F,) if given; in `out` (N, F) if given."""
    y = x.new_empty(x.shape[0], weight_t.shape[1]) if out is None else out
    for rows in _blocks(len(x), block_rows):
        block, target = _padded(x[rows], block_rows), _target(y[rows], block_rows)
        if bias is None:
            torch.mm(block, weight_t, out=target)
        else:
            torch.addmm(bias, block, weight_t, out=target)
        _copy_back(target, y[rows])
    return y


def sum_in_blocks(dys: Sequence[Tensor], weights: Sequence[Tensor], block_rows: int) -> Tensor:
    """Return the sum over i, in order, of dys[i] (N, F) times weights[i] (F, D)."""
    dx = dys[0].new_empty(len(dys[0]), weights[0].shape[1])
    for rows in _blocks(len(dx), block_rows):
        target = _target(dx[rows], block_rows)
        torch.mm(_padded(dys[0][rows], block_rows), weights[0], out=target)
        for dy, weight in zip(dys[1:], weights[1:], strict=True):
            target.addmm_(_padded(dy[rows], block_rows), weight)
        _copy_back(target, dx[rows])
    return dx


def _blocks(num_rows: int, block_rows: int) -> Iterator[slice]:
    return (slice(start, min(start + block_rows, num_rows)) for start in range(0, num_rows, block_rows))


def _padded(rows: Tensor, block_rows: int) -> Tensor:
    missing = block_rows - len(rows)
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _target(rows: Tensor, block_rows: int) -> Tensor:
    """Return the target of a block's product: the rows themselves, or a temporary block if there are too few."""
    return rows if len(rows) == block_rows else rows.new_empty(block_rows, rows.shape[1])


def _copy_back(target: Tensor, rows: Tensor) -> None:
    if len(rows) < len(target):
        rows.copy_(target[: len(rows)])
