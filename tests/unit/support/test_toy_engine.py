"""Snapshots of the toy engine in the middle of a gradient window behave as the real engine's."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.toy_engine import ToyEngine, toy_state
from workers.contract.messages import (
    AdamParams,
    AdapterInstall,
    AdapterSpec,
    AdapterState,
    Batch,
    Datum,
    Item,
    ItemResult,
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


def position(seq: int) -> dict[str, Any]:
    return {"op_id": f"a/{seq}", "adapter_id": "a", "prev_seq": seq - 1, "seq": seq}


def backward(seq: int, token: int = 1) -> PassItem:
    tokens = np.array([token, seq], np.int32)
    datum = Datum(tokens=tokens, loss_inputs={"target_tokens": tokens})
    fields: dict[str, Any] = {"chunk_index": 0, "num_chunks": 1, "loss_fn": "cross_entropy", "loss_config": {}}
    return PassItem(**position(seq), **fields, data=(datum, datum), backward=True)


def step(seq: int) -> OptimStepItem:
    return OptimStepItem(**position(seq), params=AdamParams())


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


def test_copy_made_in_the_middle_of_a_window_continues_with_the_same_chains() -> None:
    engine = in_a_window()
    copy = installed(snapshot(engine))
    assert snapshot(copy) == snapshot(engine)
    expected = rest_of_the_run(in_a_window())
    assert expected[0] == 4
    assert rest_of_the_run(engine) == expected
    assert rest_of_the_run(copy) == expected


def test_copy_made_without_the_gradient_has_another_chain() -> None:
    engine = in_a_window()
    state = snapshot(engine, with_gradient=False)
    assert state == toy_state(engine.adapters["a"])
    assert (state.gradient, state.num_datums) == (None, 0)
    copied, original = rest_of_the_run(installed(state)), rest_of_the_run(engine)
    assert copied[0] == 2
    assert copied[1].weights != original[1].weights
