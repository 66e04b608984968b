"""An engine on a CPU that trains as one on a GPU does, in Triton's interpreter, and few tenants with few tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.numerics.harness import Driver, Tenant, make_data, make_spec
from tests.support.numerics.interpreted import interpret
from workers.model.fused_runs import forward_runs, training_runs
from workers.model.numerics import Numerics
from workers.model.training_layers import TrainingLayers, can_train
from workers.model.usual_layers import UsualModel, has_form

FEW = (
    Tenant(spec=make_spec("small", 2), passes=[make_data("cross_entropy", [5])]),
    Tenant(spec=make_spec("attn", 4, train_mlp=False), loss_fn="gspo", passes=[make_data("gspo", [6, 1])]),
    Tenant(spec=make_spec("wide", 32), passes=[make_data("cross_entropy", [7]), make_data("cross_entropy", [3], 1)]),
)
"""With few tokens: the interpreter takes seconds for a hundred."""


def fused(path: Path, *, exact: bool = False, **config: Any) -> Driver:
    """Return a driver on a CPU that trains as a GPU does: adapters and layers by kernels of our own."""
    interpret()
    driver = Driver(path, exact=exact, **config)
    model = driver.engine.base_model
    assert has_form(model.model, model.head_dim)
    usual = UsualModel(model.model)
    assert can_train(usual)
    numerics = Numerics(is_tiled=True, can_batch=False) if exact else model.numerics
    model.use(numerics)
    usual.use(numerics)
    model.current.fuse, model.current.fuse_forward = training_runs, forward_runs
    model.training_layers = TrainingLayers(usual, model.current, model.num_heads)
    return driver
