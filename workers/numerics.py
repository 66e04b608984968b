"""What the bits depend on: the fingerprint of this process's arithmetic, and the self-test of row independence.

Knows matmuls and elementwise kernels of the library; not tenants.

Main invariant: bits are promised among runs with equal fingerprints only. If the self-test finds no number of rows from
which a row's bits are independent of the others, the fingerprint says so and no promise is made.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from workers.lora import AdapterViews, GroupViews, Run, backward_segments, forward_segments

ROWS_MIN_CANDIDATES = (16, 32, 48, 64, 96, 128, 192, 240)
MULTIPLES = (1, 2, 3, 4, 5, 7, 8, 11, 16)
EXTRA_ROWS = (1, 5, 9)
BATCHED_SEGMENTS = 5


def fingerprint(rows_min: int | None, device: torch.device) -> str:
    """The arithmetic of this process, as text: equal texts, equal bits."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return "; ".join(
        (
            f"torch {torch.__version__}",
            f"{platform.machine()} {kind}",
            f"{torch.get_num_threads()} threads",
            "rows depend on their neighbours" if rows_min is None else f"rows independent from {rows_min}",
        )
    )


Elementwise = tuple[int, Callable[[Tensor], Tensor]]
"""Values per row, and a function of each value alone."""


@torch.no_grad()
def find_rows_min(weights: Iterable[Tensor], elementwise: Iterable[Elementwise]) -> int | None:
    """The smallest number of rows from which every row's bits are independent of the number and place of the others.

    Tries products with each shape among the weights (F, D), forward and backward, softmax over F, and the elementwise
    functions (whose vector kernels end in scalar code that gives other bits), with the number of threads in use. None
    if no candidate passes. Takes milliseconds for small models.
    """
    shapes = {tuple(weight.shape): weight for weight in weights}
    elementwise = list(elementwise)
    like = next(iter(shapes.values()))
    for rows_min in ROWS_MIN_CANDIDATES:
        is_independent = all(_has_independent_products(weight, rows_min) for weight in shapes.values())
        if is_independent and all(_has_independent_rows(*function, like, rows_min) for function in elementwise):
            return rows_min
    return None


@torch.no_grad()
def can_batch_segments(weights: Iterable[Tensor], rows_min: int) -> bool:
    """Whether segments computed as one batch get the bits that each gets alone, at whatever row it begins."""
    shapes = {tuple(weight.shape): weight for weight in weights}
    return all(
        _batch_equals_singles(weight, rank, length)
        for weight in shapes.values()
        for rank in (8, 32)
        for length in (rows_min, rows_min + 2, 3 * rows_min + 2, 128)
    )


def _batch_equals_singles(weight: Tensor, rank: int, length: int) -> bool:
    d_out, d_in = weight.shape
    aligned = -(-d_out // 16) * 16
    num = BATCHED_SEGMENTS
    x = _values(num * length + 1, d_in, weight)
    dy = _values(num * length + 1, aligned, weight)[:, :d_out]
    As, Bs = (_values(num * rank, width, weight).view(num, rank, width) for width in (d_in, aligned))
    adapters = [AdapterViews((), (), slot, 2.0) for slot in range(num)]

    def compute(start: int, segments: slice) -> list[Tensor]:
        """y, dx, dA, dB of some segments, whose rows begin at `start`."""
        run = Run(start, length, adapters[segments])
        views = GroupViews(
            A=As[segments].squeeze(0),
            Bs=(Bs[segments, :, :d_out].squeeze(0),),
            A_grad=None,
            B_grads=(),
        )
        y, dx = dy.clone(), x.clone()
        xa = forward_segments(run.rows(x), [run.rows(y)], views, 2.0)
        dA, (dB,) = backward_segments(run.rows(x), [run.rows(dy)], run.rows(dx), xa, views, 2.0)
        return [result.view(len(run.adapters), *result.shape[-2:]) for result in (run.rows(y), run.rows(dx), dA, dB)]

    for start in (0, 1):
        together = compute(start, slice(0, num))
        for slot in range(num):
            alone = compute(start + slot * length, slice(slot, slot + 1))
            if not all(torch.equal(whole[slot], part[0]) for whole, part in zip(together, alone, strict=True)):
                return False
    return True


def _has_independent_products(weight: Tensor, rows_min: int) -> bool:
    """Blocks of logits may have any number of rows from the minimum up."""
    num_rows = rows_min * MULTIPLES[-1]
    x, dy = (_values(num_rows, width, weight) for width in (weight.shape[1], weight.shape[0]))
    counts = [rows_min * multiple for multiple in MULTIPLES]
    counts += [count + extra for count in counts[:3] for extra in EXTRA_ROWS]
    return (
        _keeps_rows(x, lambda rows: rows @ weight.t(), counts)
        and _keeps_rows(dy, lambda rows: rows @ weight, counts)
        and _keeps_rows(dy, lambda rows: torch.softmax(rows, -1), counts)
    )


def _has_independent_rows(width: int, function: Callable[[Tensor], Tensor], like: Tensor, rows_min: int) -> bool:
    """A pass is padded to a multiple of the minimum."""
    values = _values(rows_min * MULTIPLES[-1], width, like)
    return _keeps_rows(values, function, [rows_min * multiple for multiple in MULTIPLES])


def _keeps_rows(values: Tensor, compute: Callable[[Tensor], Tensor], counts: list[int]) -> bool:
    """Whether some rows of `values`, from two places, give the same bits as all of them together."""
    whole = compute(values)
    for count in counts:
        for start in (0, len(values) - count):
            if not torch.equal(compute(values[start : start + count]), whole[start : start + count]):
                return False
    return True


def _values(num_rows: int, num_columns: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows * num_columns)
    return torch.randn(num_rows, num_columns, generator=generator).to(like.device, like.dtype)
