"""What the kernels of our own cost, from their grids. Tests compare with what Triton's interpreter launches and moves.

Importing this module declares them to `costs`.

Dimensions as in `workers.model.gpu_operations`.
"""

from __future__ import annotations

from tests.support.fake_cuda.costs import Call, Cost, declare, num_bytes
from workers.model.gpu_operations import EXPAND_COLUMNS, NAMESPACE, SHRINK_COLUMNS, TILE_ROWS


def _shrunk(call: Call) -> Cost:
    """Each block of columns reads all rows, each tile its adapter's A."""
    xa, x, tiles = call.argument("xa"), call.argument("x"), call.argument("tiles")
    num_blocks = -(-xa.shape[2] // SHRINK_COLUMNS)
    matrix = xa.shape[2] * x.shape[1] * x.element_size()
    flops = 2.0 * len(tiles) * TILE_ROWS * x.shape[1] * xa.shape[2]
    return Cost(1, num_blocks * num_bytes(x) + len(tiles) * matrix + num_bytes(xa), flops)


def _expanded(call: Call) -> Cost:
    """Each block of columns reads its linear's part of all rows of xa, each tile its adapter's B."""
    xa, tiles = call.argument("xa"), call.argument("tiles")
    ys = [y for y in (call.argument(f"y{number}") for number in range(3)) if y is not None]
    num_blocks = sum(-(-y.shape[1] // EXPAND_COLUMNS) for y in ys)
    rank, num_columns = xa.shape[2] // len(ys), sum(y.shape[1] for y in ys)
    matrices = len(tiles) * rank * num_columns * ys[0].element_size()
    read = num_blocks * num_bytes(xa) // len(ys) + matrices
    return Cost(1, read + 2 * sum(map(num_bytes, ys)), 2.0 * len(tiles) * TILE_ROWS * rank * num_columns)


def _rotated(call: Call) -> Cost:
    """Every head of a query or a key reads its row's angles, and its weights."""
    query, keys, projected = call.argument("query"), call.argument("keys"), call.argument("projected")
    num_rows, num_heads, head_dim = query.shape
    num_angled = num_rows * (num_heads + keys.shape[-2])
    angles = num_angled * head_dim * 2 * query.element_size()
    weights = 0 if call.argument("query_weight") is None else num_angled * head_dim * query.element_size()
    slots = 2 * num_rows * keys.shape[-2] * call.argument("slots").element_size()
    return Cost(1, 2 * num_bytes(projected) + angles + weights + slots)


def _joined(call: Call) -> Cost:
    """Two results and their sums are read."""
    return Cost(1, sum(map(num_bytes, (call.argument(name) for name in
                                       ("out", "first", "first_sums", "second", "second_sums")))))  # fmt: skip


def _squared(call: Call) -> Cost:
    """Gradients are read, and three more vectors of rows whose norms are not known."""
    squares, num_values, num_unknown = (call.argument(name) for name in ("squares", "num_values", "num_unknown"))
    return Cost(1, 4 * num_values + 12 * num_unknown + squares[:, 0].numel() * squares.element_size())


def _updated(call: Call) -> Cost:
    """Four vectors are read and written, copies written; every part reads the sums of squares of all of its row."""
    squares, results = call.argument("squares"), call.argument("results")
    sums = squares[:, 0].numel() * squares.shape[2] * squares.element_size()
    moved = 32 * call.argument("num_values") + 2 * call.argument("num_copied")
    return Cost(1, moved + sums + num_bytes(results))


declare(f"{NAMESPACE}::rotate", _rotated, "workers/sampling/attention/page_kernels.py: its grid")
declare(f"{NAMESPACE}::join", _joined, "workers/sampling/attention/page_kernels.py: its grid")
declare(f"{NAMESPACE}::shrink", _shrunk, "workers/model/adapter_kernels.py: its grid")
declare(f"{NAMESPACE}::expand", _expanded, "workers/model/adapter_kernels.py: its grid")
declare(f"{NAMESPACE}::adamw_squares", _squared, "workers/training/adamw_kernels.py: its grid")
declare(f"{NAMESPACE}::adamw_update", _updated, "workers/training/adamw_kernels.py: its grid")
