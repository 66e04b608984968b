"""Drawing by graphs, here by a stand-in that runs a function again, against drawing without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from workers.contract.messages import SamplingParams
from workers.sampling import device_drawing, draw_graphs
from workers.sampling.draw_graphs import DrawGraphs
from workers.sampling.drawing import Drawn
from workers.sampling.graph_pool import GraphPool

NUM_USED, NUM_ROWS, VOCAB_SIZE = 5, 16, 97
KINDS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}]


class AgainPool(GraphPool):
    """Runs a function again, on the same inputs, into the same result."""

    def __init__(self) -> None:
        super().__init__()
        self.num_captured = 0

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `GraphPool`."""
        self.num_captured += 1
        out = run()
        return lambda: out.copy_(run())


class FailingPool(GraphPool):
    """Captures nothing."""

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `GraphPool`."""
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture
def rows() -> tuple[Tensor, Tensor]:
    """Logits and log-probabilities; those of rows that are left over are not numbers."""
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(NUM_ROWS, VOCAB_SIZE)).astype(np.float32))
    logits[NUM_USED:] = torch.nan
    return logits, logits.log_softmax(-1)


def drawn(graphs: DrawGraphs, params: list[SamplingParams], numbers: list[list[float]]) -> Drawn | None:
    """Return what graphs draw; None if they do not."""
    drawing = graphs.draw_rows(params, numbers)
    return None if drawing is None else drawing.read()


def numbers_of(seed: int) -> list[list[float]]:
    return [[number] for number in np.random.default_rng(seed).random(NUM_USED).tolist()]


def test_tokens_by_graphs_are_those_without(rows: tuple[Tensor, Tensor]) -> None:
    pool = AgainPool()
    graphs = DrawGraphs(*rows, pool)
    for seed in range(3):
        for kind in KINDS:
            params = [SamplingParams(max_tokens=1, **own) for own in [*KINDS, {}]]
            params = params if kind == KINDS[-1] else [SamplingParams(max_tokens=1, **kind)] * NUM_USED
            used = rows[0][:NUM_USED], rows[1][:NUM_USED]
            expected = device_drawing.draw_rows(*used, params, numbers_of(seed)).read()
            assert drawn(graphs, params, numbers_of(seed)) == expected
            assert graphs.tokens[:NUM_USED].tolist() == expected.tokens, "for a step that begins before they are read"
    assert pool.num_captured == 3, "greedy, sampled, filtered; settings and numbers are inputs"


def test_tokens_can_be_read_after_the_next_ones_are_drawn(rows: tuple[Tensor, Tensor]) -> None:
    graphs, params = DrawGraphs(*rows, AgainPool()), [SamplingParams(max_tokens=1)] * NUM_USED
    expected = [drawn(graphs, params, numbers_of(seed)) for seed in range(2)]
    drawings = [graphs.draw_rows(params, numbers_of(seed)) for seed in range(2)]
    assert [drawing and drawing.read() for drawing in drawings] == expected


def test_rows_that_are_not_finite_are_named_by_a_graph(rows: tuple[Tensor, Tensor]) -> None:
    graphs, params = DrawGraphs(*rows, AgainPool()), [SamplingParams(max_tokens=1)] * NUM_USED
    for bad in (0.0, torch.nan, torch.inf, -torch.inf):
        rows[0][NUM_USED - 1, 3] = bad
        result = drawn(graphs, params, numbers_of(0))
        assert result is not None
        assert result.is_finite == [True] * (NUM_USED - 1) + [bad == 0.0]


def test_rows_with_other_numbers_than_one_have_no_graph(rows: tuple[Tensor, Tensor]) -> None:
    graphs, params = DrawGraphs(*rows, AgainPool()), [SamplingParams(max_tokens=1)] * 2
    assert graphs.draw_rows(params, [[0.5], [0.5, 0.7]]) is None
    assert graphs.draw_rows(params, [[0.5], []]) is None


def test_large_drawings_are_several_graphs(rows: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_graphs, "VALUES_MAX", 3 * VOCAB_SIZE)
    pool = AgainPool()
    graphs = DrawGraphs(*rows, pool)
    kinds = [KINDS[0], KINDS[0], KINDS[1], KINDS[2], KINDS[0]]
    params = [SamplingParams(max_tokens=1, **kind) for kind in kinds]
    for seed in range(2):
        used = rows[0][:NUM_USED], rows[1][:NUM_USED]
        expected = device_drawing.draw_rows(*used, params, numbers_of(seed)).read()
        assert drawn(graphs, params, numbers_of(seed)) == expected
        assert graphs.tokens[:NUM_USED].tolist() == expected.tokens
    assert pool.num_captured == 3, "two rows each, and one"


def test_there_are_no_graphs_after_a_capture_that_fails(
    rows: tuple[Tensor, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    graphs, params = DrawGraphs(*rows, FailingPool()), [SamplingParams(max_tokens=1)] * NUM_USED
    assert [graphs.draw_rows(params, numbers_of(seed)) for seed in range(2)] == [None, None]
    assert caplog.text.count("tokens are drawn without graphs") == 1
