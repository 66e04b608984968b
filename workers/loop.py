"""One thread that owns one engine and does everything with it, batches and decode steps in turn.

Knows neither what a batch means nor where callers live (another thread, another process). While there is both, it
alternates: after every batch at least one decode step, after every decode step the next batch; so neither starves.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from workers.messages import Batch, BatchResult, SampleEvent, SampleRequest
from workers.pool import Engine, EngineFactory, WorkerLost

logger = logging.getLogger(__name__)


class EngineLoop:
    """Owns an engine's thread. `on_event` is called on it, for every sample event, and must not block."""

    def __init__(self, factory: EngineFactory, incarnation: str, on_event: Callable[[SampleEvent], None]) -> None:
        self.ready: Future[Engine] = Future()
        """Done when the engine is made; has its failure if it could not be."""
        self.failed: Future[None] = Future()
        """Done, with WorkerLost, when the engine has raised or the loop was stopped."""
        self._factory = factory
        self._incarnation = incarnation
        self._on_event = on_event
        self._changed = threading.Condition()
        self._batches: deque[tuple[Batch, Future[BatchResult]]] = deque()
        self._controls: deque[Callable[[Engine], None]] = deque()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=f"engine-{incarnation}", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch) -> Future[BatchResult]:
        """Queue a batch. The future raises WorkerLost if the engine dies first."""
        future: Future[BatchResult] = Future()
        with self._changed:
            if self._is_stopping:
                future.set_exception(WorkerLost("the engine has stopped"))
            else:
                self._batches.append((batch, future))
                self._changed.notify()
        return future

    def start_sample(self, request: SampleRequest) -> None:
        """Hand over a sample request; it joins at the next decode step."""
        self._control(lambda engine: engine.start_sample(request))

    def cancel_sample(self, op_id: str) -> None:
        """Stop a sample request at the next decode step."""
        self._control(lambda engine: engine.cancel_sample(op_id))

    def stop(self) -> None:
        """End the thread after the batch that is running; what waits fails with WorkerLost. Idempotent."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _control(self, control: Callable[[Engine], None]) -> None:
        with self._changed:
            if self._is_stopping:
                raise WorkerLost("the engine has stopped")
            self._controls.append(control)
            self._changed.notify()

    def _run(self) -> None:
        failure: BaseException = WorkerLost("the engine was stopped")
        try:
            engine = self._factory(self._incarnation)
        except BaseException as error:  # noqa: BLE001 (handed on to whoever awaits `ready`)
            self._end(error)
            self.ready.set_exception(error)
            return
        self.ready.set_result(engine)
        try:
            while self._step(engine):
                pass
        except BaseException as error:
            logger.exception("the engine failed")
            failure = WorkerLost(f"the engine failed: {error}")
        self._end(failure)

    def _step(self, engine: Engine) -> bool:
        """Whatever is first: controls, one batch, one decode step. False when it is time to stop."""
        with self._changed:
            while not (self._is_stopping or self._batches or self._controls or engine.can_decode()):
                self._changed.wait()
            if self._is_stopping:
                return False
            controls = list(self._controls)
            self._controls.clear()
            entry = self._batches.popleft() if self._batches else None
        for control in controls:
            control(engine)
        if entry is not None:
            batch, future = entry
            try:
                future.set_result(engine.run(batch))
            except BaseException as error:
                future.set_exception(WorkerLost(f"the engine failed: {error}"))
                raise
        if engine.can_decode():
            for event in engine.decode_step():
                self._on_event(event)
        return True

    def _end(self, failure: BaseException) -> None:
        with self._changed:
            self._is_stopping = True
            waiting = list(self._batches)
            self._batches.clear()
        for _, future in waiting:
            future.set_exception(WorkerLost(str(failure)))
        self.failed.set_exception(failure)
