"""The short version of `make attack`: attacks on a pool in a process of its own, without torch and Ray.

Only what does not depend on the machine's load is checked: answers, processor time of single callbacks, memory.
"""

from __future__ import annotations

import pytest

from coordinator.doors.grpc.public import WATCHERS_MAX
from scripts.attack.attacks import ATTACKS
from scripts.attack.report import CPU_MS_MAX, MEMORY_GROWTH_MAX, Figures
from scripts.attack.run import Plan, run_attacks
from tests.support.serving import TOY

SHORT = (
    "rapid-reset",
    "grpc-empty-data",
    "grpc-large",
    "grpc-results-unread",
    "saves",
    "health-watchers",
    "health-watch",
)
"""In this order; the last one goes on while the pool stops."""
LIKE_THEM = ("zstd-empty-data", "sessions-listed", "health-unfinished", "pings", "wait-names", "lists-abandoned")
LONG = (*LIKE_THEM, "streams-unread", *SHORT)
"""With those that resemble one of them."""
PLAN = Plan(
    serve_arguments=TOY[:4], scale=0.05, warm_up_s=0.0, solo_s=0.3, attack_s=0.7, attack_s_max=30.0, after_s=0.0
)


@pytest.fixture(
    scope="module", params=[SHORT, pytest.param(LONG, marks=pytest.mark.long)], ids=["some attacks", "all attacks"]
)
def figures(request: pytest.FixtureRequest) -> list[Figures]:
    """Return the figures of one pool under short attacks."""
    figures = run_attacks([ATTACKS[name] for name in request.param], PLAN)
    assert [each.attack for each in figures] == list(request.param)
    return figures


@pytest.mark.slow
@pytest.mark.xdist_group("attacks")
def test_no_callback_of_the_event_loop_takes_long_under_attack(figures: list[Figures]) -> None:
    assert {each.attack: each.longest_name for each in figures if each.longest_cpu_ms > CPU_MS_MAX} == {}


@pytest.mark.slow
@pytest.mark.xdist_group("attacks")
def test_memory_stays_near_its_idle_size_under_attack(figures: list[Figures]) -> None:
    grown = {each.attack: each.peak_bytes - each.idle_bytes for each in figures}
    assert {attack: size for attack, size in grown.items() if size > MEMORY_GROWTH_MAX} == {}


@pytest.mark.slow
@pytest.mark.xdist_group("attacks")
def test_neighbours_calls_succeed_under_attack_and_the_pool_stops_at_a_signal(figures: list[Figures]) -> None:
    for each in figures:
        assert not each.failures, (each.attack, each.reasons)
        assert each.attacked["step"] is not None, f"{each.attack}: the neighbour took no step"
        assert each.exit_code is None
        assert each.stop_s is not None
        assert "the attack itself failed" not in each.tally


@pytest.mark.slow
@pytest.mark.xdist_group("attacks")
def test_many_watchers_of_one_address_leave_a_place_to_another(figures: list[Figures]) -> None:
    [watched] = [each for each in figures if each.attack == "health-watchers"]
    assert watched.note == "Watch from another address said SERVING"
    assert watched.tally["watches begun"] > WATCHERS_MAX
