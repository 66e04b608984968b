"""Drawing of next tokens as CUDA graphs: it is one launch of the host instead of thirty.

A graph draws from the first rows of what step graphs write, by settings that are its only inputs. There is one for each
power of two of rows and each `device_drawing.Kind`. A graph is captured from a drawing that ran without it, and must
give what that gave; if it does not, or cannot be captured, there are no graphs from then on. The tokens stay on the
device too, for a step that begins before they are read.

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
"""Logits of a graph, whose drawing takes some 30 bytes for each in the pool. Kernels of more take longer than their
launches."""


class DrawGraphs:
    """The graphs of one sampler. Used by one thread only."""

    def __init__(self, logits: Tensor, logprobs: Tensor, pool: GraphPool) -> None:
        """Draw from the first rows of logits and log-probabilities (.., V)."""
        self._logits = logits
        self._logprobs = logprobs
        self._pool = pool
        self.tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        """What was drawn last, in its first rows."""
        self._draws: dict[tuple[int, Kind], DrawGraph] = {}
        self._is_off = False

    def draw_rows(self, params: Sequence[SamplingParams], numbers: Sequence[Sequence[float]]) -> Drawing | None:
        """Draw a token of each of the first rows, by its one number, with its log-probability; None: use no graph."""
        num_used, vocab_size = len(params), self._logits.shape[1]
        num_rows = power_of_two(num_used)
        if self._is_off or num_rows * vocab_size > VALUES_MAX or any(len(of_row) != 1 for of_row in numbers):
            return None
        place = num_rows, kind_of(params, vocab_size)
        known = self._draws.get(place)
        graph = known or DrawGraph(self._logits[:num_rows], self._logprobs[:num_rows], self.tokens[:num_rows], place[1])
        graph.fill(np.hstack((settings_of(params), numbers)))
        try:
            drawn = graph.begin(self._pool) if known is None else graph.replay()
        except GraphError as error:
            logger.warning("tokens are drawn without graphs, which is slower: %s", error)
            self._is_off = True
            self._draws.clear()
            return None
        self._draws[place] = graph
        return Drawing(drawn, num_rows, num_rows, num_used)


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
