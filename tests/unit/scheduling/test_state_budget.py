"""The budget of the step phase: how many steps, saves and loads run in one cycle, and whose."""

import pytest

from coordinator.operations.operation import Kind
from coordinator.scheduling.state_budget import (
    BYTES_MAX,
    SECONDS_MAX,
    UNKNOWN,
    StateCandidate,
    StateCost,
    StateCosts,
    plan_states,
)
from coordinator.scheduling.virtual_counters import FairState, Share, charged
from tests.support.adapter_logs import spec_named

QUICK = StateCost(1000, SECONDS_MAX / 10)
TOKENS_PER_S = 1000.0


def candidate(adapter_id: str, tenant_id: str, num: int, cost: StateCost = QUICK, last: int = 0) -> StateCandidate:
    return StateCandidate(adapter_id=adapter_id, tenant_id=tenant_id, costs=[cost] * num, last_cycle_id=last)


def planned(*candidates: StateCandidate, state: FairState = FairState()) -> dict[str, int]:  # noqa: B008 (frozen)
    return plan_states(candidates, state, TOKENS_PER_S)[0]


def test_steps_take_what_the_pass_has_left_of_the_cycle_and_a_tenth_of_a_second_in_any_case() -> None:
    step = StateCost(0, SECONDS_MAX / 10, moves_state=False)
    steps = [candidate(f"a{i:03}", "t", 1, step) for i in range(200)] + [candidate("b", "u", 1, step)]
    for left_s, number in ((-1.0, 10), (0.0, 10), (3 * SECONDS_MAX, 30)):
        found, _ = plan_states(steps, FairState(), TOKENS_PER_S, left_s)
        assert len(found) == pytest.approx(number, abs=1)
        assert "b" in found, "the neighbour of a tenant with hundreds"
    slow = StateCost(0, 9.0, moves_state=False)
    assert planned(candidate("a", "t", 1, slow), candidate("b", "u", 1, slow)) == {"a": 1}


def test_steps_and_states_have_room_apart_and_keep_their_order() -> None:
    step = StateCost(0, SECONDS_MAX, moves_state=False)
    save = StateCost(BYTES_MAX, SECONDS_MAX)
    both = StateCandidate("a", "t", [step, save], 0)
    assert planned(both) == {"a": 2}
    assert planned(StateCandidate("a", "t", [save, step, save], 0)) == {"a": 2}


def test_hundreds_of_saves_are_spread_over_cycles() -> None:
    assert planned(candidate("a", "t", 500)) == {"a": 10}


def test_the_states_of_one_phase_fit_into_the_budget_of_bytes() -> None:
    third = StateCost(BYTES_MAX // 3, 0.0)
    assert planned(candidate("a", "t", 500, third)) == {"a": 3}


def test_a_state_beyond_the_budget_has_a_phase_for_itself() -> None:
    huge = StateCost(2 * BYTES_MAX, 2 * SECONDS_MAX)
    assert planned(candidate("a", "t", 2, huge), candidate("b", "u", 2)) == {"a": 1}


def test_tenants_share_a_phase_by_their_counters_and_not_by_what_they_queue() -> None:
    assert planned(candidate("a", "t", 500), candidate("b", "u", 5)) == {"a": 5, "b": 5}


def test_a_plan_chooses_by_estimates_and_charges_nothing() -> None:
    state = FairState(shares={"t": Share(weight=2.0, virtual_tokens=7.0)}, active=frozenset("t"))
    _, after = plan_states([candidate("a", "t", 1), candidate("b", "u", 1)], state, TOKENS_PER_S)
    assert after.shares["t"].virtual_tokens == 7.0
    assert after.shares["u"].virtual_tokens == 7.0, "lifted"
    assert after.active == {"t", "u"}


def test_measured_work_is_charged_over_the_weight_and_also_to_a_tenant_that_is_not_active() -> None:
    shares = {"t": Share(weight=2.0, virtual_tokens=7.0), "idle": Share(virtual_tokens=1.0)}
    state = FairState(shares=shares, active=frozenset("t"))
    state = charged(state, {"t": 100.0, "idle": 10.0})
    assert state.shares["t"].virtual_tokens == 57.0
    assert state.shares["idle"].virtual_tokens == 67.0, "it returns behind the active ones by what it used"
    assert charged(state, {"new": 1.0}).shares["new"].virtual_tokens == 58.0
    assert state.active == {"t"}


def test_a_tenant_that_was_idle_gets_no_saved_up_share() -> None:
    state = FairState(shares={"t": Share(virtual_tokens=900.0), "u": Share()}, active=frozenset("t"))
    assert planned(candidate("a", "t", 500), candidate("b", "u", 500), state=state) == {"a": 5, "b": 5}


def test_the_adapters_of_a_tenant_take_turns_over_cycles() -> None:
    huge = StateCost(2 * BYTES_MAX, 0.0)
    assert planned(candidate("a", "t", 9, huge, last=8), candidate("b", "t", 9, huge, last=7)) == {"b": 1}


def test_the_first_operation_of_a_kind_has_a_phase_for_itself_and_is_measured() -> None:
    costs, spec = StateCosts(), spec_named("a")
    assert costs.of(Kind.SAVE_STATE, spec) == UNKNOWN
    assert planned(candidate("a", "t", 5, UNKNOWN), candidate("b", "u", 5, UNKNOWN)) == {"a": 1}
    for seconds in (0.01, 5.0, 0.02):
        costs.observe(Kind.SAVE_STATE, spec, StateCost(10, seconds))
    assert costs.of(Kind.SAVE_STATE, spec) == StateCost(10, 0.02), "one slow disk write has no effect"
    assert costs.of(Kind.LOAD_STATE, spec) == UNKNOWN
