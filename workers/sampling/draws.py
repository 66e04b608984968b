"""The draws of a step: which rows of logits give the next tokens of which sequences, and where they are drawn.

Logits of a CPU are drawn from there, those of a GPU on it, by a graph if one wrote them. Does not depend on slots,
caches or passes.

Main invariant: the draws of one call are in the order of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Protocol

from workers.contract.messages import SampleEvent
from workers.sampling import device_drawing
from workers.sampling.draw_graphs import DrawGraphs
from workers.sampling.drawing import Drawn, check_finite, draw_rows
from workers.sampling.sample_pass import LogitsRows
from workers.sampling.sequences import ActiveRequest, ActiveSequence


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """The next tokens of sequences of one request, all of which run already, or all of which begin."""

    active: ActiveRequest
    sequences: Sequence[ActiveSequence]
    logits: LogitsRows
    rows: slice
    """Of `logits`: one per sequence, or one that all of them begin with."""

    @property
    def row_indices(self) -> range:
        """The same rows."""
        return range(self.rows.start, self.rows.stop)

    def numbers(self, num_unread: int) -> list[list[float]]:
        """Return the random numbers by which each of the rows is drawn.

        `num_unread`: tokens of each sequence that were drawn before and that the host has not read.
        """
        numbers = self.active.next_numbers(self.sequences, num_unread)
        return [numbers] if len(self.row_indices) == 1 else [[number] for number in numbers]

    def append(
        self, tokens: Sequence[int], logprobs: Sequence[float]
    ) -> tuple[list[SampleEvent], list[ActiveSequence]]:
        """Append a token to each sequence that still runs; return events, and the sequences that ended."""
        return self.active.append(self.sequences, tokens, logprobs, self.logits, self.rows)


class Arriving(Protocol):
    """Tokens that are being drawn."""

    def read(self) -> Drawn:
        """Return the tokens once they are drawn. Raises the library's error if the device failed."""


@dataclass(frozen=True, slots=True)
class _Arrived:
    """Tokens that were drawn on the host."""

    drawn: Drawn

    def read(self) -> Drawn:
        """See `Arriving`."""
        return self.drawn


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """Draws with tokens that the host has not read."""

    draws: Sequence[Draw]
    counts: Sequence[int]
    """Tokens of each draw."""
    arriving: Arriving
    stays_on_device: bool
    """Whether the tokens are in `DrawGraphs.tokens` too, in the order of the draws."""


def late(active: ActiveRequest) -> Draw:
    """Begin sequences that had no slot when their prompt was computed; return the draw of their first tokens."""
    first = active.first
    assert first is not None
    return Draw(active, active.begin(), first, slice(0, 1))


def in_rows(draws: Sequence[Draw]) -> list[Draw]:
    """Return draws in the order of their rows, so that these need not be picked."""
    return sorted(draws, key=lambda draw: (id(draw.logits), draw.rows.start))


def begin(draws: Sequence[Draw], graphs: DrawGraphs | None, num_unread: int = 0) -> Flight:
    """Draw a token for each sequence of draws in the order of their rows.

    `num_unread`: see `Draw.numbers`. Raises NonFiniteLogitsError if a row on a CPU is not finite.
    """
    of_draws = [draw.numbers(num_unread) for draw in draws]
    params = [draw.active.request.params for draw in draws for _ in draw.row_indices]
    rows, numbers = _rows(draws), list(chain.from_iterable(of_draws))
    counts = [sum(map(len, of_draw)) for of_draw in of_draws]
    if rows.is_of_graph and graphs is not None and (by_graph := graphs.draw_rows(params, numbers)) is not None:
        return Flight(draws, counts, by_graph, stays_on_device=True)
    arriving: Arriving
    if rows.logits.is_cpu:
        check_finite(rows.values)
        tokens = draw_rows(rows.values, params, numbers)
        logprobs = rows.logprobs_of([row for row, of_row in enumerate(numbers) for _ in of_row], tokens)
        arriving = _Arrived(Drawn(tokens, logprobs, [True] * len(numbers)))
    else:
        arriving = device_drawing.draw_rows(rows.logits, rows.logprobs, params, numbers)
    return Flight(draws, counts, arriving, stays_on_device=False)


def _rows(draws: Sequence[Draw]) -> LogitsRows:
    """Return the rows of all draws, in their order."""
    parts = [list(own) for _, own in groupby(draws, key=lambda draw: id(draw.logits))]
    return LogitsRows.joined([own[0].logits.pick([row for draw in own for row in draw.row_indices]) for own in parts])
