"""What the cycles of one base model cost: a pass by its tokens, and a commit. Measured, and read by all who predict.

Passes are kept by size, in classes of a factor of two, the last few of each. A class speaks by its medians, so that a
pause, a swap or a first run of new shapes changes nothing; and because sizes are kept apart, a thousand large passes do
not wash out what the small ones said about the fixed cost. What has not been confirmed for long is forgotten.

Knows tokens and seconds; not what is computed, who asked, or what follows from a cost (`budget`, `clock`, `deadlines`).
Main invariant: everything here is a function of the measurements alone, in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

KEPT = 9
"""Measurements of one class: its median stands up to four that are wrong."""
KEPT_MIN = 3
"""With fewer, a class has no say in the line: one wrong measurement must not decide."""
MEMORY = 512
"""Passes after which a class of which there was none is forgotten: the machine may not be what it was."""
SPAN_MIN, SPAN_WIDE = 1.5, 4.0
"""How many times more tokens the largest class must have than the smallest, or the two costs cannot be told apart; and
from where on they can be told apart well enough to go by them beyond what was measured."""
TOKENS_MIN = 64
"""A pass with fewer tokens shows little about the price of one: it counts only while there is nothing better."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A pass, or what stands for several."""

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
    """What it was drawn through is far enough apart to go by it for other sizes."""


class CycleCosts:
    """The measurements of one base model, from all its workers."""

    def __init__(self) -> None:
        self._classes: dict[int, deque[tuple[int, Measured]]] = {}
        """By the bits of the number of tokens; each measurement with its number."""
        self._medians: dict[int, Measured] = {}
        self._hint: Measured | None = None
        """All that is known: a pass that did more than passing."""
        self._num_passes = 0
        self._commits: deque[float] = deque(maxlen=KEPT)
        self._line: Line | None = None

    @property
    def line(self) -> Line | None:
        """What a pass costs; None: not known. Neither cost is negative, and they are not both zero."""
        return self._line

    @property
    def commit_s(self) -> float:
        """Seconds of a commit; 0: not known yet."""
        return _median(self._commits) if self._commits else 0.0

    @property
    def fixed_s(self) -> float | None:
        """Seconds that a cycle takes whatever it carries, its commit included. None: nothing is known.

        Without a line: those of the smallest passes, which cannot be less.
        """
        known = self._known()
        if not known:
            return None
        return self.commit_s + (known[0].seconds if self._line is None else self._line.fixed_s)

    @property
    def num_tokens_seen(self) -> float:
        """Tokens of the largest passes that are remembered; 0: none is."""
        return max((each.num_tokens for each in self._medians.values()), default=0.0)

    def observe_pass(self, num_tokens: int, length: float, seconds: float, *, is_pure: bool = True) -> None:
        """A pass of so many tokens (1 or more) took so long. One that is not pure did something else besides: it counts
        only as long as nothing is known."""
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
            _median(each.num_tokens for _, each in measured),
            _median(each.length for _, each in measured),
            _median(each.seconds for _, each in measured),
        )
        self._line = _fit([self._medians[k] for k, kept in self._classes.items() if len(kept) >= KEPT_MIN])

    def observe_commit(self, seconds: float) -> None:
        """A cycle's commit took so long."""
        self._commits.append(seconds)

    def predicted_s(self, num_tokens: int, length: float) -> float | None:
        """What a pass of 1 or more tokens may well take, as a bound; None: not known.

        In proportion to the nearest smaller pass, which counts the fixed cost again and again, and to the length of the
        sequences, because attention makes a token dearer the longer its sequence, at most in proportion.
        """
        known = self._known()
        if not known:
            return None
        below = [each for each in known if each.num_tokens <= max(num_tokens, TOKENS_MIN)]
        near = below[-1] if below else known[0]
        return near.seconds * max(1.0, num_tokens / near.num_tokens) * max(1.0, length / near.length)

    def tokens_within(self, seconds: float) -> float:
        """Tokens of a pass that takes so long; infinite if nothing is known, or nothing limits them.

        Without a wide line: in proportion to the largest passes seen, which gives too few rather than too many.
        """
        if (line := self._line) is not None and line.is_wide:
            return max(0.0, seconds - line.fixed_s) / line.token_s if line.token_s else float("inf")
        known = self._known()
        return seconds / known[-1].seconds * known[-1].num_tokens if known and known[-1].seconds else float("inf")

    def _known(self) -> list[Measured]:
        """By number of tokens."""
        hints = [self._hint] if self._hint is not None else []
        return sorted([*self._medians.values(), *hints], key=lambda each: each.num_tokens)


def _median(values: Iterable[float]) -> float:
    """The middle one; of two in the middle the lower, so that it is one that was measured."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _fit(points: list[Measured]) -> Line | None:
    """The line with the least squares of relative errors: a small pass, which shows the fixed cost, counts as much."""
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
