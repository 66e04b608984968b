"""The pool on Ray: every worker is an actor, a process of its own, on this machine or on a cluster.

Does not depend on the meaning of a batch. Ray restarts and retries nothing: a call that fails ends that incarnation of
its worker, and only `replace` starts another. On a cluster, actors have names and outlive a killed coordinator, with
their models loaded: the next start adopts those that it would start in the same way, and ends the others.

Main invariant: a call reaches the present incarnation of a worker only; see `ray_incarnation`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Mapping

import ray

from tinkerpool.serving import STAGES
from workers.contract.messages import Batch, BatchResult, SampleEvent, SampleRequest, WorkerInfo
from workers.contract.protocols import Owner, PoolFailed, PoolStartError, WorkerLost
from workers.contract.settings import PoolConfig, num_cores
from workers.pool.actor import pack, unpack
from workers.pool.large_contents import fetch, send
from workers.pool.ray_host import RayHost
from workers.pool.ray_incarnation import Incarnation
from workers.pool.ray_starts import Starts

logger = logging.getLogger(__name__)

JOIN_GRACE_S, JOIN_GRACE_S_MAX = 1.0, 10.0
"""Fewest and most seconds that a cluster's other workers have to be ready with the first ones."""


class RayPool:
    """Implements `workers.contract.protocols.Pool`. One at a time in a process, as there is one Ray in a process."""

    def __init__(self, config: PoolConfig) -> None:
        """`config.kind` is "ray"."""
        self._config = config
        self._engines = config.engines()
        self._incarnations: dict[str, Incarnation] = {}
        self._prepared: dict[str, asyncio.Task[Incarnation]] = {}
        """Starts of incarnations that no call reaches yet, and those that failed: `replace` waits for them."""
        self._host: RayHost | None = None
        self._reviving = asyncio.Lock()
        self._owner: Owner
        self._starts: Starts

    def base_models(self) -> Mapping[str, str]:
        """Return the base model of each configured worker."""
        return {worker_id: settings.model_name for worker_id, settings in self._engines.items()}

    async def start(self, owner: Owner, drained: Collection[str] = ()) -> None:
        """Start Ray, then all workers at once but the drained ones. Raises PoolStartError.

        Waits until all are ready; on a cluster, until each base model has one, and a little for the others.
        """
        assert self._host is None, "the pool has been started already"
        self._owner = owner
        try:
            STAGES.info("starting Ray" if self._config.ray_address is None else "joining Ray's cluster")
            await self._start_ray()
            self._check_room()
            starting = [worker_id for worker_id in self._engines if worker_id not in drained]
            adopted = await self._starts.adopt_left(starting)
            if len(adopted) < len(starting):
                STAGES.info("loading %s", self._config.summary)
            for worker_id in starting:
                start = self._starts.started(worker_id, adopted.get(worker_id))
                self._prepared[worker_id] = asyncio.create_task(start)
            await self._until_served()
        except Exception as error:  # after a cancellation the caller stops the pool, who knows whether that is final
            await self.stop()
            if isinstance(error, WorkerLost):
                raise PoolStartError(str(error)) from error
            raise

    async def stop(self, *, is_final: bool = False) -> None:
        """End every worker unless they are kept for the next coordinator, and a private Ray. Idempotent."""
        incarnations, self._incarnations = list(self._incarnations.values()), {}
        for incarnation in incarnations:
            incarnation.end("the pool was stopped")
        is_kept = self._config.keep_workers and not is_final
        if is_kept and self._prepared:
            self._starts.leave_adopted()
        for prepared in await asyncio.gather(*(self._take_prepared(worker_id) for worker_id in list(self._prepared))):
            if prepared is not None:
                prepared.end("the pool was stopped")
                incarnations.append(prepared)
        if not is_kept and not any(incarnation.is_taken for incarnation in incarnations):
            await asyncio.gather(*(incarnation.kill() for incarnation in incarnations))
        async with self._reviving:
            if self._host is not None:
                await self._host.stop()
                self._host = None

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the workers, in the order of the configuration."""
        running = self._incarnations
        return tuple(running[worker_id].info for worker_id in self._engines if worker_id in running)

    async def run(self, worker_id: str, batch: Batch) -> BatchResult:
        """Run a batch. Raises WorkerLost."""
        incarnation = self._incarnation(worker_id)
        batch = await send(batch, incarnation.call_contents)
        result: BatchResult = unpack(await incarnation.call("run", pack(batch), group="work"))
        return await fetch(result, incarnation.call_contents, self._config.spool_folder)

    async def start_sample(self, worker_id: str, request: SampleRequest) -> None:
        """Hand over a sample request. Raises WorkerLost."""
        incarnation = self._incarnation(worker_id)
        async with incarnation.starting_sample:
            request = await send(request, incarnation.call_contents)
            await incarnation.call("start_sample", pack(request))

    async def cancel_sample(self, worker_id: str, op_id: str) -> None:
        """Stop a sample request. Raises WorkerLost."""
        await self._incarnation(worker_id).call("cancel_sample", op_id)

    async def sample_events(self, worker_id: str) -> AsyncIterator[SampleEvent]:
        """Yield the sample events of the current incarnation. Raises WorkerLost at its end."""
        incarnation = self._incarnation(worker_id)
        while (events := await incarnation.events.get()) is not None:
            for event in events:
                yield event
        raise incarnation.lost()

    async def ping(self, worker_id: str) -> None:
        """Raise WorkerLost unless the worker's process replies and its engine has not failed."""
        await self._incarnation(worker_id).call("ping", group="ping")

    async def add(self, base_model: str) -> WorkerInfo:
        """Start another worker of a base model. Raises WorkerLost."""
        worker_id = f"w{len(self._engines)}"  # those of removed workers stay, so that no id is used again
        self._engines[worker_id] = next(each for each in self._engines.values() if each.model_name == base_model)
        await self._revive_ray()
        self._incarnations[worker_id] = await self._starts.started(worker_id)
        return self._incarnation(worker_id).info

    async def remove(self, worker_id: str) -> None:
        """End a worker's process, and that of a prepared incarnation."""
        if (incarnation := self._incarnations.pop(worker_id, None)) is not None:
            incarnation.end("it was removed")
            await incarnation.kill()
        if (prepared := await self._take_prepared(worker_id)) is not None:
            prepared.end("it was removed")
            await prepared.kill()

    async def prepare(self, worker_id: str) -> None:
        """Start a worker's next incarnation beside the present one. Raises WorkerLost."""
        preparing = self._prepared[worker_id] = asyncio.create_task(self._starts.started(worker_id))
        try:
            await asyncio.shield(preparing)
        except WorkerLost:
            self._prepared.pop(worker_id, None)
            raise

    async def replace(self, worker_id: str) -> WorkerInfo:
        """Kill a worker's process, whatever state it is in, and start its next incarnation, or take the prepared one.

        A private Ray that has died is started again first. Raises WorkerLost, and PoolFailed if a cluster is lost.
        """
        if (incarnation := self._incarnations.get(worker_id)) is not None:
            incarnation.end("it was replaced")
            await incarnation.kill()
        await self._revive_ray()
        if (preparing := self._prepared.pop(worker_id, None)) is not None:
            self._incarnations[worker_id] = await preparing
        else:
            self._incarnations[worker_id] = await self._starts.started(worker_id)
        return self._incarnation(worker_id).info

    async def leaving(self) -> Mapping[str, float]:
        """Return the workers on nodes that Ray drains, with the seconds until then; none on a private Ray."""
        if (nodes := self._starts.nodes) is None or self._host is None or self._host.ended.done():
            return {}
        left_s = await nodes.leaving()
        found = [(worker_id, each.info.node_id) for worker_id, each in self._incarnations.items()]
        return {worker_id: left_s[node_id] for worker_id, node_id in found if node_id in left_s}

    async def _take_prepared(self, worker_id: str) -> Incarnation | None:
        """Return a prepared incarnation, which no call has reached; end its start if it is not ready."""
        if (preparing := self._prepared.pop(worker_id, None)) is None:
            return None
        preparing.cancel()
        [prepared] = await asyncio.gather(preparing, return_exceptions=True)
        return prepared if isinstance(prepared, Incarnation) else None

    def _incarnation(self, worker_id: str) -> Incarnation:
        incarnation = self._incarnations.get(worker_id)
        if incarnation is None:
            raise WorkerLost(f"{worker_id} is not running")
        return incarnation

    async def _start_ray(self) -> None:
        self._host = RayHost(self._config, self._ray_lost)
        await self._host.start()
        self._starts = Starts(self._config, self._engines, self._owner, self._host)

    def _ray_lost(self) -> None:
        for incarnation in self._incarnations.values():
            incarnation.end(incarnation.host.ended.result())

    async def _revive_ray(self) -> None:
        """Start a private Ray again if it has died. Of concurrent calls one starts it, the others wait.

        Raises WorkerLost, or PoolFailed if a cluster is lost.
        """
        async with self._reviving:
            if self._host is None:
                raise WorkerLost("the pool was stopped")
            if not self._host.ended.done():
                return
            if self._config.ray_address is not None:
                raise PoolFailed(self._host.ended.result())
            await self._host.stop()
            try:
                await self._start_ray()
            except PoolStartError as error:
                raise WorkerLost(str(error)) from error
            logger.warning("Ray was started again")

    async def _until_served(self) -> None:
        """Wait for every worker, or on a cluster for one of each base model. Raises WorkerLost.

        Then the others of a cluster have as long again: adapters are spread over those that are there at the beginning.
        """
        begun_s, starts = time.monotonic(), dict(self._prepared)
        if self._config.ray_address is None:
            done, _ = await asyncio.wait(starts.values(), return_when=asyncio.FIRST_EXCEPTION)
            for start in done:
                start.result()
        base_models = self.base_models()
        for model in self._config.models:
            await _any_of([each for worker_id, each in starts.items() if base_models[worker_id] == model.name])
        grace_s = min(JOIN_GRACE_S_MAX, max(JOIN_GRACE_S, time.monotonic() - begun_s))
        await asyncio.wait(starts.values(), timeout=grace_s)
        for worker_id, start in starts.items():
            if start.done() and start.exception() is None:
                self._incarnations[worker_id] = self._prepared.pop(worker_id).result()
        if self._prepared:
            logger.warning("the pool is ready without %s: they join when they are", ", ".join(self._prepared))

    def _check_room(self) -> None:
        """Raise PoolStartError if the workers can never fit into a private Ray. A cluster may grow."""
        if self._config.ray_address is not None:
            return
        num_gpus = ray.cluster_resources().get("GPU", 0)
        if self._config.num_gpus * self._config.num_workers > num_gpus:
            raise PoolStartError(
                f"{self._config.num_workers} x {self._config.num_gpus:g} GPUs are asked for, and Ray sees {num_gpus:g} "
                "on this machine: give less with --gpus, or leave it out to run on CPUs"
            )
        if self._config.num_cpus > num_cores():
            raise PoolStartError(
                f"this machine has {num_cores()} CPUs, too few for workers ({self._config.num_workers} in all) with "
                f"{self._config.claim}; lower num_cpus or the number of workers"
            )


async def _any_of(tasks: Collection[asyncio.Task[Incarnation]]) -> None:
    """Wait until one task has succeeded. Raises WorkerLost if all fail, and any other error at once."""
    pending = set(tasks)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        errors = [task.exception() for task in done]
        if None in errors:
            return
        for error in filter(None, errors):
            if not pending or not isinstance(error, WorkerLost):
                raise error
            logger.warning("%s; the pool waits for another one", error)
