"""The recipe of the shipped base model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that determines the weights, besides the text."""

    seed: int = 0
    steps: int = 3000
    """Optimizer steps."""
    batch_rows: int = 8
    """Windows per step."""
    window_tokens: int = 256
    """Length of a training window, and of an evaluation window."""
    vocab_size: int = 2048
    """Byte-level BPE entries, the four special tokens among them."""
    hidden_size: int = 192
    num_layers: int = 5
    intermediate_size: int = 512
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    learning_rate: float = 3e-3
    """Peak, after the warm-up; a cosine schedule lowers it to a hundredth."""
    warmup_steps: int = 60
    weight_decay: float = 0.1
    """On matrices; norms are not decayed."""
    grad_norm_max: float = 1.0
    threads: int = 2
