"""The random numbers of samples over all seeds that a request can carry, and that they never change."""

from __future__ import annotations

from tests.support.random_numbers import uniform

INT64_SEEDS = (-(2**63), -(2**62), -2, -1, 0, 1, 2**62, 2**63 - 1)


def test_every_int64_seed_has_its_own_random_numbers() -> None:
    """Keys beyond an int64 once went through floating point, which made all negative seeds one."""
    places = [(seed, index, position) for seed in INT64_SEEDS for index in range(3) for position in range(5)]
    numbers = [uniform(*place) for place in places]
    assert len(set(numbers)) == len(places)
    assert all(0 <= number < 1 for number in numbers)


def test_random_numbers_never_change() -> None:
    """A sample is run again from its logged seed, also after an upgrade, and must give the same tokens."""
    numbers = [uniform(7, 3, position) for position in range(3)]
    assert numbers == [0.4821286018761155, 0.6807485287933278, 0.5862841579788101]
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)
