"""The measured costs of one base model's cycles, and what follows from them: a cycle's tokens, a batch's deadline.

`CycleCosts` has the cost of a pass by its tokens, and of what is behind it. The last few passes are kept in classes by
size, each spanning a factor of two. A class counts by its medians, so that a pause, a swap or a first run of new shapes
has no effect. Because classes are separate, a thousand large passes do not outweigh the small ones, which show the
fixed cost. A class without new passes is dropped after a while.

`TokenBudget` has the tokens of a cycle on one worker: the operator's number, or the knee of the measured costs. A cycle
costs a fixed time and a time per token. Where the tokens take `KNEE` times as long as the fixed part, a larger cycle is
hardly more efficient, and every tenant waits longer for the next one.

`Deadlines` records the times of batches. The deadline of a batch is a generous multiple of its predicted time. (Pings
find a worker sooner that is stopped or cut off.)

Depends on batches and incarnations; not on operations, tenants or queues. Main invariants: every cost
is a function of the measurements, in their order, and of nothing else; no result depends on the budget, because chunks
are canonical; an incarnation without a finished batch gets `DEADLINE_UNKNOWN_S`.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from statistics import median_low

from workers.contract.messages import Batch, LoadItem, PassItem, SaveItem

logger = logging.getLogger(__name__)

KEPT = 9
"""Measurements kept in one class: its median is right with up to four outliers."""
KEPT_MIN = 3
"""A class with fewer measurements is left out of the line: one outlier must not decide."""
MEMORY = 512
"""Passes after which a class without a new measurement is dropped: the speed of the machine may have changed."""
SPAN_MIN, SPAN_WIDE = 1.5, 4.0
"""Ratio of tokens, largest class to smallest: from the first value on, the fixed cost and the cost of a token can be
told apart; from the second on, well enough to extrapolate beyond the measured sizes."""
TOKENS_MIN = 64
"""A pass with fewer tokens shows little about the cost of a token: it is used only while there is no larger one."""
KNEE = 20.0
"""Tokens at the knee take this many times the fixed cost: less than 5 % of such a cycle is fixed."""
START_TOKENS = 2048
"""The budget until the knee is known."""
TRUST = 2.0
"""A budget is at most this many times the largest measured pass (or the start): beyond it the line is unreliable."""
TOKENS_MAX = 65_536
"""The largest budget, for a machine on which the measured cost of a token is zero."""
LONE_PART, SHARED_PART = 0.6, 0.25
"""Parts of `cycle_s_max` that a cycle takes with the decoding that is owed for it: of a lone tenant, and while several
are active. A request that has just missed a cycle waits for that one, of the first kind at worst, and for its own."""
NOTABLE = 0.1
"""Changes by a smaller fraction are not logged."""
DEADLINE_FLOOR_S = 8.0
"""Seconds that every batch may take, also an empty one."""
DEADLINE_FACTOR = 8.0
"""How many times its prediction a batch may take."""
DEADLINE_UNKNOWN_S = 600.0
"""Seconds that a batch may take before any pass was measured, or if it is its incarnation's first one."""
SOLO_FACTOR = 4.0
"""How many times longer a batch may take for each solo loss of its operation: it may only be slow."""
STEP_TOKENS = 640
"""The most rows of a decode step that may be running when a batch arrives: of prompts and of running sequences. On a
GPU there may be seven times as many, which take less than `DEADLINE_FACTOR` times as long."""
BYTES_PER_S, SAVE_S = 20e6, 5.0
"""The slowest transfer of states to a worker and back, and the most seconds that a save may take besides."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A pass, or the medians of several."""

    num_tokens: float
    length: float
    """Mean length of the sequence that a token is in, in tokens."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Line:
    """The time of a pass: `fixed_s + token_s * tokens`."""

    fixed_s: float
    token_s: float
    is_wide: bool
    """Its points span enough sizes to extrapolate to other sizes."""


class CycleCosts:
    """The measurements of one base model, from all its workers."""

    def __init__(self) -> None:
        self._classes: dict[int, deque[tuple[int, Measured]]] = {}
        """By the bits of the number of tokens; each measurement with its number."""
        self._medians: dict[int, Measured] = {}
        self._hint: Measured | None = None
        """A pass that was not pure, used as long as there is no other measurement."""
        self._num_passes = 0
        self._steps: deque[float] = deque(maxlen=KEPT)
        self._commits: deque[float] = deque(maxlen=KEPT)
        self._line: Line | None = None

    @property
    def line(self) -> Line | None:
        """The cost of a pass; None: unknown. Neither part is negative, and they are not both zero."""
        return self._line

    @property
    def commit_s(self) -> float:
        """Seconds of a commit; 0: not known yet."""
        return median_low(self._commits) if self._commits else 0.0

    @property
    def end_s(self) -> float:
        """Seconds of a cycle behind its pass: steps and commit; 0: not known yet."""
        return self.commit_s + (median_low(self._steps) if self._steps else 0.0)

    @property
    def fixed_s(self) -> float | None:
        """Seconds that a cycle of any size takes, its commit included. None: nothing was measured.

        Without a line, the time of the smallest passes: an upper bound.
        """
        known = self._known()
        if not known:
            return None
        return self.commit_s + (known[0].seconds if self._line is None else self._line.fixed_s)

    @property
    def num_tokens_seen(self) -> float:
        """Tokens of the largest class of passes; 0: nothing was measured."""
        return max((each.num_tokens for each in self._medians.values()), default=0.0)

    def observe_pass(self, num_tokens: int, length: float, seconds: float, *, is_pure: bool = True) -> None:
        """Record the time of a pass that costs 1 or more tokens.

        A pass that is not pure included other work, such as installs: it counts only while there is no other.
        """
        if not is_pure:
            if self._hint is None and not self._classes:
                self._hint = Measured(num_tokens, length, seconds)
            return
        if self._hint is not None and num_tokens >= min(self._hint.num_tokens, TOKENS_MIN):
            self._hint = None
        self._num_passes += 1
        key = num_tokens.bit_length()
        measured = self._classes.setdefault(key, deque(maxlen=KEPT))
        measured.append((self._num_passes, Measured(num_tokens, length, seconds)))
        while measured[0][0] <= self._num_passes - MEMORY:
            measured.popleft()
        for stale in [k for k, kept in self._classes.items() if kept[-1][0] <= self._num_passes - MEMORY]:
            del self._classes[stale], self._medians[stale]
        self._medians[key] = Measured(
            median_low(each.num_tokens for _, each in measured),
            median_low(each.length for _, each in measured),
            median_low(each.seconds for _, each in measured),
        )
        self._line = _fit([self._medians[k] for k, kept in self._classes.items() if len(kept) >= KEPT_MIN])

    def observe_end(self, step_s: float, commit_s: float) -> None:
        """Record the time of a cycle's steps, without what they waited for decoding, and of its commit."""
        self._steps.append(step_s)
        self._commits.append(commit_s)

    def predicted_s(self, num_tokens: int, length: float) -> float | None:
        """Return an upper bound of the seconds of a pass that costs 1 or more tokens; None: unknown.

        In proportion to the nearest smaller pass, which counts the fixed cost several times, and to the length of the
        sequences, because the cost of attention per token grows at most in proportion to it.
        """
        known = self._known()
        if not known:
            return None
        below = [each for each in known if each.num_tokens <= max(num_tokens, TOKENS_MIN)]
        near = below[-1] if below else known[0]
        return near.seconds * max(1.0, num_tokens / near.num_tokens) * max(1.0, length / near.length)

    def tokens_within(self, seconds: float) -> float:
        """Return the tokens of a pass of this many seconds; infinite if that is unknown, or tokens cost no time.

        Without a wide line: in proportion to the largest passes, which gives too few rather than too many.
        """
        if (line := self._line) is not None and line.is_wide:
            return max(0.0, seconds - line.fixed_s) / line.token_s if line.token_s else float("inf")
        known = self._known()
        return seconds / known[-1].seconds * known[-1].num_tokens if known and known[-1].seconds else float("inf")

    def _known(self) -> list[Measured]:
        """Return the measurements of all classes, and the hint, by number of tokens."""
        hints = [self._hint] if self._hint is not None else []
        return sorted([*self._medians.values(), *hints], key=lambda each: each.num_tokens)


class TokenBudget:
    """The budget of one base model's cycles."""

    def __init__(
        self, costs: CycleCosts, *, base_model: str, chunk_tokens: int, tokens: int | None, cycle_s_max: float
    ) -> None:
        """`tokens`: the operator's number; None: measured, from one chunk up to a part of `cycle_s_max`."""
        self._costs = costs
        self._base_model = base_model
        self._chunk_tokens = chunk_tokens
        self._cycle_s_max = cycle_s_max
        self._is_measured = tokens is None
        self.seconds = cycle_s_max
        """Seconds that the next pass, the steps behind it and the commit may take."""
        self._tokens = self._logged = tokens or max(START_TOKENS, chunk_tokens)

    @property
    def tokens(self) -> int:
        """Tokens of one cycle on one worker; whole chunks are counted, and a cycle takes at least one."""
        return self._tokens

    def update(self, part: float = 1.0) -> None:
        """Update the budget from the measured costs. Call between cycles.

        `part`: of `cycle_s_max`, for the next cycle.
        """
        self.seconds = part * self._cycle_s_max
        if not self._is_measured:
            return
        self._tokens = self._measured(self.seconds)
        if abs(self._tokens - self._logged) > NOTABLE * self._logged:
            line = self._costs.line
            shown = "costs unknown" if line is None else f"{line.fixed_s:.4f} s + {line.token_s:.3g} s per token"
            logger.debug("cycles of %s carry %d tokens (%s)", self._base_model, self._tokens, shown)
            self._logged = self._tokens

    def _measured(self, seconds_max: float) -> int:
        knee, line = float(START_TOKENS), self._costs.line
        if line is not None and line.is_wide:
            fixed_s = line.fixed_s + self._costs.commit_s
            knee = KNEE * fixed_s / line.token_s if line.token_s else float("inf")
        trusted = max(START_TOKENS, TRUST * self._costs.num_tokens_seen)
        most = min(trusted, TOKENS_MAX, self._costs.tokens_within(max(0.0, seconds_max - self._costs.end_s)))
        return max(self._chunk_tokens, int(min(knee, most)))


class Deadlines:
    """The deadlines of one base model's batches."""

    def __init__(self, costs: CycleCosts) -> None:
        self._costs = costs
        self._owed_s: dict[str, float] = {}
        """Incarnation that has finished a batch (and so has loaded its kernels) to the most seconds that decoding gets
        as its share for the last one."""

    def allowed_s(
        self,
        batch: Batch,
        incarnation: str,
        num_solo_losses: int = 0,
        extra_tokens: float = 0.0,
        saved_bytes: int = 0,
    ) -> float:
        """Return the seconds within which the worker must reply.

        `extra_tokens`: what its passes cost besides their tokens. `saved_bytes`: of the states in its reply, at most.
        """
        num_tokens, length = _size(batch, extra_tokens)
        predicted = self._costs.predicted_s(num_tokens, length) if num_tokens else 0.0
        step = self._costs.predicted_s(STEP_TOKENS, 0.0)  # no backward outweighs long sequences
        if incarnation not in self._owed_s or predicted is None or step is None:
            return DEADLINE_UNKNOWN_S
        # Decoding gets its share for the batch before, and finishes its running step: this batch may wait for both.
        waiting = self._owed_s[incarnation] + min(DEADLINE_FACTOR * step, DEADLINE_UNKNOWN_S)
        states = (_state_bytes(batch) + saved_bytes) / BYTES_PER_S + SAVE_S * _num_saves(batch)
        return (DEADLINE_FLOOR_S + DEADLINE_FACTOR * predicted + waiting + states) * SOLO_FACTOR**num_solo_losses

    def observe(self, batch: Batch, incarnation: str, seconds: float, extra_tokens: float = 0.0) -> None:
        """Record the time after which the worker replied to a batch; `extra_tokens` as in `allowed_s`."""
        is_first = incarnation not in self._owed_s
        self._owed_s[incarnation] = seconds * batch.decode_share / (1.0 - batch.decode_share)
        num_tokens, length = _size(batch, extra_tokens)
        if num_tokens:
            self._costs.observe_pass(num_tokens, length, seconds, is_pure=not is_first and not batch.installs)

    def forget(self, incarnation: str) -> None:
        """Drop the state of an incarnation that has ended."""
        self._owed_s.pop(incarnation, None)


def _fit(points: list[Measured]) -> Line | None:
    """Fit a line by least squares of relative errors, so that small passes count as much: they show the fixed cost."""
    if not points or any(point.seconds <= 0 for point in points):
        return None
    span = max(point.num_tokens for point in points) / min(point.num_tokens for point in points)
    if span < SPAN_MIN:
        return None
    is_wide = span >= SPAN_WIDE
    # Minimise sum((fixed * u + token * v - 1)^2) with u = 1 / seconds, v = tokens / seconds.
    uu = sum(1 / p.seconds**2 for p in points)
    uv = sum(p.num_tokens / p.seconds**2 for p in points)
    vv = sum((p.num_tokens / p.seconds) ** 2 for p in points)
    u, v = sum(1 / p.seconds for p in points), sum(p.num_tokens / p.seconds for p in points)
    determinant = uu * vv - uv * uv
    fixed_s, token_s = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
    if fixed_s < 0:
        return Line(0.0, v / vv, is_wide)
    if token_s < 0:
        return Line(u / uu, 0.0, is_wide)
    return Line(fixed_s, token_s, is_wide)


def _state_bytes(batch: Batch) -> int:
    states = [install.state for install in batch.installs] + [i.state for i in batch.items if isinstance(i, LoadItem)]
    return sum(state.num_bytes for state in states if state is not None)


def _num_saves(batch: Batch) -> int:
    return sum(isinstance(item, SaveItem) for item in batch.items)


def _size(batch: Batch, extra_tokens: float) -> tuple[int, float]:
    """Return the cost of the batch's passes in tokens, and the mean length of the sequence that a token is in."""
    lengths = [len(datum.tokens) for item in batch.items if isinstance(item, PassItem) for datum in item.data]
    num_tokens = sum(lengths)
    length = sum(length * length for length in lengths) / max(1, num_tokens)
    return num_tokens + round(extra_tokens) if num_tokens else 0, length
