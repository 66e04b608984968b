"""Batches on the engine: fences, installs, failures, saves and loads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.batches import Reference
from tests.support.numerics.harness import DATA, Driver, code, make_data, make_spec, message_of, trained
from workers.bank import state_files
from workers.contract.messages import (
    AdamParams,
    AdapterInstall,
    AdapterSpec,
    Batch,
    ErrorCode,
    Item,
)
from workers.model.segments import Segment
from workers.rows import RowLayout
from workers.training import copies
from workers.training.logits import ChunkedLoss


@pytest.fixture
def driver(qwen3: Path) -> Driver:
    driver = Driver(qwen3)
    driver.install(make_spec("a"), make_spec("b", 16))
    return driver


def test_item_sent_twice_is_applied_once(driver: Driver) -> None:
    items: list[Item] = [driver.backward("a", DATA), driver.step("a")]
    driver.train(*items)
    weights = driver.weights("a")
    assert [code(result) for result in driver.run(*items)] == [ErrorCode.OUT_OF_ORDER] * 2
    assert all(torch.equal(weights[name], matrix) for name, matrix in driver.weights("a").items())
    assert not driver.gradient("a").any()


def test_a_batch_tells_where_its_time_went(driver: Driver) -> None:
    items: tuple[Item, ...] = (driver.backward("a", DATA), driver.step("a"))
    result = driver.engine.run(Batch(epoch=1, cycle_id=7, items=items))
    assert result.phase_s.keys() == {"pack", "forward", "loss", "backward", "step"}
    assert 0 < sum(result.phase_s.values()) <= result.wall_s
    assert not driver.engine.run(Batch(epoch=1, cycle_id=8)).phase_s, "nothing of the batch before"
    assert result.use.resident_bytes > 10_000_000
    assert result.use.cpu_s > 0
    assert (result.use.num_loads, result.use.num_evictions, result.use.device_bytes) == (1, 0, 0)


def test_removed_adapter_is_out_of_order_and_its_slot_free(driver: Driver) -> None:
    trained(driver, "a")
    driver.engine.run(Batch(epoch=1, cycle_id=99, removals=("a", "unknown")))
    assert code(driver.run(driver.step("a"))[0]) == ErrorCode.OUT_OF_ORDER
    assert "a" not in driver.engine.bank


def test_a_copy_is_installed_by_a_reference_to_its_state_and_not_at_all_if_nobody_holds_that(driver: Driver) -> None:
    trained(driver, "a")
    driver.train(driver.backward("a", DATA))
    state, weights, gradient = driver.snapshot("a"), driver.weights("a"), driver.gradient("a")
    for reference, expected in ((Reference(None), ErrorCode.OUT_OF_ORDER), (Reference(state), None)):
        install = AdapterInstall(spec=make_spec("a"), state=reference)
        driver.run(installs=(install,))
        driver.seqs["a"] = state.applied_seq
        assert code(driver.run(driver.snapshot_item("a"))[0]) == expected
    assert all(torch.equal(weights[name], matrix) for name, matrix in driver.weights("a").items())
    assert torch.equal(driver.gradient("a"), gradient)


def test_newer_epoch_drops_everything_and_an_older_one_is_refused(driver: Driver) -> None:
    trained(driver, "a")
    items = (driver.backward("a", DATA),)
    result = driver.engine.run(Batch(epoch=2, cycle_id=1, items=items))
    assert code(result.results[0]) == ErrorCode.OUT_OF_ORDER
    assert len(driver.engine.bank) == 0
    install = AdapterInstall(spec=make_spec("a"), state=None)
    stale = driver.engine.run(Batch(epoch=1, cycle_id=2, installs=(install,), items=items))
    assert stale.epoch == 2
    assert code(stale.results[0]) == ErrorCode.OUT_OF_ORDER
    assert len(driver.engine.bank) == 0


def test_bad_item_fails_with_its_reason_and_no_other_item_does(driver: Driver) -> None:
    bad = driver.backward("a", DATA, loss_fn="nonsense")
    failed, fine = driver.run(bad, driver.backward("b", DATA))
    assert code(failed) == ErrorCode.INVALID_ARGUMENT
    assert "unknown loss function" in message_of(failed)
    assert code(fine) is None


def test_sequence_longer_than_the_model_is_refused_with_the_limit(driver: Driver) -> None:
    (result,) = driver.run(driver.backward("a", make_data("cross_entropy", [513])))
    assert code(result) == ErrorCode.INVALID_ARGUMENT
    assert "at most 512" in message_of(result)


def test_failed_pass_drops_the_whole_window_and_the_next_one_is_clean(driver: Driver) -> None:
    results = driver.run(
        driver.backward("a", DATA), driver.backward("a", DATA, "nonsense"), driver.backward("a", DATA), driver.step("a")
    )
    assert [code(result) for result in results] == [None, *[ErrorCode.INVALID_ARGUMENT] * 3]
    assert not driver.gradient("a").any()
    reference = Driver(Path(driver.engine.settings.model_path))
    reference.install(make_spec("a"))
    for each in (driver, reference):
        trained(each, "a", 1)
    assert driver.state("a").weights == reference.state("a").weights


def test_drop_gradient_drops_the_pending_gradient(driver: Driver) -> None:
    other = make_data("cross_entropy", [9], 5)
    driver.train(driver.backward("a", DATA), driver.backward("a", other, drop_gradient=True))
    dropped = driver.gradient("a")
    driver.install(make_spec("a"))
    driver.train(driver.backward("a", other))
    assert torch.equal(driver.gradient("a"), dropped)


def fail_passes(monkeypatch: pytest.MonkeyPatch, error: Exception, when: Any) -> list[int]:
    """Let passes for which `when(parts)` holds fail after gradients were added; return their sizes.

    Patches the loss, because no input makes a pass fail there.
    """
    run = ChunkedLoss.run
    sizes: list[int] = []

    def failing(self: ChunkedLoss, hidden: torch.Tensor, parts: Any, *, backward: bool) -> Any:
        result = run(self, hidden, parts, backward=backward)
        if when(parts):
            sizes.append(len(parts))
            raise error
        return result

    monkeypatch.setattr(ChunkedLoss, "run", failing)
    return sizes


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), ErrorCode.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ErrorCode.OUT_OF_MEMORY),
        (RuntimeError("a fault of ours"), ErrorCode.INTERNAL),
    ],
)
def test_failed_pass_is_bisected_until_only_the_failing_request_fails(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: ErrorCode
) -> None:
    driver.install(make_spec("c"), make_spec("d"))
    keys = ["a", "b", "c", "d"]
    pending = [driver.backward(key, DATA) for key in keys]
    driver.train(*pending)
    more = [make_data("cross_entropy", [30 + number]) for number in range(4)]
    expected_gradients = {}
    for key, data in zip(keys, more, strict=True):
        twin = Driver(Path(driver.engine.settings.model_path))
        twin.install(make_spec(key, 16 if key == "b" else 8))
        twin.train(twin.backward(key, DATA), twin.backward(key, data))
        expected_gradients[key] = twin.gradient(key)
    sizes = fail_passes(monkeypatch, error, lambda parts: any(part.stop - part.start == 32 for part in parts))
    results = driver.run(*(driver.backward(key, data) for key, data in zip(keys, more, strict=True)))
    assert [code(result) for result in results] == [None, None, expected, None]
    again = [1] if expected is ErrorCode.OUT_OF_MEMORY else []
    assert sizes == [4, 2, 1, *again], "a solo request without memory is tried once more, with recomputed layers"
    for key in ("a", "b", "d"):
        assert torch.equal(driver.gradient(key), expected_gradients[key])
    assert not driver.gradient("c").any()
    assert "a fault of ours" not in message_of(results[2])


def test_step_that_would_make_weights_infinite_is_not_taken(driver: Driver) -> None:
    trained(driver, "a")
    driver.train(driver.backward("a", DATA))
    before = driver.engine.bank.entry("a").read()
    copies = [vector.clone() for vector in (before.weights, before.exp_avg, before.exp_avg_sq) if vector is not None]
    (result,) = driver.run(driver.step("a", AdamParams(learning_rate=1e38, weight_decay=1e10)))
    assert code(result) == ErrorCode.NON_FINITE
    after = driver.engine.bank.entry("a").read()
    for vector, copy in zip((after.weights, after.exp_avg, after.exp_avg_sq), copies, strict=True):
        assert vector is not None
        assert torch.equal(vector, copy)
    trained(driver, "a")


def test_adapter_installed_from_its_state_continues_with_the_same_bits(driver: Driver, qwen3: Path) -> None:
    trained(driver, "a")
    state = driver.state("a")
    other = Driver(qwen3, num_slots=1)
    other.install(make_spec("a"), state=state)
    for each in (driver, other):
        trained(each, "a")
    assert other.state("a") == driver.state("a")


def test_loading_a_checkpoint_restores_weights_moments_and_step_count(driver: Driver) -> None:
    trained(driver, "a")
    state = driver.state("a")
    driver.train(driver.backward("a", DATA))
    expected = driver.train(driver.backward("a", DATA), driver.step("a"))[-1].metrics
    driver.train(driver.load("a", state))
    assert not driver.gradient("a").any()
    driver.train(driver.backward("a", DATA), driver.backward("a", DATA))
    (again,) = driver.train(driver.step("a"))
    assert again.metrics == expected


def test_loading_without_optimizer_starts_with_fresh_moments(driver: Driver) -> None:
    trained(driver, "a")
    state = driver.state("a")
    driver.train(driver.load("a", state, with_optimizer=False))
    restored = driver.state("a")
    assert restored.weights == state.weights
    assert restored.num_steps == 0
    assert driver.engine.bank.entry("a").read().exp_avg is None


@pytest.mark.parametrize("damage", [{"weights": b"x"}, {"optimizer": b"x"}])
def test_damaged_checkpoint_changes_nothing(driver: Driver, damage: dict[str, bytes]) -> None:
    trained(driver, "a")
    state = driver.state("a")
    (result,) = driver.run(driver.load("a", dataclasses.replace(state, **damage)))  # type: ignore[arg-type]
    assert code(result) == ErrorCode.DATA_LOSS
    assert driver.state("a").weights == state.weights
    assert driver.state("a").optimizer == state.optimizer


def test_checkpoint_of_another_rank_is_refused_with_both_ranks(driver: Driver) -> None:
    trained(driver, "b")
    (result,) = driver.run(driver.load("a", driver.state("b")))
    assert code(result) == ErrorCode.INVALID_ARGUMENT
    assert "rank 16, this adapter has rank 8" in message_of(result)


def test_failed_install_is_the_error_of_the_adapters_items(driver: Driver) -> None:
    state = dataclasses.replace(driver.state("a"), weights=b"nonsense")
    driver.install(make_spec("broken"), state=state)
    driver.install(make_spec("large", 128))
    broken, large = driver.run(driver.backward("broken", DATA), driver.backward("large", DATA))
    assert code(broken) == ErrorCode.DATA_LOSS
    assert code(large) == ErrorCode.INVALID_ARGUMENT
    driver.install(make_spec("broken"))
    driver.train(driver.backward("broken", DATA))


def test_an_install_that_finds_no_memory_fails_one_item_and_no_neighbour(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is out of order, so that the adapter is installed again."""
    state, read = driver.state("a"), state_files.read_state

    def short(layout: RowLayout, spec: AdapterSpec, *parts: Any) -> Any:
        if spec.adapter_id == "large":
            raise MemoryError
        return read(layout, spec, *parts)

    monkeypatch.setattr(copies, "read_state", short)
    driver.install(make_spec("large"), state=state)
    item = driver.backward("large", DATA)
    large, other = driver.run(item, driver.backward("b", DATA))
    assert code(large) == ErrorCode.OUT_OF_MEMORY
    assert "has no memory for the adapter's state" in message_of(large)
    assert code(other) is None
    [again] = driver.run(item)
    assert code(again) == ErrorCode.OUT_OF_ORDER


def test_saving_changes_nothing_and_leaves_the_pending_gradient_out(driver: Driver) -> None:
    trained(driver, "a")
    before = driver.state("a")
    driver.train(driver.backward("a", DATA))
    gradient = driver.gradient("a")
    for with_optimizer in (True, False):
        after = driver.train(driver.save("a", with_optimizer=with_optimizer))[0].state
        assert after is not None
        assert (after.weights, after.optimizer) == (before.weights, before.optimizer if with_optimizer else None)
        assert (after.gradient, after.num_datums) == (None, 0)
    assert torch.equal(driver.gradient("a"), gradient)


def test_engine_time_is_shared_by_tokens_and_tokens_are_counted(qwen3: Path) -> None:
    driver = Driver(qwen3)
    driver.install(make_spec("a"), make_spec("b"))
    small, large = driver.train(
        driver.backward("a", make_data("cross_entropy", [10])), driver.backward("b", make_data("cross_entropy", [30]))
    )
    assert (small.num_tokens, large.num_tokens) == (10, 30)
    assert large.engine_s == pytest.approx(3 * small.engine_s)


def test_a_row_has_the_same_bits_among_few_rows_of_its_adapter_as_among_many(driver: Driver) -> None:
    """The sampler's decode steps rely on this: 1 row of an adapter, or 40."""
    trained(driver, "a")
    base_model, bank = driver.engine.base_model, driver.engine.bank
    (row,) = bank.acquire(["a"])
    hidden = torch.randn(40, base_model.hidden_size)
    for num_rows in (1, 2, 5, 15, 16, 31):
        logits = [base_model.unembed(hidden[:n], [Segment(0, n, row.groups)]) for n in (num_rows, 40)]
        assert torch.equal(logits[0], logits[1][:num_rows])
