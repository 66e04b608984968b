"""Operations of our own on a GPU, which torch knows by name: `torch.ops.tinkerpool.shrink` and the like.

Each is one launch of a kernel in Triton. Depends on no model; defining the operations imports no Triton, the first
launch does.

Dimensions: T rows of the pass, L tiles, N pieces of segments, S adapters, D inputs, F outputs, R padded rank of an
adapter, G linears of a group (1 to 3), M the largest G * R, P parts of a sum over D or F.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

NAMESPACE = "tinkerpool"
TILE_ROWS, TRAINING_TILE_ROWS = 16, 64
"""Rows of a tile at most: the fewest that a product on tensor cores has, for the few rows of a decode step; and more,
where adapters have many rows, so that their matrices are read less often."""
EXPAND_GATE_COLUMNS = 64
"""Of a program that has two tiles of rows in its registers, gate and up: so three programs share a processor."""
GRADIENT_ROWS, GRADIENT_COLUMNS = 64, 128
"""Of a gradient, those of a program; rows at most."""
GRADIENT_DEPTH = 64
"""Rows of a pass that one product of a gradient sums. These numbers are those of the fastest launches on an H200 with
adapters of rank 32, eight of 256 rows each and 64 of 64."""
PART_DEPTH, PARTS_MAX = 512, 8
"""What a program of a pass with a backward sums of D or F, unless there would be more parts."""
LINEARS_MAX = 3
"""Of a group."""

SHRINK = (
    "shrink(Tensor(a!) xa, Tensor(b!)? summed, Tensor(c!)? arrivals, Tensor x, Tensor addresses, Tensor tiles, "
    "Tensor ranks, Tensor scalings, int num_linears, int tile_rows)"
)
"""Set xa (P, T, M), fp32, to scaling x A^T of each row's adapter, each part over some of D, from x (T, D).

Sets `summed` (1, T, M), if given, to the sum of the parts; with it, `arrivals` (`num_arrivals`,) int32: zeros, and
zeros again afterwards.
`addresses` (S, 4) int64: of A (G * R, D) and of each B^T (R, F), in the dtype of x; 0: not adapted, and nothing is
written. `tiles` (L, 3) int32: first row, number of rows, at most `tile_rows`, adapter; of rows without an adapter the
number is negative, for those operations that do something with all rows. `ranks` (S,) int32: R; `scalings` (S,) fp32.
"""
EXPAND = (
    "expand(Tensor(a!) y0, Tensor(b!)? y1, Tensor(c!)? y2, Tensor xa, Tensor addresses, Tensor tiles, Tensor ranks, "
    "int tile_rows)"
)
"""Add to y_i (T, F) the product of the sum of xa's parts with B_i^T; the others as in `SHRINK`."""
SHRINK_OUTPUTS = (
    "shrink_outputs(Tensor(a!) dxa, Tensor(b!)? summed, Tensor(c!)? arrivals, Tensor dy0, Tensor? dy1, Tensor? dy2, "
    "Tensor addresses, Tensor tiles, Tensor ranks, Tensor scalings, int tile_rows)"
)
"""Set dxa (P, T, M), fp32, to scaling dy_i B_i of each row's adapter, each part over some of F, from dy_i (T, F); the
others as in `SHRINK`."""
EXPAND_INPUTS = (
    "expand_inputs(Tensor(a!) dx, Tensor dxa, Tensor addresses, Tensor tiles, Tensor ranks, int num_linears, "
    "int tile_rows)"
)
"""Add dxa A to dx (T, D); the others as in `SHRINK`."""
EXPAND_GATE = (
    "expand_gate(Tensor(a!) out, Tensor(b!) gate_up, Tensor xa, Tensor addresses, Tensor tiles, Tensor ranks, "
    "int tile_rows)"
)
"""Do as `EXPAND` does with gate and up of gate_up (T, 2 F), then as `layer_operations.GATE` does with out (T, F).

Of xa, one part. Rows of no tile are not written. Rows of gate_up may have gaps.
"""
EXPAND_GATE_BACKWARD = (
    "expand_gate_backward(Tensor(a!) dgate_up, Tensor dout, Tensor gate_up, Tensor dxa, Tensor addresses, "
    "Tensor tiles, Tensor ranks, int tile_rows)"
)
"""Do as `EXPAND_INPUTS` does with dout (T, F), of one linear, then as `layer_operations.GATE_BACKWARD`.

dout is not written, nor are rows of no tile. Rows of dout and gate_up (T, 2 F) may have gaps.
"""
ADD_GRADIENTS = (
    "add_gradients(Tensor x, Tensor dy0, Tensor? dy1, Tensor? dy2, Tensor xa, Tensor dxa, Tensor gradients, "
    "Tensor pieces, Tensor firsts, Tensor ranks, Tensor? are_set, int num_set)"
)
"""Add dxa^T x to the gradients of A, and xa_i^T dy_i to those of B_i^T, segment by segment of each adapter in order.

x (T, D), dy_i (T, F), xa (1, T, M) and dxa (T, M) the sums of parts of `SHRINK` and `SHRINK_OUTPUTS`. `gradients`
(S, 4) int64: the addresses of those of A and of each B^T, fp32; 0: not adapted. `pieces` (N, 3) int32, of segments, by
adapter, then by row: first row, number of rows, at most GRADIENT_DEPTH, and 1 if it is the segment's last piece.
`firsts` (S + 1,) int32: the first piece of each adapter, and their number. `are_set` (S,) int32: 1 for adapters whose
gradients are set instead: their memory may hold anything. `num_set` of them, for those who count what is read.
"""

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
defined: dict[str, str] = {}
"""The module of each operation, which has a function of the same name that launches it."""


def blocks_of(number: int, size: int) -> int:
    """Return how many blocks of a size hold so many. Triton's own function takes as long as a launch."""
    return -(-number // size)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`, which is positive; likewise."""
    return 1 << (number - 1).bit_length()


def shrink_columns(width: int, tile_rows: int) -> int:
    """Return the columns of a program of `SHRINK`: few where there are few rows, so that there are many programs."""
    return 32 if tile_rows == TILE_ROWS else min(64, max(16, power_of_two(width)))


def expand_columns(tile_rows: int) -> int:
    """Return the columns of a program of `EXPAND`, likewise."""
    return 64 if tile_rows == TILE_ROWS else 128


def parts_of(width: int) -> int:
    """Return the parts of a sum over so many values in a pass with a backward."""
    return min(PARTS_MAX, -(-width // PART_DEPTH))


def num_arrivals(num_tiles: int, rank_max: int) -> int:
    """Return the sums of one launch at most that are cut into parts: of tiles, by blocks of each linear."""
    return num_tiles * LINEARS_MAX * -(-rank_max // shrink_columns(rank_max, TRAINING_TILE_ROWS))


def gradient_rows(rank: int) -> int:
    """Return the rows of a program of `ADD_GRADIENTS`, of the largest padded rank: a product has 16 at least."""
    return min(GRADIENT_ROWS, max(16, power_of_two(rank)))


def dense(rows: Tensor) -> Tensor:
    """Return rows whose last dimension has no gaps: themselves, unless a gradient was broadcast or transposed."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def has_triton() -> bool:
    """Return whether Triton is installed; torch for CUDA brings it."""
    return find_spec("triton") is not None


def can_launch(device: torch.device) -> bool:
    """Return whether a kernel can be compiled and launched, by trying: Triton needs a C compiler, for example."""
    floats, numbers = (torch.zeros(16, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32))
    addresses = torch.zeros(1, 4, dtype=torch.int64, device=device)  # of an adapter that adapts nothing
    try:
        torch.ops.tinkerpool.shrink(
            floats.view(1, 1, 16),
            None,
            None,
            floats.view(1, 16).bfloat16(),
            addresses,
            numbers[:3].view(1, 3),
            numbers[:1],
            floats[:1],
            1,
            TILE_ROWS,
        )
    except Exception as error:  # noqa: BLE001 (whatever it is: without the kernels there is a slower way)
        logger.warning("the GPU runs without kernels of our own, which is slower: %s", error)
        return False
    return True


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether a device runs kernels of our own. Decided once for each process, because bits depend on it."""
    return device.type == "cuda" and has_triton() and can_launch(device)


def missing_kernels(device: torch.device) -> str:
    """Return why a GPU runs without kernels of our own, for people; empty: it does not, or is no GPU."""
    if device.type != "cuda" or has_kernels(device):
        return ""
    if not has_triton():
        return "Triton, which compiles the kernels of the pool, is not installed"
    return "Triton cannot launch the kernels of the pool; it needs a C compiler, as gcc with libc6-dev"


def launcher(name: str) -> Callable[..., None]:
    """Return the function that launches an operation; calling it imports the kernel's module."""

    def launch(*args: Any) -> None:
        getattr(importlib.import_module(defined[name]), name)(*args)

    return launch


def define(module: str, *schemas: str) -> None:
    """Make operations known to torch, whose kernels are in a module; each returns nothing."""
    for schema in schemas:
        name = schema.partition("(")[0]
        defined[name] = module
        _LIBRARY.define(f"{schema} -> ()")
        _LIBRARY.impl(name, launcher(name), "CUDA")
        _LIBRARY.impl(name, lambda *_: None, "Meta")


define("workers.model.adapter_kernels", SHRINK, EXPAND, SHRINK_OUTPUTS, EXPAND_INPUTS, ADD_GRADIENTS)
define("workers.model.gate_kernels", EXPAND_GATE, EXPAND_GATE_BACKWARD)
