"""The trial of an adapter's costs: on the shipped model, and where memory is too small for it."""

import pytest

from tests.support.served_pool import SHIPPED_MODEL
from workers.contract.messages import AdapterCosts
from workers.model.base_model import BaseModel
from workers.selftest import adapter_costs
from workers.training.passes import Outcome, PassRunner


@pytest.fixture(scope="module")
def base_model() -> BaseModel:
    return BaseModel(str(SHIPPED_MODEL), name="kjv-2m")


def test_items_steps_and_moves_of_the_shipped_model_cost_something(base_model: BaseModel) -> None:
    costs = adapter_costs.measured_costs(base_model)
    assert 1.0 < costs.item_tokens < 1000.0
    assert 0.0 < costs.byte_tokens < 1e-3
    assert 0.0 < costs.move_byte_tokens < 1e-3
    assert adapter_costs.measured_costs(base_model) is costs, "once in a process"


def test_without_memory_for_the_trial_nothing_but_tokens_counts(
    base_model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_costs, "_TRIED", {})
    monkeypatch.setattr(PassRunner, "run", lambda _, requests: [Outcome() for _ in requests])
    assert adapter_costs.measured_costs(base_model) == AdapterCosts()
