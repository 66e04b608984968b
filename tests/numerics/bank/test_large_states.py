"""Files of large states are made when they are read: later work of the engine changes no byte of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.numerics.harness import Driver, assemble_again, make_data, make_spec
from tests.support.numerics.late_transfers import LateTransfers
from workers.bank import arriving, state_files
from workers.bank.bank import Bank
from workers.bank.transfers import Transfers
from workers.contract.contents import Content, whole
from workers.contract.messages import AdapterState

SPECS = (make_spec("a"), make_spec("b", 16), make_spec("padded", 3, train_mlp=False))
DATA = make_data("cross_entropy", [20, 11])
NUM_STEPS = 3


def contents(state: AdapterState) -> list[Content | None]:
    return [state.weights, state.optimizer, state.gradient]


def saved(model: Path, num_slots: int, transfers: Transfers | None) -> list[list[Content | None]]:
    """Return states after each step of three adapters and after their last pass, none of which was read meanwhile.

    One with a gradient is waited for, whose values are checked; so nothing waits before the last round.
    """
    driver = Driver(model, num_slots=num_slots)
    engine = driver.engine
    assemble_again(engine, Bank(engine.base_model.group_shapes, num_slots, transfers=transfers))
    driver.install(*SPECS)
    states = []
    for number in range(NUM_STEPS):
        for spec in SPECS:
            driver.train(driver.backward(spec.adapter_id, DATA))
            if number == NUM_STEPS - 1:
                states.append(contents(driver.snapshot(spec.adapter_id)))
            driver.train(driver.step(spec.adapter_id))
            states.append(contents(driver.state(spec.adapter_id)))
    return states


@pytest.mark.parametrize("num_slots", [1, 4])
@pytest.mark.parametrize("is_late", [False, True])
def test_states_that_are_read_later_are_those_of_their_saves(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, num_slots: int, *, is_late: bool
) -> None:
    expected = saved(qwen3, num_slots, None)
    assert all(isinstance(each, bytes) or each is None for state in expected for each in state)
    monkeypatch.setattr(state_files, "LARGE_BYTES", 0)
    found = saved(qwen3, num_slots, LateTransfers() if is_late else None)
    assert not any(isinstance(each, bytes) for state in found for each in state)
    assert [[each and whole(each) for each in state] for state in found] == expected


def continued(model: Path, state: AdapterState, *, is_ahead: bool) -> list[Content | None]:
    """Return the state after two steps on an installed one, the second behind a load of it."""
    driver = Driver(model)
    run, read_ahead = driver.engine.run, driver.engine.read_ahead
    if is_ahead:
        driver.engine.run = lambda batch: run(read_ahead(batch))  # type: ignore[method-assign] # as the loop does
    driver.install(SPECS[2], state=state)
    driver.train(driver.step("padded"), driver.load("padded", state), driver.backward("padded", DATA))
    driver.train(driver.step("padded"))
    return contents(driver.state("padded"))


def test_states_read_ahead_go_on_with_the_bits_of_those_that_the_engine_reads(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(qwen3)
    driver.install(SPECS[2])
    driver.train(driver.backward("padded", DATA), driver.step("padded"), driver.backward("padded", DATA))
    state = driver.snapshot("padded")
    expected = continued(qwen3, state, is_ahead=False)
    monkeypatch.setattr(arriving, "LARGE_BYTES", 0)
    assert continued(qwen3, state, is_ahead=True) == expected
