"""What the kernels of our own cost, from their grids. Tests compare with what Triton's interpreter launches and moves.

Importing this module declares them to `costs`.

Dimensions as in `workers.model.gpu_operations`.
"""

from __future__ import annotations

from torch import Tensor

from tests.support.fake_cuda.costs import Call, Cost, declare, most_keys, num_bytes
from workers.model.delta_heads import HISTORY, TOKENS
from workers.model.expert_groups import COLUMNS as EXPERT_COLUMNS
from workers.model.few_rows import RANKS, columns_of
from workers.model.frozen_products import TILE_COLUMNS, TILE_ROWS
from workers.model.gpu_attention import tile_tokens
from workers.model.gpu_operations import (
    EXPAND_GATE_COLUMNS,
    GRADIENT_COLUMNS,
    GRADIENT_ROWS,
    NAMESPACE,
    TRAINING_TILE_ROWS,
    expand_columns,
    gradient_rows,
    shrink_columns,
)
from workers.model.gpu_operations import TILE_ROWS as ROWS_OF_TILE
from workers.sampling.attention.pages import tile_rows
from workers.training.kernel_scores import LOGITS_AT_ONCE, num_parts_of


def _linears(call: Call, name: str, most: int = 3) -> list[Tensor]:
    """Return the tensors of one to so many linears."""
    return [tensor for tensor in (call.argument(f"{name}{number}") for number in range(most)) if tensor is not None]


def _shrunk(call: Call) -> Cost:
    """Each block of columns reads all rows, each tile its adapter's A. Parts of xa are written, and read if added."""
    xa, x, tiles = call.argument("xa"), call.argument("x"), call.argument("tiles")
    num_blocks = -(-xa.shape[2] // shrink_columns(xa.shape[2], call.argument("tile_rows")))
    matrix = xa.shape[2] * x.shape[1] * x.element_size()
    flops = 2.0 * len(tiles) * call.argument("tile_rows") * x.shape[1] * xa.shape[2]
    return Cost(1, num_blocks * num_bytes(x) + len(tiles) * matrix + _parts(call, xa), flops)


def _few_multiplied(call: Call) -> Cost:
    """Each block of columns reads all rows, and a norm's weight; weights are read once. Tables: as `_shrunk`."""
    out, left, weight, xa, tiles = (call.argument(name) for name in ("out", "left", "weight", "xa", "tiles"))
    norm_weight, bias = call.argument("norm_weight"), call.argument("bias")
    normed = 0 if norm_weight is None else num_bytes(norm_weight)
    num_blocks = -(-len(weight) // columns_of(len(weight)))
    moved = num_blocks * (num_bytes(left) + normed) + num_bytes(weight) + (0 if bias is None else num_bytes(bias))
    moved += num_bytes(out) * (2 if call.argument("is_added") else 1)
    flops = 2.0 * left.numel() * len(weight)
    if tiles is not None:
        rank_blocks = -(-xa.shape[2] // RANKS)
        matrix = xa.shape[2] * left.shape[1] * left.element_size()
        moved += rank_blocks * (num_bytes(left) + len(tiles) * normed) + len(tiles) * matrix + num_bytes(xa)
        flops += 2.0 * len(tiles) * ROWS_OF_TILE * left.shape[1] * xa.shape[2]
    return Cost(1, moved, flops)


def _parts(call: Call, parts: Tensor) -> int:
    """Return the bytes of parts that are written, read if they are added up, and of their sum."""
    summed = call.argument("summed")
    return num_bytes(parts) if summed is None else 2 * num_bytes(parts) + num_bytes(summed)


def _expanded(call: Call) -> Cost:
    """Each block of columns reads its linear's part of all rows of xa, each tile its adapter's B."""
    xa, tiles, ys = call.argument("xa"), call.argument("tiles"), _linears(call, "y")
    num_blocks = sum(-(-y.shape[1] // expand_columns(call.argument("tile_rows"))) for y in ys)
    rank, num_columns = xa.shape[2] // len(ys), sum(y.shape[1] for y in ys)
    matrices = len(tiles) * rank * num_columns * ys[0].element_size()
    read = num_blocks * num_bytes(xa) // len(ys) + matrices
    flops = 2.0 * len(tiles) * call.argument("tile_rows") * rank * num_columns
    return Cost(1, read + 2 * sum(map(num_bytes, ys)), flops)


def _shrunk_outputs(call: Call) -> Cost:
    """Each block of ranks reads its linear's rows, each tile its adapter's B. Parts as in `_shrunk`."""
    dxa, tiles, dys = call.argument("dxa"), call.argument("tiles"), _linears(call, "dy")
    rank, num_columns = dxa.shape[2] // len(dys), sum(dy.shape[1] for dy in dys)
    matrices = len(tiles) * rank * num_columns * dys[0].element_size()
    flops = 2.0 * len(tiles) * call.argument("tile_rows") * rank * num_columns
    num_blocks = -(-rank // shrink_columns(rank, call.argument("tile_rows")))
    return Cost(1, num_blocks * sum(map(num_bytes, dys)) + matrices + _parts(call, dxa), flops)


def _expanded_inputs(call: Call) -> Cost:
    """Each block of columns reads all rows of dxa, each tile its adapter's A."""
    dx, dxa, tiles = call.argument("dx"), call.argument("dxa"), call.argument("tiles")
    num_blocks = -(-dx.shape[1] // expand_columns(call.argument("tile_rows")))
    matrices = len(tiles) * dxa.shape[1] * dx.shape[1] * dx.element_size()
    flops = 2.0 * len(tiles) * call.argument("tile_rows") * dxa.shape[1] * dx.shape[1]
    return Cost(1, num_blocks * num_bytes(dxa) + matrices + 2 * num_bytes(dx), flops)


def _gate_expanded(call: Call) -> Cost:
    """As `_expanded` of gate and up, whose sums are read and written; what the gate gives is written."""
    xa, tiles, out = call.argument("xa"), call.argument("tiles"), call.argument("out")
    num_blocks = -(-out.shape[1] // EXPAND_GATE_COLUMNS)
    matrices = len(tiles) * xa.shape[2] * out.shape[1] * out.element_size()
    flops = 2.0 * len(tiles) * call.argument("tile_rows") * xa.shape[2] * out.shape[1]
    return Cost(
        1, num_blocks * num_bytes(xa) + matrices + 2 * num_bytes(call.argument("gate_up")) + num_bytes(out), flops
    )


def _gate_expanded_backward(call: Call) -> Cost:
    """As `_expanded_inputs` of one linear, but that the sums go through the gate and are not written."""
    dout, dxa, tiles = call.argument("dout"), call.argument("dxa"), call.argument("tiles")
    num_blocks = -(-dout.shape[1] // EXPAND_GATE_COLUMNS)
    matrices = len(tiles) * dxa.shape[1] * dout.shape[1] * dout.element_size()
    flops = 2.0 * len(tiles) * call.argument("tile_rows") * dxa.shape[1] * dout.shape[1]
    moved = sum(num_bytes(call.argument(name)) for name in ("dout", "gate_up", "dgate_up"))
    return Cost(1, num_blocks * num_bytes(dxa) + matrices + moved, flops)


def _added_gradients(call: Call) -> Cost:
    """A block of a gradient reads the rows of both sides; gradients are written, and read if they are not set."""
    x, dxa, dys, num_adapters = (
        call.argument("x"),
        call.argument("dxa"),
        _linears(call, "dy"),
        len(call.argument("ranks")),
    )
    read, num_values = 0, 0
    rank = dxa.shape[1] // len(dys)
    rows = gradient_rows(rank)
    for right, height in ((x, dxa.shape[1]), *((dy, rank) for dy in dys)):
        left = len(dxa) * height * dxa.element_size()
        read += -(-height // rows) * num_bytes(right) + -(-right.shape[1] // GRADIENT_COLUMNS) * left
        num_values += num_adapters * height * right.shape[1]
    flops = 2.0 * len(dxa) * num_values / num_adapters
    num_read = num_values * (num_adapters - call.argument("num_set")) // num_adapters
    return Cost(1, read + (num_read + num_values) * dxa.element_size(), flops)


PROGRAM_BYTES = 24
"""What a program of experts reads to find its rows and its matrix, also if there are none."""


def _expanded_to_experts(call: Call) -> Cost:
    """Each block of columns reads its matrix's part of all rows of xa, each group its matrix once."""
    ys, xa, rows, lasts = _linears(call, "y", 2), call.argument("xa"), call.argument("rows"), call.argument("lasts")
    num_blocks, (num_parts, _, width) = -(-ys[0].shape[1] // EXPERT_COLUMNS), xa.shape
    matrices = min(len(rows), lasts.numel() // 2) * width * ys[0].shape[1] * ys[0].element_size()
    read = num_blocks * (len(ys) * num_bytes(rows) + num_parts * len(rows) * width * xa.element_size()) + matrices
    programs = PROGRAM_BYTES * num_blocks * len(ys) * lasts.numel() // 2
    return Cost(1, read + programs + 2 * sum(map(num_bytes, ys)), 2.0 * len(rows) * width * ys[0].shape[1])


def _shrunk_of_experts(call: Call) -> Cost:
    """Rows are read once, by each group its matrix."""
    xa, ys, lasts = call.argument("xa"), _linears(call, "y", 2), call.argument("lasts")
    matrices = min(len(xa), lasts.numel() // 2) * xa.shape[1] * ys[0].shape[1] * ys[0].element_size()
    flops = 2.0 * xa.numel() * ys[0].shape[1]
    programs = PROGRAM_BYTES * len(ys) * lasts.numel() // 2
    return Cost(1, sum(map(num_bytes, ys)) + matrices + programs + num_bytes(xa), flops)


def _added_expert_gradients(call: Call) -> Cost:
    """A block of a gradient reads its rows of both sides; the gradients of groups are read and written."""
    dys, xa, rows, ranks = _linears(call, "dy", 2), call.argument("xa"), call.argument("rows"), call.argument("ranks")
    width, rank, num_columns = xa.shape[1], xa.shape[1] // len(dys), dys[0].shape[1]
    num_blocks, num_times = -(-num_columns // EXPERT_COLUMNS), -(-rank // GRADIENT_ROWS)
    weights = call.argument("row_weights")
    of_rows = num_bytes(rows) + (0 if weights is None else num_bytes(weights))
    lefts = num_blocks * (len(rows) * width * xa.element_size() + len(dys) * num_times * of_rows)
    num_values = min(len(rows), len(call.argument("lasts")) * len(ranks)) * width * num_columns
    programs = PROGRAM_BYTES * num_times * num_blocks * len(dys) * call.argument("lasts").numel() // 2
    read = num_times * sum(map(num_bytes, dys)) + lefts + programs
    return Cost(1, read + 2 * num_values * xa.element_size(), 2.0 * len(rows) * width * num_columns)


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


def _attended(call: Call) -> Cost:
    """Each tile of query rows reads all keys of its sequence, which are taken to be as many as the table has room for.

    As in `costs.attention_forward`, at most `keys_max`; only a causal call has queries that see fewer, and none sees
    more than its window.
    """
    query, keys, table = call.argument("query"), call.argument("keys"), call.argument("table")
    most_queries, is_causal, window = (call.argument(name) for name in ("most_queries", "is_causal", "window"))
    num_rows = tile_rows(query.shape[2], is_causal=is_causal, has_window=window > 0)
    num_tiles = -(-most_queries * query.shape[1] // (keys.shape[2] * num_rows))
    num_keys = most_keys(table.shape[1] * keys.shape[1])
    num_seen = num_keys - most_queries / 2 if is_causal else num_keys
    num_seen = min(num_seen, window or num_seen)
    read = int(2 * num_tiles * len(table) * num_seen * num_bytes(keys[0, 0]))
    operands = sum(map(num_bytes, (query, call.argument("out"), call.argument("log_sums"))))
    return Cost(1, read + operands, 4.0 * query.numel() * num_seen, is_attention=True)


def _parts_joined(call: Call) -> Cost:
    """The results of parts are read once, their log-sum-exps twice, by each head of a row."""
    operands = [call.argument(name) for name in ("out", "log_sums", "parts", "part_sums", "part_sums")]
    return Cost(1, sum(map(num_bytes, operands)))


def _once_a_row(call: Call) -> int:
    """Return the bytes that each row reads once: its angles, and the weights of heads if there are norms."""
    cos, sin, *weights = (call.argument(name) for name in ("cos", "sin", "query_weight", "key_weight"))
    return (
        num_bytes(cos) + num_bytes(sin) + len(cos) * sum(num_bytes(weight) for weight in weights if weight is not None)
    )


def _multiplied(call: Call) -> Cost:
    """Each tile of the result reads its rows and its columns."""
    out, left, right, bias = (call.argument(name) for name in ("out", "left", "right", "bias"))
    down, across = -(-out.shape[0] // TILE_ROWS), -(-out.shape[1] // TILE_COLUMNS)
    read = across * num_bytes(left) + down * (num_bytes(right) + (0 if bias is None else num_bytes(bias)))
    written = num_bytes(out) * (2 if call.argument("is_added") else 1)
    return Cost(1, read + written, 2.0 * left.numel() * right.shape[1])


def _attention_differentiated(call: Call) -> Cost:
    """A tile of keys reads the queries that may see it, then a tile of queries the keys that it may see.

    All sequences are taken to be as long as the longest, and no window to be shorter. A sequence of one tile has the
    first alone. A query comes with its result and its gradient, and with a log-sum-exp in fp32.
    """
    query, key, log_sums, ends = (call.argument(name) for name in ("query", "key", "log_sums", "ends"))
    num_tiles = -(-call.argument("longest") // tile_tokens(query.shape[2]))
    num_pairs, is_again = num_tiles * (num_tiles + 1) // 2, num_tiles > 1
    of_queries = 3 * num_bytes(query) + num_bytes(log_sums)
    of_keys = 2 * num_bytes(key)
    group = query.shape[1] // key.shape[1]
    read = num_pairs * of_queries // num_tiles + of_keys
    if is_again:
        read += of_queries + num_pairs * group * of_keys // num_tiles
    num_programs = key.shape[1] * (len(ends) - 1) * num_tiles * (2 if is_again else 1)
    written = num_bytes(query) + of_keys
    flops = 2.0 * (7 if is_again else 5) * query.numel() * num_pairs / num_tiles * tile_tokens(query.shape[2])
    return Cost(1, read + written + 2 * num_programs * ends.element_size(), flops, is_attention=True)


def _heads_rotated(call: Call) -> Cost:
    """Queries and keys are read, and written."""
    out = call.argument("out")
    return Cost(1, 2 * num_bytes(out) + _once_a_row(call))


def _heads_rotated_backward(call: Call) -> Cost:
    """Gradients are read, and queries and keys if there are norms; the gradient of all is written."""
    dquery, dkey, dvalue = (call.argument(name) for name in ("dquery", "dkey", "dvalue"))
    read = num_bytes(dquery) + num_bytes(dkey)
    normed = 0 if call.argument("query_weight") is None else read
    return Cost(1, read + num_bytes(dvalue) + normed + num_bytes(call.argument("dprojected")) + _once_a_row(call))


def _moved_once(call: Call) -> Cost:
    """Every operand is read or written once."""
    return Cost(1, sum(num_bytes(operand) for operand in call.args))


def _norm_added_backward(call: Call) -> Cost:
    """What is added to is read and written; each row reads the weight."""
    dhidden, weight = call.argument("dhidden"), call.argument("weight")
    inverse = num_bytes(call.argument("inverse"))
    return Cost(1, 4 * num_bytes(dhidden) + len(dhidden) * num_bytes(weight) + inverse)


def _added_and_normalised(call: Call) -> Cost:
    """Two rows are read and two written; each row reads the weight."""
    total, weight = call.argument("total"), call.argument("weight")
    return Cost(1, 4 * num_bytes(total) + len(total) * num_bytes(weight) + num_bytes(call.argument("inverse")))


def _pending(call: Call, num_parts: int) -> tuple[int, float]:
    """Every part of the logits reads all rows of xa; each tile its adapter's B. And the products with B^T."""
    xa, tiles, logits = call.argument("xa"), call.argument("tiles"), call.argument("logits")
    if xa is None:
        return 0, 0.0
    matrices = len(tiles) * xa.shape[2] * logits.shape[1] * logits.element_size()
    return num_parts * num_bytes(xa) + matrices, 2.0 * len(tiles) * TRAINING_TILE_ROWS * xa.shape[2] * logits.shape[1]


TARGET_BYTES = 4


def _of_targets(call: Call, num_parts: int, *, has_slopes: bool) -> int:
    """Return the bytes of targets, and of their slopes: every part reads them.

    If rows may have several, every block of columns reads all targets, and those of a row where one of its tile is in
    the block once more, which is not counted.
    """
    logits, targets = call.argument("logits"), num_bytes(call.argument("targets"))
    slopes = num_parts * num_bytes(call.argument("slopes")) if has_slopes else 0
    if call.argument("has_one_target"):
        return slopes + num_parts * targets
    num_blocks = -(-int(logits.shape[1]) // LOGITS_AT_ONCE)
    return slopes + num_parts * len(logits) * TARGET_BYTES + num_blocks * targets


def _logits_summed(call: Call) -> Cost:
    """The logits are read once, by every part what is known of rows; places of a row are two."""
    logits, parts = call.argument("logits"), call.argument("parts")
    of_rows = sum(num_bytes(call.argument(name)) for name in ("places", "places", "scales"))
    moved, flops = _pending(call, len(parts))
    moved += _of_targets(call, len(parts), has_slopes=False) + num_bytes(call.argument("logprobs"))
    return Cost(1, moved + num_bytes(logits) + len(parts) * of_rows + num_bytes(parts), flops)


def _scored(call: Call) -> Cost:
    """The norms of parts are read, and logits of targets become log-probabilities."""
    names = ("parts", "norms", "places", "places", "scales", "logprobs", "logprobs")
    return Cost(1, sum(num_bytes(call.argument(name)) for name in names))


def _summed(call: Call) -> Cost:
    """Slopes are read; zeros in place of those that are not finite are not counted. Ends of a request are two."""
    names = ("sums", "ends", "slopes", "losses")
    return Cost(1, sum(num_bytes(call.argument(name)) for name in (*names, "sums", "ends")))


def _differentiated(call: Call) -> Cost:
    """The logits are read and written; every part reads what is known of rows, and their slopes."""
    logits, dxa = call.argument("logits"), call.argument("dxa")
    num_parts = num_parts_of(logits.shape[1])
    of_rows = sum(num_bytes(call.argument(name)) for name in ("norms", "places", "places", "scales"))
    moved, flops = _pending(call, num_parts)
    moved += _of_targets(call, num_parts, has_slopes=True) + (0 if dxa is None else _parts(call, dxa))
    return Cost(1, moved + 2 * num_bytes(logits) + num_parts * of_rows, 2 * flops)


declare(f"{NAMESPACE}::sum_logits", _logits_summed, "workers/training/loss_kernels.py: its grid")
declare(f"{NAMESPACE}::score_targets", _scored, "workers/training/loss_kernels.py: its grid")
declare(f"{NAMESPACE}::add_losses", _summed, "workers/training/loss_kernels.py: its grid")
declare(f"{NAMESPACE}::differentiate_logits", _differentiated, "workers/training/loss_kernels.py: its grid")


def _squared(call: Call) -> Cost:
    """Gradients are read, and three more vectors of rows whose norms are not known."""
    squares, num_values, num_unknown = (call.argument(name) for name in ("squares", "num_values", "num_unknown"))
    return Cost(1, 4 * num_values + 12 * num_unknown + squares[:, 0].numel() * squares.element_size())


def _updated(call: Call) -> Cost:
    """Four vectors are read, three and copies written; every part reads the sums of squares of all of its row."""
    squares, results = call.argument("squares"), call.argument("results")
    sums = squares[:, 0].numel() * squares.shape[2] * squares.element_size()
    moved = 28 * call.argument("num_values") + 2 * call.argument("num_copied")
    return Cost(1, moved + sums + num_bytes(results))


declare(f"{NAMESPACE}::rotate", _rotated, "workers/sampling/attention/page_kernels.py: its grid")
declare(f"{NAMESPACE}::join", _joined, "workers/sampling/attention/page_kernels.py: its grid")
declare(f"{NAMESPACE}::attend_pages", _attended, "workers/sampling/attention/attend_kernels.py: its grid")
declare(f"{NAMESPACE}::join_parts", _parts_joined, "workers/sampling/attention/attend_kernels.py: its grid")
declare(f"{NAMESPACE}::shrink", _shrunk, "workers/model/adapter_kernels.py: its grid")
declare(f"{NAMESPACE}::expand", _expanded, "workers/model/adapter_kernels.py: its grid")
declare(f"{NAMESPACE}::shrink_outputs", _shrunk_outputs, "workers/model/adapter_kernels.py: its grid")
declare(f"{NAMESPACE}::expand_inputs", _expanded_inputs, "workers/model/adapter_kernels.py: its grid")
declare(f"{NAMESPACE}::expand_gate", _gate_expanded, "workers/model/gate_kernels.py: its grid")
declare(f"{NAMESPACE}::expand_gate_backward", _gate_expanded_backward, "workers/model/gate_kernels.py: its grid")
declare(f"{NAMESPACE}::add_gradients", _added_gradients, "workers/model/adapter_kernels.py: its grid")
declare(f"{NAMESPACE}::expand_experts", _expanded_to_experts, "workers/model/expert_kernels.py: its grid")
declare(f"{NAMESPACE}::shrink_experts", _shrunk_of_experts, "workers/model/expert_kernels.py: its grid")
declare(f"{NAMESPACE}::add_expert_gradients", _added_expert_gradients, "workers/model/expert_kernels.py: its grid")
declare(f"{NAMESPACE}::rotate_heads", _heads_rotated, "workers/model/layer_kernels.py: a program a row")
declare(
    f"{NAMESPACE}::rotate_heads_backward", _heads_rotated_backward, "workers/model/layer_kernels.py: a program a row"
)
declare(f"{NAMESPACE}::attention_gradients", _attention_differentiated, "workers/model/attention_kernels.py: its grid")
declare(f"{NAMESPACE}::multiply_few", _few_multiplied, "workers/model/few_rows_kernels.py: its grid")
declare(f"{NAMESPACE}::multiply", _multiplied, "workers/model/product_kernels.py: its grid")
for _name in ("gate", "gate_backward"):
    declare(f"{NAMESPACE}::{_name}", _moved_once, "workers/model/layer_kernels.py: its grid")
declare(f"{NAMESPACE}::add_norm", _added_and_normalised, "workers/model/layer_kernels.py: a program a row")
declare(f"{NAMESPACE}::norm_add_backward", _norm_added_backward, "workers/model/layer_kernels.py: a program a row")
declare(f"{NAMESPACE}::adamw_squares", _squared, "workers/training/adamw_kernels.py: its grid")
declare(f"{NAMESPACE}::adamw_update", _updated, "workers/training/adamw_kernels.py: its grid")


def _slots_stepped(call: Call) -> Cost:
    """A value head reads its state and its key head's inputs. States and inputs of key heads are written once."""
    history, states, value = call.argument("history"), call.argument("states"), call.argument("value")
    num_seqs = len(call.argument("rows"))
    _, heads, per_key, key_dim, value_dim = states.shape
    num_heads, size, num_before = heads * per_key, value.element_size(), history.shape[1]
    channels, written = num_heads * (2 * key_dim + value_dim), history.shape[2]
    convolved = channels * (num_before + 1) * (size + 4) + written * num_before * size
    others = num_heads * (value_dim * (2 * size + 4) + 2 * size + 2 * 4 + 3 * 8)
    moved = 2 * num_heads * key_dim * value_dim * 4
    return Cost(1, num_seqs * (convolved + others + moved), 8.0 * num_seqs * num_heads * key_dim * value_dim)


declare(f"{NAMESPACE}::step_slots", _slots_stepped, "workers/sampling/delta_kernels.py: a program a value head")


def _convolved(call: Call) -> Cost:
    """Each program reads the rows of its tokens and the three before them, and its head's weights."""
    heads, inputs = call.argument("heads"), call.argument("inputs")
    num_chunks, num_tokens = len(heads), heads.shape[2]
    num_blocks = -(-num_tokens // TOKENS)
    rows = (num_tokens + HISTORY * num_blocks) * num_bytes(inputs) // inputs.shape[1]
    return Cost(1, rows + num_chunks * num_blocks * num_bytes(call.argument("conv")) + num_bytes(heads))


def _convolved_backward(call: Call) -> Cost:
    """A program but a chunk's first one computes the gradients of the three tokens before its own, too."""
    dinputs, dheads = call.argument("dinputs"), call.argument("dheads")
    num_chunks, num_tokens = len(dheads), dheads.shape[2]
    num_blocks = -(-num_tokens // TOKENS)
    again = HISTORY * (num_blocks - 1)
    rows = (num_tokens + HISTORY + 2 * again) * num_bytes(dinputs) // dinputs.shape[1]
    gradients = (num_tokens + again) * dheads.numel() // num_tokens * dheads.element_size()
    weights = num_chunks * num_blocks * num_bytes(call.argument("conv"))
    return Cost(1, rows + gradients + weights + num_bytes(dinputs))


declare(f"{NAMESPACE}::convolve", _convolved, "workers/model/delta_head_kernels.py: its grid")
declare(f"{NAMESPACE}::convolve_backward", _convolved_backward, "workers/model/delta_head_kernels.py: its grid")
