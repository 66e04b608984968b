"""The layout of an adapter in one row of a bank, and the views of it that the model's layers use.

Depends on shapes only. A row is padded: ranks 1 to 8 have rows of rank 8, and so on, with zeros that stay zero, so that
an adapter's numbers depend on its own rank and on no other adapter's.

Main invariant: the layout depends on the base model, the rank class and the trained kinds of modules alone, and every
matrix begins at a multiple of `ALIGNMENT` values, so that matmuls have the same alignment in every slot.

Dimensions: P values of a row, R padded rank, r rank, D inputs, F outputs, G linears in a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.contract.adapted_modules import AdaptedModule, ModuleKind, initial_A
from workers.contract.messages import AdapterSpec

GroupKind = ModuleKind | Literal["frozen"]
"""Which setting of an adapter adapts a group; or none does."""
ALIGNMENT = 64
"""In values: 256 bytes, a whole number of cache lines and of vector registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """Linear modules that read the same input (query, key and value; gate and up; the others alone).

    Of a layer's experts it has the same linears of all, as `AdaptedModule` has them.
    """

    index: int
    """Index among the base model's groups."""
    kind: GroupKind
    names: tuple[str, ...]
    """Full module names, as `named_modules` gives them."""
    d_in: int
    d_outs: tuple[int, ...]
    num_As: int = 1  # noqa: N815 - A is the matrix
    num_Bs: int = 1  # noqa: N815 - B is the matrix

    @property
    def modules(self) -> tuple[AdaptedModule, ...]:
        """The modules of a group that adapters can adapt."""
        assert self.kind != "frozen"
        return tuple(
            AdaptedModule(
                name=name, kind=self.kind, d_in=self.d_in, d_out=d_out, num_As=self.num_As, num_Bs=self.num_Bs
            )
            for name, d_out in zip(self.names, self.d_outs, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupViews:
    """Views of a group's A and B in a bank: of one row, or of all S rows of a slab, with S as the first dimension.

    Of experts, the factor that each has is (E * R, ...) where a linear's is (R, ...).
    """

    A: Tensor
    """(G * R, D): the A of all linears, stacked."""
    Bs: tuple[Tensor, ...]
    """B^T (R, F) of each linear: products with B in this layout are several times faster than with (F, R)."""
    A_grad: Tensor | None
    """Like A, added to by the backward; None in rows of sampler versions."""
    B_grads: tuple[Tensor, ...]

    def row(self, slot: int) -> GroupViews:
        """Return the views of one row of a slab."""
        return GroupViews(
            A=self.A[slot],
            Bs=tuple(B[slot] for B in self.Bs),
            A_grad=None if self.A_grad is None else self.A_grad[slot],
            B_grads=tuple(B_grad[slot] for B_grad in self.B_grads),
        )


@dataclass(eq=False)
class AdapterViews:
    """An adapter in its bank slot, as a `Segment` of a pass refers to it; the slot never moves in memory."""

    slab: Sequence[GroupViews | None]
    """Of each group of the base model, over all rows of the slab; None where the group is not adapted."""
    groups: Sequence[GroupViews | None]
    """The same of this row alone."""
    slot: int
    """Index of the row in its slab."""
    scaling: float = 0.0
    """alpha / rank of the adapter in the slot."""

    @property
    def device(self) -> torch.device:
        """The device of the slab."""
        return next(views.A.device for views in self.slab if views is not None)

    @cached_property
    def padded_rank(self) -> int:
        """R of the slab."""
        # A group of experts may have a B^T of each, joined.
        return min(views.Bs[0].shape[1] for views in self.slab if views is not None)

    @cached_property
    def addresses(self) -> NDArray[np.int64]:
        """Addresses (groups, 4) of A and of each B^T; 0: there is none. An array of this slot alone."""
        return self._addresses([None if views is None else (views.A, *views.Bs) for views in self.slab])

    @cached_property
    def gradient_addresses(self) -> NDArray[np.int64]:
        """The same of their gradients."""
        found: list[tuple[Tensor, ...] | None] = []
        for views in self.slab:
            assert views is None or views.A_grad is not None, "a row of a sampler version has no gradient"
            found.append(None if views is None or views.A_grad is None else (views.A_grad, *views.B_grads))
        return self._addresses(found)

    def _addresses(self, groups: Sequence[tuple[Tensor, ...] | None]) -> NDArray[np.int64]:
        """Return the addresses of matrices of this slot, from those of the slab."""
        found = np.zeros((len(groups), 4), np.int64)
        for addresses, matrices in zip(found, groups, strict=True):
            if matrices is not None:
                row_bytes = matrices[0].stride(0) * matrices[0].element_size()
                addresses[: len(matrices)] = [matrix.data_ptr() + self.slot * row_bytes for matrix in matrices]
        return found

    def occupy(self, spec: AdapterSpec) -> None:
        """Let the views stand for this adapter, which now lies in the slot."""
        self.scaling = spec.alpha / spec.rank

    def can_follow(self, last: AdapterViews) -> bool:
        """Return whether this adapter may come behind `last` in a batch."""
        return self.slab is last.slab and self.slot > last.slot and self.scaling == last.scaling


def trained_kinds(spec: AdapterSpec) -> tuple[ModuleKind, ...]:
    """Return the kinds of modules that an adapter adapts. Raises ValueError if there are none."""
    if not spec.kinds:
        raise ValueError("at least one of train_attn, train_mlp and train_unembed must be true")
    return spec.kinds


@dataclass(frozen=True, slots=True)
class Part:
    """The place of one matrix in the flat row."""

    offset: int
    num_rows: int
    num_columns: int

    def view(self, flat: Tensor) -> Tensor:
        """Return (..., P) as (..., num_rows, num_columns), sharing memory."""
        part = flat[..., self.offset : self.offset + self.num_rows * self.num_columns]
        return part.view(*flat.shape[:-1], self.num_rows, self.num_columns)

    def matrix(self, flat: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return (P,) as (num_rows, num_columns), sharing memory."""
        return flat[self.offset : self.offset + self.num_rows * self.num_columns].reshape(self.num_rows, -1)


@dataclass(frozen=True, slots=True)
class GroupParts:
    """The place of a group: its As (R, D), stacked, then each B^T (R, F)."""

    shape: GroupShape
    A: Part
    Bs: tuple[Part, ...]


class RowLayout:
    """The layout of one bank's rows."""

    def __init__(self, shapes: Sequence[GroupShape], padded_rank: int, kinds: tuple[ModuleKind, ...]) -> None:
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
                A = take(len(shape.names) * shape.num_As * padded_rank, shape.d_in)
                Bs = tuple(take(shape.num_Bs * padded_rank, d_out) for d_out in shape.d_outs)
                self.parts.append(GroupParts(shape, A, Bs))
            else:
                self.parts.append(None)
        self.num_values = end
        """P."""
        sizes = (part.num_rows * part.num_columns for group in self.parts if group for part in (group.A, *group.Bs))
        self.has_gaps = sum(sizes) < end
        """Whether there are values between matrices."""
        self._places: dict[int, list[tuple[str, tuple[int, ...], int, tuple[int, ...]]]] = {}
        """Rank to name, shape, first byte and strides of each matrix of an adapter."""

    def views(self, weights: Tensor, grad: Tensor | None) -> tuple[GroupViews | None, ...]:
        """Return the views of rows' weights and gradients (S, P), for each group of the base model."""
        return tuple(None if parts is None else self._views(parts, weights, grad) for parts in self.parts)

    def _views(self, parts: GroupParts, weights: Tensor, grad: Tensor | None) -> GroupViews:
        return GroupViews(
            A=parts.A.view(weights),
            Bs=tuple(part.view(weights) for part in parts.Bs),
            A_grad=None if grad is None else parts.A.view(grad),
            B_grads=() if grad is None else tuple(part.view(grad) for part in parts.Bs),
        )

    def matrices(self, flat: NDArray[np.float32], rank: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield `<module>.lora_A.weight` or `.lora_B.weight` and the unpadded view of every A (r, D) and B (F, r).

        Those of experts have one more dimension, as `AdaptedModule` has them.
        Of an array, whose places are known after the first call: an adapter has hundreds of small matrices.
        """
        if (places := self._places.get(rank)) is None:
            template = np.empty(self.num_values, np.float32)
            begin = template.ctypes.data
            found = ((name, matrix, matrix.ctypes.data - begin) for name, matrix in self._matrices(template, rank))
            places = [(name, matrix.shape, offset, matrix.strides) for name, matrix, offset in found]
            self._places[rank] = places
        for name, shape, offset, strides in places:
            yield name, np.ndarray(shape, np.float32, flat, offset, strides)

    def _matrices(self, flat: NDArray[np.float32], rank: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
        for parts in self.parts:
            if parts is None:
                continue
            modules = parts.shape.modules
            As = np.split(parts.A.matrix(flat), len(modules))
            for module, A, B in zip(modules, As, parts.Bs, strict=True):
                stacked = (
                    A.reshape(module.num_As, self.padded_rank, -1)[:, :rank],
                    B.matrix(flat).reshape(module.num_Bs, self.padded_rank, -1)[:, :rank].transpose(0, 2, 1),
                )
                for matrix_name, matrix in zip((module.A_name, module.B_name), stacked, strict=True):
                    yield matrix_name, matrix if module.is_of_experts else matrix[0]

    def initial_weights(self, spec: AdapterSpec) -> Tensor:
        """Return a fresh adapter (P,), fp32 on the CPU: A drawn by `initial_A`, B zero.

        Depends on neither slot nor process nor padding.
        """
        flat = np.zeros(self.num_values, dtype=np.float32)
        for name, matrix in self.matrices(flat, spec.rank):
            if name.endswith(".lora_A.weight"):
                matrix[...] = initial_A(spec.seed, name, *matrix.shape)
        return torch.from_numpy(flat)
