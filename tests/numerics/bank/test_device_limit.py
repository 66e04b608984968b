"""Batches whose adapters do not fit on the device together run in parts, and change no bit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.mini_model import build_mini_model
from tests.support.numerics.harness import Driver, Trace, assemble_again, code, make_data, make_spec, message_of
from tests.support.numerics.small_device import SmallDevice
from tests.support.numerics.tenants import TENANTS, assert_same, train
from workers.contract.messages import Batch, ErrorCode
from workers.model.base_model import BaseModel
from workers.training.logits import ROW_ALIGNMENT
from workers.training.memory import PassRoom

pytestmark = pytest.mark.usefixtures("own_base_models")


def row_bytes(driver: Driver, rank: int) -> int:
    """Return the bytes of a trained row with a base model in fp32."""
    return 16 * driver.engine.bank.layout(make_spec("a", rank)).num_values


@pytest.fixture(scope="session")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows of logits are whole cache lines.

    A deferred loss does not align rows of logits, and a CPU's products of few columns depend on the alignment: its
    fingerprint promises no bits there. With this vocabulary every row is aligned, so a tenant's bits show what the
    limit changes, not its place in the pass.
    """
    return build_mini_model(tmp_path_factory.mktemp("aligned"), vocab_size=17 * ROW_ALIGNMENT)


def plain(model: Path) -> Driver:
    return Driver(model)


def deferred(model: Path) -> Driver:
    driver = Driver(model)
    driver.engine.base_model.is_deferred = True
    assemble_again(driver.engine)
    return driver


@pytest.mark.parametrize("make", [plain, deferred])
def test_tenants_on_a_device_for_two_of_them_get_the_same_bits(aligned: Path, make: Callable[[Path], Driver]) -> None:
    expected: dict[str, Trace] = train(make(aligned), TENANTS)
    driver = make(aligned)
    num_bytes = 2 * row_bytes(driver, max(tenant.spec.rank for tenant in TENANTS))
    driver.engine.bank.limit(num_bytes)
    assert_same(train(driver, TENANTS), expected)
    assert driver.engine.bank.device_bytes <= num_bytes
    assert driver.engine.bank.stats.num_evictions > len(TENANTS)


def stepped_twice(driver: Driver) -> list[Any]:
    """Train two tenants, both in each pass and each batch of steps; return their states after every batch of steps."""
    found: list[Any] = []
    driver.install(make_spec("a"), make_spec("b"))
    for seed in range(2):
        driver.train(*(driver.backward(key, make_data("cross_entropy", (9,), seed + 2 * (key == "a"))) for key in "ab"))
        driver.train(driver.step("a"), driver.step("b"))
        found += [driver.snapshot("a"), driver.snapshot("b")]
    return found


def test_steps_taken_one_by_one_for_lack_of_memory_use_their_gradients_up_once(
    aligned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit allows both rows. The device has no memory for the second: it takes the place of the first."""
    expected = stepped_twice(deferred(aligned))
    driver = deferred(aligned)
    driver.engine.bank.limit(100 * row_bytes(driver, 8))
    device = SmallDevice(monkeypatch, int(1.5 * row_bytes(driver, 8)))
    assert stepped_twice(driver) == expected
    assert device.num_refused
    assert [state.gradient for state in expected] == [None] * 4


@pytest.mark.parametrize("make", [plain, deferred])
def test_adapter_that_does_not_fit_alone_fails_with_the_reason_and_its_neighbours_do_not(
    qwen3: Path, make: Callable[[Path], Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make(qwen3)
    driver.engine.bank.limit(100 * row_bytes(driver, 8))
    SmallDevice(monkeypatch, int(2.5 * row_bytes(driver, 8)))
    keys = ("a", "large", "b", "c")
    driver.install(*(make_spec(key, 32 if key == "large" else 8) for key in keys))
    passes = driver.run(*(driver.backward(key, make_data("cross_entropy", [20])) for key in keys))
    steps = driver.run(*(driver.step(key) for key in keys))
    for results in (passes, steps):
        assert [code(result) for result in results] == [None, ErrorCode.OUT_OF_MEMORY, None, None]
        assert f"takes {row_bytes(driver, 32) / 1e6:.1f} MB" in message_of(results[1])
        assert "shorter" not in message_of(results[1])


def test_long_request_gets_the_memory_of_other_adapters(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patched: a forward on a CPU does not run out of memory."""
    driver = Driver(qwen3)
    bank = driver.engine.bank
    bank.limit(100 * row_bytes(driver, 8))
    driver.install(*(make_spec(key) for key in "abc"))
    driver.train(*(driver.backward(key, make_data("cross_entropy", [20])) for key in "bc"))
    forward = BaseModel.forward

    def short_of_memory(*args: Any, **options: Any) -> torch.Tensor:
        if bank.device_bytes > row_bytes(driver, 8):
            raise torch.OutOfMemoryError
        return forward(*args, **options)

    monkeypatch.setattr(BaseModel, "forward", short_of_memory)
    driver.train(driver.backward("a", make_data("cross_entropy", [20])))
    assert [key for key in "abc" if bank.entry(key).row is not None] == ["a"]


@pytest.mark.parametrize("refuses", [False, True], ids=["others leave", "the host is full"])
def test_a_request_that_never_fits_is_tried_a_few_times_although_another_adapter_is_expected(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, *, refuses: bool
) -> None:
    """The expected one, which is loaded while passes run, is not to take the memory that others have left."""
    driver = Driver(qwen3, recompute="auto")
    bank = driver.engine.bank
    bank.limit(100 * row_bytes(driver, 8))
    monkeypatch.setattr(type(bank._transfers), "is_concurrent", True)  # patched: as a GPU's are
    driver.install(*(make_spec(key) for key in "abc"))
    driver.train(*(driver.backward(key, make_data("cross_entropy", [20])) for key in "bc"))
    evict, forward, recomputed = bank.evict, BaseModel.forward, list[bool]()

    def noted(*args: Any, recompute: bool = False, **options: Any) -> torch.Tensor:
        recomputed.append(recompute)
        return forward(*args, recompute=recompute, **options)

    def short_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError

    def full(key: str) -> None:
        if refuses:
            raise MemoryError
        evict(key)

    monkeypatch.setattr(BaseModel, "forward", noted)
    monkeypatch.setattr(BaseModel, "backward", short_of_memory)
    monkeypatch.setattr(bank, "evict", full)
    item = driver.backward("a", make_data("cross_entropy", [20]))
    [result] = driver.engine.run(Batch(epoch=1, cycle_id=1, items=(item,), expected=("b",))).results
    assert code(result) == ErrorCode.OUT_OF_MEMORY
    assert recomputed == [False, False, True]


def test_halves_of_a_failed_pass_keep_copies_of_their_own_gradients_alone(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(qwen3)
    driver.install(*(make_spec(key) for key in "abcdefgh"))
    data, entries = make_data("cross_entropy", [9]), [driver.engine.bank.entry(key) for key in "abcdefgh"]
    driver.train(*(driver.backward(key, data) for key in "abcdefgh"))
    copies, clone, kept = list[weakref.ref[torch.Tensor]](), torch.Tensor.clone, list[int]()
    gradients = [entry.read().grad for entry in entries]
    shape = gradients[0].shape if gradients[0] is not None else None

    def cloned(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        copy = clone(self, *args, **options)
        if copy.shape == shape:
            copies.append(weakref.ref(copy))
        return copy

    def fail(*_: Any, **__: Any) -> torch.Tensor:
        kept.append(sum(copy() is not None for copy in copies))
        raise ValueError("a fault")

    monkeypatch.setattr(torch.Tensor, "clone", cloned)
    monkeypatch.setattr(BaseModel, "forward", fail)
    results = driver.run(*(driver.backward(key, data) for key in "abcdefgh"))
    assert {code(result) for result in results} == {ErrorCode.INTERNAL}
    assert kept == [8, 4, 2, 1, 1, 2, 1, 1, 4, 2, 1, 1, 2, 1, 1]


def test_memory_of_passes_is_measured_with_the_adapters_that_fit(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patched: what is free on a CPU does not depend on the bank."""
    driver = Driver(qwen3)
    bank = driver.engine.bank
    bank.limit(2 * row_bytes(driver, 8))
    driver.install(*(make_spec(key) for key in "abc"))
    resident: list[int] = []
    monkeypatch.setattr(PassRoom, "measure", lambda *_: resident.append(bank.num_resident))
    driver.train(*(driver.backward(key, make_data("cross_entropy", [20])) for key in "abc"))
    assert resident == [2]


def test_passes_leave_room_for_the_rows_of_later_ones_and_of_those_that_are_loaded_ahead(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(qwen3, num_slots=2)
    bank, data = driver.engine.bank, make_data("cross_entropy", [20])
    bank.limit(100 * row_bytes(driver, 8))
    driver.install(*(make_spec(key) for key in "abcd"))
    reserved: list[int] = []
    monkeypatch.setattr(PassRoom, "measure", lambda _, num_bytes: reserved.append(num_bytes))
    driver.train(*(driver.backward(key, data) for key in "ab"))
    driver.train(*(driver.backward(key, data) for key in "abc"))
    driver.engine.run(Batch(epoch=1, cycle_id=1, items=(driver.backward("b", data),), expected=("d", "gone")))
    own, later, ahead = (num_bytes / row_bytes(driver, 8) for num_bytes in reserved)
    assert own == 0
    assert later >= 1
    assert ahead >= 1


@pytest.mark.parametrize("limit", [3, 7, 100])
def test_rows_take_no_more_than_was_reserved(qwen3: Path, limit: int) -> None:
    driver = Driver(qwen3)
    bank = driver.engine.bank
    bank.limit(limit * row_bytes(driver, 8))
    keys = [f"{rank} {number}" for rank in (16, 8, 4) for number in range(6)]
    driver.install(*(make_spec(key, int(key.split()[0])) for key in keys))
    wanted: list[str] = []
    for count in (5, 1, 2, 1, 4, 5):
        for key in wanted:
            bank.evict(key)  # leaves free rows, which may be of another kind
        wanted, keys = keys[:count], keys[count:]
        before, growth_bytes = bank.device_bytes, bank.growth_bytes(wanted)
        # Rows that are loaded during a pass are added beside all others.
        beside = sum(row_bytes(driver, bank.entry(key).spec.rank) for key in wanted)
        assert growth_bytes >= min(beside, limit * row_bytes(driver, 8) - before)
        most = before
        for key in wanted:
            bank.acquire([key])
            most = max(most, bank.device_bytes)
        assert most <= before + growth_bytes
