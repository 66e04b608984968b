"""The Ray actor of a worker: one engine in a process of its own. It hands every call on to the engine's loop.

Does not depend on the meaning of a batch or on the caller. Batches, results and events cross between processes as
pickles (`pack`): Ray's serializer takes up to twice as long for the many small objects of a batch.

On a cluster, an actor may outlive its coordinator. The next one adopts it: it takes it over as a new incarnation, with
its model loaded and nothing else. One that hears from no coordinator for the time of its lease ends itself.

Main invariants: only the engine's thread computes. A call names the incarnation that it is for, and fails once another
coordinator has adopted the actor. Calls in the group `control` return at once and in order, whatever the engine does. A
`ping` does not queue behind them either, for they may have much to unpack. A call in `work` returns after its batch; a
call in `events` runs until the incarnation ends.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import ray

from workers.contract.logs import LogConfig, about, take_over
from workers.contract.messages import Batch, SampleEvent, SampleRequest, WorkerInfo
from workers.contract.protocols import TakenOver, WorkerLost
from workers.contract.settings import EngineSettings
from workers.pool.large_contents import Aside
from workers.pool.loop import EngineLoop, engine_factory
from workers.pool.version import running_version

logger = logging.getLogger(__name__)

CONCURRENCY_GROUPS = {"work": 2, "control": 1, "contents": 1, "ping": 1, "events": 1}
"""Threads for each kind of call. A single thread for `control` keeps its calls in order, and one for `contents`."""


def pack(message: Any) -> bytes:
    """Return a message of `workers.contract.messages` as bytes."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(packed: bytes) -> Any:
    """Return the message. Only for bytes from the pool's own processes, through Ray's authenticated channels."""
    return pickle.loads(packed)  # noqa: S301 (see above)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What an actor is started with. A coordinator adopts only actors on the terms on which it would start them."""

    engine: str
    """An import string as in `PoolConfig`."""
    settings: EngineSettings
    num_cpus: float
    """That it claims from Ray, like `num_gpus`."""
    num_gpus: float
    lease_s: float | None
    """Seconds after which it ends if it hears from no coordinator; None: it ends with its coordinator."""


class EngineActor:
    """A worker's process. The pool makes a Ray actor of it, with `CONCURRENCY_GROUPS`."""

    def __init__(self, terms: Terms, worker_id: str, incarnation: str, log: LogConfig) -> None:
        """Begin to load the engine."""
        log.apply()
        take_over("ray")
        self._terms = terms
        self._version = running_version()
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._events: SimpleQueue[Sequence[SampleEvent] | None] = SimpleQueue()
        self._aside = Aside()
        self._loop = EngineLoop(engine_factory(terms.engine, terms.settings), incarnation, self._events)
        self._heard_s = time.monotonic()
        if terms.lease_s is not None:
            threading.Thread(target=self._end_after, args=(terms.lease_s,), name="lease", daemon=True).start()

    # ---- work

    def start(self, incarnation: str) -> WorkerInfo:
        """Wait until the base model is loaded. Raises WorkerLost with the reason if that fails."""
        self._hear(incarnation)
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
            num_slots=self._terms.settings.num_slots,
            device=self._terms.settings.device,
            version=self._version,
            node_id=self.node_id(),
        )

    def run(self, incarnation: str, packed: bytes) -> bytes:
        """Run a packed `Batch`; return its `BatchResult`, packed, without its large contents. Raises WorkerLost."""
        self._hear(incarnation)
        batch: Batch = unpack(packed)
        return pack(self._aside.take_out(self._loop.submit(self._aside.put_back(batch)).result()))

    # ---- contents

    def contents(self, incarnation: str, method: str, *arguments: Any) -> Any:
        """Call a method of `Aside`. Raises WorkerLost."""
        self._hear(incarnation)
        return getattr(self._aside, method)(*arguments)

    # ---- ping

    def node_id(self) -> str:
        """Return Ray's id of the node, as soon as the process has begun."""
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    def ping(self, incarnation: str) -> None:
        """Raise WorkerLost if the engine has failed."""
        self._hear(incarnation)
        self._loop.check()

    # ---- control

    def adopt(self, terms: Terms, version: str, epoch: int, incarnation: str) -> bool:
        """Serve another coordinator from now on, as this incarnation; return False if the terms or the code differ.

        The batch that runs is finished, and its result goes nowhere. Raises WorkerLost.
        """
        if (terms, version) != (self._terms, self._version):
            return False
        events: SimpleQueue[Sequence[SampleEvent] | None] = SimpleQueue()
        self._loop.begin(epoch, incarnation, events)
        self._incarnation, self._events, self._aside = incarnation, events, Aside()
        self._heard_s = time.monotonic()
        return True

    def start_sample(self, incarnation: str, packed: bytes) -> None:
        """Hand over a packed `SampleRequest`. Raises WorkerLost."""
        self._hear(incarnation)
        request: SampleRequest = unpack(packed)
        self._loop.start_sample(self._aside.put_back(request))

    def cancel_sample(self, incarnation: str, op_id: str) -> None:
        """Stop a sample request. Raises WorkerLost."""
        self._hear(incarnation)
        self._loop.cancel_sample(op_id)

    # ---- events

    def events(self, incarnation: str) -> Iterator[bytes]:
        """Yield sample events as packed lists, each with all events so far. Raises WorkerLost at the end."""
        self._hear(incarnation)
        queue = self._events
        while (first := queue.get()) is not None:
            gathered = list(first)
            more: Sequence[SampleEvent] | None = ()
            with suppress(Empty):
                while more is not None:
                    gathered += more
                    more = queue.get_nowait()
            yield pack(gathered)
            if more is None:
                break
        self._hear(incarnation)
        self._loop.check()

    # ---- the coordinator

    def _hear(self, incarnation: str) -> None:
        """Renew the lease. Raises TakenOver if the call is for an incarnation that has ended."""
        if incarnation != self._incarnation:
            raise TakenOver(f"another coordinator has taken over {incarnation}, as {self._incarnation}")
        self._heard_s = time.monotonic()

    def _end_after(self, lease_s: float) -> None:
        """End the process when no coordinator has called for that long; a call that runs does not count."""
        while (left_s := self._heard_s + lease_s - time.monotonic()) > 0:
            time.sleep(left_s)
        ids = about(worker=self._worker_id, incarnation=self._incarnation)
        logger.error("no coordinator has called for %g s: %s ends", lease_s, self._incarnation, extra=ids)
        os._exit(1)
