"""Adapters of a small made-up model, for tests of the bank with and without a GPU."""

from __future__ import annotations

from typing import Any

from workers.contract.messages import AdapterSpec
from workers.model.lora import GroupShape

SHAPES = (
    GroupShape(index=0, kind="attn", names=("l.q_proj", "l.k_proj"), d_in=48, d_outs=(48, 16)),
    GroupShape(index=1, kind="attn", names=("l.o_proj",), d_in=48, d_outs=(48,)),
    GroupShape(index=2, kind="mlp", names=("l.gate_proj", "l.up_proj"), d_in=48, d_outs=(96, 96)),
    GroupShape(index=3, kind="unembed", names=("lm_head",), d_in=48, d_outs=(101,)),
)


def make_spec(adapter_id: str = "a", rank: int = 8, seed: int = 1, **flags: bool) -> AdapterSpec:
    fields: dict[str, Any] = {"train_attn": True, "train_mlp": True, "train_unembed": True, **flags}
    return AdapterSpec(adapter_id=adapter_id, rank=rank, alpha=32.0, seed=seed, **fields)
