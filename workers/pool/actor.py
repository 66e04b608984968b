"""The Ray actor of a worker: one engine in a process of its own. It hands every call on to the engine's loop.

Does not depend on the meaning of a batch or on the caller. Batches, results and events cross between processes as
pickles (`pack`): Ray's serializer takes up to twice as long for the many small objects of a batch.

Main invariant: only the engine's thread computes. Calls in the group `control` return at once and in order, whatever
the engine does. A `ping` does not queue behind them either, for they may have much to unpack. A call in `work` returns
after its batch; the one call in `events` runs as long as the actor.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import ray

from workers.contract.messages import Batch, SampleEvent, SampleRequest, WorkerInfo
from workers.contract.protocols import WorkerLost
from workers.contract.settings import EngineSettings
from workers.pool.loop import EngineLoop, engine_factory

CONCURRENCY_GROUPS = {"work": 2, "control": 1, "ping": 1, "events": 1}
"""Threads for each kind of call. A single thread for `control` keeps its calls in order."""


def pack(message: Any) -> bytes:
    """Return a message of `workers.contract.messages` as bytes."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(packed: bytes) -> Any:
    """Return the message. Only for bytes from the pool's own processes, through Ray's authenticated channels."""
    return pickle.loads(packed)  # noqa: S301 (see above)


class EngineActor:
    """One incarnation of a worker. The pool makes a Ray actor of it, with `CONCURRENCY_GROUPS`."""

    def __init__(self, engine: str, settings: EngineSettings, worker_id: str, incarnation: str) -> None:
        """Begin to load the engine; `engine` is an import string as in `PoolConfig`."""
        self._settings = settings
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._events: SimpleQueue[Sequence[SampleEvent] | None] = SimpleQueue()
        self._loop = EngineLoop(engine_factory(engine, settings), incarnation, self._events)

    # ---- work

    def start(self) -> WorkerInfo:
        """Wait until the base model is loaded. Raises WorkerLost with the reason if that fails."""
        try:
            engine = self._loop.ready.result()
        except Exception as error:  # noqa: BLE001 (the caller may not have the exception's class)
            raise WorkerLost(str(error) or type(error).__name__) from None
        return WorkerInfo(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            model=engine.info,
            pid=os.getpid(),
            node=ray.util.get_node_ip_address(),
            num_slots=self._settings.num_slots,
            device=self._settings.device,
            node_id=ray.get_runtime_context().get_node_id(),
        )

    def run(self, packed: bytes) -> bytes:
        """Run a packed `Batch`; return its `BatchResult`, packed. Raises WorkerLost."""
        batch: Batch = unpack(packed)
        return pack(self._loop.submit(batch).result())

    # ---- ping

    def ping(self) -> None:
        """Raise WorkerLost if the engine has failed."""
        self._loop.check()

    # ---- control

    def start_sample(self, packed: bytes) -> None:
        """Hand over a packed `SampleRequest`. Raises WorkerLost."""
        request: SampleRequest = unpack(packed)
        self._loop.start_sample(request)

    def cancel_sample(self, op_id: str) -> None:
        """Stop a sample request. Raises WorkerLost."""
        self._loop.cancel_sample(op_id)

    # ---- events

    def events(self) -> Iterator[bytes]:
        """Yield sample events as packed lists, each with all events so far. Raises WorkerLost at the end."""
        while (first := self._events.get()) is not None:
            gathered = list(first)
            more: Sequence[SampleEvent] | None = ()
            with suppress(Empty):
                while more is not None:
                    gathered += more
                    more = self._events.get_nowait()
            yield pack(gathered)
            if more is None:
                break
        self._loop.check()
