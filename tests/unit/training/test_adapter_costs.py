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


def test_steps_and_moves_of_the_shipped_model_cost_something(base_model: BaseModel) -> None:
    costs = adapter_costs.measured_costs(base_model)
    assert costs.item_tokens >= 0.0
    assert costs.byte_tokens > 0.0
    assert costs.move_byte_tokens > 0.0
    assert adapter_costs.measured_costs(base_model) is costs, "once in a process"


SECONDS = {"few tokens": 1.0, "many tokens": 6.0, "items": 4.5, "steps": 0.8, "moves": 1.6}
"""With 500 tokens more in the pass of many tokens, a token takes 10 ms."""


def test_costs_are_the_seconds_of_the_trial_in_tokens() -> None:
    costs = adapter_costs.evaluated(SECONDS, num_tokens=500, copy_bytes=1000)
    assert costs.byte_tokens == pytest.approx(10 / 1000), "8 steps in 0.8 s: ten tokens each"
    assert costs.move_byte_tokens == pytest.approx(20 / 1000)
    assert costs.item_tokens == pytest.approx(50 - 10), "7 items in 3.5 s; the coordinator adds an item's step itself"


def test_noise_makes_no_cost_negative() -> None:
    slow_base = adapter_costs.evaluated({**SECONDS, "few tokens": 4.6}, num_tokens=140, copy_bytes=1000)
    assert slow_base.item_tokens == 0.0
    assert slow_base.byte_tokens > 0.0
    assert adapter_costs.evaluated({**SECONDS, "few tokens": 6.0}, 500, 1000) == AdapterCosts()


def test_without_memory_for_the_trial_nothing_but_tokens_counts(
    base_model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_costs, "_TRIED", {})
    monkeypatch.setattr(PassRunner, "run", lambda _, requests: [Outcome() for _ in requests])
    assert adapter_costs.measured_costs(base_model) == AdapterCosts()
