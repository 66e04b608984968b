"""AdamW of any number of rows on a GPU as two launches and one copy to the host.

The first launch adds up the squares of the gradients, and reads 4 bytes a value. The second takes the steps, and moves
28, with copies of the weights in bf16 30. Rows are reached by address, so their slabs do not matter.

A step whose gradient is not finite is not taken. Nor is one whose new weights might not be: the second launch bounds
their norm before it writes. The bound needs the norms of the weights and of the first moment, which a row has from its
last step (`Row.norms`). The first launch computes those that are not known, from 12 further bytes a value. `optim`
takes steps that exceed the bound once more, without it and with copies of their rows. Their bits are the same on either
way.

Depends on vectors of numbers; not on their adapter or model.

Main invariant: the number of parts of a row's sums, and the order in which they are added, depend on the row's length
alone.

Dimensions: S steps, C most parts of a row, P values of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from workers.bank.entries import Row
from workers.contract.messages import AdamParams
from workers.host.uploads import all_on_device
from workers.model.gpu_operations import define

PART_MULTIPLE = 2048
"""Every part of a row but the last has a multiple of so many values."""
PARTS_MAX = 512
"""Most parts of a row: enough that one row alone keeps all processors busy, few enough to be added up by every one."""
BOUND_MAX = 1e18
"""Most that the norm of new weights may be, by its bound: 18 times less than what would overflow when it is squared."""

ALIGNED_BYTES = 16
"""Every vector of a row begins at a multiple of it (`rows.ALIGNMENT`), so that a thread moves so many bytes at once."""

ROW_FIELDS = ("weights", "exp_avg", "exp_avg_sq", "grad", "compute", "num_values")
"""Columns of the table `rows`: addresses, 0 for no copy in bf16; P."""
NUMBERS = (
    "decay",
    "beta1",
    "rest1",
    "beta2",
    "rest2",
    "step_size",
    "root",
    "eps",
    "grad_clip_norm",
    "weights_norm",
    "exp_avg_norm",
    "is_checked",
)
"""Columns of the table `numbers`: learning rate times weight decay; betas, and 1 minus each; the learning rate by the
first bias correction, and the root of the second; norms, -1 if they are not known; 0: without the bound."""

SQUARES = "adamw_squares(Tensor(a!) squares, Tensor rows, Tensor numbers, int num_values, int num_unknown)"
"""Set squares (S, 3, C), fp32, to the parts of sums of squares: of each row's gradient; of its weights and of its first
moment where the norms are not known, infinite if a value of the second moment is negative or too large.

`rows` (S, 6) int64, `numbers` (S, 12) fp32. `num_values` in all rows, of them `num_unknown` in rows without norms: what
the launch reads, for those who count it.
"""
UPDATE = "adamw_update(Tensor(a!) results, Tensor squares, Tensor rows, Tensor numbers, int num_values, int num_copied)"
"""Take the steps: write weights, moments and copies. Set results (S, C, 4), fp32, for each part of a row: the
gradient's norm, and sums of squares of the change, of the new weights and of the new first moment. A step that is not
taken writes no more than that, with infinite sums for the new weights."""
define("workers.training.adamw_kernels", SQUARES, UPDATE)


class LaunchedNorms(NamedTuple):
    """Euclidean norms of a row in a step."""

    gradient: float
    """Before clipping. Not finite: the step was not taken."""
    update: float
    weights: float
    """After the step. Infinite: the step was not taken, if it was checked."""
    exp_avg: float
    """After the step; infinite if it bounds nothing (`SQUARES`)."""


def part_values(num_values: int) -> int:
    """Return the values of each part of a row but the last one."""
    return -(-num_values // (PART_MULTIPLE * PARTS_MAX)) * PART_MULTIPLE


def launch(
    rows: Sequence[Row], params: Sequence[AdamParams], num_steps: Sequence[int], *, is_checked: bool
) -> list[LaunchedNorms]:
    """Take a step of each row and wait for the norms; `is_checked`: not if the new weights might not be finite."""
    lengths = [row.weights.numel() for row in rows]
    num_parts = [-(-length // part_values(length)) for length in lengths]
    device, width = rows[0].weights.device, max(num_parts)
    numbers = [
        _numbers(row, own, number, is_checked=is_checked)
        for row, own, number in zip(rows, params, num_steps, strict=True)
    ]
    arrays = [np.array([_fields(row) for row in rows]), np.array(numbers, np.float32)]
    tables = all_on_device(arrays, device)
    squares = torch.empty(len(rows), 3, width, device=device)
    results = torch.empty(len(rows), width, 4, device=device)
    num_unknown = sum(length for row, length in zip(rows, lengths, strict=True) if row.norms is None)
    num_copied = sum(length for row, length in zip(rows, lengths, strict=True) if row.compute is not None)
    torch.ops.tinkerpool.adamw_squares(squares, *tables, sum(lengths), num_unknown)
    torch.ops.tinkerpool.adamw_update(results, squares, *tables, sum(lengths), num_copied)
    on_host = results.cpu().numpy()
    norms: dict[int, LaunchedNorms] = {}
    for count in set(num_parts):
        indices = [index for index, own in enumerate(num_parts) if own == count]
        norms.update(zip(indices, _norms(on_host[indices, :count]), strict=True))
    return [norms[index] for index in range(len(rows))]


def _fields(row: Row) -> list[int]:
    """Return a row of the table `ROW_FIELDS`."""
    assert row.compute is None or row.compute.dtype == torch.bfloat16
    vectors = (row.weights, row.exp_avg, row.exp_avg_sq, row.grad, row.compute)
    addresses = [0 if vector is None else vector.data_ptr() for vector in vectors]
    assert not any(address % ALIGNED_BYTES for address in addresses)
    return [*addresses, row.weights.numel()]


def _numbers(row: Row, params: AdamParams, num_steps: int, *, is_checked: bool) -> list[float]:
    """Return a row of the table `NUMBERS`."""
    return [
        params.learning_rate * params.weight_decay,
        params.beta1,
        1 - params.beta1,
        params.beta2,
        1 - params.beta2,
        params.learning_rate / (1 - params.beta1**num_steps),
        math.sqrt(1 - params.beta2**num_steps),
        params.eps,
        params.grad_clip_norm,
        *((-1.0, -1.0) if row.norms is None else row.norms),
        float(is_checked),
    ]


def _norms(parts: np.ndarray[tuple[int, int, int], np.dtype[np.float32]]) -> list[LaunchedNorms]:
    """Return the norms of rows with equal numbers of parts, of their parts of `results` (rows, parts, 4)."""
    roots = np.sqrt(parts[:, :, 1:].sum(axis=1, dtype=np.float64))  # (rows, 3)
    return [
        LaunchedNorms(gradient, *own) for gradient, own in zip(parts[:, 0, 0].tolist(), roots.tolist(), strict=True)
    ]
