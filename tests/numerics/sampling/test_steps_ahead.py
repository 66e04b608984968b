"""Decode steps that begin before the tokens of the step before them are read; stand-ins run what graphs would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

import pytest
import torch
from torch import Tensor

from tests.support.numerics.captures import again
from tests.support.numerics.harness import Driver
from tests.support.numerics.interpreted import interpret
from tests.support.numerics.samplers import Sampling, make_sampler, request
from workers.contract.messages import SampledSequence, SampleEvent, SampleRequest, StopReason, TokenEvent
from workers.host.downloads import Download
from workers.model.fused_runs import forward_runs
from workers.model.sampling_layers import SamplingLayers
from workers.model.usual_layers import UsualModel
from workers.sampling.attention.pages import triton_pages
from workers.sampling.draw_graphs import DrawGraphs
from workers.sampling.graph_pool import GraphPool
from workers.sampling.kv_cache import PagedCache
from workers.sampling.sample_pass import LogitsRows, NextPart, SamplePass
from workers.sampling.step_graphs import StepGraphs

pytestmark = [pytest.mark.usefixtures("own_base_models"), pytest.mark.slow]


@pytest.fixture
def ahead(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sequences of each step that began ahead."""
    interpret()
    # patched: a CPU captures nothing
    monkeypatch.setattr(GraphPool, "capture", again)
    counts: list[int] = []
    follow = SamplePass.follow

    def noted(own: SamplePass, parts: Sequence[NextPart], drawn: Tensor) -> LogitsRows | None:
        rows = follow(own, parts, drawn)
        assert rows is not None
        counts.append(len(rows.logits))
        return rows

    monkeypatch.setattr(SamplePass, "follow", noted)
    return counts


@pytest.fixture
def both(qwen3: Path, ahead: list[int]) -> tuple[Sampling, Sampling]:
    """A sampler whose steps run ahead, and one on the same adapters whose steps do not."""
    driver = Driver(qwen3)
    model = driver.engine.base_model
    model.sampling_layers = SamplingLayers(UsualModel(model.model), has_gate=True)
    model.use(model.numerics)
    model.current.fuse_forward = forward_runs
    samplers = [make_sampler(driver, 400, triton_pages) for _ in range(2)]
    for sampler in samplers:
        assert isinstance(sampler._cache, PagedCache)
        pool = GraphPool()
        # A sampler makes them on a GPU alone.
        sampler._pass._graphs = graphs = StepGraphs(model, sampler._cache, triton_pages, 8, pool)
        if sampler is samplers[0]:
            sampler._draw_graphs = DrawGraphs(graphs.logits, graphs.logprobs, pool)
    mine, theirs = (Sampling(driver, sampler) for sampler in samplers)
    mine.publish("a", "b")
    return mine, theirs


def wanted() -> list[SampleRequest]:
    """Return requests of several samples, with and without adapters, drawn in several ways."""
    return [
        request("one", "a/v", length=5, num_samples=2, max_tokens=6, seed=1, stream=True),
        request("two", "", length=9, max_tokens=4, seed=2, temperature=0.0),
        request("three", "b/v", length=7, max_tokens=5, seed=3, top_p=0.8),
    ]


def assert_same(mine: list[tuple[SampledSequence, ...]], theirs: list[tuple[SampledSequence, ...]]) -> None:
    for own, right in zip(mine, theirs, strict=True):
        for one, other in zip(own, right, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.logprobs.tolist() == pytest.approx(other.logprobs.tolist(), abs=1e-4)
            assert one.stop_reason == other.stop_reason


def is_of(event: SampleEvent, index: int) -> TypeGuard[TokenEvent]:
    return isinstance(event, TokenEvent) and event.sequence_index == index


def test_samples_of_steps_ahead_are_those_of_steps_one_by_one(
    both: tuple[Sampling, Sampling], ahead: list[int]
) -> None:
    mine, theirs = both
    expected = theirs.sequences(*wanted())
    assert not ahead
    assert_same(mine.sequences(*wanted()), expected)
    assert ahead == [4, 4], "third and fourth tokens; when one sequence has all its tokens, the step waits for them"


def test_a_step_gives_each_sequence_one_token(both: tuple[Sampling, Sampling]) -> None:
    mine, _ = both
    mine.sampler.start_sample(request("one", num_samples=2, max_tokens=6, seed=1, stream=True))
    for step in range(5):
        mine.step()
        tokens = [event for event in mine.events if isinstance(event, TokenEvent)]
        assert len(tokens) == 2 * (step + 1)


def test_a_sequence_that_stops_is_not_drawn_further(both: tuple[Sampling, Sampling], ahead: list[int]) -> None:
    mine, theirs = both
    (long,) = theirs.sequences(request("long", num_samples=3, max_tokens=8, seed=5))
    stop = int(long[0].tokens[3])
    asked = request("long", num_samples=3, max_tokens=8, seed=5, stop_tokens=(stop,), stream=True)
    expected = theirs.sequences(asked)
    assert StopReason.STOP in [sequence.stop_reason for sequence in expected[0]]
    [result] = mine.run(asked)
    assert_same([result.sequences], expected)
    for index, sequence in enumerate(result.sequences):
        streamed = [event.token for event in mine.events if is_of(event, index)]
        assert streamed == sequence.tokens.tolist(), "the token that was drawn behind its stop is nobody's"
    assert len(set(ahead)) > 1, "with all sequences, and with those that are left"


def test_a_request_joins_and_another_is_cancelled_behind_a_step_ahead(
    both: tuple[Sampling, Sampling], ahead: list[int]
) -> None:
    mine, theirs = both
    first, second = (request(name, key, max_tokens=9, seed=4) for name, key in (("first", "a/v"), ("gone", "")))
    joined = request("joined", "b/v", length=6, max_tokens=5, seed=6)
    expected = theirs.sequences(first, joined)
    for one in (first, second):
        mine.sampler.start_sample(one)
    for _ in range(3):
        mine.step()
    assert ahead
    mine.sampler.cancel_sample("gone")
    mine.sampler.start_sample(joined)
    while mine.sampler.can_decode():
        mine.step()
    assert_same([mine.result(name).sequences for name in ("first", "joined")], expected)
    assert mine.sampler.num_cache_blocks_used == 0


def test_what_ran_ahead_of_a_reset_is_forgotten(both: tuple[Sampling, Sampling], ahead: list[int]) -> None:
    mine, theirs = both
    expected = theirs.sequences(*wanted())
    mine.sampler.start_sample(request("lost", num_samples=2, max_tokens=9, seed=4))
    for _ in range(3):
        mine.step()
    assert ahead
    mine.sampler.reset()
    mine.events.clear()
    assert_same(mine.sequences(*wanted()), expected)


def test_logits_that_are_not_finite_end_their_request_alone(
    both: tuple[Sampling, Sampling], ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step ahead has overwritten the logits by the time this is known."""
    mine, theirs = both
    kept, bad = request("kept", "a/v", max_tokens=7, seed=4), request("bad", "b/v", max_tokens=7, seed=5)
    expected = theirs.sequences(kept)
    for one in (kept, bad):
        mine.sampler.start_sample(one)
    for _ in range(2):
        mine.step()
    assert ahead
    begin = mine.sampler._draw_graphs.draw_rows  # type: ignore[union-attr]
    graphs = mine.sampler._pass._graphs
    assert graphs is not None

    def spoiled(params: Sequence[object], numbers: Sequence[Sequence[float]]) -> object:
        """Draw from logits of which the row of "bad" is not finite; the base model and "a" come first."""
        graphs.logits[len(params) - 1, 7] = torch.nan
        return begin(params, numbers)  # type: ignore[arg-type]

    monkeypatch.setattr(mine.sampler._draw_graphs, "draw_rows", spoiled)
    mine.step()
    monkeypatch.undo()
    while mine.sampler.can_decode():
        mine.step()
    assert_same([mine.result("kept").sequences], expected)
    failure = mine.result("bad").error
    assert failure is not None
    assert "infinite or not a number" in failure.message


def test_tokens_that_cannot_be_read_fail_their_requests(
    both: tuple[Sampling, Sampling], ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not drawn again, from logits of the step ahead."""
    mine, theirs = both
    expected = theirs.sequences(*wanted())
    for one in wanted():
        mine.sampler.start_sample(one)
    for _ in range(2):
        mine.step()
    assert ahead

    def fails(_: Download) -> Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patched:
        patched.setattr(Download, "wait", fails)
        mine.step()
    for one in wanted():
        assert mine.result(one.op_id).error is not None
    mine.events.clear()
    assert_same(mine.sequences(*wanted()), expected)
