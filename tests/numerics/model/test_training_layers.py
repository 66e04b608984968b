"""Decoder layers in few kernels train as transformers' modules do, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.numerics.agreement import distance, observe
from tests.support.numerics.harness import Driver, Tenant, make_data, make_spec
from tests.support.numerics.interpreted import interpret
from workers.model.fused_runs import forward_runs, training_runs
from workers.model.training_layers import TrainingLayers, can_train
from workers.model.usual_layers import UsualModel, has_form

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_base_models")]

FEW = (
    Tenant(spec=make_spec("small", 2), passes=[make_data("cross_entropy", [5])]),
    Tenant(spec=make_spec("attn", 4, train_mlp=False), loss_fn="gspo", passes=[make_data("gspo", [6, 1])]),
    Tenant(spec=make_spec("wide", 32), passes=[make_data("cross_entropy", [7]), make_data("cross_entropy", [3], 1)]),
)
"""With few tokens: the interpreter takes seconds for a hundred."""


def fused(path: Path, **config: Any) -> Driver:
    """Return a driver on a CPU that trains as a GPU does: adapters and layers by kernels of our own."""
    interpret()
    driver = Driver(path, **config)
    model = driver.engine.base_model
    assert has_form(model.model, model.head_dim)
    usual = UsualModel(model.model)
    assert can_train(usual)
    model.use(model.numerics)
    model.current.fuse, model.current.fuse_forward = training_runs, forward_runs
    model.training_layers = TrainingLayers(usual, model.current, model.num_heads)
    return driver


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("recompute", ["off", "on"])
def test_kernels_train_as_the_modules_do(model_directories: dict[str, Path], architecture: str, recompute: str) -> None:
    path = model_directories[architecture]
    expected = observe(Driver(path), FEW)
    apart = distance(observe(fused(path, recompute=recompute), FEW), expected)
    assert apart.logprobs < 1e-4
    assert apart.gradients < 1e-4
