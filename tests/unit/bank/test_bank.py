"""The adapter bank: layout of a row, seeded initialisation, eviction, versions."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.numerics.bank_rows import SHAPES, assert_same, copy_of, fill, make_spec, weights_of
from workers.bank.bank import Bank
from workers.contract.adapted_modules import RANK_CLASSES, rank_class
from workers.rows import ALIGNMENT, RowLayout

FIRST_VALUES = [0.033296097069978714, -0.007186605129390955, 0.07977347075939178]


def test_every_matrix_is_an_aligned_view_and_none_overlap() -> None:
    layout = RowLayout(SHAPES, 8, ("attn", "mlp", "unembed"))
    flat = np.zeros(layout.num_values, dtype=np.float32)
    matrices = dict(layout.matrices(flat, 8))
    assert len(matrices) == 2 * 6
    for matrix in matrices.values():
        matrix[...] += 1
    assert flat.max() == 1
    assert flat.sum() == sum(matrix.size for matrix in matrices.values())
    for parts in layout.parts:
        assert parts is not None
        assert all(part.offset % ALIGNMENT == 0 for part in (parts.A, *parts.Bs))
    assert layout.num_values % ALIGNMENT == 0


def test_only_trained_modules_are_in_the_row() -> None:
    bank = Bank(SHAPES, 1)
    whole = bank.layout(make_spec())
    head = bank.layout(make_spec(train_attn=False, train_mlp=False))
    assert [name for name, _ in head.matrices(np.zeros(head.num_values, dtype=np.float32), 8)] == [
        "lm_head.lora_A.weight",
        "lm_head.lora_B.weight",
    ]
    assert head.num_values < whole.num_values
    with pytest.raises(ValueError, match="at least one of train_attn"):
        bank.layout(make_spec(train_attn=False, train_mlp=False, train_unembed=False))


@pytest.mark.parametrize(("rank", "padded"), [(1, 8), (8, 8), (9, 16), (16, 16), (32, 32), (64, 64), (128, 128)])
def test_rank_class_depends_on_the_rank_only(rank: int, padded: int) -> None:
    assert rank_class(rank) == padded
    assert padded in RANK_CLASSES


@pytest.mark.parametrize("rank", [0, -1, 129])
def test_rank_outside_all_classes_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank is {rank}"):
        rank_class(rank)


def test_fresh_adapter_is_uniform_in_its_bounds_and_depends_only_on_seed_and_module() -> None:
    layout = Bank(SHAPES, 1).layout(make_spec())
    small = dict(layout.matrices(layout.initial_weights(make_spec("x", 2)).numpy(), 2))
    large = dict(layout.matrices(layout.initial_weights(make_spec("y", 8)).numpy(), 8))
    other = dict(layout.matrices(layout.initial_weights(make_spec("x", 8, seed=2)).numpy(), 8))
    for name, matrix in large.items():
        if ".lora_B." in name:
            assert not matrix.any()
            continue
        assert float(np.abs(matrix).max()) <= 48**-0.5
        assert float(matrix.std()) == pytest.approx(48**-0.5 / 3**0.5, rel=0.1)
        assert np.array_equal(small[name], matrix[:2])
        assert not np.array_equal(other[name], matrix)
    assert not np.array_equal(large["l.q_proj.lora_A.weight"], large["l.k_proj.lora_A.weight"])


def test_fresh_adapter_has_the_same_bits_in_every_release() -> None:
    layout = Bank(SHAPES, 1).layout(make_spec())
    (_, first), *_ = layout.matrices(layout.initial_weights(make_spec(seed=7)).numpy(), 8)
    assert first[0, :3].tolist() == FIRST_VALUES


def test_full_bank_evicts_the_least_recently_used() -> None:
    bank = Bank(SHAPES, num_slots=2)
    for key in "abc":
        bank.add(key, make_spec(key))
    bank.acquire(["a"])
    bank.acquire(["b"])
    bank.acquire(["a"])
    bank.acquire(["c"])
    assert [bank.entry(key).row is not None for key in "abc"] == [True, False, True]
    assert bank.num_resident == 2


@settings(max_examples=40)
@given(
    ranks=st.lists(st.sampled_from([2, 8, 16]), min_size=1, max_size=6),
    num_slots=st.integers(1, 3),
    accesses=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=20),
)
def test_values_keep_their_bits_when_moved(ranks: list[int], num_slots: int, accesses: list[list[int]]) -> None:
    bank = Bank(SHAPES, num_slots)
    contents = {}
    for number, rank in enumerate(ranks):
        bank.add(str(number), make_spec(str(number), rank))
        contents[str(number)] = fill(bank, str(number), number)
    for access in accesses:
        keys: Sequence[str] = [str(number % len(ranks)) for number in dict.fromkeys(access)][:num_slots]
        rows = bank.acquire(keys)
        assert bank.num_resident <= num_slots
        for key, row in zip(keys, rows, strict=True):
            assert torch.equal(row.weights, weights_of(contents[key]))
    for key, host in contents.items():
        assert_same(copy_of(bank, key), host)


def test_reused_row_holds_no_value_of_its_last_entry() -> None:
    bank = Bank(SHAPES, num_slots=1)
    bank.add("a", make_spec("a"))
    fill(bank, "a", 1)
    bank.remove("a")
    bank.add("b", make_spec("b"))
    (row,) = bank.acquire(["b"])
    assert bank.entry("b").read().grad is None
    bank.entry("b").begin_gradient()
    for vector in (row.exp_avg, row.exp_avg_sq, row.grad):
        assert vector is not None
        assert not vector.any()
    assert torch.equal(row.weights, bank.entry("b").layout.initial_weights(make_spec("b")))


@pytest.mark.parametrize("num_slots", [1, 4])
@pytest.mark.parametrize("is_resident", [True, False])
def test_published_version_is_a_copy_that_training_does_not_touch(num_slots: int, is_resident: bool) -> None:
    bank = Bank(SHAPES, num_slots)
    bank.add("a", make_spec("a"))
    before = weights_of(fill(bank, "a", 1))
    if not is_resident:
        bank.evict("a")
    bank.publish("a", "version")
    fill(bank, "a", 2)
    (row,) = bank.acquire(["version"])
    assert torch.equal(row.weights, before)
    assert row.grad is None
    assert row.exp_avg is None
    bank.evict("version")
    assert torch.equal(bank.acquire(["version"])[0].weights, before)


def test_pinned_version_is_removed_with_its_last_pin() -> None:
    bank = Bank(SHAPES, 2)
    bank.add("a", make_spec("a"))
    bank.publish("a", "version")
    bank.pin("version")
    bank.pin("version")
    bank.remove("version")
    bank.unpin("version")
    assert "version" in bank
    bank.acquire(["version"])
    bank.unpin("version")
    assert "version" not in bank


def test_pinned_version_that_is_published_again_stays_pinned() -> None:
    bank = Bank(SHAPES, 2)
    bank.add("a", make_spec("a"))
    bank.publish("a", "version")
    bank.pin("version")
    bank.remove("version")
    after = weights_of(fill(bank, "a", 2))
    bank.publish("a", "version")
    assert torch.equal(bank.acquire(["version"])[0].weights, after)
    bank.remove("version")
    bank.acquire(["version"])
    bank.unpin("version")
    assert "version" not in bank


def test_dropped_gradient_is_zero_in_the_row_and_on_the_host() -> None:
    bank = Bank(SHAPES, 1)
    for key in "ab":
        bank.add(key, make_spec(key))
        fill(bank, key, 1)
    for key in "ab":
        bank.entry(key).drop_grad()
        assert bank.entry(key).read().grad is None
        (row,) = bank.acquire([key])
        bank.entry(key).begin_gradient()
        assert row.grad is not None
        assert not row.grad.any()


def test_memory_of_unused_rows_is_freed_at_once() -> None:
    """Without the garbage collector, which does not run for a few objects with much memory."""
    bank = Bank(SHAPES, num_slots=1)
    bank.add("a", make_spec("a", 8))
    bank.add("b", make_spec("b", 16))
    gc.collect()
    gc.disable()
    try:
        slab = weakref.ref(bank.acquire(["a"])[0].slab)
        assert slab() is not None
        bank.acquire(["b"])
        assert slab() is None
    finally:
        gc.enable()


def test_cleared_bank_frees_all_memory_at_once() -> None:
    bank = Bank(SHAPES, num_slots=100)  # more slots than rows
    bank.add("a", make_spec("a", 8))
    bank.add("b", make_spec("b", 16))
    gc.collect()
    gc.disable()
    try:
        slabs = [weakref.ref(row.slab) for row in bank.acquire(["a", "b"])]
        bank.remove("a")
        assert None not in [slab() for slab in slabs]
        bank.clear()
        assert [slab() for slab in slabs] == [None, None]
    finally:
        gc.enable()


def test_removed_and_cleared_keys_are_gone() -> None:
    bank = Bank(SHAPES, 2)
    for key in "abc":
        bank.add(key, make_spec(key))
    bank.acquire(["a", "b"])
    bank.remove("a")
    bank.remove("unknown")
    assert "a" not in bank
    assert len(bank) == 2
    bank.pin("b")
    bank.clear()
    assert len(bank) == bank.num_resident == 0
    with pytest.raises(KeyError):
        bank.acquire(["a"])
