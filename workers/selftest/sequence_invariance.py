"""Trials of attention: whether a sequence keeps its bits among any others.

In exact mode on a GPU, requests share calls of the library's attention (`model.gpu_attention`). The trial compares them
with each request solo, forward and backward.

Linear attention of a hybrid: the gated delta rule takes batched products, triangular solutions and elementwise kernels
of the library for several sequences at once (`model.delta_rule`). The trial runs the rule of a model's first such layer
with random inputs, as training and as sampling do, for several sequences together and for each of them solo: decode
steps by the kernel of our own (`sampling.delta_steps`), where there is one.

Main invariant: no result is assumed; see `row_invariance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from workers.model.attention import AttendPacked
from workers.model.base_model import BaseModel
from workers.model.delta_rule import DeltaInputs, DeltaWeights, step
from workers.model.fixed_order import fixed_order
from workers.model.gpu_attention import SHARED_MAX
from workers.model.packed_delta import ALONE, PackedDelta, Recur
from workers.sampling.delta_steps import can_step, step_slots

TRIAL_LENGTHS = (150, 70, 64, 17, 17, 5, 1)
"""Of the sequences: several chunks of the largest size, one, and chunks of each smaller size."""
NUM_SEQUENCES, STEP_SEQUENCES = 24, (1, 2, 3, 7, 16)
"""Sequences of the largest decode step, and of those that it is compared with. The large one has more values of each
kind than the vectors of a processor."""
REQUESTS = ((300, 129), (20,), (SHARED_MAX,), (1, 1, 1), (64, 20))
"""Lengths of the sequences of requests that share calls: several blocks of keys, one, and none beside their own."""


def requests_can_share(model: BaseModel) -> bool:
    """Return whether every request's attention in exact mode, and its gradients, have the bits that they have solo."""
    generator = torch.Generator().manual_seed(model.head_dim)
    lengths = [*chain(*REQUESTS)]
    heads = model.num_heads, model.num_key_value_heads, model.num_key_value_heads, model.num_heads
    rows = [
        torch.randn(sum(lengths), number, model.head_dim, generator=generator).to(model.device, model.dtype)
        for number in heads
    ]
    with fixed_order():
        together = attention_results(model.attend_packed, lengths, [*map(len, REQUESTS)], rows)
    start = 0
    for request in REQUESTS:
        own = slice(start, start + sum(request))
        with fixed_order():
            solo = attention_results(model.attend_packed, request, [len(request)], [tensor[own] for tensor in rows])
        if not all(torch.equal(whole[own], part) for whole, part in zip(together, solo, strict=True)):
            return False
        start = own.stop
    return True


def attention_results(
    attend_packed: AttendPacked,
    lengths: Sequence[int],
    counts: Sequence[int],
    rows: Sequence[Tensor],
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """Return the output of sequences, and the gradients of queries, keys and values, each (T, heads, E).

    `rows`: queries, keys, values, and the gradient of the output.
    """
    with torch.enable_grad():
        *inputs, dout = (tensor.transpose(0, 1).unsqueeze(0) for tensor in rows)  # (1, heads, T, E)
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        attend = attend_packed(lengths, counts)
        out = attend(0, *leaves, scaling=rows[0].shape[-1] ** -0.5, sliding_window=window, sinks=sinks)
        gradients = torch.autograd.grad(out, leaves, dout.transpose(1, 2))
    return [out.detach()[0], *(gradient[0].transpose(0, 1) for gradient in gradients)]


def keeps_sequences(weights: DeltaWeights, dtype: torch.dtype, *, are_alone: bool = False) -> bool:
    """Return whether each sequence has the bits that it has solo, in passes with a backward and in decode steps.

    `are_alone`: if passes compute one sequence at a time.
    """
    shape, rows = weights.shape, random_rows(weights, dtype)
    generator = torch.Generator().manual_seed(shape.num_value_heads)
    device = weights.norm.device

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device, dtype)

    values_max = ALONE if are_alone else None
    return packed_keeps(lambda lengths: PackedDelta(lengths, device, values_max), weights, rows) and _step_keeps(
        weights,
        [draw(NUM_SEQUENCES, *part.shape[1:]) for part in rows],
        [draw(NUM_SEQUENCES, shape.history, width) for width in shape.conv_widths],
        draw(NUM_SEQUENCES, shape.num_key_heads, shape.heads_per_key, shape.key_dim, shape.value_dim).float(),
    )


def random_rows(weights: DeltaWeights, dtype: torch.dtype) -> list[Tensor]:
    """Return inputs of sequences of `TRIAL_LENGTHS`, the same in every process, on the weights' device."""
    shape = weights.shape
    generator = torch.Generator().manual_seed(shape.key_dim)
    widths = (*shape.conv_widths, shape.conv_widths[2], shape.num_value_heads, shape.num_value_heads)
    rows = [torch.randn(sum(TRIAL_LENGTHS), width, generator=generator) for width in widths]
    return [part.to(weights.norm.device, dtype) for part in rows]


def packed_results(recur: Recur, weights: DeltaWeights, rows: Sequence[Tensor]) -> list[Tensor]:
    """Return results and the gradients of their sum of squares by each input."""
    with torch.enable_grad():
        leaves = [tensor.detach().clone().requires_grad_() for tensor in rows]
        out = recur(0, weights, DeltaInputs.of(leaves))
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]


def packed_keeps(make: Callable[[Sequence[int]], Recur], weights: DeltaWeights, rows: Sequence[Tensor]) -> bool:
    """Return whether sequences of `TRIAL_LENGTHS` have the bits of each solo; `make` takes lengths."""
    together = [part.split(TRIAL_LENGTHS) for part in packed_results(make(TRIAL_LENGTHS), weights, rows)]
    inputs = [tensor.split(TRIAL_LENGTHS) for tensor in rows]
    for number, length in enumerate(TRIAL_LENGTHS):
        solo = packed_results(make([length]), weights, [parts[number] for parts in inputs])
        if not all(torch.equal(parts[number], own) for parts, own in zip(together, solo, strict=True)):
            return False
    return True


def _step_keeps(weights: DeltaWeights, rows: Sequence[Tensor], before: Sequence[Tensor], states: Tensor) -> bool:
    def compute(sequences: slice) -> tuple[Tensor, Tensor]:
        state = states[sequences].clone()
        inputs = DeltaInputs.of([tensor[sequences] for tensor in rows])
        history = [tensor[sequences] for tensor in before]
        if can_step(state.device, inputs.gate.dtype, weights.shape):
            return _moved(inputs, weights, torch.cat(history, -1), state)
        return step(inputs, weights, history, state), state

    together = compute(slice(None))
    for count in STEP_SEQUENCES:
        for start in (0, len(states) - count):
            part = slice(start, start + count)
            if not all(torch.equal(own, whole[part]) for own, whole in zip(compute(part), together, strict=True)):
                return False
    return True


def _moved(inputs: DeltaInputs, weights: DeltaWeights, history: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of a step by the kernel, and the states after it, in slots behind those before."""
    out, memory = torch.empty_like(inputs.gate), (history.repeat(2, 1, 1), states.repeat(2, 1, 1, 1, 1))
    reads, writes = torch.arange(2 * len(out), device=out.device).chunk(2)
    step_slots(out, inputs, weights, memory, (reads, reads, writes))
    return out, memory[1][len(out) :]
