"""The modules of a base model that adapters adapt, and what A of a new one begins with.

Numpy only: the worker makes fresh adapters by these rules, and the coordinator completes imported ones by the same.

Main invariant: the first values of A depend on seed, module name, rank and inputs, and on nothing else.

Dimensions: r rank, D inputs, F outputs.
"""

from __future__ import annotations

import hashlib
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
    """Rows of a linear in which transformers joins several modules: `width` of every `period`, from `begin` on."""

    linear: str
    """The last part of the linear's name, `in_proj_qkv`."""
    begin: int
    width: int
    period: int

    def runs(self, num_rows: int) -> tuple[range, ...]:
        """Return the rows, consecutive ones together, of a module that has so many."""
        starts = range(self.begin, num_rows // self.width * self.period, self.period)
        return tuple(range(start, start + self.width) for start in starts)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedModule:
    """A linear module (F, D) of a base model that adapters can adapt."""

    name: str
    """Full name: `model.layers.0.self_attn.q_proj`; as `named_modules` gives it, unless the module is `joined`."""
    kind: ModuleKind
    """Which of `train_attn`, `train_mlp` and `train_unembed` adapts it."""
    d_in: int
    d_out: int
    joined: JoinedRows | None = None
    """Where it is in transformers' model, if that has no module of this name."""

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
        """The name of its A (r, D)."""
        return f"{self.name}.lora_A.weight"

    @property
    def B_name(self) -> str:  # noqa: N802 - B is the matrix
        """The name of its B (F, r)."""
        return f"{self.name}.lora_B.weight"


def leaf_names(modules: Iterable[AdaptedModule], *kinds: ModuleKind) -> tuple[str, ...]:
    """Return the last parts of the names of these kinds' modules, as PEFT's `target_modules` has them."""
    return tuple(dict.fromkeys(module.leaf_name for module in modules if module.kind in kinds))


def rank_class(rank: int) -> int:
    """Return the padded rank of a rank. Raises ValueError outside 1 to 128."""
    for padded in RANK_CLASSES:
        if 1 <= rank <= padded:
            return padded
    raise ValueError(f"rank is {rank}; it must be between 1 and {RANK_CLASSES[-1]}")


def adapter_params(modules: Iterable[AdaptedModule], *kinds: ModuleKind) -> int:
    """Return the parameters of an adapter of rank 1 on these kinds' modules; those of rank r are r times as many."""
    return sum(module.d_in + module.d_out for module in modules if module.kind in kinds)


def initial_A(seed: int, name: str, rank: int, d_in: int) -> NDArray[np.float32]:  # noqa: N802 - A is the matrix
    """Return the first A (r, D) of a module, fp32, uniform in +-1/sqrt(D). `name` is the name of A.

    The top 24 bits of each 64 of Philox, whose stream is fixed by its definition, keyed by seed and name.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(rank * d_in)
    unit = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)  # in [-1, 1)
    return (unit * np.float32(d_in**-0.5)).reshape(rank, d_in)
