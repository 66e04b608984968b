"""Drawing of next tokens as CUDA graphs: it is one launch of the host instead of thirty.

A graph draws from adjacent rows of what step graphs write, by settings that are its only inputs. There is one for each
power of two of rows and each `device_drawing.Kind`; many rows are drawn by several of the largest. A graph is captured
from a drawing that ran without it, and must give what that gave; if it does not, or cannot be captured, there are no
graphs from then on. The tokens stay on the device too, for a step that begins before they are read.

Does not depend on models or requests.

Dimensions: D rows drawn, N rows of a graph (at least D), V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from workers.contract.messages import SamplingParams
from workers.model.gpu_operations import power_of_two
from workers.sampling.device_drawing import Drawing, Kind, draw, kind_of, settings_of
from workers.sampling.graph_pool import GraphError, GraphPool, Run

logger = logging.getLogger(__name__)

VALUES_MAX = 1 << 24
"""Logits of a graph, whose drawing takes some 30 bytes for each in the pool."""


class DrawGraphs:
    """The graphs of one sampler. Used by one thread only."""

    def __init__(self, logits: Tensor, logprobs: Tensor, pool: GraphPool) -> None:
        """Draw from the first rows of logits and log-probabilities (.., V)."""
        self._logits = logits
        self._logprobs = logprobs
        self._pool = pool
        self.tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        """What was drawn last, in its first rows."""
        self._rows_max = 1 << (VALUES_MAX // logits.shape[1]).bit_length() - 1
        """Of a graph."""
        self._draws: dict[tuple[int, int, Kind], DrawGraph] = {}
        """By first row, number of rows and kind."""
        self._is_off = False

    def draw_rows(self, params: Sequence[SamplingParams], numbers: Sequence[Sequence[float]]) -> Drawing | None:
        """Draw a token of each of the first rows, by its one number, with its log-probability; None: use no graph."""
        num_used = len(params)
        if self._is_off or any(len(of_row) != 1 for of_row in numbers):
            return None
        settings = np.hstack((settings_of(params), numbers))
        starts = range(0, num_used, self._rows_max)
        parts = [slice(start, min(start + self._rows_max, num_used)) for start in starts]
        try:
            if len(parts) == 1:
                num_rows = power_of_two(num_used)
                return Drawing(self._drawn(0, params, settings), num_rows, num_rows, num_used)
            # Of each a copy: the next graph overwrites it.
            drawn = [self._drawn(part.start, params[part], settings[part]).view(4, -1).clone() for part in parts]
            used = [values[:, : part.stop - part.start] for values, part in zip(drawn, parts, strict=True)]
            return Drawing(torch.cat(used, 1).flatten(), num_used, num_used)
        except GraphError as error:
            logger.warning("tokens are drawn without graphs, which is slower: %s", error)
            self._is_off = True
            self._draws.clear()
            return None

    def _drawn(
        self, start: int, params: Sequence[SamplingParams], settings: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    ) -> Tensor:
        """Return the results (4 N,) of the graph that draws the rows from `start` on. Raises GraphError."""
        rows = slice(start, start + power_of_two(len(params)))
        place = start, rows.stop - start, kind_of(params, self._logits.shape[1])
        if (graph := self._draws.get(place)) is not None:
            graph.fill(settings)
            return graph.replay()
        graph = DrawGraph(self._logits[rows], self._logprobs[rows], self.tokens[rows], place[2])
        graph.fill(settings)
        drawn = graph.begin(self._pool)
        self._draws[place] = graph
        return drawn


class DrawGraph:
    """The graph of one number of rows and one kind, with its settings."""

    def __init__(self, logits: Tensor, logprobs: Tensor, tokens: Tensor, kind: Kind) -> None:
        """Allocate the settings. `tokens` (N,) get what is drawn from logits and log-probabilities (N, V)."""
        self._rows = logits, logprobs
        self._tokens = tokens
        self._kind = kind
        self._settings = torch.zeros(len(logits), 4, dtype=torch.float64, device=logits.device)
        self._replay: Run | None = None

    def fill(self, settings: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> None:
        """Overwrite the settings (D, 4); what rows that are left over give is not read."""
        target = self._settings[: len(settings)]
        target.copy_(torch.from_numpy(settings), non_blocking=True)

    def begin(self, pool: GraphPool) -> Tensor:
        """Draw, and capture it for the next times. Raises GraphError."""
        drawn = self._run()
        self._replay = pool.captured(self._run, drawn)
        return drawn

    def replay(self) -> Tensor:
        """Return the results of `draw` (4 N,), which the next graph of the pool overwrites."""
        assert self._replay is not None
        return self._replay()

    def _run(self) -> Tensor:
        drawn, extremes = draw(*self._rows, self._settings, self._kind)
        self._tokens.copy_(drawn[0, :, 0])
        return torch.cat((drawn.flatten(), extremes.flatten()))
