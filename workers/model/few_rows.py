"""Products of the few rows of a decode step on a GPU: one launch normalises, multiplies, and applies a gate or a sum.

A decode step waits for kernels to begin and to end, more than for what they read. So the launch that multiplies by
frozen weights also normalises the rows before, applies the gate or adds to the residual stream behind, and computes
x A^T of the adapters in programs of its own. The weights are read once, for all rows.

Defining the operation imports no Triton (`gpu_operations`). Does not depend on models or passes.

Main invariant: a row's result depends on that row and its adapter only; the order of its sums depends on D alone.

Dimensions: N rows, D inputs, F outputs, T tiles of adapters' rows, S adapters, M ranks of all linears of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.model.fused_runs import ForwardRun
from workers.model.gpu_operations import define
from workers.model.segments import SegmentRun

MULTIPLY_FEW = (
    "multiply_few(Tensor(a!) out, Tensor(b!) xa, Tensor left, Tensor weight, Tensor? bias, Tensor? norm_weight, "
    "float eps, bool is_added, bool is_gated, Tensor? addresses, Tensor? tiles, Tensor? ranks, Tensor? scalings, "
    "int num_linears)"
)
"""Set out (N, F) to left (N, D) W^T plus bias (F,) if given, or add it to out, rounding once; W (F, D) is `weight`.

Of left as its RMS normalisation gives it, if there is a `norm_weight` (D,): the products' sums are scaled by 1 / rms.
With `is_gated` W is of gate and up (2 F, D), and out is silu(gate) * up of both as they are rounded.
With tables also do as `gpu_operations.SHRINK`, where they are described, with left likewise and xa (1, N, M).
N is at most `ROWS_MAX`. Columns of out and left are adjacent; the others have no gaps.
"""
define("workers.model.few_rows_kernels", MULTIPLY_FEW)

ROWS_MAX = 32
"""Rows of a product at most: each program reads all of them, and the more there are, the less it helps that weights
are read once. 0: the library multiplies any number."""
DEPTH = 128
"""What one product sums."""
RANKS = 32
"""Ranks of an adapter, of those of a program."""
PROGRAMS_MIN, COLUMNS_MIN, COLUMNS_MAX = 64, 16, 128
"""So many programs have enough reads under way to keep the memory busy; with more columns, each reads rows less often.
A product on tensor cores has 16 columns at least."""


def can_multiply(num_rows: int, runs: Sequence[SegmentRun]) -> bool:
    """Return whether rows are few, and all adapters of a pass without a backward are one run that has all rows."""
    are_known = all(isinstance(run, ForwardRun) and run.has_all_rows for run in runs)
    return num_rows <= ROWS_MAX and len(runs) <= 1 and are_known


def columns_of(width: int) -> int:
    """Return the columns of a program for a weight (width, D), a power of two."""
    fitting = max(1, width // PROGRAMS_MIN)
    return min(COLUMNS_MAX, max(COLUMNS_MIN, 1 << (fitting.bit_length() - 1)))
