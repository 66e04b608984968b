"""Weights that change: nobody waits for what it used at another weight, and nobody is put before others."""

import pytest

from coordinator.scheduling.virtual_counters import Share, reweighed

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
