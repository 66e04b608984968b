"""A kernel of variable-length attention that runs on any device."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from workers.model.gpu_attention import Sequences


class SlowKernel:
    """Implements `gpu_attention.Kernel`: softmax of all scores, one sequence and one query head at a time."""

    def __init__(self) -> None:
        self.ends: list[list[int]] = []
        """Of each call."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        self.ends.append(sequences.ends.tolist())
        return _slow_attention(query, key, value, sequences), (sequences.ends,)

    def backward(
        self,
        dout: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        saved: tuple[Tensor, ...],
        sequences: Sequences,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert saved[0] is sequences.ends
        assert dout.is_contiguous()
        with torch.enable_grad():
            own = [tensor.detach().requires_grad_() for tensor in inputs]
            again = _slow_attention(own[0], own[1], own[2], sequences)
            assert torch.equal(again, out)
            query, key, value = torch.autograd.grad(again, own, dout)
        return query, key, value

    def buffer_bytes(self, num_tokens: int, num_sequences: int, num_heads: int, head_dim: int) -> int:
        return 0


def _slow_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    ends = sequences.ends.tolist()
    assert sequences.longest == max(stop - start for start, stop in itertools.pairwise(ends))
    outputs = []
    for start, stop in itertools.pairwise(ends):
        heads = []
        positions = torch.arange(stop - start)
        distance = positions.unsqueeze(1) - positions
        is_seen = (distance >= 0) & (distance < (sequences.window or len(positions)))
        for head in range(query.shape[1]):
            shared = head // (query.shape[1] // key.shape[1])
            scores = query[start:stop, head] @ key[start:stop, shared].t() * sequences.scaling
            scores = scores.masked_fill(~is_seen, float("-inf"))
            if sequences.sinks is not None:
                scores = torch.cat([scores, sequences.sinks[head].expand(len(scores), 1)], 1)
            heads.append(scores.softmax(-1)[:, : stop - start] @ value[start:stop, shared])
        outputs.append(torch.stack(heads, 1))
    return torch.cat(outputs)
