"""What the bits of a base model's results depend on: how its products are computed, and the fingerprint of that.

Depends on the library's version and the kind of processor; not on tenants.

Main invariant: bits are promised between runs with equal fingerprints only. A fingerprint says when rows depend on
their neighbours, and then no promise is made.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

ROWS_MIN = 16
"""Rows of the smallest product where no trial has found another number."""

EXPERT_ROWS = 16
"""Rows of the smallest product of an expert where no trial has found another number."""

SUM_MAX = 512
"""Values that a sum in parts adds up at once: a library leaves sums of so few values whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """How a base model computes its products. `selftest` finds the values when the model is loaded."""

    rows_min: int | None = None
    """Rows from which a row's bits do not depend on other rows: products with fewer rows are padded. None: a row's
    bits depend on the others at any number of rows; `ROWS_MIN` is the minimum then."""
    block_rows: int | None = None
    """Exact mode: products with frozen weights take exactly so many rows at a time; see `frozen_products`."""
    is_tiled: bool = False
    """Exact mode: products with frozen weights are our own kernel's, in tiles of one size; likewise."""
    is_packed: bool = False
    """Products with frozen weights are oneDNN's; see `frozen_products`."""
    expert_rows: int = EXPERT_ROWS
    """The same of each expert's rows."""
    can_batch: bool = True
    """Segments of different adapters may be computed as one batch: each has the bits that it has solo."""
    unbatched: frozenset[tuple[int, int]] = frozenset()
    """Shapes (F, D) of linears for which that does not hold."""
    in_parts: frozenset[tuple[int, int]] = frozenset()
    """Shapes (F, D) of linears whose adapters add up at most `SUM_MAX` values at once, parts of longer sums in order.
    The library adds up whole sums of others. It may divide long ones between threads, differently for a batch and for a
    segment solo."""

    are_sequences_alone: bool = False
    """Linear attention of a pass computes one sequence at a time: each has other bits among others, but not so. Then
    results are those of any sequence solo, so this is no part of a fingerprint."""

    @property
    def is_exact(self) -> bool:
        """Whether a row's bits do not depend on the others at any number of rows."""
        return self.is_tiled or self.block_rows is not None


def fingerprint(
    numerics: Numerics,
    device: torch.device,
    dtype: torch.dtype,
    *,
    linear_attention: str,
    kernels: str,
    is_thread_count_invariant: bool,
    are_samples_batch_invariant: bool,
) -> str:
    """Return the arithmetic of this process as text: equal texts, equal bits. `dtype` is the base model's.

    `linear_attention`: the library that computes it in passes, with its version; empty: none. `kernels`: what kernels
    of our own compute; empty: nothing.
    """
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    if numerics.is_tiled:
        rows = "exact in tiles"
    elif numerics.block_rows is not None:
        rows = f"exact in blocks of {numerics.block_rows} rows"
    elif numerics.rows_min is None:
        rows = "rows depend on their neighbours"
    else:
        rows = f"rows independent from {numerics.rows_min}"
    parts = [
        f"torch {torch.__version__}",
        f"{platform.machine()} {kind}",
        f"{'up to ' if is_thread_count_invariant else ''}{torch.get_num_threads()} threads",
        rows,
    ]
    if numerics.is_packed:
        parts.append("packed groups")
    if numerics.in_parts:
        shapes = ", ".join(f"{d_out} x {d_in}" for d_out, d_in in sorted(numerics.in_parts))
        parts.append(f"sums of {SUM_MAX} values for {shapes}")
    if not are_samples_batch_invariant:
        parts.append("samples depend on their neighbours")
    if kernels:
        parts.append(f"{kernels} by kernels of our own")
    if linear_attention:
        parts.append(f"linear attention by {linear_attention}")
    if dtype != torch.float32:
        parts.append(str(dtype).removeprefix("torch."))
    return "; ".join(parts)
