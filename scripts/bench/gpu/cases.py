"""Models and loads of the GPU benchmarks, the FLOP of a trained token, and the bytes of a decode step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from workers.contract.messages import Datum

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 384,
        "tie_word_embeddings": True,
    },
    "0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12_288,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    },
}
"""Shapes of Qwen3. The weights are random."""


@dataclass(frozen=True, slots=True)
class Case:
    """The load of a step: tenants with sequences of equal length."""

    num_tenants: int
    num_seqs: int
    num_tokens: int
    """Of each sequence."""

    @classmethod
    def read(cls, text: str) -> Case:
        """Parse "tenants x sequences x tokens", without blanks. Raises ValueError."""
        return cls(*(int(part) for part in text.split("x")))

    @property
    def total_tokens(self) -> int:
        """Tokens trained in a step."""
        return self.num_tenants * self.num_seqs * self.num_tokens

    def __str__(self) -> str:
        return f"{self.num_tenants} x {self.num_seqs} x {self.num_tokens}"

    def data(self, vocab_size: int) -> list[tuple[Datum, ...]]:
        """Return random sequences by tenant, equal in every run."""
        lengths = [self.num_tokens] * self.num_seqs
        return [random_data(tenant, lengths, vocab_size) for tenant in range(self.num_tenants)]


def random_data(seed: int, lengths: Sequence[int], vocab_size: int) -> tuple[Datum, ...]:
    """Return a tenant's sequences: random tokens, next-token targets, weights of one."""
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        tokens = rng.integers(0, vocab_size, length + 1).astype(np.int32)
        weights = np.ones(length, dtype=np.float32)
        data.append(Datum(tokens=tokens[:-1], loss_inputs={"target_tokens": tokens[1:], "weights": weights}))
    return tuple(data)


def num_weights(config: Any, rank: int) -> tuple[int, int]:
    """Return N, the weights of all linears with the unembedding, and P, those of an adapter on all of them."""
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden, mlp = config.hidden_size, config.intermediate_size
    linears = [
        (hidden, query),
        (hidden, key),
        (hidden, key),
        (query, hidden),
        (hidden, mlp),
        (hidden, mlp),
        (mlp, hidden),
    ]
    layers = config.num_hidden_layers
    base = layers * sum(d_in * d_out for d_in, d_out in linears) + hidden * config.vocab_size
    adapter = rank * (layers * sum(d_in + d_out for d_in, d_out in linears) + hidden + config.vocab_size)
    return base, adapter


def train_flops_per_token(config: Any, num_tokens: int, rank: int) -> float:
    """Return the FLOP of a trained token in sequences of `num_tokens`: 4N + 6P + attention.

    N are the weights of all linears (forward, and backward to the inputs: 2N each), P those of the adapter (forward,
    backward to inputs and to weights). Attention is causal: a token sees half of its sequence on average; scores and
    values are two products forward and five backward; flash attention recomputes one of them.
    """
    base, adapter = num_weights(config, rank)
    attention = config.num_hidden_layers * 7 * 2 * config.num_attention_heads * config.head_dim * num_tokens / 2
    return float(4 * base + 6 * adapter + attention)


def decode_bytes(config: Any, *, num_seqs: int, num_tokens: float, num_adapters: int, rank: int, width: int) -> float:
    """Return the bytes that a decode step has to read: all weights once, and the keys and values of all sequences.

    `num_tokens`: keys of a sequence, on average. `num_adapters`: different ones among the sequences. `width`: bytes of
    a value.
    """
    base, adapter = num_weights(config, rank)
    keys = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * num_tokens
    return float(width * (base + num_adapters * adapter + num_seqs * keys))


def write_model(shape: str, directory: Path, device: torch.device) -> Path:
    """Write a random Qwen3 of a named shape as a Hugging Face directory."""
    config = Qwen3Config(**SHAPES[shape], max_position_embeddings=32_768, dtype=torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return directory
