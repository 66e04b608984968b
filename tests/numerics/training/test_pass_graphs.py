"""Training passes in buckets, as graphs run them; a capture that runs the functions again stands in for a GPU's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.numerics.agreement import distance
from tests.support.numerics.by_kernels import FEW, fused, spoil_new_gradients
from tests.support.numerics.harness import Driver, make_data, make_spec
from tests.support.numerics.tenants import assert_same, train
from workers.model.attention import PackedAttention
from workers.model.base_model import BaseModel
from workers.model.gpu_attention import VarlenAttention
from workers.model.gpu_operations import TRAINING_TILE_ROWS
from workers.selftest.training_kernels import check_training_kernels
from workers.training import memory, pass_graphs
from workers.training.pass_graphs import Trunk, cut, left_tiles_of_bucket, rows_of_bucket

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_base_models")]


def between(like: Any, ends: Tensor, num_rows: int, longest: int) -> Any:
    """Stand in for attention between ends that are on a device, and have no values yet."""
    assert isinstance(like, PackedAttention), "the model's own"

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        lengths = [length for length in ends.diff().tolist() if length]
        assert sum(lengths) == num_rows
        assert max(lengths) <= longest
        return PackedAttention(lengths)(*args, **kwargs)

    return attend


def again(self: Trunk, _: Any) -> None:
    """Stand in for a capture: run on the same inputs, into the same result."""
    out = torch.empty(self._bucket.num_rows, self._model.hidden_size, dtype=self._model.dtype)

    def forward() -> None:
        self._hidden = self._run()
        out.copy_(self._hidden.detach())

    def backward() -> None:
        assert self._hidden is not None
        self._model.backward(self._hidden, self._dhidden)

    self._replays = forward, backward, out


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[pass_graphs.Bucket]:
    """The buckets that were captured; a CPU captures nothing."""
    buckets = []

    def capture(self: Trunk, pool: Any) -> None:
        buckets.append(self._bucket)
        again(self, pool)

    # patched: what only a GPU has
    monkeypatch.setattr(
        pass_graphs, "can_capture", lambda model: model.training_layers is not None and model.has_pass_graphs
    )
    monkeypatch.setattr(VarlenAttention, "between", between)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(Trunk, "capture", capture)
    return buckets


@pytest.mark.parametrize("exact", [False, True])
def test_passes_by_graphs_train_as_passes_without(
    qwen3: Path, captured: list[pass_graphs.Bucket], *, exact: bool
) -> None:
    expected = train(Driver(qwen3), FEW, num_steps=3)
    apart = distance(train(fused(qwen3, exact=exact), FEW, num_steps=3), expected)
    assert len(captured) == 1, "one bucket: its first pass runs without a graph, two by one"
    assert apart.logprobs < 1e-3
    assert apart.gradients < 1e-3


def test_what_is_in_the_memory_of_a_gradient_before_its_first_pass_reaches_nothing(
    qwen3: Path, captured: list[pass_graphs.Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(BaseModel, "sets_gradients", False)
        expected = train(fused(qwen3, dtype="bfloat16"), FEW[2:], num_steps=2)
    set_by_passes = spoil_new_gradients(monkeypatch)
    assert_same(train(fused(qwen3, dtype="bfloat16"), FEW[2:], num_steps=2), expected)
    assert any(set_by_passes)
    assert len(captured) == 2, "one of either training"


@pytest.mark.parametrize(("fewest", "num_sequences"), [(16, 16), (None, 8)])
def test_requests_that_attend_alone_have_a_bucket_of_their_own_lengths(
    qwen3: Path,
    captured: list[pass_graphs.Bucket],
    monkeypatch: pytest.MonkeyPatch,
    fewest: int | None,
    num_sequences: int,
) -> None:
    """And if they share a call of attention, it has as many sequences as that needs."""
    monkeypatch.setattr(PackedAttention, "fewest_sequences", fewest)
    expected = train(Driver(qwen3), FEW, num_steps=2)
    apart = distance(train(fused(qwen3), FEW, num_steps=2), expected)
    assert apart.gradients < 1e-3
    assert captured
    for bucket in captured:
        assert bool(bucket.requests) == (fewest is None)
        assert bucket.num_sequences == num_sequences


def test_a_pass_that_takes_most_of_the_memory_has_no_graph(
    qwen3: Path, captured: list[pass_graphs.Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "KEPT_FRACTION", 1e-9)
    train(fused(qwen3), FEW, num_steps=2)
    assert not captured


def test_passes_of_other_sizes_share_a_bucket_and_leave_no_rows_of_the_last(
    qwen3: Path, captured: list[pass_graphs.Bucket]
) -> None:
    """The same tenant, whose sequences get shorter."""
    tenant = replace(FEW[0], passes=[make_data("cross_entropy", [length], length) for length in (8, 7, 6, 5)])
    expected = train(Driver(qwen3), [tenant], num_steps=1)
    apart = distance(train(fused(qwen3, pass_tokens_max=8), [tenant], num_steps=1), expected)
    assert len(captured) == 1
    assert apart.logprobs < 1e-4
    assert apart.gradients < 1e-4


def test_passes_run_without_graphs_if_a_capture_fails(
    qwen3: Path, captured: list[pass_graphs.Bucket], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Trunk, "capture", refuse)
    expected = train(Driver(qwen3), FEW, num_steps=3)
    apart = distance(train(fused(qwen3), FEW, num_steps=3), expected)
    assert apart.logprobs < 1e-3
    assert [record.getMessage() for record in caplog.records if "without graphs" in record.getMessage()] == [
        "training passes run without graphs, which is slower: operation not permitted when stream is capturing"
    ]
    assert not captured


def test_a_pass_without_memory_drops_the_graphs_and_is_tried_again(
    qwen3: Path, captured: list[pass_graphs.Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Trunk.forward

    def forward_in_little_memory(self: Trunk) -> Tensor:
        if self.is_captured:
            raise torch.OutOfMemoryError
        return forward(self)

    monkeypatch.setattr(Trunk, "forward", forward_in_little_memory)
    expected = train(Driver(qwen3), FEW[2:], num_steps=2)
    apart = distance(train(fused(qwen3, recompute="off"), FEW[2:], num_steps=2), expected)
    assert len(captured) == 1, "the second step had a graph"
    assert apart.logprobs < 1e-3


@pytest.mark.parametrize(("most", "num_captured"), [(1, 0), (2, 2)])
def test_the_least_recently_used_bucket_gives_way(
    qwen3: Path, captured: list[pass_graphs.Bucket], monkeypatch: pytest.MonkeyPatch, most: int, num_captured: int
) -> None:
    """Two tenants in turn, whose passes are of two buckets: the longest sequence differs."""
    monkeypatch.setattr(pass_graphs, "GRAPHS_MAX", most)
    driver = fused(qwen3)
    lengths = {"short": 3, "long": 9}
    driver.install(*(make_spec(name, 2) for name in lengths))
    for _ in range(2):
        for name, length in lengths.items():
            driver.train(driver.backward(name, make_data("cross_entropy", [length])), driver.step(name))
    assert len(captured) == num_captured


@pytest.mark.parametrize(("dtype", "is_wrong"), [("float32", False), ("float32", True), ("bfloat16", False)])
def test_graphs_that_give_other_gradients_are_not_used(
    qwen3: Path, captured: list[pass_graphs.Bucket], monkeypatch: pytest.MonkeyPatch, dtype: str, *, is_wrong: bool
) -> None:
    """In bf16 gradients are set, too."""
    model = fused(qwen3, dtype=dtype).engine.base_model
    fill = Trunk.fill

    def filled_wrongly(self: Trunk, *args: Any) -> None:
        fill(self, *args)
        if self.is_captured:
            self._tables.tensors[4].zero_()  # the scalings of adapters

    if is_wrong:
        monkeypatch.setattr(Trunk, "fill", filled_wrongly)
    check_training_kernels(model)
    assert len(captured) == 1
    assert model.has_pass_graphs != is_wrong


@pytest.mark.parametrize(
    ("num_rows", "expected"), [(1, 64), (64, 64), (65, 128), (1000, 1024), (1030, 1152), (2048, 2048)]
)
def test_an_eighth_of_a_bucket_is_left_over_at_most(num_rows: int, expected: int) -> None:
    assert rows_of_bucket(num_rows) == expected
    assert len(range(num_rows, expected)[::TRAINING_TILE_ROWS]) <= left_tiles_of_bucket(expected)


def test_rows_that_are_left_over_are_sequences_no_longer_than_the_longest() -> None:
    assert cut(0, 8) == []
    assert cut(19, 8) == [8, 8, 3]
