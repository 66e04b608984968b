"""One more token of many sequences by the gated delta rule, on a GPU: one kernel of our own for a layer.

By operations of torch a step is 80 kernels, and its states go through memory nine times. The kernel reads each state
once, from its slot, and writes it once, to the slot that it moves to; nothing else of it is in memory.

Does not depend on slots' owners, or on how many sequences there are at a time.

Dimensions: T rows of the pass, S sequences, N slots, W weights of a convolution, H key heads, G value heads for each
key head, E key head dimension, P value head dimension, K = H E, V = H G P.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model.delta_rule import DeltaInputs, DeltaShape, DeltaWeights
from workers.model.fused_runs import can_run
from workers.model.gpu_operations import define

STEP_SLOTS = (
    "step_slots(Tensor(a!) out, Tensor(b!) history, Tensor(c!) states, Tensor rows, Tensor reads, Tensor writes, "
    "Tensor query, Tensor key, Tensor value, Tensor gate, Tensor strength, Tensor decay, Tensor query_conv, "
    "Tensor key_conv, Tensor value_conv, Tensor decay_scale, Tensor dt_bias, Tensor norm, float eps)"
)
"""Compute `delta_rule.step` for the rows of sequences, and move each state from one slot to another.

Set `rows` (S,) of out (T, V), and the slots `writes` (S,) of history (N, W - 1, 2 K + V), the last inputs of the
convolutions, and of states (N, H, G, E, P), fp32, from the slots `reads` (S,), which are no slots of `writes`. Numbers
of rows and slots are int64. From `query` on see `DeltaInputs` (T, ...), from `query_conv` on `DeltaWeights`, whose
decay is `decay_scale` here.
"""
define("workers.sampling.delta_kernels", STEP_SLOTS)

HEAD_VALUES_MAX = 1 << 14
"""Of a head's state, with both sides filled up to powers of two: what the registers of a program hold."""


def can_step(device: torch.device, dtype: torch.dtype, shape: DeltaShape) -> bool:
    """Return whether the kernel takes the decode steps of a model in this dtype on this device."""
    keys, values = (1 << (side - 1).bit_length() for side in (shape.key_dim, shape.value_dim))
    return can_run(device, dtype) and keys * values <= HEAD_VALUES_MAX


def step_slots(
    out: Tensor,
    inputs: DeltaInputs,
    weights: DeltaWeights,
    memory: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor, Tensor],
) -> None:
    """See `STEP_SLOTS`: `memory` are a layer's history and states, `places` are rows, reads and writes."""
    of_heads = weights.decay, weights.dt_bias, weights.norm
    torch.ops.tinkerpool.step_slots(
        out, *memory, *places, *inputs.tensors(), *weights.conv, *of_heads, weights.norm_eps
    )
