"""The two interfaces: the pool, for the coordinator; and the engine, for a pool. Imports neither torch nor ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from workers.contract.messages import Batch, BatchResult, ModelInfo, SampleEvent, SampleRequest, WorkerInfo


class WorkerLost(Exception):
    """The worker died, hangs or cannot be reached. Its last batch may be applied or not; its state is lost."""


class TakenOver(Exception):
    """A coordinator of a later epoch has the workers: this one must end, and end no worker."""


class PoolStartError(Exception):
    """The pool cannot start with this configuration; the message names the change that is needed."""


class PoolFailed(Exception):
    """No worker of the pool can start any more: the coordinator must stop. The next start continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The coordinator that workers serve."""

    pool_id: str
    """The same for all coordinators of a data directory."""
    epoch: int
    """Higher than those of all coordinators before it; batches and installs carry it."""


Arriving = TypeVar("Arriving", Batch, SampleRequest)
"""What brings states to a worker."""


class Engine(Protocol):
    """One warm base model. One thread only, but for `read_ahead`.

    A tenant's error is no exception but an `ItemResult.error`.
    """

    @property
    def info(self) -> ModelInfo:
        """Facts of the base model; they never change."""

    def begin(self, epoch: int, incarnation: str) -> None:
        """Serve the next coordinator, as a new incarnation: drop everything of the last one, samples too."""

    def read_ahead(self, message: Arriving) -> Arriving:
        """Return a batch or sample request that takes the engine's thread less time, because its states are read.

        Any thread may call this, while the engine's thread does other work. A state that cannot be read now stays as it
        is: whoever needs it says why.
        """

    def run(self, batch: Batch) -> BatchResult:
        """Run one batch to its end and return one result per item."""

    def start_sample(self, request: SampleRequest) -> None:
        """Drop the request's `removals` and queue it for `decode_step`. Its errors are in its `SampleResult`."""

    def cancel_sample(self, op_id: str) -> None:
        """Stop a request; a `SampleResult` with `CANCELLED` follows. Unknown ids are ignored: it may have finished."""

    def decode_step(self) -> Sequence[SampleEvent]:
        """Advance running sequences by one token, in one forward; return the events in order."""

    def can_decode(self) -> bool:
        """Return whether `decode_step` has anything to do."""


EngineFactory = Callable[[str], Engine]
"""Makes an engine from the name of its incarnation; called on the thread, and in the process, that will own it."""


class Pool(Protocol):
    """Workers, each with one warm base model. A pool restarts nothing by itself: the coordinator supervises."""

    def base_models(self) -> Mapping[str, str]:
        """Return the base model of each configured worker, by its id; also before the start."""

    async def start(self, owner: Owner, drained: Collection[str] = ()) -> None:
        """Start the configured workers but the drained ones, or take over those that an earlier coordinator has left.

        Returns when each base model has a worker: `workers` lacks the others then, and `replace` waits for them. Raises
        PoolStartError. Call `stop` after a start that was cancelled: it decides which workers stay.
        """

    async def stop(self, *, is_final: bool = False) -> None:
        """End every worker, and release everything that `start` created. Idempotent.

        Unless the stop is final, workers that are configured to outlive the coordinator stay for the next one.
        """

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the current incarnations in a fixed order; a dead one stays listed until it is replaced."""

    async def run(self, worker_id: str, batch: Batch) -> BatchResult:
        """Run a batch on one worker; a worker runs one batch at a time.

        Raises `WorkerLost`, and `TakenOver`, as do all calls of a worker.
        """

    async def start_sample(self, worker_id: str, request: SampleRequest) -> None:
        """Hand over a sample request; `sample_events` yields its events. Raises `WorkerLost`."""

    async def cancel_sample(self, worker_id: str, op_id: str) -> None:
        """Stop a request on a worker. Raises `WorkerLost`."""

    def sample_events(self, worker_id: str) -> AsyncIterator[SampleEvent]:
        """Yield the sample events of the current incarnation; raise `WorkerLost` when it ends. One consumer only."""

    async def ping(self, worker_id: str) -> None:
        """Return when the worker replies, which does not queue behind its batches. Raises `WorkerLost`."""

    async def add(self, base_model: str) -> WorkerInfo:
        """Start another worker of a configured base model, with an id of its own. Raises `WorkerLost`."""

    async def remove(self, worker_id: str) -> None:
        """End a worker's process. Only `replace` starts it again."""

    async def prepare(self, worker_id: str) -> None:
        """Start a worker's next incarnation beside the present one, for the next `replace`; return when it is ready.

        Raises `WorkerLost` if it does not start.
        """

    async def replace(self, worker_id: str) -> WorkerInfo:
        """Kill the worker's process, if it lives, and start the next incarnation, empty, or take the prepared one.

        Raises `WorkerLost`, and `PoolFailed`.
        """

    async def leaving(self) -> Mapping[str, float]:
        """Return the workers whose hosts are about to leave, with the seconds until then; infinite: not known."""
