"""The engine loop: one thread, batches and decode steps in turn, errors and stops."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue

import pytest

from tests.support.batches import batch, request
from tests.support.toy_engine import KILL_TOKEN, ToyAdapter, ToyEngine, fresh_chain, toy_state
from tests.support.waiting import wait_until
from workers.contract.contents import LARGE_BYTES
from workers.contract.messages import (
    Batch,
    BatchResult,
    SampleEvent,
    SampleResult,
    SamplerVersion,
    TokenEvent,
)
from workers.contract.protocols import Arriving, WorkerLost
from workers.pool.loop import EngineLoop

TIMEOUT_S = 20.0
SPEC = batch(0).installs[0].spec
STATE = toy_state(ToyAdapter(SPEC, fresh_chain(SPEC)))
LARGE_STATE = replace(STATE, gradient=bytes(LARGE_BYTES + 1))


class RecordingEngine(ToyEngine):
    """Records its batches and steps. While `gate` is cleared, batches wait; while `may_read` is, states are not read.

    By default a batch takes 4 s of the engine's own time, a step 1 s.
    """

    def __init__(self, incarnation: str) -> None:
        super().__init__(incarnation)
        self.now = 0.0
        self.batch_s: Iterator[float] = itertools.repeat(4.0)
        self.step_s: Iterator[float] = itertools.repeat(1.0)
        self.done: list[tuple[str, float]] = []
        """Batches and decode steps, with their seconds."""
        self.thread = threading.get_ident()
        self.calls: list[str] = []
        self.has_begun = threading.Event()
        """Set when a batch begins."""
        self.gate = threading.Event()
        self.gate.set()
        self.may_read = threading.Event()
        self.may_read.set()

    def read_ahead(self, message: Arriving) -> Arriving:
        assert threading.get_ident() != self.thread
        self.may_read.wait(TIMEOUT_S)
        self.calls.append("read")
        return message

    def run(self, batch: Batch) -> BatchResult:
        self.has_begun.set()
        self.gate.wait(TIMEOUT_S)
        assert threading.get_ident() == self.thread
        self.calls.append(f"batch {batch.cycle_id}")
        self._spend("batch", next(self.batch_s))
        return super().run(batch)

    def decode_step(self) -> Sequence[SampleEvent]:
        assert threading.get_ident() == self.thread
        self.calls.append("decode")
        self._spend("decode", next(self.step_s))
        return super().decode_step()

    def _spend(self, what: str, seconds: float) -> None:
        self.now += seconds
        self.done.append((what, seconds))


class Running:
    """A loop around a recording engine, and its events."""

    def __init__(self) -> None:
        self.events: list[SampleEvent] = []
        self.has_result = threading.Event()
        self.has_ended = threading.Event()
        self.loop = EngineLoop(RecordingEngine, "toy-1", self, clock=lambda: self.engine.now)
        engine = self.loop.ready.result(TIMEOUT_S)
        assert isinstance(engine, RecordingEngine)
        self.engine = engine

    def put(self, events: Sequence[SampleEvent] | None) -> None:
        self.events += events or ()
        if events is None:
            self.has_ended.set()
        elif any(isinstance(event, SampleResult) for event in events):
            self.has_result.set()


def decoded_between_batches(share: float, batch_s: Iterator[float], step_s: Iterator[float]) -> list[tuple[str, float]]:
    """Return batches and steps of ten seconds, of an engine that always has a sample and a queued batch."""
    running = Running()
    running.engine.batch_s, running.engine.step_s = batch_s, step_s
    running.engine.gate.clear()
    futures = [running.loop.submit(batch(0, decode_share=share))]
    running.loop.start_sample(request("s", max_tokens=10**9))
    futures += [running.loop.submit(batch(cycle_id, decode_share=share)) for cycle_id in range(1, 101)]
    running.engine.gate.set()
    futures[-1].result(TIMEOUT_S)
    running.loop.stop()
    done = running.engine.done
    last = max(index for index, (what, _) in enumerate(done) if what == "batch")
    assert sum(seconds for _, seconds in done[:last]) >= 10.0
    return done[:last]


def part_decoding(done: list[tuple[str, float]]) -> float:
    return sum(seconds for what, seconds in done if what == "decode") / sum(seconds for _, seconds in done)


def varied(seed: int, low: float, high: float) -> Iterator[float]:
    source = random.Random(seed)
    while True:
        yield source.uniform(low, high)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 2 / 3, 0.9])
def test_decoding_has_its_share_of_ten_seconds_within_ten_percent(share: float) -> None:
    found = part_decoding(decoded_between_batches(share, varied(1, 0.05, 0.25), varied(2, 0.002, 0.008)))
    assert abs(found - share) < 0.1 * min(share, 1 - share)


def test_steps_longer_than_the_owed_time_shorten_later_turns() -> None:
    """With full turns there would be two of these steps for each batch, and decoding would have 0.62 of the time."""
    found = part_decoding(decoded_between_batches(0.5, itertools.repeat(0.06), itertools.repeat(0.05)))
    assert abs(found - 0.5) < 0.05


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("step_s", [0.005, 0.05, 0.5])
def test_between_two_tokens_are_at_most_one_batch_and_one_step(share: float, step_s: float) -> None:
    done = decoded_between_batches(share, varied(3, 0.05, 0.25), itertools.repeat(step_s))
    begun = [index for index, (what, _) in enumerate(done) if what == "decode"]
    gaps = [done[begun[i] + 1 : begun[i + 1] + 1] for i in range(len(begun) - 1)]
    assert all([what for what, _ in gap] in (["decode"], ["batch", "decode"]) for gap in gaps)
    assert max(sum(seconds for _, seconds in gap) for gap in gaps) <= 0.25 + step_s


def test_decoding_while_no_batch_is_queued_does_not_count_against_its_share() -> None:
    running = Running()
    running.loop.start_sample(request("s", max_tokens=100))
    assert running.has_result.wait(TIMEOUT_S)
    running.engine.gate.clear()
    futures = [running.loop.submit(batch(0))]
    running.loop.start_sample(request("t", max_tokens=100))
    futures += [running.loop.submit(batch(1))]
    running.engine.gate.set()
    for future in futures:
        future.result(TIMEOUT_S)
    running.loop.stop()
    calls = running.engine.calls
    assert calls[calls.index("batch 0") + 1 : calls.index("batch 1")] == ["decode"] * 4


def test_requests_and_cancellations_during_a_batch_count_at_the_first_step_after_it() -> None:
    running = Running()
    running.loop.start_sample(request("old", max_tokens=10**9))
    running.engine.gate.clear()
    futures = [running.loop.submit(batch(0))]
    assert running.engine.has_begun.wait(TIMEOUT_S)
    running.loop.start_sample(request("new", max_tokens=1))
    running.loop.cancel_sample("old")
    before = len(running.events)
    futures.append(running.loop.submit(batch(1, decode_share=0.1)))
    running.engine.gate.set()
    for future in futures:
        future.result(TIMEOUT_S)
    running.loop.stop()
    calls = running.engine.calls
    assert calls[calls.index("batch 0") + 1 : calls.index("batch 1")] == ["decode"]
    assert {event.op_id for event in running.events[before:] if isinstance(event, SampleResult)} == {"old", "new"}
    assert not [event for event in running.events[before:] if isinstance(event, TokenEvent) and event.op_id == "old"]


def bringing_a_large_state(cycle_id: int) -> Batch:
    """Return a batch like `batch`, whose adapter has a state that is larger than the engine's thread reads."""
    plain = batch(cycle_id)
    install = replace(plain.installs[0], state=LARGE_STATE)
    return replace(plain, installs=(install,))


def test_while_a_large_state_is_read_decoding_goes_on_and_later_batches_wait() -> None:
    running = Running()
    running.engine.may_read.clear()
    running.loop.start_sample(request("s", max_tokens=10**9))
    first, second = running.loop.submit(bringing_a_large_state(0)), running.loop.submit(batch(1))
    num_events = len(running.events)
    wait_until(lambda: len(running.events) > num_events + 10)
    assert set(running.engine.calls) == {"decode"}
    running.engine.may_read.set()
    assert first.result(TIMEOUT_S).cycle_id == 0
    assert second.result(TIMEOUT_S).cycle_id == 1
    running.loop.stop()
    assert [call for call in running.engine.calls if call != "decode"] == ["read", "batch 0", "batch 1"]


def test_a_large_state_for_a_loop_that_has_ended_is_lost_as_any_batch_is() -> None:
    running = Running()
    running.loop.stop()
    with pytest.raises(WorkerLost, match="the engine was stopped"):
        running.loop.submit(bringing_a_large_state(0)).result(TIMEOUT_S)


def test_a_batch_without_a_large_state_is_not_handed_to_another_thread() -> None:
    running = Running()
    small = replace(batch(0).installs[0], state=STATE)
    running.loop.submit(replace(batch(0), installs=(small,))).result(TIMEOUT_S)
    running.loop.stop()
    assert running.engine.calls == ["batch 0"]


def test_a_sample_whose_state_is_read_is_cancelled_by_a_call_that_comes_meanwhile() -> None:
    """The engine ignores ids that it does not know, so the cancellation must not overtake the sample."""
    running = Running()
    running.engine.may_read.clear()
    asked = replace(request("s", max_tokens=10**9), version=SamplerVersion(key="v", spec=SPEC, state=LARGE_STATE))
    running.loop.start_sample(asked)
    running.loop.cancel_sample("s")
    assert running.loop.submit(batch(0)).result(TIMEOUT_S).cycle_id == 0, "batches do not wait for samples"
    running.engine.may_read.set()
    assert running.has_result.wait(TIMEOUT_S)
    running.loop.stop()


def test_a_batch_whose_states_are_read_is_lost_with_its_coordinator() -> None:
    running = Running()
    running.engine.may_read.clear()
    reading = running.loop.submit(bringing_a_large_state(0))
    running.loop.begin(7, "toy-2", SimpleQueue())
    with pytest.raises(WorkerLost, match="another coordinator has taken over"):
        reading.result(TIMEOUT_S)
    running.engine.may_read.set()
    assert running.loop.submit(replace(batch(3), epoch=7)).result(TIMEOUT_S).incarnation == "toy-2"
    running.loop.stop()
    assert "batch 0" not in running.engine.calls


def test_cancelled_sample_ends_with_an_error_and_unknown_ids_are_ignored() -> None:
    running = Running()
    running.loop.cancel_sample("unknown")
    running.loop.start_sample(request("s", max_tokens=10**9))
    running.loop.cancel_sample("s")
    assert running.has_result.wait(TIMEOUT_S)
    result = running.events[-1]
    assert isinstance(result, SampleResult)
    assert result.error is not None
    running.loop.stop()


def test_engine_that_raises_fails_queued_batches_and_ends_the_loop() -> None:
    running = Running()
    running.engine.gate.clear()
    failing, queued = running.loop.submit(batch(0, token=KILL_TOKEN)), running.loop.submit(batch(1))
    had_ended: list[bool] = []
    failing.add_done_callback(lambda _: had_ended.append(running.loop.ended.done()))
    running.engine.gate.set()
    for future in (failing, queued, running.loop.submit(batch(2))):
        with pytest.raises(WorkerLost, match="killed by a toy token"):
            future.result(TIMEOUT_S)
    with pytest.raises(WorkerLost):
        running.loop.ended.result(TIMEOUT_S)
    with pytest.raises(WorkerLost):
        running.loop.check()
    with pytest.raises(WorkerLost):
        running.loop.start_sample(request("s", max_tokens=1))
    assert had_ended == [True], "the loop ends before its batch fails"
    assert running.has_ended.is_set(), "the events end with the loop"
    assert running.loop.stop()


@pytest.mark.parametrize("what", ["batch", "decode step"])
def test_worker_is_lost_for_the_reason_that_the_device_gives(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the advice that follows."""

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nFor debugging consider ...")

    running = Running()
    monkeypatch.setattr(running.engine, "run" if what == "batch" else "decode_step", fail)
    if what == "batch":
        running.loop.submit(batch(0))
    else:
        running.loop.start_sample(request("s", max_tokens=1))
    with pytest.raises(WorkerLost) as lost:
        running.loop.ended.result(TIMEOUT_S)
    assert str(lost.value) == "the engine failed: CUDA error: an illegal memory access was encountered"


def test_error_of_an_engine_that_cannot_be_made_is_raised() -> None:
    def factory(incarnation: str) -> ToyEngine:
        raise OSError("no such model")

    loop = EngineLoop(factory, "toy-1", SimpleQueue())
    with pytest.raises(OSError, match="no such model"):
        loop.ready.result(TIMEOUT_S)
    with pytest.raises(WorkerLost, match="no such model"):
        loop.submit(batch(0)).result(TIMEOUT_S)


def test_stop_finishes_the_running_batch_and_fails_the_queued_one() -> None:
    running = Running()
    running.loop.check()
    running.engine.gate.clear()
    first = running.loop.submit(batch(0))
    while not first.running():
        pass
    queued = running.loop.submit(batch(1))
    assert not running.loop.stop(timeout_s=0.01)
    running.engine.gate.set()
    assert running.loop.stop()
    assert first.result(TIMEOUT_S).cycle_id == 0
    with pytest.raises(WorkerLost):
        queued.result(TIMEOUT_S)


def test_batch_whose_caller_was_cancelled_before_it_ran_is_skipped() -> None:
    running = Running()
    running.engine.gate.clear()
    first, cancelled, last = (running.loop.submit(batch(cycle_id)) for cycle_id in range(3))
    assert cancelled.cancel()
    running.engine.gate.set()
    assert last.result(TIMEOUT_S).cycle_id == 2
    assert first.done()
    assert running.engine.calls == ["batch 0", "batch 2"]
    running.loop.stop()


def test_the_next_coordinator_gets_no_batch_and_no_event_of_the_last_one() -> None:
    running = Running()
    running.loop.start_sample(request("old", max_tokens=10**9))
    running.engine.gate.clear()
    begun, queued = running.loop.submit(batch(0)), running.loop.submit(batch(1))
    assert running.engine.has_begun.wait(TIMEOUT_S)
    events: SimpleQueue[Sequence[SampleEvent] | None] = SimpleQueue()
    running.loop.begin(7, "toy-2", events)
    with pytest.raises(WorkerLost, match="another coordinator has taken over"):
        queued.result(TIMEOUT_S)
    running.loop.start_sample(request("new", max_tokens=1))
    running.engine.gate.set()
    assert begun.result(TIMEOUT_S).incarnation == "toy-1", "what runs is finished"
    assert running.has_ended.wait(TIMEOUT_S), "the stream of the last coordinator ends"
    first = events.get(timeout=TIMEOUT_S)
    assert first is not None
    assert {event.op_id for event in first} == {"new"}
    stale, fresh = running.loop.submit(batch(2)), running.loop.submit(replace(batch(3), epoch=7))
    assert stale.result(TIMEOUT_S).results[0].error is not None
    assert (fresh.result(TIMEOUT_S).results[0].error, fresh.result().incarnation) == (None, "toy-2")
    running.loop.stop()
