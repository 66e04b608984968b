"""How an adapter lies in one row of a bank: which part of the flat vector is which A and B.

Knows shapes only. A row is padded: ranks 1 to 8 lie in rows of rank 8, and so on, with zeros that stay zero, because an
adapter's numbers may depend on its own rank but on nobody else's.

Main invariant: the layout depends on the base model, the rank class and the trained kinds of modules alone, and every
matrix begins at a multiple of `ALIGNMENT` values, so that matmuls see the same alignment in every slot.

Dimensions: P values of a row, R padded rank, r rank, D inputs, F outputs, G linears in a group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.contract.messages import AdapterSpec
from workers.model.lora import GroupShape, GroupViews, Kind

RANK_CLASSES = (8, 16, 32, 64, 128)
ALIGNMENT = 64
"""In values: 256 bytes, a whole number of cache lines and of vector registers."""


def rank_class(rank: int) -> int:
    """The padded rank of a rank. Raises ValueError outside 1 to 128."""
    for padded in RANK_CLASSES:
        if 1 <= rank <= padded:
            return padded
    raise ValueError(f"rank is {rank}; it must be between 1 and {RANK_CLASSES[-1]}")


def trained_kinds(spec: AdapterSpec) -> tuple[Kind, ...]:
    """The kinds of modules that an adapter adapts. Raises ValueError if there are none."""
    flags: tuple[tuple[Kind, bool], ...] = (
        ("attn", spec.train_attn),
        ("mlp", spec.train_mlp),
        ("unembed", spec.train_unembed),
    )
    kinds = tuple(kind for kind, is_trained in flags if is_trained)
    if not kinds:
        raise ValueError("at least one of train_attn, train_mlp and train_unembed must be true")
    return kinds


@dataclass(frozen=True, slots=True)
class Part:
    """One matrix in the flat row."""

    offset: int
    num_rows: int
    num_columns: int

    def view(self, flat: Tensor) -> Tensor:
        """(..., P) -> (..., num_rows, num_columns), sharing memory."""
        part = flat[..., self.offset : self.offset + self.num_rows * self.num_columns]
        return part.view(*flat.shape[:-1], self.num_rows, self.num_columns)


@dataclass(frozen=True, slots=True)
class GroupParts:
    """Where a group lies: its As (R, D) one below the other, then each B^T (R, F)."""

    shape: GroupShape
    A: Part
    Bs: tuple[Part, ...]


class RowLayout:
    """The layout of one bank's rows."""

    def __init__(self, shapes: Sequence[GroupShape], padded_rank: int, kinds: tuple[Kind, ...]) -> None:
        self.padded_rank = padded_rank
        self.kinds = kinds
        self.parts: list[GroupParts | None] = []
        end = 0

        def take(num_rows: int, num_columns: int) -> Part:
            nonlocal end
            part = Part(end, num_rows, num_columns)
            end = -(-(end + num_rows * num_columns) // ALIGNMENT) * ALIGNMENT
            return part

        for shape in shapes:
            if shape.kind in kinds:
                A = take(len(shape.names) * padded_rank, shape.d_in)
                self.parts.append(GroupParts(shape, A, tuple(take(padded_rank, d_out) for d_out in shape.d_outs)))
            else:
                self.parts.append(None)
        self.num_values = end
        """P."""

    def views(self, weights: Tensor, grad: Tensor | None) -> tuple[GroupViews | None, ...]:
        """Views of rows' weights and gradients (S, P), per group of the base model."""
        return tuple(None if parts is None else self._views(parts, weights, grad) for parts in self.parts)

    def _views(self, parts: GroupParts, weights: Tensor, grad: Tensor | None) -> GroupViews:
        return GroupViews(
            A=parts.A.view(weights),
            Bs=tuple(part.view(weights) for part in parts.Bs),
            A_grad=None if grad is None else parts.A.view(grad),
            B_grads=() if grad is None else tuple(part.view(grad) for part in parts.Bs),
        )

    def matrices(self, flat: Tensor, rank: int) -> Iterator[tuple[str, Tensor]]:
        """Name and unpadded view of every A (r, D) and B (F, r) in (P,), as `<module>.lora_A.weight` and so on."""
        for parts in self.parts:
            if parts is None:
                continue
            As = parts.A.view(flat).split(self.padded_rank)
            for name, A, B in zip(parts.shape.names, As, parts.Bs, strict=True):
                yield f"{name}.lora_A.weight", A[:rank]
                yield f"{name}.lora_B.weight", B.view(flat)[:rank].t()

    def initial_weights(self, spec: AdapterSpec) -> Tensor:
        """A fresh adapter (P,), fp32 on the CPU: A uniform in +-1/sqrt(D) from the seed and the module's name, B zero.

        Depends on neither slot nor process nor padding; drawn from Philox, whose stream is fixed by its definition.
        """
        flat = torch.zeros(self.num_values)
        for name, matrix in self.matrices(flat, spec.rank):
            if name.endswith(".lora_A.weight"):
                matrix.copy_(_uniform(spec.seed, name, matrix.shape[0], matrix.shape[1]))
        return flat


def _uniform(seed: int, name: str, rank: int, d_in: int) -> Tensor:
    """(r, D) fp32, uniform in +-1/sqrt(D): the top 24 bits of each 64 of Philox, keyed by seed and name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(rank * d_in)
    unit = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)  # in [-1, 1)
    return torch.from_numpy((unit * np.float32(d_in**-0.5)).reshape(rank, d_in))
