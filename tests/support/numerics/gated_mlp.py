"""A gate and the adapters around it, by one kernel after another and by two kernels that join them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.numerics.random_adapters import FEATURES, HIDDEN, MLP_SHAPES, NUM_ROWS
from workers.model.fused_runs import AdapterTables, TrainingRun
from workers.model.segments import Segment

GATED, DOWN = 0, 1
"""Groups of `MLP_SHAPES`."""


@dataclass(frozen=True)
class Operands:
    """What frozen products give, and the gradient of the layer's output."""

    x: Tensor
    """(T, D), of gate and up."""
    gate_up: Tensor
    """(T, 2 F)."""
    dy: Tensor
    """(T, D)."""
    dout: Tensor
    """(T, F): before adapters."""

    @classmethod
    def of(cls, dtype: torch.dtype, device: str = "cpu") -> Operands:
        """Draw them; rows of the last two have gaps."""
        generator = torch.Generator().manual_seed(0)
        widths = HIDDEN, 2 * FEATURES, HIDDEN, FEATURES
        x, gate_up, dy, dout = (
            torch.randn(NUM_ROWS, width + 8, generator=generator).to(device, dtype) for width in widths
        )
        return cls(x[:, :HIDDEN].clone(), gate_up[:, : 2 * FEATURES].clone(), dy[:, :HIDDEN], dout[:, :FEATURES])


def one_after_another(segments: Sequence[Segment], given: Operands) -> list[Tensor]:
    """Return gate and up, what the gate gives, and their gradients (T, ...)."""
    run = TrainingRun.of(segments)
    gate_up, out, dout = given.gate_up.clone(), torch.zeros_like(given.dout), given.dout.clone()
    run.forward(GATED, given.x, gate_up.split(FEATURES, 1))
    torch.ops.tinkerpool.gate(out, gate_up)
    kept = run.forward(DOWN, out, [torch.zeros_like(given.x)])
    assert kept is not None
    run.backward(DOWN, kept, out, [given.dy], dout)
    dgate_up = torch.zeros_like(gate_up)
    torch.ops.tinkerpool.gate_backward(dgate_up, dout, gate_up)
    return [gate_up, out, dgate_up]


def joined(segments: Sequence[Segment], given: Operands, before: float = 0.0, num_rows: int = 0) -> list[Tensor]:
    """Return the same by two kernels; results hold a number before. `num_rows`: see `AdapterTables.of`."""
    run = TrainingRun.of(segments)
    tables = AdapterTables.of(segments, len(MLP_SHAPES), TrainingRun.tile_rows, num_rows)
    run.tables = tables.on(given.x.device)
    gate_up, dout = given.gate_up.clone(), given.dout.clone()
    out = torch.full_like(dout, before)
    run.forward_gate(GATED, given.x, gate_up, out)
    kept = run.forward(DOWN, out, [torch.zeros_like(given.x)])
    assert kept is not None
    dgate_up = torch.full_like(gate_up, before)
    run.backward_gate(DOWN, kept, out, given.dy, given.dout, gate_up, dgate_up)
    assert torch.equal(dout, given.dout), "the gradient before the gate is not written"
    return [gate_up, out, dgate_up]


def gradients(segments: Sequence[Segment]) -> list[Tensor]:
    """Return those of all adapters' linear behind the gate."""
    views = [segment.adapter.groups[DOWN] for segment in segments]
    grads = [[view.A_grad, *view.B_grads] for view in views if view is not None]
    return [grad for own in grads for grad in own if grad is not None]
