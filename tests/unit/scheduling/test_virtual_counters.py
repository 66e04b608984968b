"""Weights that change: nobody waits for what it used at another weight, and nobody is put before others.

Corrections: what a plan charged for work that did not run is taken back, and never more.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.virtual_counters import FairState, Share, charged, reweighed, taken_back

SHARES = {"a": Share(virtual_tokens=100.0), "b": Share(weight=0.01, virtual_tokens=1100.0)}


def test_a_higher_weight_shortens_the_wait_in_proportion() -> None:
    after = reweighed(SHARES, "b", 1.0, {"a", "b"})
    assert (after["a"], after["b"].weight) == (SHARES["a"], 1.0)
    assert after["b"].virtual_tokens == pytest.approx(110.0)


def test_a_lower_weight_does_not_lengthen_the_wait() -> None:
    shares = {"a": Share(virtual_tokens=100.0), "b": Share(weight=100.0, virtual_tokens=110.0)}
    assert reweighed(shares, "b", 0.01, {"a", "b"})["b"] == Share(weight=0.01, virtual_tokens=110.0)


@pytest.mark.parametrize("active", [set(), {"a"}, {"a", "b"}])
def test_a_tenant_that_is_not_ahead_keeps_its_counter(active: set[str]) -> None:
    after = reweighed(SHARES, "a", 100.0, active)
    assert after["a"] == Share(weight=100.0, virtual_tokens=100.0)


def test_a_tenant_without_a_counter_gets_one_with_its_weight() -> None:
    assert reweighed({}, "new", 3.0, ()) == {"new": Share(weight=3.0)}


def test_what_did_not_run_is_taken_back_over_the_weight() -> None:
    state = charged(FairState(shares=SHARES, active=frozenset("ab")), {"a": 30.0, "b": 2.0})
    state = taken_back(state, {"a": 10.0, "b": 1.0}, {"a": 100.0, "b": 1100.0})
    assert {name: share.virtual_tokens for name, share in state.shares.items()} == {"a": 120.0, "b": 1200.0}


@given(st.floats(0, 100), st.floats(0.01, 100), st.floats(0, 200))
def test_no_correction_goes_below_the_counter_before_the_plan_whatever_the_weight_is_by_then(
    planned: float, weight: float, unused: float
) -> None:
    shares = {"a": Share(virtual_tokens=7.0), "b": Share(virtual_tokens=5.0)}
    state = charged(FairState(shares=shares, active=frozenset("ab")), {"a": planned})
    shares = reweighed(state.shares, "a", weight, state.active)
    before = shares["a"].virtual_tokens
    after = taken_back(FairState(shares=shares, active=state.active), {"a": unused}, {"a": 7.0}).shares["a"]
    assert min(7.0, before) <= after.virtual_tokens <= before
