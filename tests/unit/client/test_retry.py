"""Reattempts: which errors are retried, after which delay, and which are final."""

import random
from typing import Any

import pytest

from tinkerpool.client.calls.retry import Backoff, RetryPolicy, is_retryable
from tinkerpool.errors import ApiError, Code, api_error

REFUSED = api_error(Code.UNAVAILABLE, "connection refused")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def backoff(clock: Clock | None = None, **policy: Any) -> Backoff:
    return Backoff(RetryPolicy(**policy), clock=clock or Clock(), rng=random.Random(0))


def test_delays_grow_to_a_limit_with_jitter() -> None:
    delays = [b.next_delay_s(REFUSED, has_connected=True) for b in [backoff()] for _ in range(12)]
    expected = [min(0.05 * 2**i, 5.0) for i in range(12)]
    assert all(0.75 * e <= d <= 1.25 * e for d, e in zip(delays, expected, strict=True))
    assert len({d / e for d, e in zip(delays, expected, strict=True)}) == 12


def test_a_service_that_replied_once_is_retried_without_limit() -> None:
    clock = Clock()
    attempts = backoff(clock)
    for _ in range(100):
        clock.now += 60
        attempts.next_delay_s(REFUSED, has_connected=True)


def test_a_service_that_never_replied_is_retried_for_a_limited_time() -> None:
    clock = Clock()
    attempts = backoff(clock, connect_timeout_s=30)
    clock.now = 29
    attempts.next_delay_s(REFUSED, has_connected=False)
    clock.now = 30
    with pytest.raises(ApiError, match="connection refused"):
        attempts.next_delay_s(REFUSED, has_connected=False)


def test_a_call_is_given_up_when_the_next_try_would_come_after_the_users_time() -> None:
    clock = Clock()
    full = api_error(Code.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL", retry_delay_s=5.0)
    attempts = backoff(clock, timeout_s=60, jitter=0)
    clock.now = 1000  # a wait that has gone well for long
    attempts.next_delay_s(full, has_connected=True)
    clock.now = 1050
    attempts.next_delay_s(full, has_connected=True)
    clock.now = 1056
    with pytest.raises(ApiError, match="full"):
        attempts.next_delay_s(full, has_connected=True)
    attempts.reset()
    attempts.next_delay_s(full, has_connected=True)


def test_a_retry_never_comes_before_the_services_own_delay() -> None:
    full = api_error(Code.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL", retry_delay_s=2.0)
    delays = [backoff().next_delay_s(full, has_connected=True) for _ in range(20)]
    assert all(2.0 <= delay <= 2.5 for delay in delays)


def test_progress_resets_the_delays() -> None:
    attempts = backoff(jitter=0)
    for _ in range(5):
        attempts.next_delay_s(REFUSED, has_connected=True)
    attempts.reset()
    assert attempts.next_delay_s(REFUSED, has_connected=True) == 0.05


def test_unforeseen_failures_are_retried_a_few_times_only() -> None:
    crash = api_error(Code.INTERNAL, "RST_STREAM")
    attempts = backoff(unforeseen_max=2)
    attempts.next_delay_s(crash, has_connected=True)
    attempts.next_delay_s(crash, has_connected=True)
    with pytest.raises(ApiError):
        attempts.next_delay_s(crash, has_connected=True)


@pytest.mark.parametrize("code", list(Code))
def test_a_refusal_is_final_unless_it_is_unavailable_or_has_a_delay(code: Code) -> None:
    refusal = api_error(code, "no", reason="WHY")
    assert is_retryable(refusal) is (code is Code.UNAVAILABLE)
    assert is_retryable(api_error(code, "later", reason="WHY", retry_delay_s=0.0))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (Code.UNAVAILABLE, True),
        (Code.CANCELLED, True),
        (Code.DEADLINE_EXCEEDED, True),
        (Code.INTERNAL, True),
        (Code.UNKNOWN, True),
        (Code.UNIMPLEMENTED, False),
        (Code.RESOURCE_EXHAUSTED, False),
        (Code.UNAUTHENTICATED, False),
        (Code.INVALID_ARGUMENT, False),
    ],
)
def test_transient_network_errors_are_retried(code: Code, expected: bool) -> None:
    assert is_retryable(api_error(code, "no ErrorInfo")) is expected


@pytest.mark.parametrize(
    "policy",
    [{"initial_s": 0}, {"factor": 0.5}, {"jitter": 1}, {"max_s": 0.01}, {"unforeseen_max": -1}, {"timeout_s": -1}],
)
def test_an_invalid_retry_policy_is_refused(policy: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|needs"):
        RetryPolicy(**policy)
