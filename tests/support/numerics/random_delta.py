"""Linear attention with random values, by kernels of our own and by operations of torch: a decode step, and heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workers.model.delta_heads import HISTORY, convolved_by_kernels
from workers.model.delta_rule import Convolve, DeltaInputs, DeltaShape, DeltaWeights, convolved_heads, step
from workers.sampling.delta_steps import step_slots

NUM_SLOTS = 9
ROWS, READS, WRITES = (0, 3, 1, 4), (5, 2, 5, 8), (0, 7, 3, 1)
"""Of four sequences in a step of six rows; two go on from one slot."""


@dataclass(frozen=True)
class RandomDelta:
    """The slots of a layer, its weights, the inputs of a step, and the rows that the kernel takes."""

    weights: DeltaWeights
    inputs: DeltaInputs
    """(6, ...) each."""
    history: Tensor
    """(N, W - 1, 2 K + V)"""
    states: Tensor
    """(N, H, G, E, P), fp32."""
    rows: Sequence[int] = ROWS
    reads: Sequence[int] = READS
    writes: Sequence[int] = WRITES

    @classmethod
    def of(cls, shape: DeltaShape, dtype: torch.dtype, device: str = "cpu") -> RandomDelta:
        """Draw values that are the same in every dtype: those of bf16."""
        generator = torch.Generator().manual_seed(1)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator).bfloat16().to(device, dtype)

        heads = shape.num_value_heads
        widths = (*shape.conv_widths, shape.conv_widths[2], heads, heads)
        inputs = DeltaInputs.of([draw(6, width) for width in widths])
        weights = DeltaWeights(
            shape=shape,
            conv=[draw(shape.history + 1, width).float() for width in shape.conv_widths],
            decay=draw(heads).float().exp(),
            dt_bias=draw(heads).float(),
            norm=draw(shape.value_dim).float(),
            norm_eps=1e-6,
        )
        history = draw(NUM_SLOTS, shape.history, sum(shape.conv_widths))
        sizes = shape.num_key_heads, shape.heads_per_key, shape.key_dim, shape.value_dim
        return cls(weights, inputs, history, draw(NUM_SLOTS, *sizes).float())

    def only(self, sequences: Sequence[int]) -> RandomDelta:
        """Return the step of some of the sequences."""
        rows, reads, writes = ([of[number] for number in sequences] for of in (self.rows, self.reads, self.writes))
        return replace(self, rows=rows, reads=reads, writes=writes)

    def by_kernel(self) -> list[Tensor]:
        """Return the results (6, V) and all slots after the step; rows of no sequence have zeros."""
        out = torch.zeros_like(self.inputs.gate)
        memory = self.history.clone(), self.states.clone()
        places = [torch.tensor(part, device=out.device) for part in (self.rows, self.reads, self.writes)]
        step_slots(out, self.inputs, self.weights, memory, (places[0], places[1], places[2]))
        return [out, *memory]

    def by_operations(self) -> list[Tensor]:
        """Return the same in fp32, not rounded; of the history, what is moved."""
        out = torch.zeros_like(self.inputs.gate, dtype=torch.float32)
        rows, reads, writes = (list(part) for part in (self.rows, self.reads, self.writes))
        own = DeltaInputs.of([tensor[rows].float() for tensor in self.inputs.tensors()])
        before, moved = self.history[reads].float(), self.states[reads]
        history, states = self.history.float(), self.states.clone()
        out[rows] = step(own, self.weights, before.split(self.weights.shape.conv_widths, -1), moved)
        states[writes] = moved
        history[writes] = torch.cat([before, torch.cat(list(own.qkv), -1).unsqueeze(1)], 1)[:, 1:]
        return [out, history, states]


@dataclass(frozen=True)
class RandomChunks:
    """The rows of chunks, the weights of their convolution, and a gradient of their heads."""

    rows: Tensor
    """(N, C + W - 1, K)"""
    weights: Tensor
    """(W, K), fp32."""
    gradient: Tensor
    """(N, H, C, E), fp32."""
    length: float | None

    @classmethod
    def of(
        cls,
        sizes: tuple[int, int],
        heads: tuple[int, int],
        dtype: torch.dtype,
        length: float | None = None,
        device: str = "cpu",
    ) -> RandomChunks:
        """Draw N chunks of C tokens, and H heads of E values, the same in every dtype: those of bf16."""
        (num_chunks, num_tokens), (num_heads, head_dim) = sizes, heads
        generator = torch.Generator().manual_seed(head_dim)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16().float().to(device)

        rows = draw(num_chunks, HISTORY + num_tokens, num_heads * head_dim).to(dtype)
        weights = draw(HISTORY + 1, num_heads * head_dim)
        return cls(rows, weights, draw(num_chunks, num_heads, num_tokens, head_dim), length)

    def only(self, chunks: slice) -> RandomChunks:
        """Return some of the chunks, in memory of their own."""
        return replace(self, rows=self.rows[chunks].clone(), gradient=self.gradient[chunks].clone())

    def by_kernels(self) -> list[Tensor]:
        """Return the heads, and the gradient of the rows."""
        return self._by(convolved_by_kernels, self.rows)

    def by_operations(self) -> list[Tensor]:
        """Return the same in fp32, not rounded."""
        return self._by(convolved_heads, self.rows.float())

    def _by(self, convolve: Convolve, rows: Tensor) -> list[Tensor]:
        rows = rows.detach().requires_grad_()
        out = convolve(rows, self.weights, self.gradient.shape[1], self.length)
        return [out.detach(), *torch.autograd.grad(out, rows, self.gradient)]
