"""Compiles the kernels of our own for an H100, without a GPU: `python -m tests.support.numerics.compiled`.

Prints what each takes, as JSON by its name: bytes of spilled registers, bytes of shared memory. Triton brings the
compiler. Runs in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workers.model import (
    adapter_kernels,
    attention_kernels,
    delta_head_kernels,
    expert_kernels,
    few_rows,
    few_rows_kernels,
    gate_kernels,
    gpu_operations,
    layer_kernels,
    product_kernels,
)
from workers.model.expert_groups import COLUMNS
from workers.sampling import delta_kernels
from workers.sampling.attention import attend_kernels, page_kernels
from workers.sampling.attention.pages import PART_KEYS
from workers.sampling.kv_cache import PAGE_TOKENS
from workers.training import adamw_kernels, loss_kernels
from workers.training.adamw_launches import BOUND_MAX, PART_MULTIPLE, PARTS_MAX
from workers.training.kernel_scores import LOGITS_AT_ONCE, PART_COLUMNS, TARGETS_AT_ONCE

H100 = GPUTarget("cuda", 90, 32)
FP32 = {"xa", "dxa", "summed", "scalings", "first_sums", "second_sums", "inverse", "squares", "results", "numbers"}
FP32 |= {"log_sums", "parts", "part_sums", "logprobs", "norms", "scales", "slopes", "losses"}
FP32 |= {"heads", "dheads", "conv", "states", "query_conv", "key_conv", "value_conv", "decay_scale", "dt_bias", "norm"}
FP64 = {"sums"}
INT32 = {"tiles", "ranks", "pieces", "arrivals", "segments", "firsts", "targets", "places", "ends", "lasts", "owners"}
INT32 |= {"lengths", "table", "behinds", "are_set"}
INT64 = {"addresses", "gradients", "slots", "rows", "reads", "writes"}
NUMBERS = {"num_rows", "num_next", "blocks", "blocks0", "blocks1", "width", "first_value", "num_values"}
NUMBERS |= {
    "num_shrinking",
    "rank_blocks",
    "num_segments",
    "num_adapters",
    "num_parts",
    "table_width",
    "window",
    "num_tokens",
    "num_tiles",
}
"""Integers that need not be multiples of 16; those that are, Triton knows to be."""
FRACTIONS = {"eps", "scaling", "length"}
HEADS = {"H": 32, "K": 8, "E": 128}


def kernels() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield every kernel, with its constants and the options of its launch."""
    few = {"ROWS": 16, "COLUMNS": 32, "DEPTH": adapter_kernels.SHRINK_DEPTH, "PARTS": 4, "IS_SUMMED": False}
    many = {"ROWS": 64, "DEPTH": adapter_kernels.TRAINING_DEPTH, "PARTS": gpu_operations.PARTS_MAX, "IS_SUMMED": True}
    many |= {"num_stages": adapter_kernels.SHRINK_STAGES}
    yield adapter_kernels._shrink, few | {"G": 3, "num_stages": adapter_kernels.SHRINK_STAGES}
    for rows, width, way in product((16, few_rows.ROWS_MAX), (1 << 10, 1 << 12, 1 << 14), ("norm", "gate", "sum")):
        columns, shrinks = few_rows.columns_of(width), rows == few_rows.ROWS_MAX and way != "gate"
        sizes: dict[str, Any] = {"G": 3, "ROWS": rows, "COLUMNS": columns, "DEPTH": few_rows.DEPTH, "TILE": 16}
        sizes |= {
            "RANKS": few_rows.RANKS,
            "HAS_NORM": way != "sum",
            "HAS_BIAS": shrinks,
            "ADDS": way == "sum",
            "IS_GATED": way == "gate",
        }
        absent = {"norm_weight": way == "sum", "bias": not shrinks}
        absent |= dict.fromkeys(("addresses", "tiles", "ranks", "scalings"), not shrinks)
        sizes |= {"SHRINKS": shrinks} | {name: None for name, is_absent in absent.items() if is_absent}
        yield few_rows_kernels._multiply_few, sizes | few_rows_kernels.options_of(rows, columns)
    for rank in (16, 128):
        for parts in (1, 4):
            yield adapter_kernels._expand, {"ROWS": 16, "COLUMNS": 64, "RANK": rank, "PARTS": parts}
    for columns in (16, 64):
        yield adapter_kernels._shrink, many | {"G": 3, "COLUMNS": columns}
    for rank in (16, 32, 128):
        yield adapter_kernels._expand, {"ROWS": 64, "COLUMNS": 128, "RANK": rank, "PARTS": 1}
        yield adapter_kernels._shrink_outputs, many | {"BLOCKS": 2, "COLUMNS": min(64, rank)}
        gradient = {"G": 3, "ROWS": gpu_operations.gradient_rows(rank), "COLUMNS": gpu_operations.GRADIENT_COLUMNS}
        gradient |= adapter_kernels.gradient_options(gradient["ROWS"])
        yield adapter_kernels._add_gradients, gradient | {"DEPTH": gpu_operations.GRADIENT_DEPTH, "CAN_SET": True}
    yield adapter_kernels._expand_inputs, {"G": 3, "ROWS": 64, "COLUMNS": 128, "DEPTH": adapter_kernels.RANK_DEPTH}
    tile = {"ROWS": 64, "COLUMNS": gpu_operations.EXPAND_GATE_COLUMNS}
    for rank in (16, 32, 128):
        for rows in (16, 64):
            yield gate_kernels._expand_gate, tile | {"ROWS": rows, "RANK": rank}
    yield gate_kernels._expand_gate_backward, tile | {"DEPTH": adapter_kernels.RANK_DEPTH}
    for rank in (16, 128):
        for rows, depth, parts in ((16, expert_kernels.FEW_ROWS_DEPTH, 4), (64, expert_kernels.DEPTH, 1)):
            expanded = {"ROWS": min(rows, expert_kernels.EXPAND_ROWS), "COLUMNS": COLUMNS, "RANK": rank, "PARTS": parts}
            yield expert_kernels._expand_experts, expanded | {"y_column_stride": 1}
            yield expert_kernels._shrink_experts, {"ROWS": rows, "RANK": rank, "DEPTH": depth, "y_column_stride": 1}
        own = {"ROWS": min(64, rank), "COLUMNS": COLUMNS, "DEPTH": expert_kernels.GRADIENT_DEPTH, "dy_column_stride": 1}
        for has_weights in (False, True):
            yield expert_kernels._add_expert_gradients, own | {"HAS_WEIGHTS": has_weights}
    for has_norms in (False, True):
        yield page_kernels._rotate, HEADS | {"HALF": 64, "HAS_NORMS": has_norms}
    yield page_kernels._join, HEADS | {"WIDTH": 128}
    for head_dim, is_causal, has_window in product((64, 80, 128, 256), (False, True), (False, True)):
        sizes = attend_kernels._sizes(32, PAGE_TOKENS, 8, head_dim, is_causal=is_causal, has_window=has_window)
        sizes |= {"PART": PART_KEYS, "WIDENS": False}
        has_behinds = {"HAS_BEHINDS": True} if has_window and not is_causal else {"HAS_BEHINDS": False, "behinds": None}
        yield attend_kernels._attend_pages, sizes | has_behinds
    yield attend_kernels._join_parts, {"H": 32, "E": 128, "WIDTH": 128, "num_warps": 1}
    for num_heads, num_keys, head_dim in ((16, 8, 128), (32, 8, 64), (16, 8, 80), (8, 1, 256)):
        yield (
            attention_kernels._attention_gradients,
            attention_kernels._sizes(num_heads, num_keys, head_dim) | {"WIDENS": False},
        )
    for num_heads, num_keys, head_dim in ((32, 8, 128), (16, 8, 80), (8, 1, 256)):
        sizes = layer_kernels._sizes(num_heads, num_keys, head_dim)
        for has_norms in (False, True):
            yield layer_kernels._rotate_heads, sizes | {"HAS_NORMS": has_norms}
            yield layer_kernels._rotate_heads_backward, sizes | {"HAS_NORMS": has_norms}
    for kernel in (layer_kernels._gate, layer_kernels._gate_backward):
        yield kernel, {"F": 12288, "COLUMNS": layer_kernels.GATE_COLUMNS}
    tile = {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64, "GROUP": 8, "num_warps": 8, "num_stages": 3}
    for adds, of_ones in ((False, "right_depth_stride"), (True, "right_column_stride")):
        yield product_kernels._multiply, tile | {"HAS_BIAS": not adds, "ADDS": adds, "WIDENS": False, of_ones: 1}
    for width in (1024, 16384):
        num_warps = layer_kernels.norm_warps(width)
        for norm in (layer_kernels._add_norm, layer_kernels._norm_add_backward):
            yield norm, {"D": width, "WIDTH": width, "num_warps": num_warps}
    for rank in (0, 16, 32, 64, 128):
        block: dict[str, Any] = {"ROWS": 64, "RANK": max(16, rank), "HAS_ADAPTERS": rank > 0}
        if not rank:
            names = ("xa", "addresses", "tiles", "ranks", "scalings", "dxa", "summed", "arrivals")
            block |= dict.fromkeys(names)
        block |= {"PART": PART_COLUMNS, "COLUMNS": LOGITS_AT_ONCE, "TARGETS": TARGETS_AT_ONCE}
        for has_one_target in (False, True):
            block["HAS_ONE_TARGET"] = has_one_target
            yield loss_kernels._sum_logits, block | {"LEVELS": 5}
            yield loss_kernels._differentiate_logits, block | {"PARTS": 38}
    yield loss_kernels._score_targets, {"PARTS": 38, "ALL_PARTS": 64, "TARGETS": TARGETS_AT_ONCE, "num_warps": 1}
    yield loss_kernels._add_losses, {"VALUES": loss_kernels.VALUES}
    of_steps = {"MULTIPLE": PART_MULTIPLE, "PARTS": PARTS_MAX, "BOUND": BOUND_MAX, "num_warps": adamw_kernels.NUM_WARPS}
    yield adamw_kernels._squares, of_steps | {"BLOCK": adamw_kernels.SQUARES_BLOCK}
    yield adamw_kernels._update, of_steps | {"BLOCK": adamw_kernels.UPDATE_BLOCK}
    for kernel, heads, is_unit in product(
        (delta_head_kernels._convolve, delta_head_kernels._convolve_backward),
        (torch.empty(0, 16, 64, 128), torch.empty(0, 2, 64, 256), torch.empty(0, 2, 16, 16)),
        (False, True),
    ):
        yield kernel, delta_head_kernels._sizes(heads, is_unit=is_unit)
    for of_heads in ((16, 2, 128, 128, 3), (2, 2, 16, 16, 3)):
        yield delta_kernels._step_slots, delta_kernels._sizes(*of_heads)


def is_number(name: str) -> bool:
    """Return whether an argument is no tensor."""
    return name in NUMBERS or "stride" in name or name.startswith(("d_", "depth", "vocab")) or name in FRACTIONS


def type_of(name: str) -> str:
    """Return the type of an argument by its name."""
    if is_number(name):
        return "fp32" if name in FRACTIONS else "i32"
    names = {"fp32": FP32, "fp64": FP64, "i64": INT64, "i32": INT32}
    return "*" + next((kind for kind, of_kind in names.items() if name in of_kind), "bf16")


def resources(kernel: Any, constants: dict[str, Any]) -> dict[str, int]:
    """Compile a kernel; return its bytes of spilled registers and of shared memory."""
    options = {name: value for name, value in constants.items() if name not in kernel.arg_names}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {name: "constexpr" if name in constants else type_of(name) for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name not in constants and name not in NUMBERS | FRACTIONS
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=H100, options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    assert found is not None, report
    return {"spilled": int(found[1]) + int(found[2]), "shared": int(made.metadata.shared)}


if __name__ == "__main__":
    print(json.dumps([[kernel.__name__, resources(kernel, constants)] for kernel, constants in kernels()]))
