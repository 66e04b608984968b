"""Copies concurrent with the computation: a row and its copy are not used before the copy is done."""

from __future__ import annotations

from threading import Event, current_thread

import pytest
import torch

from tests.support.numerics.bank_rows import SHAPES, assert_same, copy_of, fill, make_spec, weights_of
from tests.support.numerics.late_transfers import LateTransfers
from workers.bank.bank import Bank
from workers.bank.entries import HostRow
from workers.bank.transfers import DirectTransfers
from workers.contract.messages import AdapterSpec
from workers.rows import RowLayout


def make_bank(num_slots: int, keys: str, *, compute_dtype: torch.dtype = torch.bfloat16) -> tuple[Bank, LateTransfers]:
    """Return a bank with fresh adapters whose weights have been drawn."""
    bank, transfers = make_drawing_bank(num_slots, keys, compute_dtype=compute_dtype)
    for key in keys:
        bank.entry(key).read()
    return bank, transfers


def make_drawing_bank(
    num_slots: int, keys: str, *, compute_dtype: torch.dtype = torch.bfloat16
) -> tuple[Bank, LateTransfers]:
    transfers = LateTransfers()
    bank = Bank(SHAPES, num_slots, compute_dtype=compute_dtype, transfers=transfers)
    for number, key in enumerate(keys):
        bank.add(key, make_spec(key, seed=number))
    return bank, transfers


def is_resident(bank: Bank, key: str) -> bool:
    return bank.entry(key).row is not None


def test_evicted_keys_return_with_their_bits_however_late_copies_are_made() -> None:
    bank, _ = make_bank(2, "abcde")
    expected = {key: fill(bank, key, seed) for seed, key in enumerate("abcde")}
    for key in "abcdeedcba":
        bank.acquire([key])
        assert_same(copy_of(bank, key), expected[key])
    for key in "abcde":
        assert_same(copy_of(bank, key), expected[key])


def test_acquired_weights_are_also_in_the_dtype_of_the_layers() -> None:
    bank, _ = make_bank(2, "abc")
    expected = {key: weights_of(fill(bank, key, seed)) for seed, key in enumerate("abc")}
    for key in "abc":
        (row,) = bank.acquire([key])
        assert row.compute is not None
        assert torch.equal(row.compute, expected[key].bfloat16())


def test_version_published_into_a_row_that_is_still_being_copied_has_the_adapters_weights() -> None:
    bank, _ = make_bank(2, "abc")
    expected = {key: fill(bank, key, seed) for seed, key in enumerate("abc")}
    bank.publish("c", "version")  # evicts b
    bank.publish("b", "other")  # from host memory
    for version, key in (("version", "c"), ("other", "b")):
        (row,) = bank.acquire([version])
        assert torch.equal(row.weights, weights_of(expected[key]))
    assert_same(copy_of(bank, "b"), expected["b"])


def test_adapter_that_is_still_being_loaded_is_published_with_its_weights() -> None:
    bank, _ = make_bank(3, "ab")
    expected = weights_of(fill(bank, "a", 1))
    for key, seed in (("a", 1), ("b", 2)):  # one after the other in the same row
        fill(bank, key, seed)
        bank.evict(key)
        bank.entry(key).read()
    bank.prefetch(["a"], keep=())
    bank.publish("a", "version")
    assert torch.equal(bank.acquire(["version"])[0].weights, expected)


def test_version_that_is_still_being_evicted_is_not_overwritten_by_the_next() -> None:
    bank, _ = make_bank(3, "a")
    expected = {}
    for number in range(4):  # the last two take slots of the first
        expected[f"version {number}"] = weights_of(fill(bank, "a", number))
        bank.publish("a", f"version {number}")
    for version, weights in expected.items():
        assert torch.equal(bank.acquire([version])[0].weights, weights)


def test_rows_are_copied_before_their_memory_is_freed() -> None:
    bank, _ = make_bank(1, "a")
    bank.add("wide", make_spec("wide", rank=16)).read()
    fill(bank, "a", 1)
    bank.prefetch(["wide"], keep=())  # rows of another layout: the rows of the first are freed
    host = bank.entry("a").host
    assert host is not None
    assert not weights_of(host).isnan().any()


def test_with_one_slot_a_version_is_copied_before_its_adapter_changes() -> None:
    bank, _ = make_bank(1, "a")
    expected = weights_of(fill(bank, "a", 1))
    bank.publish("a", "version")
    (row,) = bank.acquire(["a"])
    row.weights.zero_()
    assert torch.equal(bank.acquire(["version"])[0].weights, expected)


def evicted_and_loading(num_slots: int) -> tuple[Bank, HostRow]:
    """Return a bank in which an adapter is being loaded to a row that another one had, and what it must hold."""
    bank, _ = make_bank(num_slots, "ab")
    expected = fill(bank, "a", 1)
    for key in "ab":
        fill(bank, key, 1 + "ab".index(key))
        bank.evict(key)
        bank.entry(key).read()  # all of it is in host memory now
    bank.prefetch(["a"], keep=())
    return bank, expected


def test_adapter_that_is_evicted_while_it_is_being_loaded_keeps_its_bits() -> None:
    bank, expected = evicted_and_loading(2)
    bank.evict("a")
    assert_same(copy_of(bank, "a"), expected)


def test_with_one_slot_a_version_of_an_adapter_that_is_being_loaded_has_its_weights() -> None:
    bank, expected = evicted_and_loading(1)
    bank.publish("a", "version")
    bank.acquire(["a"])
    assert torch.equal(bank.acquire(["version"])[0].weights, weights_of(expected))


def test_gradient_dropped_while_its_row_is_being_loaded_is_gone() -> None:
    bank, _ = make_bank(2, "ab")
    fill(bank, "a", 1)
    bank.evict("a")
    bank.entry("a").read()  # all of it is in host memory now
    bank.prefetch(["a"], keep=())
    bank.entry("a").drop_grad()
    (row,) = bank.acquire(["a"])
    assert bank.entry("a").read().grad is None
    bank.entry("a").begin_gradient()
    assert row.grad is not None
    assert not row.grad.any()


def test_prefetch_does_not_wait_and_acquire_finds_the_key() -> None:
    bank, transfers = make_bank(3, "abc")
    expected = fill(bank, "b", 2)
    bank.evict("b")
    bank.acquire(["a"])
    num_waits = transfers.num_waits
    bank.prefetch(["b", "c", "unknown"], keep=["a"])
    assert transfers.num_waits == num_waits
    assert is_resident(bank, "b")
    assert is_resident(bank, "c")
    num_loads = bank.stats.num_loads
    bank.acquire(["b", "c"])
    assert bank.stats.num_loads == num_loads
    assert bank.stats.num_prefetches == 2
    assert_same(copy_of(bank, "b"), expected)


def test_prefetch_evicts_neither_running_nor_prefetched_keys() -> None:
    bank, _ = make_bank(3, "abcdef")
    bank.acquire(["a", "b", "c"])
    bank.prefetch(["d", "e", "f"], keep=["a", "b"])
    assert [key for key in "abcdef" if is_resident(bank, key)] == ["a", "b", "d"]
    bank.acquire(["a", "b"])
    assert is_resident(bank, "d"), "a prefetched key is evicted last"


def test_prefetch_leaves_slots_for_keys_about_to_run() -> None:
    bank, _ = make_bank(2, "abc")
    bank.prefetch(["b", "c"], keep=["a"])
    bank.acquire(["a"])
    assert [key for key in "abc" if is_resident(bank, key)] == ["a", "b"]


def test_most_urgent_keys_take_the_slots_of_the_least_urgent() -> None:
    bank, _ = make_bank(2, "abcd")
    bank.acquire(["c", "d"])
    bank.prefetch(["a", "d", "c"], keep=())
    assert [key for key in "abcd" if is_resident(bank, key)] == ["a", "d"]


def test_prefetch_of_a_resident_key_counts_as_use() -> None:
    bank, _ = make_bank(2, "abc")
    bank.acquire(["a"])
    bank.acquire(["b"])
    bank.prefetch(["a"], keep=())
    bank.acquire(["c"])
    assert is_resident(bank, "a")
    assert not is_resident(bank, "b")


def test_row_whose_key_was_removed_while_it_was_loading_takes_the_next() -> None:
    bank, _ = make_bank(1, "ab")
    expected = fill(bank, "b", 2)
    bank.evict("b")
    bank.prefetch(["a"], keep=())
    bank.remove("a")
    bank.acquire(["b"])
    assert_same(copy_of(bank, "b"), expected)


def test_nothing_is_prefetched_with_synchronous_copies() -> None:
    bank = Bank(SHAPES, 2, transfers=DirectTransfers())
    bank.add("a", make_spec("a"))
    bank.prefetch(["a"], keep=())
    assert not is_resident(bank, "a")


def test_layers_use_the_weights_themselves_with_a_base_model_in_fp32() -> None:
    bank, _ = make_bank(1, "a", compute_dtype=torch.float32)
    (row,) = bank.acquire(["a"])
    assert row.compute is None
    row.refresh()


@pytest.mark.parametrize("num_slots", [2, 3])
def test_keys_published_evicted_and_prefetched_in_any_order_keep_their_bits(num_slots: int) -> None:
    bank, _ = make_bank(num_slots, "abcd")
    expected = {key: fill(bank, key, seed) for seed, key in enumerate("abcd")}
    generator = torch.Generator().manual_seed(num_slots)
    for _ in range(60):
        action, index = torch.randint(4, (2,), generator=generator).tolist()
        key = "abcd"[index]
        if action == 0:
            bank.acquire([key])
        elif action == 1:
            bank.prefetch([key], keep=())
        elif action == 2:
            bank.evict(key)
        else:
            bank.publish(key, f"version of {key}")
            (row,) = bank.acquire([f"version of {key}"])
            assert torch.equal(row.weights, weights_of(expected[key]))
        other = "abcd"[(index + 1) % 4]
        assert_same(copy_of(bank, other), expected[other])


def test_fresh_adapter_is_prefetched_once_its_weights_are_drawn_in_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Patched: drawing ends when the test says so."""
    draw, may_end, threads = RowLayout.initial_weights, Event(), list[str]()

    def slow(layout: RowLayout, spec: AdapterSpec) -> torch.Tensor:
        threads.append(current_thread().name)
        assert may_end.wait(10)
        return draw(layout, spec)

    monkeypatch.setattr(RowLayout, "initial_weights", slow)
    bank, _ = make_drawing_bank(3, "ab")
    bank.prefetch(["a", "b"], keep=())
    assert not is_resident(bank, "a")
    may_end.set()
    (row,) = bank.acquire(["a"])
    assert torch.equal(row.weights, draw(bank.entry("a").layout, bank.entry("a").spec))
    assert bank.entry("b").read().weights is not None
    bank.prefetch(["b"], keep=["a"])
    assert is_resident(bank, "b")
    assert len(threads) == 2, "drawn once each"
    assert current_thread().name not in threads


def test_version_of_an_adapter_that_is_still_being_drawn_has_its_weights() -> None:
    bank, _ = make_drawing_bank(2, "a")
    bank.publish("a", "version")
    first = bank.entry("a").layout.initial_weights(bank.entry("a").spec)
    assert torch.equal(bank.acquire(["version"])[0].weights, first)
