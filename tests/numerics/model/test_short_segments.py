"""Segments of few rows, as in decode steps, are computed together and have the same bits as solo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.mini_model import build_mini_model
from tests.support.numerics.cases import MODELS_BY_THREADS
from tests.support.numerics.harness import Driver, make_data, make_spec
from tests.support.numerics.samplers import Sampling, sampling
from workers.contract.messages import Datum
from workers.model import segments
from workers.model.numerics import SUM_MAX
from workers.model.packed_delta import PackedDelta
from workers.model.segments import Run, Segment, ShortRun, backward_segments, forward_segments
from workers.rows import GroupViews

pytestmark = pytest.mark.slow

KEYS = ("a", "b", "c", "d", "e")
RANKS = (8, 8, 8, 4, 16)
"""Three can be one batch; the fourth has another scaling, the fifth is in another slab."""


def hidden_of(s: Sampling, runs: Sequence[tuple[str, int, int]]) -> tuple[Tensor, Tensor]:
    """Return hidden states and logits of rows (key, first token, count), each of which is a sequence."""
    model = s.driver.engine.base_model
    rows = dict(zip(KEYS, s.driver.engine.bank.acquire([f"{key}/v" for key in KEYS]), strict=True))
    tokens = torch.cat([torch.arange(first, first + count) for _, first, count in runs])
    segments, stop = [], 0
    for key, _, count in runs:
        start, stop = stop, stop + count
        segments.append(Segment(start, stop, rows[key].groups))

    def attend(
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)

    with torch.no_grad():
        recur = PackedDelta([1] * len(tokens), model.device)
        hidden = model.forward(tokens, torch.zeros_like(tokens), segments, attend, recur)
        return hidden, model.unembed(hidden, segments)


@pytest.mark.parametrize(("model_directory", "num_threads"), MODELS_BY_THREADS, indirect=["model_directory"])
def test_short_segments_have_the_same_bits_batched_and_solo(model_directory: Path, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    s = sampling(model_directory)
    s.publish(*KEYS, ranks=RANKS)
    runs = [("a", 0, 3), ("b", 10, 1), ("d", 15, 2), ("c", 20, 15), ("e", 40, 5)]
    for chosen in (runs, [runs[0], runs[3]], [*runs[:2], ("c", 100, 20)]):  # the second with a gap between its slots
        together = hidden_of(s, chosen)
        stop = 0
        for run in chosen:
            start, stop = stop, stop + run[2]
            for whole, solo in zip(together, hidden_of(s, [run]), strict=True):
                assert torch.equal(whole[start:stop], solo)


def test_short_segments_are_one_batch_where_possible(qwen3: Path) -> None:
    s = sampling(qwen3)
    s.publish(*KEYS, ranks=RANKS)
    rows = [row.groups for row in s.driver.engine.bank.acquire([f"{key}/v" for key in KEYS])]
    segments = [Segment(3 * number, 3 * number + 3, adapter) for number, adapter in enumerate(rows)]
    current = s.driver.engine.base_model.current
    routing = current.route(segments, needs_grad=False)
    assert [type(run) for run in routing.runs] == [ShortRun, Run, Run]
    routing = current.route(segments)
    assert {type(run) for run in routing.runs} == {Run}, "the backward takes no short runs"
    assert [run.length for run in routing.single_runs] == [3] * 5
    assert len(routing.runs) == 3, "but batches of equal length"


@pytest.mark.usefixtures("own_base_models")
def test_linears_whose_batches_have_other_bits_take_a_segment_at_a_time(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others stay batches. A library may split a long sum over threads, but not in a batch of several sums."""
    driver = Driver(qwen3)
    model = driver.engine.base_model
    hidden, vocab = model.groups[0].shape.d_in, model.vocab_size
    model.use(replace(model.numerics, unbatched=frozenset({(vocab, hidden)})))
    keys = ("a", "b", "c")
    driver.install(*(make_spec(key) for key in keys))
    sizes: dict[int, set[int]] = {}
    forward = Run.forward

    def counted(run: Run, group: int, x: Tensor, ys: Sequence[Tensor]) -> object:
        sizes.setdefault(ys[0].shape[1], set()).add(len(run.adapters))
        return forward(run, group, x, ys)

    monkeypatch.setattr(Run, "forward", counted)
    driver.train(*(driver.backward(key, make_data("cross_entropy", [2])) for key in keys))
    assert sizes.pop(vocab) == {1}
    assert set.union(*sizes.values()) == {3}


@pytest.mark.parametrize("num_segments", [1, 5])
def test_parts_of_a_sum_are_added_in_order(num_segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    name, widths = "addmm" if num_segments == 1 else "baddbmm", []
    multiply = getattr(torch, name)

    def counted(into: Tensor, left: Tensor, right: Tensor, **options: Any) -> Tensor:
        widths.append(left.shape[-1])
        product: Tensor = multiply(into, left, right, **options)
        return product

    monkeypatch.setattr(torch, name, counted)
    x, A = torch.randn(num_segments, 16, 80), torch.randn(num_segments, 8, 80)
    B, y = torch.randn(num_segments, 8, 16), torch.zeros(num_segments, 16, 16)
    if num_segments == 1:
        x, A, B, y = x[0], A[0], B[0], y[0]
    views = GroupViews(A=A, Bs=(B,), A_grad=None, B_grads=())
    xa = forward_segments(x, [y], views, 2.0, sum_max=32)
    assert widths == [32, 32, 16]
    expected = 2.0 * (x[..., :32] @ A[..., :32].transpose(-2, -1))
    for part in (slice(32, 64), slice(64, 80)):
        expected += 2.0 * (x[..., part] @ A[..., part].transpose(-2, -1))
    torch.testing.assert_close(xa, expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(
        forward_segments(x, [torch.zeros_like(y)], views, 2.0, sum_max=80), 2.0 * (x @ A.transpose(-2, -1))
    )


def assert_same_bits_solo(driver: Driver, data: Sequence[Datum]) -> None:
    """Assert that adapters trained together have the results and gradients that each has solo.

    In the second step: B is zero before the first.
    """
    keys = ("a", "b", "c")
    driver.install(*(make_spec(key) for key in keys))
    for key in keys:
        driver.train(driver.backward(key, data), driver.step(key))
    together = driver.train(*(driver.backward(key, data) for key in keys))
    gradients = [driver.gradient(key) for key in keys]
    for key, result, gradient in zip(keys, together, gradients, strict=True):
        solo = f"{key} solo"
        driver.install(make_spec(solo, seed=make_spec(key).seed))
        driver.train(driver.backward(solo, data), driver.step(solo))
        [own] = driver.train(driver.backward(solo, data))
        assert [each.tobytes() for each in own.logprobs] == [each.tobytes() for each in result.logprobs]
        assert torch.equal(driver.gradient(solo), gradient)


@pytest.mark.usefixtures("own_base_models")
@pytest.mark.parametrize("is_unembedding_alone", [False, True])
def test_sums_in_parts_have_the_same_bits_batched_and_solo(
    qwen3: Path, is_unembedding_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the trial at loading finds; here the parts are short, so that a miniature has several of them.

    Their length leaves no rest of less than 8 values: that would fail the trial.
    """
    monkeypatch.setattr(segments, "SUM_MAX", 24)
    driver = Driver(qwen3)
    model = driver.engine.base_model
    groups = [model.unembedding] if is_unembedding_alone else model.groups
    in_parts = frozenset((d_out, group.shape.d_in) for group in groups for d_out in group.shape.d_outs)
    model.use(replace(model.numerics, in_parts=in_parts))
    assert_same_bits_solo(driver, make_data("cross_entropy", [5, 3]))


@pytest.mark.usefixtures("own_base_models")
def test_only_linear_with_long_sums_has_the_same_bits_batched_and_solo(tmp_path: Path) -> None:
    """With two threads some builds of the library divide the sums of this unembedding's backward, and no others."""
    torch.set_num_threads(2)
    driver = Driver(build_mini_model(tmp_path, vocab_size=1024))
    numerics, hidden = driver.engine.base_model.numerics, driver.engine.base_model.hidden_size
    assert numerics.in_parts <= {(1024, hidden)}
    assert not numerics.unbatched
    assert_same_bits_solo(driver, make_data("cross_entropy", [64]))


@pytest.mark.usefixtures("own_base_models")
def test_linears_whose_whole_sums_fail_the_trial_alone_add_up_parts(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches, padded or not, with a backward or without."""
    s = sampling(qwen3)
    s.publish(*KEYS, ranks=RANKS)
    driver, model = s.driver, s.driver.engine.base_model
    model.use(replace(model.numerics, in_parts=frozenset({(model.vocab_size, model.hidden_size)})))
    sums: dict[int, set[int | None]] = {}

    def recorded(compute: Any) -> Any:
        def call(x: Tensor, ys: Sequence[Tensor], *others: Any) -> Any:
            sums.setdefault(ys[0].shape[-1], set()).add(others[-1])
            return compute(x, ys, *others)

        return call

    monkeypatch.setattr(segments, "forward_segments", recorded(forward_segments))
    monkeypatch.setattr(segments, "backward_segments", recorded(backward_segments))
    for length in (5, 40):
        driver.train(*(driver.backward(key, make_data("cross_entropy", [length])) for key in "ab"))
    hidden_of(s, [("a", 0, 3), ("b", 10, 1)])
    assert sums.pop(model.vocab_size) == {SUM_MAX}
    assert set.union(*sums.values()) == {None}
