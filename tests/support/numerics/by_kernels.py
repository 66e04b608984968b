"""An engine on a CPU that trains as one on a GPU does, in Triton's interpreter, and few tenants with few tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.numerics.harness import Driver, Tenant, assemble_again, make_data, make_spec
from tests.support.numerics.interpreted import interpret
from workers.bank.entries import Entry
from workers.model.fused_runs import forward_runs, training_runs
from workers.model.numerics import Numerics
from workers.model.training_layers import TrainingLayers
from workers.model.usual_layers import UsualModel, has_form

FEW = (
    Tenant(spec=make_spec("small", 2), passes=[make_data("cross_entropy", [5])]),
    Tenant(spec=make_spec("attn", 4, train_mlp=False), loss_fn="gspo", passes=[make_data("gspo", [6, 1])]),
    Tenant(spec=make_spec("wide", 32), passes=[make_data("cross_entropy", [7]), make_data("cross_entropy", [3], 1)]),
)
"""With few tokens: the interpreter takes seconds for a hundred."""


def spoil_new_gradients(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let the memory of a gradient hold no number before its first pass; return whether passes set each."""
    begin, are_set = Entry.begin_gradient, list[bool]()

    def begin_spoilt(self: Entry, **options: bool) -> bool:
        if not self.has_grad:
            assert self.row is not None
            assert self.row.grad is not None
            self.row.grad.fill_(math.nan)
        are_set.append(begin(self, **options))
        return are_set[-1]

    monkeypatch.setattr(Entry, "begin_gradient", begin_spoilt)
    return are_set


def fused(path: Path, *, exact: bool = False, **config: Any) -> Driver:
    """Return a driver on a CPU that trains as a GPU does: adapters, layers and losses by kernels of our own."""
    interpret()
    driver = Driver(path, exact=exact, **config)
    model = driver.engine.base_model
    assert has_form(model.model, model.head_dim)
    usual = UsualModel(model.model)
    assert usual.has_silu
    numerics = Numerics(is_tiled=True, can_batch=False) if exact else model.numerics
    model.use(numerics)
    usual.use(numerics)
    model.current.fuse, model.current.fuse_forward = training_runs, forward_runs
    model.training_layers = TrainingLayers(usual, model.current, model.num_heads)
    model.is_deferred = model.scores_by_kernels = True
    assemble_again(driver.engine)
    return driver
