"""The toy's snapshots in the middle of a gradient window, as the real engine's."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.support.toy_engine import POISON_TOKEN, ToyEngine, toy_state
from workers.contract.messages import (
    AdamParams,
    AdapterInstall,
    AdapterSpec,
    AdapterState,
    Batch,
    Datum,
    ErrorCode,
    Item,
    ItemResult,
    LoadItem,
    OptimStepItem,
    PassItem,
    SaveItem,
)

SPEC = AdapterSpec(adapter_id="a", rank=8, alpha=16.0, seed=3, train_attn=True, train_mlp=True, train_unembed=True)


def run(engine: ToyEngine, *items: Item, installs: tuple[AdapterInstall, ...] = ()) -> list[ItemResult]:
    return list(engine.run(Batch(epoch=1, cycle_id=1, installs=installs, items=items)).results)


def installed(state: AdapterState | None = None) -> ToyEngine:
    engine = ToyEngine("toy")
    run(engine, installs=(AdapterInstall(spec=SPEC, state=state),))
    return engine


def place(seq: int) -> dict[str, Any]:
    return {"op_id": f"a/{seq}", "adapter_id": "a", "prev_seq": seq - 1, "seq": seq}


def backward(seq: int, token: int = 1) -> PassItem:
    tokens = np.array([token, seq], np.int32)
    datum = Datum(tokens=tokens, loss_inputs={"target_tokens": tokens})
    fields: dict[str, Any] = {"chunk_index": 0, "num_chunks": 1, "loss_fn": "cross_entropy", "loss_config": {}}
    return PassItem(**place(seq), **fields, data=(datum, datum), backward=True)


def step(seq: int) -> OptimStepItem:
    return OptimStepItem(**place(seq), params=AdamParams())


def snapshot(engine: ToyEngine, *, with_gradient: bool = True) -> AdapterState:
    seq = engine.adapters["a"].progress.applied_seq
    item = SaveItem(op_id="", adapter_id="a", prev_seq=seq, seq=seq, with_optimizer=True, with_gradient=with_gradient)
    (result,) = run(engine, item)
    assert result.state is not None
    return result.state


def rest_of_the_run(engine: ToyEngine) -> tuple[float, AdapterState]:
    _, stepped = run(engine, backward(4), step(5))
    return stepped.metrics["num_datums:sum"], snapshot(engine)


def in_a_window() -> ToyEngine:
    engine = installed()
    run(engine, backward(1), step(2), backward(3))
    return engine


def test_copy_made_in_the_middle_of_a_window_goes_on_with_the_same_chains() -> None:
    engine = in_a_window()
    copy = installed(snapshot(engine))
    assert snapshot(copy) == snapshot(engine)
    expected = rest_of_the_run(in_a_window())
    assert expected[0] == 4
    assert rest_of_the_run(engine) == expected
    assert rest_of_the_run(copy) == expected


def test_copy_made_without_the_gradient_shows() -> None:
    engine = in_a_window()
    state = snapshot(engine, with_gradient=False)
    assert state == toy_state(engine.adapters["a"])
    assert (state.gradient, state.num_datums) == (None, 0)
    copied, original = rest_of_the_run(installed(state)), rest_of_the_run(engine)
    assert copied[0] == 2
    assert copied[1].weights != original[1].weights


def test_no_gradient_is_saved_between_windows_and_in_a_closed_one() -> None:
    engine = in_a_window()
    run(engine, backward(4, POISON_TOKEN))
    closed = snapshot(engine)
    run(engine, step(5))
    for state in (closed, snapshot(engine)):
        assert (state.gradient, state.num_datums) == (None, 0)


def test_gradient_that_was_installed_is_dropped_like_any_other() -> None:
    engine = in_a_window()
    copy, without = installed(snapshot(engine)), installed(snapshot(engine, with_gradient=False))
    _, dropped = run(copy, dataclasses.replace(backward(4), drop_gradient=True), step(5))
    assert (dropped.metrics["num_datums:sum"], snapshot(copy)) == rest_of_the_run(without)


@pytest.mark.parametrize("gradient", [b"", b"{}", b'{"chain": "00", "sha256": ""}'])
def test_damaged_gradient_is_data_loss_for_an_install_and_nothing_to_a_load(gradient: bytes) -> None:
    engine = in_a_window()
    state = dataclasses.replace(snapshot(engine), gradient=gradient)
    (result,) = run(installed(state), backward(4))
    assert result.error is not None
    assert result.error.code is ErrorCode.DATA_LOSS
    (loaded,) = run(engine, LoadItem(**place(4), state=state, with_optimizer=True))
    assert loaded.error is None
    assert snapshot(engine).gradient is None


def test_load_takes_no_gradient_from_a_state() -> None:
    engine = in_a_window()
    run(engine, LoadItem(**place(4), state=snapshot(engine), with_optimizer=True))
    loaded = snapshot(engine)
    assert (loaded.gradient, loaded.num_datums) == (None, 0)
    assert loaded == dataclasses.replace(snapshot(in_a_window(), with_gradient=False), applied_seq=4)
