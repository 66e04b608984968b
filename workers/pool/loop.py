"""The engine's thread: one per worker. It makes the engine, and alternates batches and decode steps.

Does not depend on what a batch does or on where callers are (another thread, another process).

Main invariant: while there are both batches and samples, decoding gets its share of the time (`Batch.decode_share`): a
batch of t seconds owes it t * share / (1 - share), and at least one step runs between two batches. So neither starves,
and between two tokens of a sequence lie at most one batch and one decode step, however many batches are queued. A step
that took longer than was owed shortens the next turn of decoding; decoding gets more than its share only if one step is
longer than whole batches owe. Requests are handed to the engine in the order of the calls, and so are batches. Large
states that they bring are read by another thread first, while the engine goes on with other work. An engine that raises
has failed: everything that was handed over fails with WorkerLost.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, cast

from workers.contract.contents import LARGE_BYTES
from workers.contract.failpoints import failpoint
from workers.contract.logs import about
from workers.contract.messages import Batch, BatchResult, SampleEvent, SampleRequest
from workers.contract.protocols import Arriving, Engine, EngineFactory, WorkerLost
from workers.contract.settings import EngineSettings
from workers.pool.environment import worker_of

logger = logging.getLogger(__name__)


class EventSink(Protocol):
    """A queue of sample events, such as `queue.SimpleQueue`."""

    def put(self, events: Sequence[SampleEvent] | None, /) -> None:
        """Add the events of a decode step, or None as the last entry. Called by the engine's thread; must not block."""


class EngineLoop:
    """Owns an engine's thread, from construction to `stop`, and one that reads large states for it."""

    def __init__(
        self,
        factory: EngineFactory,
        incarnation: str,
        events: EventSink,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start the thread, which makes the engine. `clock` gives seconds, for sharing the engine's time."""
        self.ready: Future[Engine] = Future()
        """Done when the engine is made; has the exception if that failed."""
        self.ended: Future[None] = Future()
        """Fails with WorkerLost when the engine has raised, could not be made, or the loop was stopped."""
        self._factory = factory
        self._incarnation = incarnation
        self._events = events
        self._clock = clock
        self._changed = threading.Condition()
        self._batches: deque[tuple[Future[Batch], Future[BatchResult]]] = deque()
        """Each as soon as its states have been read, and its result."""
        self._controls: deque[tuple[Future[Any] | None, Callable[[Engine], None]]] = deque()
        """Each with what it waits for, if with anything."""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix=f"states-{incarnation}")
        self._is_stopping = False
        self._owed_s = 0.0
        """Seconds that decoding gets before the next batch; below 0: its last step took that much too long."""
        for future in (self.ready, self.ended):
            future.set_running_or_notify_cancel()  # one caller that stops waiting must not cancel it for the others
        self._thread = threading.Thread(target=self._run, name=f"engine-{incarnation}", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch) -> Future[BatchResult]:
        """Queue a batch. The future raises WorkerLost if the loop ends first."""
        future: Future[BatchResult] = Future()
        arriving = self._arriving(batch)
        with self._changed:
            if self._is_stopping:
                future.set_exception(self._why_ended())
            else:
                self._batches.append((arriving, future))
                self._changed.notify()
        return future

    def begin(self, epoch: int, incarnation: str, events: EventSink) -> None:
        """Serve the next coordinator from the next turn on; queued batches fail. Raises WorkerLost.

        The events so far end with None, and later ones go to the new sink.
        """
        self._control(lambda engine: self._begin(engine, epoch, incarnation, events))
        self._fail_queued("another coordinator has taken over the worker")

    def start_sample(self, request: SampleRequest) -> None:
        """Hand over a sample request, which joins at the next decode step. Raises WorkerLost."""
        arriving = self._arriving(request)
        self._control(lambda engine: engine.start_sample(arriving.result()), awaits=arriving)

    def cancel_sample(self, op_id: str) -> None:
        """Stop a sample request at the next decode step. Raises WorkerLost."""
        self._control(lambda engine: engine.cancel_sample(op_id))

    def check(self) -> None:
        """Raise WorkerLost if the loop has ended."""
        if self.ended.done():
            raise self._why_ended()

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread after the batch or step that it runs; queued batches fail with WorkerLost. Idempotent.

        Returns whether the thread has ended. None: wait without limit.
        """
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _why_ended(self) -> WorkerLost:
        error = self.ended.exception() if self.ended.done() else None
        return WorkerLost(str(error or "the engine is stopping"))

    def _begin(self, engine: Engine, epoch: int, incarnation: str, events: EventSink) -> None:
        self._events.put(None)
        self._events = events
        self._owed_s = 0.0
        engine.begin(epoch, incarnation)

    def _control(self, control: Callable[[Engine], None], awaits: Future[Any] | None = None) -> None:
        with self._changed:
            if self._is_stopping:
                raise self._why_ended()
            self._controls.append((awaits, control))
            self._changed.notify()

    def _arriving(self, message: Arriving) -> Future[Arriving]:
        """Return a message as it goes to the engine: large states that it brings are read first."""
        if any(state.num_bytes > LARGE_BYTES for state in message.states):
            with self._changed:
                if not self._is_stopping:  # or the call fails anyway
                    reading = self._reader.submit(self._read_ahead, message)
                    reading.add_done_callback(self._notify)
                    return reading
        at_hand: Future[Arriving] = Future()
        at_hand.set_result(message)
        return at_hand

    def _read_ahead(self, message: Arriving) -> Arriving:
        return self.ready.result().read_ahead(message)

    def _notify(self, _: Future[Any]) -> None:
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        reason = "the engine was stopped"
        try:
            engine = self._factory(self._incarnation)
        except BaseException as error:  # noqa: BLE001 (raised by `ready`)
            self._end(f"the engine could not be made: {error}")
            self.ready.set_exception(error)
            return
        self.ready.set_result(engine)
        try:
            while self._turn(engine):
                pass
        except BaseException as error:
            ids = about(worker=worker_of(self._incarnation), incarnation=self._incarnation)
            logger.exception("the engine of %s failed", self._incarnation, extra=ids)
            reason = f"the engine failed: {_summary(error)}"
        self._end(reason)

    def _turn(self, engine: Engine) -> bool:
        """Take the requests handed over, run one batch, then the decode steps owed for it. Return False to stop."""
        with self._changed:
            while not (
                self._is_stopping or _is_ready(self._batches) or _is_ready(self._controls) or engine.can_decode()
            ):
                self._changed.wait()
            if self._is_stopping:
                return False
            entry = self._batches.popleft() if _is_ready(self._batches) else None
        self._take_controls(engine)
        if entry is not None:
            started = self._clock()
            self._run_batch(engine, *entry)
            share = entry[0].result().decode_share
            self._owed_s += (self._clock() - started) * share / (1.0 - share)
            self._take_controls(engine)  # requests and cancellations during the batch count at the first step after it
        self._decode(engine)
        if entry is None:
            self._owed_s = 0.0  # no batch was queued meanwhile
        return True

    def _decode(self, engine: Engine) -> None:
        """Run decode steps until decoding has had the time it is owed, and at least one."""
        while engine.can_decode() and not self._is_stopping:
            started = self._clock()
            self._events.put(engine.decode_step())
            step_s = self._clock() - started
            self._owed_s = max(self._owed_s - step_s, -step_s)
            if self._owed_s <= 0.0:
                return
            self._take_controls(engine)
        self._owed_s = 0.0  # time without samples is not saved up

    def _take_controls(self, engine: Engine) -> None:
        controls = []
        with self._changed:
            while _is_ready(self._controls):
                controls.append(self._controls.popleft()[1])
        for control in controls:
            control(engine)

    def _run_batch(self, engine: Engine, arriving: Future[Batch], future: Future[BatchResult]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            failpoint("worker.received")
            result = engine.run(arriving.result())
            failpoint("worker.applied")
        except BaseException as error:
            reason = f"the engine failed: {_summary(error)}"
            self._end(reason)  # before the future, so that the caller's next call fails too
            future.set_exception(WorkerLost(reason))
            raise
        future.set_result(result)

    def _end(self, reason: str) -> None:
        """Fail queued batches and all later calls. The first reason stays."""
        if self.ended.done():
            return
        with self._changed:
            self._is_stopping = True
        self._reader.shutdown(wait=False)
        self._fail_queued(reason)
        self.ended.set_exception(WorkerLost(reason))
        self._events.put(None)

    def _fail_queued(self, reason: str) -> None:
        with self._changed:
            queued = list(self._batches)
            self._batches.clear()
        for _, future in queued:
            if future.set_running_or_notify_cancel():
                future.set_exception(WorkerLost(reason))


def _is_ready(queue: Sequence[tuple[Future[Any] | None, Any]]) -> bool:
    """Return whether there is a first entry, and what it waits for is done."""
    return bool(queue) and ((awaited := queue[0][0]) is None or awaited.done())


def _summary(error: BaseException) -> str:
    """Return the first line of an error: CUDA's go on with advice for programmers."""
    return str(error).partition("\n")[0]


def engine_factory(path: str, settings: EngineSettings) -> EngineFactory:
    """Return a factory that imports `module:attribute` when it is called, and makes the engine with that."""

    def make_engine(incarnation: str) -> Engine:
        module, _, attribute = path.partition(":")
        make = cast("Callable[[EngineSettings], EngineFactory]", getattr(importlib.import_module(module), attribute))
        return make(settings)(incarnation)

    return make_engine
