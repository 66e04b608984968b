"""The gated delta rule of one more token on a GPU, in Triton. Imported by the first launch alone (`gpu_operations`).

The operation is described in `delta_steps`. A program has one value head of one sequence, and its whole state in
registers, because the norm behind the rule is of all values of a head. It computes its key head's query and key too:
they are few values beside the state. Everything is computed in fp32 and rounded once, at the end.

Main invariants: a program reads the slots and the row of one sequence, and the order of its sums depends on the sizes
of a head alone. So a sequence's bits do not depend on the others of a step, and what is not finite stays in it.

Dimensions as in `delta_steps`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.model.delta_rule import UNIT_EPS
from workers.model.gpu_operations import power_of_two

WARP_VALUES = 64 * 32
"""Of a state, those of a warp at most: 64 in each thread's registers."""


@triton.jit
def _convolved(
    source, target, own, weights, begin, place, is_place, is_written,
    HISTORY: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return SiLU of a convolution of some channels, and write what the next one reads where `is_written`.

    `begin` counts channels of the history before the first of `weights` (W, WIDTH), `place` those of `weights`.
    """
    newest = tl.load(own + place, mask=is_place, other=0.0)
    total = tl.zeros_like(newest).to(tl.float32)
    for number in tl.static_range(HISTORY):
        value = tl.load(source + number * C + begin + place, mask=is_place, other=0.0)
        total += value.to(tl.float32) * tl.load(weights + number * WIDTH + place, mask=is_place, other=0.0)
        if number > 0:
            tl.store(target + (number - 1) * C + begin + place, value, mask=is_written)
    total += newest.to(tl.float32) * tl.load(weights + HISTORY * WIDTH + place, mask=is_place, other=0.0)
    if HISTORY > 0:
        tl.store(target + (HISTORY - 1) * C + begin + place, newest, mask=is_written)
    return total / (1 + tl.exp(-total))


@triton.jit
def _step_slots(
    out, history, states, rows, reads, writes, query, key, value, gate, strength, decay,
    query_conv, key_conv, value_conv, decay_scale, dt_bias, norm, eps,
    out_stride, query_stride, key_stride, value_stride, gate_stride, strength_stride, decay_stride,
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, P: tl.constexpr, HISTORY: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute the next token of a value head, and move its state on. Grid: sequences, value heads."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    K: tl.constexpr = H * E
    V: tl.constexpr = H * G * P
    C: tl.constexpr = 2 * K + V
    row, read, write = tl.load(rows + sequence), tl.load(reads + sequence), tl.load(writes + sequence)
    key_place, value_place = tl.arange(0, KEYS), tl.arange(0, VALUES)
    is_key, is_value = key_place < E, value_place < P
    of_state = head * (E * P) + key_place[:, None] * P + value_place[None, :]
    is_state = is_key[:, None] & is_value[None, :]
    state = tl.load(states + read * (H * G * E * P) + of_state, mask=is_state, other=0.0)  # (E, P)

    source, target = history + read * (HISTORY * C), history + write * (HISTORY * C)
    channels, is_first = head // G * E + key_place, key_place < tl.where(head % G == 0, E, 0)
    q = _convolved(source, target, query + row * query_stride, query_conv, 0, channels, is_key, is_first, HISTORY, K, C)
    k = _convolved(source, target, key + row * key_stride, key_conv, K, channels, is_key, is_first, HISTORY, K, C)
    channels = head * P + value_place
    v = _convolved(
        source, target, value + row * value_stride, value_conv, 2 * K, channels, is_value, is_value, HISTORY, V, C
    )
    q *= 1 / tl.sqrt(tl.sum(q * q, 0) + UNIT) * E**-0.5
    k *= 1 / tl.sqrt(tl.sum(k * k, 0) + UNIT)

    beta = 1 / (1 + tl.exp(-tl.load(strength + row * strength_stride + head).to(tl.float32)))
    argument = tl.load(decay + row * decay_stride + head).to(tl.float32) + tl.load(dt_bias + head)
    softplus = tl.where(argument > 0, argument, 0.0) + tl.log(1 + tl.exp(-tl.abs(argument)))
    keep = tl.exp(-softplus * tl.load(decay_scale + head))

    delta = (v - tl.sum(state * k[:, None], 0) * keep) * beta
    result = tl.sum(state * q[:, None], 0) * keep + delta * tl.sum(q * k, 0)
    state = state * keep + k[:, None] * delta[None, :]
    tl.store(states + write * (H * G * E * P) + of_state, state, mask=is_state)

    result *= 1 / tl.sqrt(tl.sum(result * result, 0) / P + eps)
    opening = tl.load(gate + row * gate_stride + channels, mask=is_value, other=0.0).to(tl.float32)
    result *= tl.load(norm + value_place, mask=is_value, other=0.0) * opening / (1 + tl.exp(-opening))
    tl.store(out + row * out_stride + channels, result.to(out.dtype.element_ty), mask=is_value)


def step_slots(
    out: Tensor,
    history: Tensor,
    states: Tensor,
    rows: Tensor,
    reads: Tensor,
    writes: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    strength: Tensor,
    decay: Tensor,
    query_conv: Tensor,
    key_conv: Tensor,
    value_conv: Tensor,
    decay_scale: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
) -> None:
    """See `delta_steps.STEP_SLOTS`."""
    heads, per_key, key_dim, value_dim = states.shape[1:]
    inputs = query, key, value, gate, strength, decay
    _step_slots[len(rows), heads * per_key](
        out, history, states, rows, reads, writes, *inputs,
        query_conv, key_conv, value_conv, decay_scale, dt_bias, norm, eps,
        out.stride(0), *(rows.stride(0) for rows in inputs),
        **_sizes(heads, per_key, key_dim, value_dim, history.shape[1]),
    )  # fmt: skip


def _sizes(heads: int, per_key: int, key_dim: int, value_dim: int, history: int) -> dict[str, float]:
    """Return the constants of a launch, and its warps."""
    keys, values = power_of_two(key_dim), power_of_two(value_dim)
    heads_of = {"H": heads, "G": per_key, "E": key_dim, "P": value_dim, "HISTORY": history}
    constants = {"KEYS": keys, "VALUES": values, "UNIT": UNIT_EPS}
    return heads_of | constants | {"num_warps": max(1, keys * values // WARP_VALUES)}
