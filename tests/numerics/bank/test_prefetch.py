"""Adapters that a batch names as expected next are loaded while it runs, and change no result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.support.numerics.harness import Driver, assemble_again, make_data, make_spec
from tests.support.numerics.late_transfers import LateTransfers
from workers.bank.bank import Bank
from workers.bank.transfers import DirectTransfers, Transfer, Transfers
from workers.contract.messages import Batch, Item
from workers.model.base_model import BaseModel
from workers.training.logits import ChunkedLoss


def with_transfers(driver: Driver, transfers: Transfers) -> None:
    """Give an engine a bank with these transfers."""
    engine = driver.engine
    base_model = engine.base_model
    bank = Bank(base_model.group_shapes, engine.settings.num_slots, transfers=transfers)
    assemble_again(engine, bank)


class RecordingTransfers(DirectTransfers):
    """Records the target of each load."""

    is_concurrent = True

    def __init__(self, events: list[str | int]) -> None:
        self._events = events

    def to_device(
        self,
        copies: Sequence[tuple[Tensor, Tensor | None]],
        filling: Transfer | None = None,
        emptying: Transfer | None = None,
    ) -> Transfer:
        self._events.append(copies[0][0].data_ptr())
        return super().to_device(copies, filling, emptying)


def order_of(driver: Driver, monkeypatch: pytest.MonkeyPatch, items: Sequence[Item], *expected: str) -> list[str | int]:
    """Run a batch; return its events in order: loaded keys, and "forward" and "loss" of passes.

    Patched: the order is not visible in results.
    """
    events: list[str | int] = []
    with_transfers(driver, RecordingTransfers(events))
    driver.install(*(make_spec(key) for key in driver.seqs))
    for key in driver.seqs:
        driver.engine.bank.entry(key).read()  # until it is drawn, it is not prefetched
    for owner, name, event in ((BaseModel, "forward", "forward"), (ChunkedLoss, "run", "loss")):
        original = getattr(owner, name)

        def recording(*args: object, _original: Any = original, _event: str = event, **kwargs: object) -> Any:
            result = _original(*args, **kwargs)
            events.append(_event)
            return result

        monkeypatch.setattr(owner, name, recording)
    engine = driver.engine
    results = engine.run(Batch(epoch=1, cycle_id=1, items=tuple(items), expected=expected)).results
    assert not any(result.error for result in results)
    rows = {key: engine.bank.entry(key).row for key in driver.seqs}
    names = {row.weights.data_ptr(): key for key, row in rows.items() if row is not None}
    return [event if isinstance(event, str) else names[event] for event in events]


def passes(driver: Driver, keys: str) -> list[Item]:
    driver.seqs = dict.fromkeys("abcd", 0)
    return [driver.backward(key, make_data("cross_entropy", [20])) for key in keys]


def test_adapters_of_the_batch_are_loaded_first_and_expected_ones_while_it_computes(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(qwen3, num_slots=4)
    order = order_of(driver, monkeypatch, passes(driver, "ab"), "c", "d")
    assert order == ["a", "b", "forward", "c", "d", "loss"]


def test_adapters_of_a_later_pass_are_loaded_before_expected_ones(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(qwen3, num_slots=4, pass_tokens_max=30)
    order = order_of(driver, monkeypatch, passes(driver, "ab"), "c", "d")
    assert order == ["a", "b", "forward", "c", "d", "loss", "forward", "loss"]


def test_expected_adapters_are_loaded_after_a_batch_without_a_pass(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(qwen3, num_slots=4)
    driver.seqs = dict.fromkeys("abcd", 0)
    assert order_of(driver, monkeypatch, [driver.step("a")], "c", "d") == ["a", "c", "d"]


def test_adapters_expected_next_are_loaded_while_a_batch_runs(each_kind: Path) -> None:
    driver, plain = Driver(each_kind, num_slots=2), Driver(each_kind, num_slots=2)
    engine = driver.engine
    with_transfers(driver, LateTransfers())
    for each in (driver, plain):
        each.install(*(make_spec(key) for key in "abc"))
    for key in "abc":
        engine.bank.entry(key).read()  # until it is drawn, it is not prefetched
    data = make_data("cross_entropy", [20])

    def run(key: str, *expected: str) -> None:
        batch = Batch(epoch=1, cycle_id=1, items=(driver.backward(key, data),), expected=expected)
        (result,) = engine.run(batch).results
        (other,) = plain.train(plain.backward(key, data))
        assert result.error is None
        assert [part.tobytes() for part in result.logprobs] == [part.tobytes() for part in other.logprobs]

    run("a", "b", "c", "removed meanwhile")
    assert [engine.bank.entry(key).row is not None for key in "abc"] == [True, True, False]
    num_loads = engine.bank.stats.num_loads
    run("b")
    assert engine.bank.stats.num_loads == num_loads
    run("c", "a")
    run("a")
    for key in "abc":
        assert (driver.gradient(key) == plain.gradient(key)).all()
