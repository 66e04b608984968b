"""The bank on a GPU: rows move to pinned memory and back during the computation, and keep their bits."""

from __future__ import annotations

import pytest
import torch

from tests.support.numerics.bank_rows import SHAPES, make_spec
from workers.bank.bank import Bank
from workers.bank.entries import HostRow

pytestmark = pytest.mark.gpu

NAMES = ("weights", "exp_avg", "exp_avg_sq", "grad")


def make_bank(num_slots: int, keys: str) -> Bank:
    bank = Bank(SHAPES, num_slots, "cuda", compute_dtype=torch.bfloat16)
    for number, key in enumerate(keys):
        bank.add(key, make_spec(key, seed=number))
    return bank


def fill(bank: Bank, key: str, seed: int) -> dict[str, torch.Tensor]:
    """Fill a key's row with random values; return copies on the CPU."""
    (row,) = bank.acquire([key])
    bank.entry(key).note_step()
    bank.entry(key).begin_gradient()
    generator = torch.Generator("cuda").manual_seed(seed)
    for name in NAMES:
        getattr(row, name).normal_(generator=generator)
    row.refresh()
    return contents(bank.entry(key).read())


def contents(host: HostRow) -> dict[str, torch.Tensor]:
    return {name: getattr(host, name).to("cpu", copy=True) for name in NAMES}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name in NAMES:
        assert torch.equal(actual[name], expected[name]), name


def keep_busy() -> None:
    """Queue work on the device that later copies must wait for."""
    matrix = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        matrix = (matrix @ matrix).clamp(-1, 1)


def test_evicted_rows_are_in_pinned_memory_and_return_with_their_bits() -> None:
    bank = make_bank(2, "abcde")
    expected = {}
    for seed, key in enumerate("abcde"):
        keep_busy()
        expected[key] = fill(bank, key, seed)
    for key in "abcdeedcba":
        keep_busy()
        (row,) = bank.acquire([key])
        assert row.compute is not None
        assert torch.equal(row.compute.cpu(), expected[key]["weights"].bfloat16())
        assert_same(contents(bank.entry(key).read()), expected[key])
    bank.evict("a")
    host = bank.entry("a").read()
    assert host.weights is not None
    assert host.weights.is_pinned()
    assert_same(contents(host), expected["a"])


def test_prefetch_runs_during_the_computation_and_keeps_the_bits() -> None:
    bank = make_bank(3, "abcd")
    expected = {key: fill(bank, key, seed) for seed, key in enumerate("abcd")}
    for running, expected_next in (("a", "bc"), ("b", "cd"), ("d", "ab")):
        (row,) = bank.acquire([running])
        bank.prefetch(list(expected_next), keep=[running])
        keep_busy()
        assert row.grad is not None
        row.grad.add_(1)
        expected[running]["grad"] += 1
        for key in expected_next:
            bank.acquire([key])
            assert_same(contents(bank.entry(key).read()), expected[key])
    assert bank.stats.num_prefetches > 0


def test_a_gradient_on_its_way_to_the_host_is_not_written_over_by_the_next_one_in_its_row() -> None:
    bank = make_bank(1, "ab")
    for seed in range(4):
        expected = fill(bank, "a", seed)
        keep_busy()
        bank.acquire(["b"])  # loads no gradient: nothing of its own follows that copy
        bank.entry("b").begin_gradient()
        assert_same(contents(bank.entry("a").read()), expected)
        bank.entry("b").drop_grad()


def test_version_published_from_a_row_has_its_weights_of_that_moment() -> None:
    bank = make_bank(2, "ab")
    expected = fill(bank, "a", 1)
    fill(bank, "b", 2)
    keep_busy()
    bank.publish("a", "version")
    bank.acquire(["a"])[0].weights.zero_()
    (row,) = bank.acquire(["version"])
    assert torch.equal(row.weights.cpu(), expected["weights"])


def test_a_row_takes_eighteen_bytes_per_value_and_frees_them() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    bank = make_bank(4, "abcd")
    bank.acquire(list("abcd"))
    num_values = bank.layout(make_spec()).num_values
    assert torch.cuda.memory_allocated() - before <= 4 * num_values * 18 + (1 << 16)
    bank.clear()
    del bank
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def test_banks_that_come_and_go_unpin_their_memory() -> None:
    for seed in range(20):
        bank = make_bank(1, "ab")
        fill(bank, "a", seed)
        bank.acquire(["b"])
        assert bank.stats.num_evictions == 1
        bank.clear()
