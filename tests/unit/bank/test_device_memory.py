"""The bank on a device of few bytes: keys leave until a row fits, slabs are as large as their use, bits stay."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.numerics.bank_rows import SHAPES, assert_same, copy_of, fill, make_spec, weights_of
from tests.support.numerics.late_transfers import LateTransfers
from tests.support.numerics.small_device import SmallDevice
from workers.bank.bank import Bank, RowMemoryError
from workers.bank.slabs import SLAB_ROWS
from workers.bank.transfers import Transfers
from workers.contract.adapted_modules import COPY_PARAM_BYTES

VALUE_BYTES = 4 * 4 + 2
"""Weights, moments and gradient in fp32, and weights in bf16."""
ROW_BYTES = VALUE_BYTES * Bank(SHAPES, 1).layout(make_spec()).num_values
"""Of rank 8; a row of rank 16 has twice as many."""


def make_bank(ranks: Sequence[int], limit: int | None, num_slots: int = 16, transfers: Transfers | None = None) -> Bank:
    """Return a bank with an adapter of each rank, their keys "0", "1", ..."""
    bank = Bank(SHAPES, num_slots, compute_dtype=torch.bfloat16, transfers=transfers)
    if limit is not None:
        bank.limit(limit)
    for number, rank in enumerate(ranks):
        bank.add(str(number), make_spec(str(number), rank, seed=number)).read()  # a prefetch leaves out undrawn ones
    return bank


def residents(bank: Bank, num_keys: int) -> list[str]:
    return [str(number) for number in range(num_keys) if bank.entry(str(number)).row is not None]


def test_least_recently_used_keys_leave_until_a_row_is_within_the_limit() -> None:
    bank = make_bank([8, 8, 8, 16], limit=4 * ROW_BYTES)
    for key in ("0", "1", "2", "0"):
        bank.acquire([key])
    bank.acquire(["3"])
    assert residents(bank, 4) == ["0", "2", "3"]
    assert bank.device_bytes == 4 * ROW_BYTES


def test_keys_leave_when_the_device_has_less_memory_than_the_bank_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SmallDevice(monkeypatch, 3 * ROW_BYTES)
    bank = make_bank([8, 16, 8, 16, 8], limit=100 * ROW_BYTES)
    expected = [fill(bank, str(number), number) for number in range(5)]
    for number in (4, 3, 2, 1, 0):
        bank.acquire([str(number)])
        assert_same(copy_of(bank, str(number)), expected[number])
    assert device.num_refused > 0


def test_the_largest_copy_within_the_limit_is_that_of_a_row_of_the_limit() -> None:
    num_values = ROW_BYTES // VALUE_BYTES
    assert make_bank([], limit=ROW_BYTES).copy_bytes_max == COPY_PARAM_BYTES * num_values
    assert make_bank([], limit=ROW_BYTES - 1).copy_bytes_max == COPY_PARAM_BYTES * (num_values - 1)
    assert make_bank([], limit=None).copy_bytes_max is None


def test_only_a_row_that_does_not_fit_alone_is_an_error_with_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    SmallDevice(monkeypatch, int(1.5 * ROW_BYTES))
    bank = make_bank([8, 16], limit=ROW_BYTES)
    expected = fill(bank, "0", 1)
    with pytest.raises(RowMemoryError, match=rf"takes {2 * ROW_BYTES / 1e6:.1f} MB .* no memory for it") as error:
        bank.acquire(["1"])
    assert "shorter" not in str(error.value)
    bank.acquire(["0"])
    assert_same(copy_of(bank, "0"), expected)


def test_a_row_larger_than_the_limit_is_resident_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    SmallDevice(monkeypatch, 3 * ROW_BYTES)
    bank = make_bank([8, 16], limit=ROW_BYTES)
    bank.acquire(["0"])
    assert bank.fits(["1"])
    assert not bank.fits(["0", "1"])
    bank.acquire(["1"])
    assert residents(bank, 2) == ["1"]
    assert bank.device_bytes == 2 * ROW_BYTES


def test_adapters_of_different_ranks_fit_by_their_own_bytes() -> None:
    bank = make_bank([8, 8, 16], limit=4 * ROW_BYTES)
    assert bank.fits(["0", "1", "2"]), "three of the largest would not"
    bank.limit(4 * ROW_BYTES - 1)
    assert not bank.fits(["0", "1", "2"])


@pytest.mark.parametrize("num_keys", [1, 2, 3, 5, 9, 16])
def test_adapters_of_one_rank_are_in_one_slab_of_at_most_twice_their_rows(num_keys: int) -> None:
    bank = make_bank([8] * num_keys, limit=64 * ROW_BYTES)
    expected = [fill(bank, str(number), number) for number in range(num_keys)]
    keys = [str(number) for number in range(num_keys)]
    assert len({id(row.slab) for row in bank.acquire(keys)}) == 1
    assert bank.device_bytes < 2 * num_keys * ROW_BYTES
    for key, host in zip(keys, expected, strict=True):
        assert_same(copy_of(bank, key), host)


@pytest.mark.parametrize("num_keys", [33, 64, 70])
def test_adapters_that_come_at_once_are_in_as_few_slabs_as_hold_them(num_keys: int) -> None:
    bank = make_bank([8] * num_keys, limit=256 * ROW_BYTES, num_slots=num_keys)
    rows = bank.acquire([str(number) for number in range(num_keys)])
    assert len({id(row.slab) for row in rows}) == -(-num_keys // SLAB_ROWS)


def test_memory_of_adapters_that_are_gone_is_given_back_to_other_ranks() -> None:
    bank = make_bank([8] * 16 + [16], limit=64 * ROW_BYTES)
    bank.acquire([str(number) for number in range(16)])
    for number in range(1, 16):
        bank.remove(str(number))
    bank.acquire(["0"])
    assert bank.device_bytes == ROW_BYTES
    bank.remove("0")
    bank.acquire(["16"])
    assert bank.device_bytes == 2 * ROW_BYTES


def test_prefetched_rows_join_the_slab_of_their_kind_when_no_pass_runs() -> None:
    bank = make_bank([8] * 6, limit=64 * ROW_BYTES, transfers=LateTransfers())
    keys = [str(number) for number in range(6)]
    expected = [fill(bank, key, seed) for seed, key in enumerate(keys[:1])]
    (row,) = bank.acquire(keys[:1])
    bank.prefetch(keys[1:], keep=keys[:1])
    assert bank.entry("0").row is row, "a pass may use it"
    rows = bank.acquire(keys)
    assert len({id(row.slab) for row in rows}) == 1
    assert_same(copy_of(bank, "0"), expected[0])
    assert not torch.cat([row.weights for row in rows]).isnan().any()


def test_prefetch_takes_no_memory_beyond_the_limit_and_no_row_of_another_kind() -> None:
    bank = make_bank([8, 8, 16], limit=2 * ROW_BYTES, transfers=LateTransfers())
    bank.acquire(["0", "1"])
    bank.prefetch(["2"], keep=["0"])
    assert residents(bank, 3) == ["0", "1"]
    assert bank.device_bytes == 2 * ROW_BYTES


def test_version_without_room_beside_its_adapter_is_published_to_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, memory in ((ROW_BYTES, 100 * ROW_BYTES), (100 * ROW_BYTES, ROW_BYTES)):
        with monkeypatch.context() as patched:
            SmallDevice(patched, memory)
            bank = make_bank([8], limit)
            before = weights_of(fill(bank, "0", 1))
            bank.publish("0", "version")
            assert residents(bank, 1) == ["0"]
            assert bank.entry("version").row is None
            fill(bank, "0", 2)
            assert torch.equal(bank.acquire(["version"])[0].weights, before)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), limit=st.integers(2, 10), memory=st.integers(2, 16), is_late=st.booleans())
def test_any_use_of_a_small_device_succeeds_and_keeps_the_bits(
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject, limit: int, memory: int, is_late: bool
) -> None:
    """Every row fits alone: those of rank 16 take two of the bytes that are counted here."""
    with monkeypatch.context() as patched:
        device = SmallDevice(patched, memory * ROW_BYTES)
        ranks = [8, 16, 8, 8, 16, 8]
        keys = [str(number) for number in range(6)]
        bank = make_bank(ranks, limit * ROW_BYTES, num_slots=5, transfers=LateTransfers() if is_late else None)
        expected = {key: fill(bank, key, seed) for seed, key in enumerate(keys)}
        versions: dict[str, torch.Tensor] = {}
        actions = st.sampled_from(["acquire", "prefetch", "evict", "publish", "change"])
        for action in data.draw(st.lists(actions, max_size=12)):
            key, other = data.draw(st.sampled_from(keys)), data.draw(st.sampled_from(keys))
            if action == "acquire" and bank.fits({key, other}) and memory >= 4:
                for row, name in zip(bank.acquire([key, other]), (key, other), strict=True):
                    assert torch.equal(row.weights, weights_of(expected[name]))
            elif action == "prefetch":
                (row,) = bank.acquire([key])
                bank.prefetch([other, *keys], keep=[key])
                assert bank.entry(key).row is row
                assert torch.equal(row.weights, weights_of(expected[key]))
            elif action == "evict":
                bank.evict(key)
            elif action == "publish":
                bank.publish(key, f"version of {key}")
                versions[f"version of {key}"] = weights_of(expected[key])
            else:
                expected[key] = fill(bank, key, data.draw(st.integers(10, 20)))
            assert bank.num_resident <= 5
            assert bank.device_bytes == device.used
        for key in keys:
            assert_same(copy_of(bank, key), expected[key])
        for version, weights in versions.items():
            assert torch.equal(bank.acquire([version])[0].weights, weights)
