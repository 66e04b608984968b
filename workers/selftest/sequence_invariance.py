"""Trial of linear attention: whether a sequence of a hybrid keeps its bits among any others.

The gated delta rule takes batched products, triangular solutions and elementwise kernels of the library for several
sequences at once (`model.delta_rule`). The trial runs the rule of a model's first such layer with random inputs, as
training and as sampling do, for several sequences together and for each of them solo: decode steps by the kernel of our
own (`sampling.delta_steps`), where there is one.

Main invariant: no result is assumed; see `row_invariance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workers.model.delta_rule import DeltaInputs, DeltaWeights, step
from workers.model.packed_delta import PackedDelta, Recur
from workers.sampling.delta_steps import can_step, step_slots

TRIAL_LENGTHS = (150, 70, 64, 17, 17, 5, 1)
"""Of the sequences: several chunks of the largest size, one, and chunks of each smaller size."""
NUM_SEQUENCES, STEP_SEQUENCES = 24, (1, 2, 3, 7, 16)
"""Sequences of the largest decode step, and of those that it is compared with. The large one has more values of each
kind than the vectors of a processor."""


def keeps_sequences(weights: DeltaWeights, dtype: torch.dtype) -> bool:
    """Return whether each sequence has the bits that it has solo, in passes with a backward and in decode steps."""
    shape, rows = weights.shape, random_rows(weights, dtype)
    generator = torch.Generator().manual_seed(shape.num_value_heads)
    device = weights.norm.device

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device, dtype)

    return packed_keeps(lambda lengths: PackedDelta(lengths, device), weights, rows) and _step_keeps(
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
