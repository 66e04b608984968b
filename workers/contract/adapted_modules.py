"""The modules of a base model that adapters adapt, and what A of a new one begins with.

Numpy only: the worker makes fresh adapters by these rules, and the coordinator completes imported ones by the same.

Main invariant: the first values of A depend on seed, module name, rank and inputs, and on nothing else.

Dimensions: r rank, D inputs, F outputs, E experts of a layer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

ModuleKind = Literal["attn", "mlp", "unembed"]
RANK_CLASSES = (8, 16, 32, 64, 128)
"""Ranks as a worker pads them: a row has the values of one of these."""
COPY_PARAM_BYTES = 16
"""Bytes of an adapter's copy for each parameter: weights, two moments and a gradient in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRows:
    """Rows of a linear in which transformers joins several modules: `width` of every `period`, from `begin` on.

    Or of the matrix of each expert in a parameter that has them all.
    """

    linear: str
    """The last part of the linear's name, `in_proj_qkv`, or of the parameter's, `gate_up_proj`."""
    begin: int
    width: int
    period: int
    is_of_experts: bool = False

    def runs(self, num_rows: int) -> tuple[range, ...]:
        """Return the rows, consecutive ones together, of a module that has so many."""
        starts = range(self.begin, num_rows // self.width * self.period, self.period)
        return tuple(range(start, start + self.width) for start in starts)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedModule:
    """A linear module (F, D) of a base model that adapters can adapt, or the same linear of all experts of a layer.

    The experts share the factor on the side of the hidden states, which is one matrix; of the other each has its own.
    """

    name: str
    """Full name: `model.layers.0.self_attn.q_proj`; as `named_modules` gives it, unless the module is `joined`."""
    kind: ModuleKind
    """Which of `train_attn`, `train_mlp` and `train_unembed` adapts it."""
    d_in: int
    d_out: int
    joined: JoinedRows | None = None
    """Where it is in transformers' model, if that has no module of this name."""
    num_As: int = 1  # noqa: N815 - A is the matrix
    num_Bs: int = 1  # noqa: N815 - B is the matrix
    """E: the factor that each expert has; 1: the one that all share, or a linear's."""

    @property
    def is_of_experts(self) -> bool:
        """Whether it is a linear of all experts of a layer."""
        return self.num_As * self.num_Bs > 1

    @property
    def num_values(self) -> int:
        """Parameters of an adapter of rank 1."""
        return self.num_As * self.d_in + self.num_Bs * self.d_out

    def A_shape(self, rank: int) -> tuple[int, ...]:  # noqa: N802 - A is the matrix
        """Return the shape of A: (r, D), of experts (E or 1, r, D)."""
        return (self.num_As, rank, self.d_in) if self.is_of_experts else (rank, self.d_in)

    def B_shape(self, rank: int) -> tuple[int, ...]:  # noqa: N802 - B is the matrix
        """Return the shape of B: (F, r), of experts (E or 1, F, r)."""
        return (self.num_Bs, self.d_out, rank) if self.is_of_experts else (self.d_out, rank)

    @property
    def linear_name(self) -> str:
        """The full name of the linear of transformers' model that it is, or is in."""
        return f"{self.name.rpartition('.')[0]}.{self.joined.linear}" if self.joined else self.name

    @property
    def leaf_name(self) -> str:
        """The last part of its name, `q_proj`."""
        return self.name.rpartition(".")[2]

    @property
    def A_name(self) -> str:  # noqa: N802 - A is the matrix
        """The name of its A."""
        return f"{self.name}.lora_A.weight"

    @property
    def B_name(self) -> str:  # noqa: N802 - B is the matrix
        """The name of its B."""
        return f"{self.name}.lora_B.weight"


def leaf_names(modules: Iterable[AdaptedModule], *kinds: ModuleKind) -> tuple[str, ...]:
    """Return the last parts of the names of these kinds' modules, as PEFT's `target_modules` has them."""
    return tuple(dict.fromkeys(module.leaf_name for module in modules if module.kind in kinds))


def peft_name_of_experts(parameter: str) -> str:
    """Return what PEFT calls the layer of a parameter of experts: `gate_up_proj`'s is inside `down_proj`'s."""
    experts, _, leaf = parameter.rpartition(".")
    return f"{experts}.base_layer" if leaf == "gate_up_proj" else experts


def rank_class(rank: int) -> int:
    """Return the padded rank of a rank. Raises ValueError outside 1 to 128."""
    for padded in RANK_CLASSES:
        if 1 <= rank <= padded:
            return padded
    raise ValueError(f"rank is {rank}; it must be between 1 and {RANK_CLASSES[-1]}")


def adapter_params(modules: Iterable[AdaptedModule], *kinds: ModuleKind) -> int:
    """Return the parameters of an adapter of rank 1 on these kinds' modules; those of rank r are r times as many."""
    return sum(module.num_values for module in modules if module.kind in kinds)


def initial_A(seed: int, name: str, *shape: int) -> NDArray[np.float32]:  # noqa: N802 - A is the matrix
    """Return the first A (..., D) of a module, fp32, uniform in +-1/sqrt(D). `name` is the name of A.

    The top 24 bits of each 64 of Philox, whose stream is fixed by its definition, keyed by seed and name.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(math.prod(shape))
    unit = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)  # in [-1, 1)
    return (unit * np.float32(shape[-1] ** -0.5)).reshape(shape)
