"""The token budget: the operator's number, or the knee of measured cycles, from one chunk to the latency target."""

import pytest

from coordinator.scheduling.budget import KNEE, START_TOKENS, TOKENS_MAX, TRUST, TokenBudget
from coordinator.scheduling.cost_model import MEMORY, CycleCosts

CHUNK_TOKENS = 128


def costs_of(fixed_s: float, token_s: float, *sizes: int) -> CycleCosts:
    costs = CycleCosts()
    for num_tokens in sizes * 3:
        costs.observe_pass(num_tokens, 16.0, fixed_s + token_s * num_tokens)
    return costs


def found(costs: CycleCosts, tokens: int | None = None, cycle_s_max: float = 2.0) -> int:
    budget = TokenBudget(costs, base_model="m", chunk_tokens=CHUNK_TOKENS, tokens=tokens, cycle_s_max=cycle_s_max)
    budget.update()
    return budget.tokens


def test_the_operators_number_is_used_unchanged() -> None:
    assert found(costs_of(0.01, 1e-4, 16, 1024), tokens=1) == 1
    assert found(costs_of(0.01, 1e-4, 16, 1024), tokens=1_000_000) == 1_000_000


def test_the_budget_keeps_its_start_value_while_measured_sizes_are_too_similar() -> None:
    assert found(CycleCosts()) == START_TOKENS
    assert found(costs_of(0.0001, 1e-4, 64, 128)) == START_TOKENS


def test_the_budget_is_the_knee_of_pass_and_commit() -> None:
    costs = costs_of(0.01, 2e-4, 16, 128, 1024)
    assert found(costs) == pytest.approx(KNEE * 0.01 / 2e-4, abs=1)
    costs.observe_commit(0.002)
    assert found(costs) == pytest.approx(KNEE * 0.012 / 2e-4, abs=1)


def test_the_budget_is_never_less_than_a_chunk() -> None:
    assert found(costs_of(0.0, 1e-3, 16, 1024)) == CHUNK_TOKENS
    assert found(costs_of(10.0, 1.0, 16, 1024)) == CHUNK_TOKENS, "also if the latency target cannot be met"


def test_a_pass_takes_no_longer_than_the_latency_target() -> None:
    tokens = found(costs_of(0.5, 0.002, 16, 128, 1024))
    assert 0.5 + 0.002 * tokens == pytest.approx(2.0, abs=0.002)
    tokens = found(costs_of(0.5, 0.002, 16, 128, 1024), cycle_s_max=1.0)
    assert 0.5 + 0.002 * tokens == pytest.approx(1.0, abs=0.002)


def test_slow_passes_limit_the_budget_before_the_line_is_known() -> None:
    assert found(costs_of(0.0, 0.01, 256), cycle_s_max=2.0) == 200


def test_the_budget_exceeds_the_measured_sizes_by_a_bounded_factor() -> None:
    flat = costs_of(0.1, 1e-9, 16, 4096)
    assert found(flat) == TRUST * 4096
    assert found(costs_of(0.1, 1e-9, 16, 1_000_000)) == TOKENS_MAX


def test_the_budget_recovers_after_a_machine_became_faster() -> None:
    """Old large passes and new small ones give a line without a fixed cost: the budget falls to a chunk."""
    costs = costs_of(0.01, 2e-3, 256, 2048)
    for _ in range(9):
        costs.observe_pass(256, 16.0, 0.005 + 1e-4 * 256)
    budget = TokenBudget(costs, base_model="m", chunk_tokens=CHUNK_TOKENS, tokens=None, cycle_s_max=2.0)
    budget.update()
    assert budget.tokens == CHUNK_TOKENS
    for _ in range(MEMORY + 10):  # under load each cycle fills the budget
        costs.observe_pass(budget.tokens, 16.0, 0.005 + 1e-4 * budget.tokens)
        budget.update()
    assert budget.tokens == pytest.approx(KNEE * 0.005 / 1e-4, rel=0.05)
