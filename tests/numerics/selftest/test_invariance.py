"""The trials at loading: an engine promises bits only if the library's kernels keep them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.numerics.harness import Driver, make_engine
from workers import engine
from workers.contract.settings import EngineSettings
from workers.host.allocator import kept_bytes
from workers.model.base_model import BaseModel
from workers.model.numerics import SUM_MAX
from workers.model.pretrained import UnsupportedModelError
from workers.selftest import row_invariance, thread_invariance
from workers.selftest.loading import load_base_model


@pytest.mark.slow
def test_threads_are_fixed_where_bits_depend_on_their_number(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A trial runs once in a process; and no build of torch at hand has bits that depend on the number of threads.
    torch.set_num_threads(2)
    monkeypatch.setattr(thread_invariance, "_TRIED", {})
    assert "; up to 2 threads;" in Driver(qwen3).engine.info.fingerprint
    monkeypatch.setattr(thread_invariance, "_TRIED", {})
    monkeypatch.setattr(thread_invariance, "_trial", lambda _: [torch.tensor(torch.get_num_threads())])
    assert "; 2 threads;" in Driver(qwen3).engine.info.fingerprint


def test_device_whose_rows_depend_on_their_position_is_refused(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def uneven(x: Tensor, matrix: Tensor) -> Tensor:
        return torch.matmul(x, matrix) * (1 + 2.0**-20 * torch.arange(len(x)).unsqueeze(1))

    monkeypatch.setattr(torch.Tensor, "__matmul__", uneven)  # this library has independent rows
    assert not row_invariance.are_blocks_invariant([torch.ones(8, 8)], 64)
    monkeypatch.undo()
    assert row_invariance.are_blocks_invariant([torch.ones(8, 8)], 64)
    monkeypatch.setattr("workers.selftest.row_invariance.are_blocks_invariant", lambda *_: False)
    with pytest.raises(UnsupportedModelError, match="load it without exact"):
        load_base_model(EngineSettings(model_path=str(qwen3), exact=True))


@pytest.mark.usefixtures("own_base_models")
def test_a_cpu_with_another_torch_than_the_tested_one_promises_no_bits(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Driver(qwen3).engine.info.is_exact
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    info = Driver(qwen3).engine.info
    assert not info.is_exact
    assert "rows depend on their neighbours" in info.fingerprint
    with pytest.raises(UnsupportedModelError, match=r"torch 2.11.0\+cu130 keeps no bits on a CPU; 2.13.x does"):
        load_base_model(EngineSettings(model_path=str(qwen3), exact=True))


def test_only_the_linears_whose_batches_have_other_bits_are_left_out(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base_model = Driver(qwen3).engine.base_model
    weights = [weight for group in base_model.groups for weight in group.weights]
    assert row_invariance.shapes_unbatched(weights, 16) == frozenset(), "small products keep their bits in batches"
    unembedding = (weights[-1].shape[0], weights[-1].shape[1])
    monkeypatch.setattr(row_invariance, "_batch_equals_singles", lambda _, *shape: shape[:2] != unembedding)
    assert row_invariance.shapes_unbatched(weights, 16) == {unembedding}


@pytest.mark.usefixtures("own_base_models")
def test_long_sums_are_added_up_in_parts_where_that_allows_batches(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A linear takes them alone, and with it those that read the same input: their adapters have one product."""
    base_model = load_base_model(EngineSettings(model_path=str(qwen3)))
    assert not base_model.numerics.in_parts, "the miniature has no long sums"
    attention = next(group for group in base_model.groups if len(group.weights) == 3)
    (query, _), (key, hidden) = (tuple(weight.shape) for weight in attention.weights[:2])
    vocab = base_model.vocab_size

    def load(fails_whole: set[int], fails_in_parts: set[int]) -> BaseModel:
        """Load where linears of so many outputs, which all read the hidden state, fail the trial."""

        def trial(_: object, d_out: int, d_in: int, rank: int, length: int, sum_max: int | None) -> bool:
            return d_in != hidden or d_out not in (fails_whole if sum_max is None else fails_in_parts)

        monkeypatch.setattr(row_invariance, "_batch_equals_singles", trial)
        return load_base_model(EngineSettings(model_path=str(qwen3)))

    def fingerprint(base_model: BaseModel) -> str:
        return base_model.info(is_thread_count_invariant=False, are_samples_batch_invariant=True).fingerprint

    one = load({vocab}, set())
    assert one.numerics.in_parts == {(vocab, hidden)}
    assert not one.numerics.unbatched
    assert [group.shape.index for group in one.groups if group.is_in_parts] == [one.unembedding.shape.index]
    assert f"; sums of {SUM_MAX} values for {vocab} x {hidden};" in f"{fingerprint(one)};", "the bits are others"
    two = load({vocab, key}, set())
    assert f"; sums of {SUM_MAX} values for {key} x {hidden}, {vocab} x {hidden};" in f"{fingerprint(two)};"
    assert {group.shape.d_outs for group in two.groups if group.is_in_parts} == {(query, key, key), (vocab,)}
    neither = load({vocab, key}, {query})
    assert neither.numerics.in_parts == {(vocab, hidden)}
    assert neither.numerics.unbatched == {(key, hidden)}, "parts do not help its group"


@pytest.mark.usefixtures("own_base_models")
def test_memory_of_the_trials_at_loading_is_not_kept(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial of threads takes more memory than the model, and leaves it in pieces."""
    grown: list[int] = []

    def trial(_: BaseModel) -> bool:
        filling = [torch.ones(1 << 18) for _ in range(64)]  # takes the free blocks of the heap
        before = kept_bytes()
        tensors = [torch.ones(1 << 18) for _ in range(16)]
        last = tensors.pop()  # stays at the heap's end
        del tensors
        grown.append(kept_bytes() - before)
        return len(filling) == 64 and float(last[0]) == 1

    monkeypatch.setattr(engine, "is_thread_count_invariant", trial)
    make_engine(qwen3)
    assert grown[0] < 1 << 20
