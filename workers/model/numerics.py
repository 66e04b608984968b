"""What the bits depend on: the fingerprint of this process's arithmetic, and the self-test of row independence.

Knows matmuls and elementwise kernels of the library; not tenants.

Main invariant: bits are promised among runs with equal fingerprints only. If the self-test finds no number of rows from
which a row's bits are independent of the others, the fingerprint says so and no promise is made.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from workers.model.frozen import FrozenProducts, PackedProducts, PlainProducts
from workers.model.lora import Run, backward_segments, forward_segments
from workers.rows import AdapterViews, GroupViews

ROWS_MIN_CANDIDATES = (16, 32, 48, 64, 96, 128, 192, 240)
MULTIPLES = (1, 2, 3, 4, 5, 7, 8, 11, 16)
EXTRA_ROWS = (1, 5, 9)
BATCHED_SEGMENTS = 5
LARGE_WEIGHT = 1 << 22


def fingerprint(
    rows_min: int | None,
    device: torch.device,
    dtype: torch.dtype,
    block_rows: int | None,
    *,
    is_packed: bool,
    are_threads_alike: bool,
    are_samples_alike: bool,
) -> str:
    """The arithmetic of this process, as text: equal texts, equal bits.

    `dtype` is the base model's; `block_rows` that of exact mode; `is_packed`: products with its weights
    are oneDNN's; threads are alike if fewer give the same bits, samples if they have the same in any company.
    """
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    if block_rows is not None:
        rows = f"exact in blocks of {block_rows} rows"
    elif rows_min is None:
        rows = "rows depend on their neighbours"
    else:
        rows = f"rows independent from {rows_min}"
    parts = [
        f"torch {torch.__version__}",
        f"{platform.machine()} {kind}",
        f"{'up to ' if are_threads_alike else ''}{torch.get_num_threads()} threads",
        rows,
    ]
    if is_packed:
        parts.append("packed groups")
    if not are_samples_alike:
        parts.append("samples depend on their neighbours")
    if dtype != torch.float32:
        parts.append(str(dtype).removeprefix("torch."))
    return "; ".join(parts)


Elementwise = tuple[int, Callable[[Tensor], Tensor]]
"""Values per row, and a function of each value alone."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kernel is chosen by, besides sizes; the self-test runs once per process for each."""

    device: torch.device
    dtype: torch.dtype
    num_threads: int

    def values(self, num_rows: int, num_columns: int) -> Tensor:
        """Normal values (num_rows, num_columns), the same in every process."""
        generator = torch.Generator().manual_seed(num_rows * num_columns)
        return torch.randn(num_rows, num_columns, generator=generator).to(self.device, self.dtype)


def _kind(weight: Tensor) -> Kind:
    return Kind(weight.device, weight.dtype, torch.get_num_threads())


@torch.no_grad()
def find_rows_min(
    groups: Sequence[Sequence[Tensor]], elementwise: Iterable[Elementwise], *, is_packed: bool
) -> int | None:
    """The smallest number of rows from which every row's bits are independent of the number and place of the others.

    Tries products with each shape among the weights (F, D) of linears that read the same input, forward and backward,
    packed or not, softmax over F, and the elementwise functions (whose vector kernels end in scalar code that gives
    other bits), with the number of threads in use. None if no candidate passes. Takes a fraction of a second for small
    models.
    """
    kind = _kind(groups[0][0])
    shapes = dict.fromkeys((tuple(weight.shape[0] for weight in group), group[0].shape[1]) for group in groups)
    elementwise = list(elementwise)
    for rows_min in ROWS_MIN_CANDIDATES:
        is_independent = all(_has_independent_products(kind, *shape, rows_min, is_packed=is_packed) for shape in shapes)
        if is_independent and all(_has_independent_rows(*function, kind, rows_min) for function in elementwise):
            return rows_min
    return None


@torch.no_grad()
def can_batch_segments(weights: Iterable[Tensor], rows_min: int) -> bool:
    """Whether segments computed as one batch get the bits that each gets alone, at whatever row it begins."""
    weights = list(weights)
    kind = _kind(weights[0])
    shapes = dict.fromkeys((weight.shape[0], weight.shape[1]) for weight in weights)
    return all(
        _batch_equals_singles(kind, *shape, rank, length)
        for shape in shapes
        for rank in ((8,) if _is_large(*shape) else (8, 32))
        for length in (rows_min, rows_min + 1, *(() if _is_large(*shape) else (3 * rows_min + 5, 128)))
    )


def _is_large(d_out: int, d_in: int) -> bool:
    """Products with it take long, and it is a big vocabulary's, which sees blocks of few rows."""
    return d_out * d_in > LARGE_WEIGHT


@cache
def _batch_equals_singles(kind: Kind, d_out: int, d_in: int, rank: int, length: int) -> bool:
    aligned = -(-d_out // 16) * 16  # as logits are
    num = BATCHED_SEGMENTS
    x = kind.values(num * length + 1, d_in)
    dy = kind.values(num * length + 1, aligned)[:, :d_out]
    As, Bs = (kind.values(num * rank, width).view(num, rank, width) for width in (d_in, aligned))
    adapters = [AdapterViews((), (), slot, 2.0) for slot in range(num)]

    def compute(start: int, segments: slice) -> list[Tensor]:
        """y, dx, dA, dB of some segments, whose rows begin at `start`."""
        run = Run(start, length, adapters[segments])
        B = Bs[segments, :, :d_out].squeeze(0)
        views = GroupViews(A=As[segments].squeeze(0), Bs=(B,), A_grad=None, B_grads=())
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


@cache
def _has_independent_products(
    kind: Kind, d_outs: tuple[int, ...], d_in: int, rows_min: int, *, is_packed: bool
) -> bool:
    """Blocks of logits may have any number of rows from the minimum up."""
    width = sum(d_outs)
    multiples = [multiple for multiple in MULTIPLES if multiple <= 4 or not _is_large(width, d_in)]
    counts = [rows_min * multiple for multiple in multiples]
    weights = kind.values(width, d_in).split(d_outs)
    x, dy = (kind.values(counts[-1], columns) for columns in (d_in, width))
    counts += [count + extra for count in counts[:2] for extra in EXTRA_ROWS]
    nothing = [None] * len(d_outs)
    products: FrozenProducts = (PackedProducts if is_packed else PlainProducts)(weights, nothing)
    return (
        _keeps_rows(x, lambda rows: torch.cat(products.forward(rows, nothing), dim=1), counts)
        and _keeps_rows(dy, lambda rows: products.backward(rows.split(d_outs, dim=1)), counts)
        and _keeps_rows(dy, lambda rows: torch.softmax(rows, -1), counts)
    )


def _has_independent_rows(width: int, function: Callable[[Tensor], Tensor], kind: Kind, rows_min: int) -> bool:
    """A pass is padded to a multiple of the minimum."""
    return _keeps_rows(kind.values(rows_min * MULTIPLES[-1], width), function, [rows_min * m for m in MULTIPLES])


def _keeps_rows(values: Tensor, compute: Callable[[Tensor], Tensor], counts: list[int]) -> bool:
    """Whether some rows of `values`, from two places, give the same bits as all of them together."""
    whole = compute(values)
    for count in counts:
        for start in (0, len(values) - count):
            if not torch.equal(compute(values[start : start + count]), whole[start : start + count]):
                return False
    return True
