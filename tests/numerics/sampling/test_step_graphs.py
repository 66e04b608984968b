"""Steps in buckets, as graphs run them; a capture that runs a function again stands in for that of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.numerics.captures import again
from tests.support.numerics.harness import Driver
from tests.support.numerics.interpreted import interpret
from tests.support.numerics.random_adapters import MLP_SHAPES, segments_of
from tests.support.numerics.samplers import Sampling, make_sampler, request
from workers.contract.messages import SampledSequence, SampleRequest
from workers.model.few_rows import ROWS_MAX
from workers.model.fused_runs import AdapterTables, forward_runs
from workers.model.sampling_layers import SamplingLayers
from workers.model.usual_layers import UsualModel
from workers.sampling import step_graphs
from workers.sampling.attention.pages import triton_pages
from workers.sampling.graph_pool import GraphPool, is_same
from workers.sampling.kv_cache import PagedCache
from workers.sampling.step_graphs import GraphStep, PlacedAdapters, StepGraphs

pytestmark = [pytest.mark.usefixtures("own_base_models"), pytest.mark.slow]


def wanted() -> list[SampleRequest]:
    """Return requests that end at different steps: groups of one sample and of three, with and without adapters."""
    return [
        request("one", "a/v", length=5, num_samples=3, max_tokens=3, seed=1),
        request("two", "", length=9, num_samples=1, max_tokens=4, seed=2),
        request("three", "b/v", length=7, num_samples=1, max_tokens=2, seed=3, top_p=0.8),
    ]


@pytest.fixture
def by_graphs(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Sampling, list[tuple[SampledSequence, ...]]]:
    """A sampler with graphs, and the samples of one without pages, layers or graphs."""
    interpret()
    # patched: a CPU captures nothing
    monkeypatch.setattr(GraphPool, "capture", again)
    driver = Driver(qwen3)
    by_blocks = Sampling(driver, make_sampler(driver))
    by_blocks.publish("a", "b")
    expected = by_blocks.sequences(*wanted())
    model = driver.engine.base_model
    model.sampling_layers = SamplingLayers(UsualModel(model.model), has_gate=True)
    assert model.sampling_layers.takes_few
    model.use(model.numerics)
    model.current.fuse_forward = forward_runs
    sampler = make_sampler(driver, 400, triton_pages)
    assert isinstance(sampler._cache, PagedCache)
    # A sampler makes them on a GPU alone.
    sampler._pass._graphs = StepGraphs(model, sampler._cache, triton_pages, 8, GraphPool())
    return Sampling(driver, sampler), expected


def assert_same(mine: list[tuple[SampledSequence, ...]], theirs: list[tuple[SampledSequence, ...]]) -> None:
    for own, right in zip(mine, theirs, strict=True):
        for one, other in zip(own, right, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-4)


def test_samples_by_graphs_are_those_without(
    by_graphs: tuple[Sampling, list[tuple[SampledSequence, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, expected = by_graphs
    begun = list[int]()
    begin = GraphStep.begin

    def noted(step: GraphStep, pool: GraphPool) -> None:
        begun.append(1)
        begin(step, pool)

    monkeypatch.setattr(GraphStep, "begin", noted)
    assert_same(sampling.sequences(*wanted()), expected)
    assert len(begun) == 3, "five, four and one sequence"
    assert_same(sampling.sequences(*wanted()), expected)
    assert len(begun) == 3, "the second time every bucket has its graph"


def test_a_graph_takes_the_adapters_of_its_step(
    by_graphs: tuple[Sampling, list[tuple[SampledSequence, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, _ = by_graphs
    sent = list[int]()
    fill_tables = GraphStep._fill_tables

    def noted(step: GraphStep, adapters: AdapterTables[Any]) -> None:
        sent.append(1)
        fill_tables(step, adapters)

    monkeypatch.setattr(GraphStep, "_fill_tables", noted)
    by_blocks = Sampling(sampling.driver, make_sampler(sampling.driver))
    for name in ("a", "b", "a"):
        asked = request(name, f"{name}/v", length=5, max_tokens=5, seed=1, temperature=0.5, scales_logprobs=True)
        assert_same(sampling.sequences(asked), by_blocks.sequences(asked))
    assert len(sent) == 3, "once for each, not for each of its steps"


def test_a_step_of_fewer_rows_has_tables_of_its_own() -> None:
    segments = segments_of(torch.float32, shapes=MLP_SHAPES)[:2]  # rows 0 to 8
    placed = PlacedAdapters(segments, len(MLP_SHAPES), 16)
    assert placed.are_of(segments, 16)
    assert not placed.are_of(segments, 8), "it would write to rows that the step has not"
    assert not placed.are_of(segments[:1], 16)
    assert [8, -8, 0] in placed.tables.tiles.tolist()
    many = PlacedAdapters(segments, len(MLP_SHAPES), 2 * ROWS_MAX)
    assert (many.tables.tiles[:, 1] > 0).all(), "a library's products need no tiles of other rows"


def test_the_least_recently_used_graph_gives_way(
    by_graphs: tuple[Sampling, list[tuple[SampledSequence, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, expected = by_graphs
    monkeypatch.setattr(step_graphs, "GRAPHS_MAX", 1)
    assert_same(sampling.sequences(*wanted()), expected)
    graphs = sampling.sampler._pass._graphs
    assert graphs is not None
    assert [bucket.num_rows for bucket in graphs._steps] == [1]  # private: nothing else shows it


def test_a_graph_with_an_adapter_that_has_diverged_is_right() -> None:
    expected = torch.tensor([[1.0, -3.0], [torch.nan, torch.inf]], dtype=torch.bfloat16)
    assert is_same(expected.clone(), expected)
    assert not is_same(expected.nan_to_num(0), expected)
    assert not is_same(expected + torch.tensor([[0.5, 0.0], [0.0, 0.0]]).bfloat16(), expected)


@pytest.mark.parametrize("way", ["refuses", "is wrong"])
def test_steps_run_without_graphs_if_a_capture_fails(
    by_graphs: tuple[Sampling, list[tuple[SampledSequence, ...]]],
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sampling, expected = by_graphs

    def fails(_: GraphPool, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if way == "refuses":
            raise RuntimeError("operation not permitted when stream is capturing")
        return lambda: torch.zeros_like(run())

    monkeypatch.setattr(GraphPool, "capture", fails)
    assert_same(sampling.sequences(*wanted()), expected)
    assert caplog.text.count("decode steps run without graphs") == 1
