"""The harness of `make load`, on a pool for a second. What it measures, `test_fair_shares` shows in virtual time."""

import pytest

from scripts.reliability.load.clients import ClientPlan
from scripts.reliability.load.figures import Memory, shares_of
from scripts.reliability.load.pool import SAMPLING, TRAINING, LoadedPool
from scripts.reliability.load.run import HEAVY, run_phase


@pytest.mark.slow
@pytest.mark.xdist_group("attacks")
def test_clients_train_and_sample_and_their_committed_tokens_and_the_memory_are_read() -> None:
    with LoadedPool({HEAVY: 2.0, "other": 1.0}, is_timed=True) as pool:
        plans = [
            ClientPlan(name="trains", key=pool.keys[HEAVY], trains=True, num_tokens=16, in_flight=2),
            ClientPlan(name="samples", key=pool.keys["other"], trains=False, num_tokens=4, num_drawn=2),
        ]
        phase = run_phase(pool, plans, 1.0, print)
        log = pool.log_text()
    assert (phase.record.num_errors, phase.record.errors) == (0, [])
    assert phase.last.since(phase.first, TRAINING)[HEAVY] > 0
    assert phase.last.since(phase.first, SAMPLING)["other"] > 0
    assert set(phase.record.latencies_s) == {"trains", "samples"}
    assert phase.num_cycles > 0 < min(phase.memory.readings)
    assert "Traceback" not in log


def test_shares_are_relative_to_the_mean_of_equal_tenants() -> None:
    found = shares_of({HEAVY: 210, "a": 90, "b": 110}, HEAVY)
    assert found.mean == 100.0
    assert found.spread == pytest.approx(0.1)
    assert found.weighted == pytest.approx(2.1)


@pytest.mark.parametrize("num_readings", [3, 7, 600])
def test_memory_grows_from_the_most_in_the_first_third_to_the_most_in_the_last(num_readings: int) -> None:
    memory = Memory(idle_bytes=1, readings=[100] * num_readings)
    memory.readings[0], memory.readings[-1] = 200, 300
    assert (memory.third(0), memory.third(2), memory.growth) == (200, 300, 1.5)
