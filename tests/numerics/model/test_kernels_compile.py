"""The kernels of our own compile for an H100, which the interpreter does not show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = {"_shrink", "_expand", "_shrink_outputs", "_expand_inputs", "_add_gradients", "_rotate", "_join"}
KERNELS |= {"_expand_gate", "_expand_gate_backward", "_multiply_few"}
KERNELS |= {"_rotate_heads", "_rotate_heads_backward", "_gate", "_gate_backward", "_add_norm", "_norm_add_backward"}
KERNELS |= {"_expand_experts", "_shrink_experts", "_add_expert_gradients"}
KERNELS |= {"_squares", "_update", "_multiply", "_add_losses"}
KERNELS |= {"_sum_logits", "_score_targets", "_differentiate_logits"}
KERNELS |= {"_step_slots", "_convolve", "_convolve_backward", "_attend_pages", "_join_parts", "_attention_gradients"}
SHARED_BYTES, PRODUCT_BYTES, ALONE_BYTES = 75 << 10, 96 << 10, 168 << 10
PRODUCTS = {"_multiply", "_attend_pages", "_attention_gradients"}
ALONE = {"_multiply_few"}
"""So three blocks share a processor, which has 228 KiB; of products with frozen weights, and of wide heads, two; of
products of few rows it has one."""


@pytest.mark.slow
def test_kernels_compile_and_spill_no_registers(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton brings the compiler; it is not installed here")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.numerics.compiled"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[0])
    assert {name for name, _ in found} == KERNELS
    for name, resources in found:
        assert resources["spilled"] == 0, name
        most = PRODUCT_BYTES if name in PRODUCTS else ALONE_BYTES if name in ALONE else SHARED_BYTES
        assert resources["shared"] <= most, name
