"""What items cost beside tokens: as the trial of the model has it, times what cycles have shown."""

from __future__ import annotations

from random import Random

import pytest

from coordinator.fleet.fleet import Fleet
from coordinator.scheduling.adapter_costs import FACTOR_MAX, NOTABLE, Costs, ItemFactor, Mix
from coordinator.scheduling.cost_model import KEPT, KEPT_MIN, MEMORY
from tests.support.adapter_logs import spec_named
from tests.support.toy_engine import toy_worker_info
from workers.contract.messages import AdapterCosts

MANY, ONE, BOTH = (96, 700.0), (2048, 15.0), (1120, 715.0)
"""Tokens and items of cycles of small steps, of a large one, and of both."""


def cycle(mix: tuple[int, float], *, fixed_s: float = 0.0, item_s: float = 4e-4, token_s: float = 2e-4) -> Mix:
    num_tokens, items = mix
    return Mix(num_tokens, items, fixed_s + token_s * num_tokens + item_s * items)


def after(*cycles: Mix, times: int = 20) -> float:
    """Return the factor after so many repetitions of cycles."""
    factor = ItemFactor()
    for each in cycles * times:
        factor.observe(each)
    return factor.value


def test_items_cost_what_cycles_of_different_mixes_show() -> None:
    three = [cycle(mix) for mix in (MANY, ONE, BOTH)] * KEPT_MIN
    assert after(*three) == pytest.approx(2.0, rel=0.01)
    assert after(*three[:2] * KEPT_MIN) == pytest.approx(2.0, rel=0.01)
    small = [cycle((2, 15.0), fixed_s=0.05)] * KEPT_MIN
    assert after(*three, *small) == pytest.approx(2.0, rel=0.01), "these show the cost of a cycle"


def test_cycles_that_are_alike_show_nothing() -> None:
    assert after(*[cycle(MANY)] * KEPT) == 1.0
    assert after(*[cycle((number, 7.0 * number)) for number in (96, 500, 1000)] * KEPT) == 1.0
    few = [cycle(ONE)] * (KEPT_MIN - 1)
    assert after(*[cycle(MANY)] * KEPT, *few, times=1) == 1.0, "one slow cycle must not decide"


def test_a_pause_and_noise_change_little() -> None:
    random = Random(1)
    cycles = [cycle(mix) for mix in (MANY, ONE, BOTH)] * 10 * KEPT
    noisy = [each._replace(seconds=each.seconds * random.uniform(0.95, 1.05)) for each in cycles]
    noisy[-3:] = [each._replace(seconds=10.0) for each in noisy[-3:]]
    assert after(*noisy, times=1) == pytest.approx(2.0, rel=0.1)


def test_a_trial_that_was_disturbed_is_corrected_both_ways_within_bounds() -> None:
    mixes = [MANY, ONE, BOTH] * KEPT_MIN
    assert after(*(cycle(mix, item_s=1e-4) for mix in mixes)) == pytest.approx(0.5, rel=0.01)
    assert after(*(cycle(mix, item_s=0.0) for mix in mixes)) == pytest.approx(1 / FACTOR_MAX, rel=0.01)
    assert after(*(cycle(mix, item_s=1e-1) for mix in mixes)) == pytest.approx(FACTOR_MAX, rel=0.01)


def test_seconds_of_a_token_are_those_of_cycles_while_these_show_them() -> None:
    factor = ItemFactor()
    assert factor.token_s == 0.0
    for each in [cycle(mix) for mix in (MANY, ONE, BOTH)] * KEPT:
        factor.observe(each)
    assert factor.token_s == pytest.approx(2e-4, rel=0.01)
    for _ in range(MEMORY):
        factor.observe(cycle(MANY))
    assert factor.token_s == 0.0, "cycles are alike for long, and the speed of the machine may have changed"
    for mix in (MANY, ONE, BOTH) * KEPT:
        factor.observe(cycle(mix, item_s=1e-1, token_s=-1e-3))
    assert factor.token_s == 0.0, "tokens seem to cost nothing"


def test_what_cycles_have_shown_is_kept_and_measured_anew_when_they_change() -> None:
    factor = ItemFactor()
    for each in [cycle(mix) for mix in (MANY, ONE, BOTH)] * 2 * KEPT:
        factor.observe(each)
    for _ in range(2 * MEMORY):
        factor.observe(cycle(MANY, item_s=6e-4))
        assert 1.9 < factor.value < 3.5
    for each in [cycle(mix, item_s=6e-4) for mix in (ONE, BOTH)] * 5 * KEPT:
        factor.observe(each)
    assert factor.value == pytest.approx(3.0, rel=0.01)


def test_the_cost_of_an_item_follows_and_that_of_a_step_and_a_move_is_the_trials() -> None:
    fleet = Fleet()
    fleet.add(toy_worker_info("w0", costs=AdapterCosts(item_tokens=10.0, byte_tokens=1e-3, move_byte_tokens=1e-3)))
    costs, specs = Costs("toy", fleet), [spec_named(f"a{number}") for number in range(64)]
    measured = costs.of(specs[0])
    for _ in range(20):
        for chosen, num_tokens in ((specs, 128), (specs[:1], 4096), (specs, 4096)):
            costs.observe(chosen, num_tokens, 1e-4 * num_tokens + 3e-4 * len(chosen) * measured.item)
    found = costs.of(specs[1])
    assert found.item == pytest.approx(3.0 * measured.item, rel=NOTABLE)
    assert (found.step, found.move) == (measured.step, measured.move)
