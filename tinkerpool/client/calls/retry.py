"""When to try again, and after how long. Pure: time and randomness are passed in.

Every call of the client is safe to repeat (by seq, by request id, or because it only reads), so what may succeed later
is retried for ever: a restarting coordinator costs a client nothing but time. Two limits: until a service has answered
once, for it may never have been there; and failures that the service did not foresee.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tinkerpool.errors import ApiError, Cancelled, Code, DeadlineExceeded, InternalError, Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with jitter."""

    initial_s: float = 0.05
    """First delay."""
    max_s: float = 5.0
    """Longest delay, unless the service asks for more."""
    factor: float = 2.0
    """From one delay to the next."""
    jitter: float = 0.25
    """A delay is drawn from +- this part of itself, so that clients do not come back all at once."""
    connect_timeout_s: float = 30.0
    """How long to look for a service that has never answered; 0 tries once."""
    unforeseen_max: int = 5
    """How often in a row to retry a call that fails with INTERNAL or UNKNOWN without the service having said why."""

    def __post_init__(self) -> None:
        if not (0 < self.initial_s <= self.max_s and self.factor >= 1 and 0 <= self.jitter < 1):
            raise ValueError("a retry policy needs 0 < initial_s <= max_s, factor >= 1 and 0 <= jitter < 1")
        if self.connect_timeout_s < 0 or self.unforeseen_max < 0:
            raise ValueError("connect_timeout_s and unforeseen_max must be 0 or more")


class Backoff:
    """The delays of one call. `next_delay_s` raises what cannot be mended by waiting."""

    def __init__(self, policy: RetryPolicy, *, clock: Callable[[], float], rng: random.Random) -> None:
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._begin = clock()
        self.reset()

    def reset(self) -> None:
        """There was progress: start again with short delays."""
        self.num_failures = 0
        self._num_unforeseen = 0
        self._delay_s = self._policy.initial_s

    @property
    def elapsed_s(self) -> float:
        """Since the first attempt."""
        return self._clock() - self._begin

    def next_delay_s(self, error: ApiError, *, has_connected: bool) -> float:
        """How long to wait before the next attempt, in seconds. Raises `error` if there shall be none."""
        if not is_retryable(error):
            raise error
        if isinstance(error, InternalError):
            self._num_unforeseen += 1
            if self._num_unforeseen > self._policy.unforeseen_max:
                raise error
        if not has_connected and self.elapsed_s >= self._policy.connect_timeout_s:
            raise error
        self.num_failures += 1
        delay_s = max(self._delay_s, error.retry_delay_s or 0.0)
        self._delay_s = min(self._delay_s * self._policy.factor, self._policy.max_s)
        spread = self._policy.jitter
        # Never sooner than the service asked for.
        return delay_s * (1 + self._rng.uniform(0 if error.retry_delay_s else -spread, spread))


def is_retryable(error: ApiError) -> bool:
    """Whether the same call may succeed later. A refusal by the service is final unless it says otherwise."""
    if error.retry_delay_s is not None:
        return True
    if isinstance(error, Unavailable):
        return True
    from_network = not error.reason
    return from_network and (
        isinstance(error, Cancelled | DeadlineExceeded)
        or (isinstance(error, InternalError) and error.code in {Code.INTERNAL, Code.UNKNOWN, Code.ABORTED})
    )
