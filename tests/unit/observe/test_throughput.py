"""Tokens a second: those of the last seconds over these seconds, by tenant and worker."""

import pytest

from coordinator.observe.throughput import WINDOW_S, Throughput, by_tenant, by_worker
from tests.support.toy_pool import FakeTime


def test_a_rate_is_the_tokens_of_the_window_over_the_time_since_it_began() -> None:
    time = FakeTime(now=1000.25)
    throughput = Throughput(time.monotonic)
    for _ in range(100):  # 30 tokens a second, in parts of a second
        for _ in range(3):
            throughput.count_trained("t", "w", 10)
        time.now += 1.0
    # The window has the 9 whole seconds before the present one, and of that a quarter without tokens so far.
    assert by_tenant(throughput.trained()) == {"t": pytest.approx(9 * 30 / 9.25)}
    assert throughput.sampled() == {}


def test_tokens_leave_the_rate_with_their_second() -> None:
    time = FakeTime(now=1000.5)
    throughput = Throughput(time.monotonic)
    time.now += 100
    throughput.count_sampled("t", "w", 95)
    time.now += WINDOW_S - 1
    assert by_tenant(throughput.sampled()) == {"t": pytest.approx(95 / 9.5)}
    time.now += 1
    assert throughput.sampled() == {}


def test_after_a_start_a_rate_is_over_the_time_since_then_and_at_least_a_second() -> None:
    time = FakeTime(now=1000.9)
    throughput = Throughput(time.monotonic)
    throughput.count_trained("t", "w", 60)
    time.now += 0.2
    assert by_tenant(throughput.trained()) == {"t": 60}
    time.now += 2.8
    assert by_tenant(throughput.trained()) == {"t": pytest.approx(60 / 3)}


def test_rates_add_up_by_tenant_and_by_worker_and_trained_tokens_are_not_sampled_ones() -> None:
    time = FakeTime()
    throughput = Throughput(time.monotonic)
    time.now += 2
    throughput.count_trained("a", "w0", 2)
    throughput.count_trained("a", "w1", 4)
    throughput.count_trained("b", "w1", 8)
    throughput.count_sampled("b", "w0", 16)
    trained, sampled = throughput.trained(), throughput.sampled()
    assert by_tenant(trained) == {"a": 3, "b": 4}
    assert by_worker(trained, None) == {"w0": 1, "w1": 6}
    assert by_worker(trained, "a") == {"w0": 1, "w1": 2}
    assert (by_tenant(sampled), by_worker(sampled, "a"), by_worker(sampled, "b")) == ({"b": 8}, {}, {"w0": 8})
