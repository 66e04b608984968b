"""The engine loop: one thread, batches and decode steps in turn, and what happens when it ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest

from tests.toy_engine import KILL_TOKEN, ToyEngine
from workers.loop import EngineLoop
from workers.messages import (
    AdapterInstall,
    AdapterSpec,
    Batch,
    BatchResult,
    Datum,
    PassItem,
    SampleEvent,
    SampleRequest,
    SampleResult,
    SamplerVersion,
    SamplingParams,
)
from workers.pool import WorkerLost

TIMEOUT_S = 20.0


class RecordingEngine(ToyEngine):
    """Notes what it did; a closed gate keeps batches from running. A batch takes 4 s of its own time, a step 1 s."""

    def __init__(self, incarnation: str) -> None:
        super().__init__(incarnation)
        self.now = 0.0
        self.thread = threading.get_ident()
        self.calls: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def run(self, batch: Batch) -> BatchResult:
        self.gate.wait(TIMEOUT_S)
        assert threading.get_ident() == self.thread
        self.calls.append(f"batch {batch.cycle_id}")
        self.now += 4.0
        return super().run(batch)

    def decode_step(self) -> Sequence[SampleEvent]:
        assert threading.get_ident() == self.thread
        self.calls.append("decode")
        self.now += 1.0
        return super().decode_step()


class Running:
    """A loop around a recording engine, and what came out of it."""

    def __init__(self) -> None:
        self.events: list[SampleEvent] = []
        self.has_result = threading.Event()
        self.loop = EngineLoop(RecordingEngine, "toy-1", self.take, clock=lambda: self.engine.now)
        engine = self.loop.ready.result(TIMEOUT_S)
        assert isinstance(engine, RecordingEngine)
        self.engine = engine

    def take(self, events: Sequence[SampleEvent]) -> None:
        self.events += events
        if any(isinstance(event, SampleResult) for event in events):
            self.has_result.set()


def batch(cycle_id: int, token: int = 1) -> Batch:
    spec = AdapterSpec(
        adapter_id="a", rank=8, alpha=32.0, seed=cycle_id, train_attn=True, train_mlp=True, train_unembed=True
    )
    tokens = np.full(3, token, np.int32)
    item = PassItem(
        op_id="op",
        adapter_id="a",
        prev_seq=0,
        seq=1,
        chunk_index=0,
        num_chunks=1,
        data=(Datum(tokens=tokens, loss_inputs={"target_tokens": tokens}),),
        loss_fn="cross_entropy",
        loss_config={},
        backward=True,
    )
    return Batch(epoch=1, cycle_id=cycle_id, installs=(AdapterInstall(spec=spec, state=None),), items=(item,))


def request(op_id: str, max_tokens: int) -> SampleRequest:
    return SampleRequest(
        op_id=op_id,
        version=SamplerVersion(key=""),
        prompt=np.ones(2, np.int32),
        num_samples=1,
        params=SamplingParams(max_tokens=max_tokens),
        stream=True,
    )


def test_decoding_gets_after_each_batch_as_long_as_the_batch_took() -> None:
    running = Running()
    running.engine.gate.clear()
    futures: list[Future[BatchResult]] = [running.loop.submit(batch(0))]
    running.loop.start_sample(request("s", max_tokens=50))
    futures += [running.loop.submit(batch(cycle_id)) for cycle_id in range(1, 9)]
    running.engine.gate.set()
    assert [future.result(TIMEOUT_S).cycle_id for future in futures] == list(range(9))
    assert running.has_result.wait(TIMEOUT_S)
    running.loop.stop()
    calls = running.engine.calls
    assert calls.count("decode") == 50
    between = calls[calls.index("batch 1") : calls.index("batch 8") + 1]
    assert between == [call for i in range(1, 8) for call in (f"batch {i}", *["decode"] * 4)] + ["batch 8"]


def test_cancelled_sample_ends_with_an_error_and_unknown_ids_are_ignored() -> None:
    running = Running()
    running.loop.cancel_sample("never heard of")
    running.loop.start_sample(request("s", max_tokens=10**9))
    running.loop.cancel_sample("s")
    assert running.has_result.wait(TIMEOUT_S)
    result = running.events[-1]
    assert isinstance(result, SampleResult)
    assert result.error is not None
    running.loop.stop()


def test_engine_that_raises_fails_what_waits_and_ends_the_loop() -> None:
    running = Running()
    running.engine.gate.clear()
    doomed, waiting = running.loop.submit(batch(0, token=KILL_TOKEN)), running.loop.submit(batch(1))
    had_ended: list[bool] = []
    doomed.add_done_callback(lambda _: had_ended.append(running.loop.ended.done()))
    running.engine.gate.set()
    for future in (doomed, waiting, running.loop.submit(batch(2))):
        with pytest.raises(WorkerLost, match="killed by a toy token"):
            future.result(TIMEOUT_S)
    with pytest.raises(WorkerLost):
        running.loop.ended.result(TIMEOUT_S)
    with pytest.raises(WorkerLost):
        running.loop.check()
    with pytest.raises(WorkerLost):
        running.loop.start_sample(request("s", max_tokens=1))
    assert had_ended == [True], "who hears of the failure must find the loop ended"
    assert running.loop.stop()


def test_engine_that_cannot_be_made_says_why() -> None:
    def factory(incarnation: str) -> ToyEngine:
        raise OSError("no such model")

    loop = EngineLoop(factory, "toy-1", lambda _: None)
    with pytest.raises(OSError, match="no such model"):
        loop.ready.result(TIMEOUT_S)
    with pytest.raises(WorkerLost, match="no such model"):
        loop.submit(batch(0)).result(TIMEOUT_S)


def test_stop_finishes_the_running_batch_and_fails_the_waiting_one() -> None:
    running = Running()
    running.loop.check()
    running.engine.gate.clear()
    first = running.loop.submit(batch(0))
    while not first.running():
        pass
    waiting = running.loop.submit(batch(1))
    assert not running.loop.stop(timeout_s=0.01)
    running.engine.gate.set()
    assert running.loop.stop()
    assert first.result(TIMEOUT_S).cycle_id == 0
    with pytest.raises(WorkerLost):
        waiting.result(TIMEOUT_S)


def test_batch_whose_caller_gave_up_before_it_ran_is_skipped() -> None:
    running = Running()
    running.engine.gate.clear()
    first, given_up, last = (running.loop.submit(batch(cycle_id)) for cycle_id in range(3))
    assert given_up.cancel()
    running.engine.gate.set()
    assert last.result(TIMEOUT_S).cycle_id == 2
    assert first.done()
    assert running.engine.calls == ["batch 0", "batch 2"]
    running.loop.stop()
