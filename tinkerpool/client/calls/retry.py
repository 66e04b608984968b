"""When a call is tried again, and after which delay.

Every call of the client is safe to repeat: by its sequence number, by its request id, or because it only reads. So
errors that may pass are retried without end, or for as long as the user says, and a restarting coordinator costs a
client nothing but time. Two errors are not: while no service has ever replied, the address may be wrong; and unforeseen
failures of the service, after a few times in a row.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from tinkerpool.errors import ApiError, Cancelled, Code, DeadlineExceeded, InternalError, Unavailable

_log = logging.getLogger("tinkerpool")

WARN_AFTER_S = 10.0
"""A call that is retried for this long is logged, and then once in as many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with jitter."""

    initial_s: float = 0.05
    """First delay."""
    max_s: float = 5.0
    """Longest delay, unless the service asks for more."""
    factor: float = 2.0
    """Growth from one delay to the next."""
    jitter: float = 0.25
    """Each delay is drawn from +- this fraction of itself, so that clients do not return all at once."""
    connect_timeout_s: float = 30.0
    """How long to look for a service that has never replied. 0: try once."""
    unforeseen_max: int = 5
    """Most retries in a row of a call that fails with INTERNAL or UNKNOWN without a reason of the service's."""
    timeout_s: float | None = None
    """How long a call is tried again since its last progress. None: without end."""

    def __post_init__(self) -> None:
        if not (0 < self.initial_s <= self.max_s and self.factor >= 1 and 0 <= self.jitter < 1):
            raise ValueError("a retry policy needs 0 < initial_s <= max_s, factor >= 1 and 0 <= jitter < 1")
        if self.connect_timeout_s < 0 or self.unforeseen_max < 0:
            raise ValueError("connect_timeout_s and unforeseen_max must be 0 or more")
        if self.timeout_s is not None and not self.timeout_s >= 0:
            raise ValueError(f"timeout_s must be None or a number of seconds, 0 or more, not {self.timeout_s}")


class Backoff:
    """The delays of one call. Pure: time and randomness are passed in."""

    def __init__(self, policy: RetryPolicy, *, clock: Callable[[], float], rng: random.Random) -> None:
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._begin = clock()
        self.reset()

    def reset(self) -> None:
        """Start again with short delays, after progress."""
        self._failing_since: float | None = None
        self._num_unforeseen = 0
        self._delay_s = self._policy.initial_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first attempt."""
        return self._clock() - self._begin

    def next_delay_s(self, error: ApiError, *, has_connected: bool) -> float:
        """Return the delay before the next attempt, in seconds. Raises `error` if the call is not to be repeated."""
        if not is_retryable(error):
            raise error
        if isinstance(error, InternalError):
            self._num_unforeseen += 1
            if self._num_unforeseen > self._policy.unforeseen_max:
                raise error
        if not has_connected and self.elapsed_s >= self._policy.connect_timeout_s:
            raise error
        if self._failing_since is None:
            self._failing_since = self._clock()
        delay_s = max(self._delay_s, error.retry_delay_s or 0.0)
        timeout_s = self._policy.timeout_s
        if timeout_s is not None and self._clock() - self._failing_since + delay_s > timeout_s:
            raise error
        self._delay_s = min(self._delay_s * self._policy.factor, self._policy.max_s)
        spread = self._policy.jitter
        # Never sooner than the service asked for.
        return delay_s * (1 + self._rng.uniform(0 if error.retry_delay_s else -spread, spread))


class Retries:
    """The retries of all calls of one connection: whether a service has ever replied, and one warning for all."""

    def __init__(self, policy: RetryPolicy | None = None) -> None:
        self._policy = policy or RetryPolicy()
        self._rng = random.Random()
        self._has_connected = False
        self._warning_time = -WARN_AFTER_S

    def start(self) -> Backoff:
        """Return the delays of a new call."""
        return Backoff(self._policy, clock=time.monotonic, rng=self._rng)

    def note_reply(self) -> None:
        """Record that the service replied: from now on it is awaited without end."""
        self._has_connected = True

    async def pause(self, backoff: Backoff, error: ApiError) -> None:
        """Wait before the next attempt of a call. Raises `error` if the call is not to be repeated."""
        self._has_connected = self._has_connected or bool(error.reason)
        delay_s = backoff.next_delay_s(error, has_connected=self._has_connected)
        now = time.monotonic()
        if backoff.elapsed_s > WARN_AFTER_S and now - self._warning_time > WARN_AFTER_S:
            self._warning_time = now
            _log.warning("no reply for %.0f s, still trying: %s", backoff.elapsed_s, error)
        await asyncio.sleep(delay_s)


def is_retryable(error: ApiError) -> bool:
    """Return whether the same call may succeed later. A refusal by the service is final unless it says otherwise."""
    if error.retry_delay_s is not None:
        return True
    if isinstance(error, Unavailable):
        return True
    from_network = not error.reason
    return from_network and (
        isinstance(error, Cancelled | DeadlineExceeded)
        or (isinstance(error, InternalError) and error.code in {Code.INTERNAL, Code.UNKNOWN, Code.ABORTED})
    )
