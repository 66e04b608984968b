"""One thread that owns one engine and does everything with it, batches and decode steps in turn.

Knows neither what a batch means nor where callers live (another thread, another process).

Main invariant: while there are both, decoding gets its share of the time (`Batch.decode_share`), which a batch of t
seconds owes it t * share / (1 - share) for, and at least one step between two batches. So neither starves, and between
two tokens of a sequence lie at most one batch and one decode step, however many batches wait. A step that took longer
than was owed shortens the next turn of decoding; only where one step is longer than what whole batches owe, decoding
gets more than its share. What callers hand over is taken in their order. An engine that raises is dead: everything that
waits for it fails with WorkerLost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from workers.contract.failpoints import failpoint
from workers.contract.messages import Batch, BatchResult, SampleEvent, SampleRequest
from workers.contract.protocols import Engine, EngineFactory, WorkerLost

logger = logging.getLogger(__name__)


class EngineLoop:
    """Owns an engine's thread, from construction to `stop`."""

    def __init__(
        self,
        factory: EngineFactory,
        incarnation: str,
        on_events: Callable[[Sequence[SampleEvent]], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start the thread. It makes the engine, and calls `on_events` after each decode step; that must not block.

        `clock` gives seconds, for sharing the engine's time.
        """
        self.ready: Future[Engine] = Future()
        """Done when the engine is made; has its failure if it could not be."""
        self.ended: Future[None] = Future()
        """Fails with WorkerLost when the engine has raised, could not be made, or the loop was stopped."""
        self._factory = factory
        self._incarnation = incarnation
        self._on_events = on_events
        self._clock = clock
        self._changed = threading.Condition()
        self._batches: deque[tuple[Batch, Future[BatchResult]]] = deque()
        self._controls: deque[Callable[[Engine], None]] = deque()
        self._is_stopping = False
        self._owed_s = 0.0
        """What decoding is to get before the next batch runs; below 0 by what its last step took too much."""
        for future in (self.ready, self.ended):
            future.set_running_or_notify_cancel()  # a caller who gives up waiting must not cancel it for the others
        self._thread = threading.Thread(target=self._run, name=f"engine-{incarnation}", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch) -> Future[BatchResult]:
        """Queue a batch. The future raises WorkerLost if the engine dies first."""
        future: Future[BatchResult] = Future()
        with self._changed:
            if self._is_stopping:
                future.set_exception(self._why_ended())
            else:
                self._batches.append((batch, future))
                self._changed.notify()
        return future

    def start_sample(self, request: SampleRequest) -> None:
        """Hand over a sample request; it joins at the next decode step. Raises WorkerLost."""
        self._control(lambda engine: engine.start_sample(request))

    def cancel_sample(self, op_id: str) -> None:
        """Stop a sample request at the next decode step. Raises WorkerLost."""
        self._control(lambda engine: engine.cancel_sample(op_id))

    def check(self) -> None:
        """Raises WorkerLost if the loop has ended."""
        if self.ended.done():
            raise self._why_ended()

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread after what it is doing now; what waits fails with WorkerLost. Idempotent.

        Returns whether the thread has ended; with None it is waited for, however long that takes.
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

    def _control(self, control: Callable[[Engine], None]) -> None:
        with self._changed:
            if self._is_stopping:
                raise self._why_ended()
            self._controls.append(control)
            self._changed.notify()

    def _run(self) -> None:
        reason = "the engine was stopped"
        try:
            engine = self._factory(self._incarnation)
        except BaseException as error:  # noqa: BLE001 (handed on to whoever awaits `ready`)
            self._end(f"the engine could not be made: {error}")
            self.ready.set_exception(error)
            return
        self.ready.set_result(engine)
        try:
            while self._turn(engine):
                pass
        except BaseException as error:
            logger.exception("the engine of %s failed", self._incarnation)
            reason = f"the engine failed: {error}"
        self._end(reason)

    def _turn(self, engine: Engine) -> bool:
        """What was handed over, then one batch, then what decoding is owed for it. False when it is time to stop."""
        with self._changed:
            while not (self._is_stopping or self._batches or self._controls or engine.can_decode()):
                self._changed.wait()
            if self._is_stopping:
                return False
            entry = self._batches.popleft() if self._batches else None
        self._take_controls(engine)
        if entry is not None:
            started = self._clock()
            self._run_batch(engine, *entry)
            share = entry[0].decode_share
            self._owed_s += (self._clock() - started) * share / (1.0 - share)
            self._take_controls(engine)  # who came or was cancelled meanwhile does so before the first step after it
        self._decode(engine)
        if entry is None:
            self._owed_s = 0.0  # nobody waited for the time that this took
        return True

    def _decode(self, engine: Engine) -> None:
        """Run decode steps until they have taken what they are owed, and at least one."""
        while engine.can_decode() and not self._is_stopping:
            started = self._clock()
            self._on_events(engine.decode_step())
            step_s = self._clock() - started
            self._owed_s = max(self._owed_s - step_s, -step_s)
            if self._owed_s <= 0.0:
                return
            self._take_controls(engine)
        self._owed_s = 0.0  # what nothing was decoded in is not saved up

    def _take_controls(self, engine: Engine) -> None:
        with self._changed:
            controls = list(self._controls)
            self._controls.clear()
        for control in controls:
            control(engine)

    def _run_batch(self, engine: Engine, batch: Batch, future: Future[BatchResult]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            failpoint("worker.received")
            result = engine.run(batch)
            failpoint("worker.applied")
        except BaseException as error:
            reason = f"the engine failed: {error}"
            self._end(reason)  # first, so that whatever the caller tries next fails too
            future.set_exception(WorkerLost(reason))
            raise
        future.set_result(result)

    def _end(self, reason: str) -> None:
        """Fail whatever waits, and what will be handed over. The first reason stays."""
        if self.ended.done():
            return
        with self._changed:
            self._is_stopping = True
            waiting = list(self._batches)
            self._batches.clear()
        for _, future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(WorkerLost(reason))
        self.ended.set_exception(WorkerLost(reason))
