"""Large states are read before the engine needs them: the same vectors, and the same errors at the same place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from tests.support.batches import Reference, request
from tests.support.numerics.bank_rows import SHAPES, make_spec
from workers.bank import arriving
from workers.bank.arriving import with_read_states
from workers.bank.bank import Bank
from workers.bank.entries import VECTORS, HostRow
from workers.bank.state_files import (
    DamagedStateError,
    ReadContent,
    gradient_file,
    optimizer_file,
    read_state,
    weights_file,
)
from workers.contract.contents import Content
from workers.contract.messages import AdapterInstall, AdapterState, Batch, LoadItem, SampleRequest, SamplerVersion
from workers.rows import RowLayout

SPEC = make_spec("a", 4)
Message = Batch | SampleRequest


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all states be large."""
    monkeypatch.setattr(arriving, "LARGE_BYTES", 0)


@pytest.fixture
def bank() -> Bank:
    return Bank(SHAPES, 2)


def some_row(bank: Bank) -> HostRow:
    """Return a row whose padding is zero."""
    layout = bank.layout(SPEC)
    vectors = [np.zeros(layout.num_values, np.float32) for _ in VECTORS]
    generator = np.random.default_rng(1)
    for flat in vectors:
        for _, matrix in layout.matrices(flat, SPEC.rank):
            matrix[...] = generator.standard_normal(matrix.shape)
    return HostRow(*map(torch.from_numpy, vectors))


def state_of(bank: Bank, row: HostRow) -> AdapterState:
    layout = bank.layout(SPEC)
    return AdapterState(
        weights=weights_file(layout, SPEC, row),
        optimizer=optimizer_file(layout, SPEC, row),
        gradient=gradient_file(layout, SPEC, row),
        num_steps=3,
        applied_seq=7,
        fingerprint="f",
    )


def installing(state: AdapterState | Reference) -> Batch:
    return Batch(epoch=1, cycle_id=1, installs=(AdapterInstall(spec=SPEC, state=state),))


def loading(state: AdapterState, *, with_optimizer: bool = True) -> Batch:
    item = LoadItem(op_id="o", adapter_id="a", prev_seq=0, seq=1, state=state, with_optimizer=with_optimizer)
    return Batch(epoch=1, cycle_id=1, items=(item,))


def sampling(state: AdapterState) -> SampleRequest:
    return replace(request("s", max_tokens=1), version=SamplerVersion(key="v", spec=SPEC, state=state))


def contents(message: Message) -> Iterator[Content | None]:
    for state in message.states:
        assert isinstance(state, AdapterState)
        yield from (state.weights, state.optimizer, state.gradient)


def vectors(bank: Bank, message: Message) -> dict[str, torch.Tensor]:
    """Return what the engine makes of a message's state, by the names of `VECTORS`, without those that it lacks."""
    weights, optimizer, gradient = contents(message)
    assert weights is not None
    row = read_state(bank.layout(SPEC), SPEC, weights, optimizer, gradient)
    return {name: vector for name in VECTORS if (vector := getattr(row, name)) is not None}


def read_ahead(bank: Bank, message: Message) -> Message:
    return with_read_states(bank, message)  # type: ignore[type-var] # it is either


def test_states_that_were_read_ahead_have_the_same_vectors_and_are_not_read_again(bank: Bank) -> None:
    row = some_row(bank)
    state = state_of(bank, row)
    bank.add("a", SPEC)
    of_weights = {"weights"}
    with_moments = of_weights | {"exp_avg", "exp_avg_sq"}
    for message, names in (
        (installing(state), set(VECTORS)),
        (installing(Reference(state)), set(VECTORS)),
        (loading(state), with_moments),
        (loading(state, with_optimizer=False), of_weights),
        (sampling(state), of_weights),
    ):
        read = read_ahead(bank, message)
        assert all(isinstance(content, ReadContent | None) for content in contents(read))
        found = vectors(bank, read)
        assert found.keys() == names
        assert all(torch.equal(vector, getattr(row, name)) for name, vector in found.items())
        assert read.states[0].num_bytes <= state.num_bytes


def test_what_cannot_be_read_ahead_stays_for_the_engine_to_refuse(bank: Bank) -> None:
    state = state_of(bank, some_row(bank))
    assert isinstance(state.weights, bytes)
    damaged = replace(state, weights=state.weights[:-1])
    bank.add("a", SPEC)
    for message in (installing(damaged), loading(damaged), sampling(damaged)):
        read = read_ahead(bank, message)
        assert next(contents(read)) == damaged.weights
        with pytest.raises(DamagedStateError, match="the weights cannot be read"):
            vectors(bank, read)
    lost = installing(Reference(None))
    assert with_read_states(bank, lost) == lost
    bank.remove("a")
    unknown = loading(state)
    assert with_read_states(bank, unknown) == unknown, "the engine does not hold the adapter"


def test_a_state_without_memory_for_its_vectors_stays_a_file(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(bank, "host_zeros", full)
    message = installing(state_of(bank, some_row(bank)))
    assert with_read_states(bank, message) == message


def test_small_states_stay_files(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(bank, some_row(bank))
    monkeypatch.setattr(arriving, "LARGE_BYTES", state.num_bytes)
    assert with_read_states(bank, installing(state)) == installing(state)


def test_a_load_into_an_adapter_of_the_same_batch_is_read_by_its_spec(bank: Bank) -> None:
    state = state_of(bank, some_row(bank))
    both = replace(loading(state), installs=(AdapterInstall(spec=SPEC, state=None),))
    assert isinstance(next(contents(with_read_states(bank, both))), ReadContent)


def test_threads_that_ask_for_a_layout_at_once_get_the_same_one(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two layouts would never be in one slab."""
    begin = RowLayout.__init__

    def slow(*arguments: Any) -> None:
        time.sleep(0.05)
        begin(*arguments)

    monkeypatch.setattr(RowLayout, "__init__", slow)
    with ThreadPoolExecutor(8) as threads:
        layouts = list(threads.map(lambda _: bank.layout(SPEC), range(8)))
    assert len(set(map(id, layouts))) == 1


def test_a_file_as_the_library_begins_it_is_read_without_the_library(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = some_row(bank)
    state = state_of(bank, row)
    monkeypatch.setattr(safetensors.numpy, "load", None)
    assert all(torch.equal(vector, getattr(row, name)) for name, vector in vectors(bank, installing(state)).items())
