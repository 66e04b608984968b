"""Trial of linear attention: whether a sequence of a hybrid keeps its bits among any others.

The gated delta rule takes batched products, triangular solutions and elementwise kernels of the library for several
sequences at once (`model.delta_rule`). The trial runs the rule of a model's first such layer with random inputs, as
training and as sampling do, for several sequences together and for each of them solo.

Main invariant: no result is assumed; see `row_invariance`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.model.delta_rule import DeltaInputs, DeltaWeights, step
from workers.model.packed_delta import PackedDelta

TRIAL_LENGTHS = (150, 70, 64, 17, 17, 5, 1)
"""Of the sequences: several chunks of the largest size, one, and chunks of each smaller size."""
NUM_SEQUENCES, STEP_SEQUENCES = 24, (1, 2, 3, 7, 16)
"""Sequences of the largest decode step, and of those that it is compared with. The large one has more values of each
kind than the vectors of a processor."""


def keeps_sequences(weights: DeltaWeights, dtype: torch.dtype) -> bool:
    """Return whether each sequence has the bits that it has solo, in passes with a backward and in decode steps."""
    shape = weights.shape
    generator = torch.Generator().manual_seed(shape.num_value_heads)
    device = weights.norm.device

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device, dtype)

    widths = (*shape.conv_widths, shape.conv_widths[2], shape.num_value_heads, shape.num_value_heads)
    rows = [draw(sum(TRIAL_LENGTHS), width) for width in widths]
    return _packed_keeps(weights, rows) and _step_keeps(
        weights,
        [draw(NUM_SEQUENCES, width) for width in widths],
        [draw(NUM_SEQUENCES, shape.history, width) for width in shape.conv_widths],
        draw(NUM_SEQUENCES, shape.num_key_heads, shape.heads_per_key, shape.key_dim, shape.value_dim).float(),
    )


def _packed_keeps(weights: DeltaWeights, rows: Sequence[Tensor]) -> bool:
    def compute(lengths: Sequence[int], own: Sequence[Tensor]) -> list[Tensor]:
        """Return results and the gradients of their sum of squares by each input."""
        with torch.enable_grad():
            leaves = [tensor.detach().clone().requires_grad_() for tensor in own]
            out = PackedDelta(lengths, own[0].device)(0, weights, DeltaInputs.of(leaves))
            return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    together = [part.split(TRIAL_LENGTHS) for part in compute(TRIAL_LENGTHS, rows)]
    inputs = [tensor.split(TRIAL_LENGTHS) for tensor in rows]
    for number, length in enumerate(TRIAL_LENGTHS):
        solo = compute([length], [parts[number] for parts in inputs])
        if not all(torch.equal(parts[number], own) for parts, own in zip(together, solo, strict=True)):
            return False
    return True


def _step_keeps(weights: DeltaWeights, rows: Sequence[Tensor], before: Sequence[Tensor], states: Tensor) -> bool:
    def compute(sequences: slice) -> tuple[Tensor, Tensor]:
        state = states[sequences].clone()
        inputs = DeltaInputs.of([tensor[sequences] for tensor in rows])
        return step(inputs, weights, [tensor[sequences] for tensor in before], state), state

    together = compute(slice(None))
    for count in STEP_SEQUENCES:
        for start in (0, len(states) - count):
            part = slice(start, start + count)
            if not all(torch.equal(own, whole[part]) for own, whole in zip(compute(part), together, strict=True)):
                return False
    return True
