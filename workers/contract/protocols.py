"""The two seams: the pool as the coordinator sees it, and the engine as a pool sees it. Neither torch nor ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from workers.contract.messages import Batch, BatchResult, ModelInfo, SampleEvent, SampleRequest, WorkerInfo


class WorkerLost(Exception):
    """The worker died, hangs or cannot be reached. What it was doing may have happened or not; its state is gone."""


class PoolStartError(Exception):
    """The pool cannot start as it is configured; the message says what to change."""


class Engine(Protocol):
    """One warm base model. One thread only; raises nothing for a tenant's mistake (see `ItemResult.error`)."""

    @property
    def info(self) -> ModelInfo:
        """Facts about the base model, constant for the engine's life."""

    def run(self, batch: Batch) -> BatchResult:
        """Run one batch to its end and return one result per item."""

    def start_sample(self, request: SampleRequest) -> None:
        """Forget its `removals` and queue it; it makes progress in `decode_step`. Errors come as its `SampleResult`."""

    def cancel_sample(self, op_id: str) -> None:
        """Stop a request; a `SampleResult` with `CANCELLED` follows. Unknown ids are ignored (it just finished)."""

    def decode_step(self) -> Sequence[SampleEvent]:
        """Advance every running sequence by one token, in one forward; returns what happened, in order."""

    def can_decode(self) -> bool:
        """Whether `decode_step` has anything to do."""


EngineFactory = Callable[[str], Engine]
"""Takes the worker's incarnation; called on the thread (and in the process) that will own the engine."""


class Pool(Protocol):
    """Workers, each with one warm base model. The coordinator supervises; a pool restarts nothing by itself."""

    async def start(self) -> None:
        """Start every configured worker and wait until each has its base model loaded. Raises PoolStartError."""

    async def stop(self) -> None:
        """End every worker and whatever else `start` created. Idempotent."""

    def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers as last started, in a fixed order; a dead one stays listed until it is replaced."""

    async def run(self, worker_id: str, batch: Batch) -> BatchResult:
        """Run a batch on one worker, one at a time per worker. Raises `WorkerLost`."""

    async def start_sample(self, worker_id: str, request: SampleRequest) -> None:
        """Hand over a sample request; its events appear in `sample_events`. Raises `WorkerLost`."""

    async def cancel_sample(self, worker_id: str, op_id: str) -> None:
        """Ask a worker to stop a request. Raises `WorkerLost`."""

    def sample_events(self, worker_id: str) -> AsyncIterator[SampleEvent]:
        """The worker's one stream of sample events; ends by raising `WorkerLost` when that life of it ends."""

    async def ping(self, worker_id: str) -> None:
        """Answered by the worker beside its work, not behind it. Raises `WorkerLost`."""

    async def replace(self, worker_id: str) -> WorkerInfo:
        """Kill what is left of a worker and start its next life, empty. Raises `WorkerLost` if that fails too."""
