"""Adapters of a small made-up model, for tests of the bank with and without a GPU."""

from __future__ import annotations

from typing import Any

import torch

from workers.bank.bank import Bank
from workers.bank.entries import HostRow
from workers.contract.messages import AdapterSpec
from workers.rows import GroupShape

SHAPES = (
    GroupShape(index=0, kind="attn", names=("l.q_proj", "l.k_proj"), d_in=48, d_outs=(48, 16)),
    GroupShape(index=1, kind="attn", names=("l.o_proj",), d_in=48, d_outs=(48,)),
    GroupShape(index=2, kind="mlp", names=("l.gate_proj", "l.up_proj"), d_in=48, d_outs=(96, 96)),
    GroupShape(index=3, kind="unembed", names=("lm_head",), d_in=48, d_outs=(101,)),
)


def make_spec(adapter_id: str = "a", rank: int = 8, seed: int = 1, **flags: bool) -> AdapterSpec:
    fields: dict[str, Any] = {"train_attn": True, "train_mlp": True, "train_unembed": True, **flags}
    return AdapterSpec(adapter_id=adapter_id, rank=rank, alpha=32.0, seed=seed, **fields)


def fill(bank: Bank, key: str, seed: int) -> HostRow:
    """Fill a key's row with random values; return copies of them."""
    (row,) = bank.acquire([key])
    bank.entry(key).note_step()
    bank.entry(key).begin_gradient()
    generator = torch.Generator().manual_seed(seed)
    for vector in (row.weights, row.exp_avg, row.exp_avg_sq, row.grad):
        assert vector is not None
        vector.copy_(torch.randn(vector.shape, generator=generator))
    return copy_of(bank, key)


def weights_of(row: HostRow) -> torch.Tensor:
    """Return a row's weights, which must be on the host."""
    assert row.weights is not None
    return row.weights


def copy_of(bank: Bank, key: str) -> HostRow:
    """Return copies of a key's vectors."""
    host = bank.entry(key).read()
    names = ("weights", "exp_avg", "exp_avg_sq", "grad")
    vectors = {name: getattr(host, name) for name in names}
    return HostRow(**{name: None if vector is None else vector.clone() for name, vector in vectors.items()})


def assert_same(actual: HostRow, expected: HostRow) -> None:
    """Assert that two rows are equal to the bit."""
    for name in ("weights", "exp_avg", "exp_avg_sq", "grad"):
        a, b = getattr(actual, name), getattr(expected, name)
        assert (a is None) == (b is None), name
        assert a is None or torch.equal(a, b), name
