"""Values of fields: names that exist in the pool, and values at the edges of their types."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

STRINGS = (
    "",
    " ",
    "a",
    "0",
    "-1",
    "null",
    "a:b:c",
    "s:train:0",
    "s:train:99999999999999999999",
    "tinker://",
    "tinker://s:train:0/weights/none",
    "tinker://s:train:0/../weights/none",
    "..",
    "../../secret",
    ".hidden",
    "%2e%2e%2f",
    "x" * 300,
    "x" * 5000,
    "\0",
    "a\0b",
    "a\nb\tc",
    "\u202egnp",
    "\u00e9" * 50,
    "\U0001f600",
    "'; DROP TABLE operations; --",
    "{}",
    "%s%n%x",
    "nan",
    "1e309",
    "cross_entropy",
    "ppo",
)
INTEGERS = (0, 1, 2, 3, -1, 7, 16, 100, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**53, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-3, 1e-300, 1e300, 3.4e38, 3.5e38, float("inf"), float("-inf"), float("nan"))
TOKENS_MAX = 60
"""Tokens above it mean failures on demand to a toy engine."""
ADAPTER_CONFIG = '{"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["q_proj"]}'
WEIGHTS_HEADER = (
    '{"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": {"dtype": "F16", "shape": [1, 1], '
    '"data_offsets": [0, 2]}, "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": {"dtype": "F16", '
    '"shape": [2, 1], "data_offsets": [2, 6]}}'
)
"""With it an adapter of the toy's model, of six bytes."""
KINDS = {
    "session_id": "session",
    "session": "session",
    "adapter_id": "adapter",
    "model_id": "adapter",
    "run": "adapter",
    "sampler_id": "sampler",
    "sampler": "sampler",
    "sampling_session_id": "sampler",
    "path": "path",
    "from_path": "path",
    "model_path": "path",
    "source_path": "path",
    "tinker_path": "path",
    "name": "operation",
    "names": "operation",
    "request_id": "operation",
    "base_model": "model",
    "model": "model",
    "key_id": "key",
    "tenant": "tenant",
    "loss_fn": "loss",
    "upload_id": "upload",
    "adapter_config": "config",
    "weights_header": "header",
}
"""Field or path parameter to the kind of its names."""


@dataclass(slots=True)
class Known:
    """Names by kind: those of the caller, and a neighbour's."""

    names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, *names: str) -> None:
        """Add names; the newest eight are kept."""
        kept = self.names.setdefault(kind, [])
        kept += names
        del kept[:-8]

    def newest(self, kind: str) -> str:
        """Return the newest name of a kind; empty if there is none."""
        return (self.names.get(kind) or [""])[-1]


class Values:
    """Draws values."""

    def __init__(self, rng: random.Random, known: Known) -> None:
        self.rng = rng
        self.known = known

    def chance(self, probability: float) -> bool:
        """Return True with a probability."""
        return self.rng.random() < probability

    def string(self, name: str) -> str:
        """Return a value of a string field: a name that exists, or an odd one."""
        names = self.known.names.get(KINDS.get(name, ""))
        if names and self.chance(0.75):
            return self.rng.choice(names)
        if self.chance(0.2):
            return "".join(chr(self.rng.choice((33, 47, 58, 97, 0x3B1, 0x4E2D))) for _ in range(self.rng.randrange(40)))
        return self.rng.choice(STRINGS)

    def integer(self, low: int = -(2**63), high: int = 2**63 - 1) -> int:
        """Return an integer of a range."""
        if self.chance(0.4):
            return min(max(self.rng.randrange(20), low), high)
        return min(max(self.rng.choice(INTEGERS), low), high)

    def number(self) -> float:
        """Return a float."""
        return self.rng.choice(FLOATS) if self.chance(0.5) else self.rng.uniform(-2, 2)

    def data(self) -> bytes:
        """Return arbitrary bytes."""
        return self.rng.randbytes(self.rng.choice((0, 1, 3, 4, 8, 64, 1000)))

    def count(self) -> int:
        """Return how many items a list has."""
        return self.rng.choice((0, 1, 1, 2, 2, 3, 5, 20))

    def tokens(self, num: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Return token ids, int32 (num,)."""
        return np.array([self.rng.randrange(TOKENS_MAX) for _ in range(num)], np.int32)

    def damaged(self, body: bytes) -> bytes:
        """Return a body with a few bytes removed, added or changed."""
        damaged = bytearray(body)
        for _ in range(self.rng.randint(1, 4)):
            at = self.rng.randrange(len(damaged) + 1)
            kind = self.rng.randrange(4)
            if kind == 0:
                del damaged[at:]
            elif kind == 1:
                damaged[at:at] = self.rng.randbytes(self.rng.randint(1, 8))
            elif kind == 2 and at < len(damaged):
                damaged[at] ^= 1 << self.rng.randrange(8)
            else:
                del damaged[at : at + self.rng.randint(1, 8)]
        return bytes(damaged)

    def choice(self, values: Sequence[object]) -> object:
        """Return one of the values."""
        return self.rng.choice(values)
