"""The pool on Ray: every worker is an actor, a process of its own, on this machine or on a cluster.

Does not depend on the meaning of a batch. Ray restarts and retries nothing: a call that fails ends that incarnation of
its worker, and only `replace` starts another. On a cluster, actors have names and outlive a killed coordinator, with
their models loaded: the next start adopts those that it would start in the same way, and ends the others.

Main invariant: after an incarnation has ended, none of its results or events reaches a caller. Each incarnation has its
own stream of events, and a future of its end; every call waits for its reply or that future, and drops a late reply.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tinkerpool.serving import STAGES
from workers.contract.messages import Batch, BatchResult, SampleEvent, SampleRequest, WorkerInfo
from workers.contract.protocols import Owner, PoolFailed, PoolStartError, TakenOver, WorkerLost
from workers.contract.settings import PoolConfig, num_cores
from workers.pool.actor import CONCURRENCY_GROUPS, EngineActor, Terms, pack, unpack
from workers.pool.environment import new_incarnation, thread_environment, worker_of
from workers.pool.processes import Process
from workers.pool.ray_host import RayHost
from workers.pool.version import running_version

logger = logging.getLogger(__name__)

KILL_GRACE_S = 1.0
"""Seconds that Ray has to end a process before the pool kills it: Ray takes long to end a process that is stopped."""
REACH_TIMEOUT_S = 2.0
"""Seconds that a node of a cluster has to accept a connection before a new worker is placed elsewhere."""
NODES_TIMEOUT_S = 10.0
"""Seconds that Ray has to list its nodes, in a process of its own, which starts with the pool."""
ADOPT_TIMEOUT_S = 5.0
"""Seconds that an actor of an earlier coordinator has to reply; it is ended otherwise."""
JOIN_GRACE_S, JOIN_GRACE_S_MAX = 1.0, 10.0
"""Fewest and most seconds that a cluster's other workers have to be ready with the first ones."""
PLACED_S = 5.0
"""Seconds after which the nodes are examined again for a worker whose process has not begun."""

_Nodes = Mapping[str, tuple[str, int]]
"""Host and port of the raylet of each node, by Ray's id."""


class RayPool:
    """Implements `workers.contract.protocols.Pool`. One at a time in a process, as there is one Ray in a process."""

    def __init__(self, config: PoolConfig) -> None:
        """`config.kind` is "ray"."""
        self._config = config
        self._engines = config.engines()
        self._incarnations: dict[str, _Incarnation] = {}
        self._prepared: dict[str, asyncio.Task[_Incarnation]] = {}
        """Starts of incarnations that no call reaches yet, and those that failed: `replace` waits for them."""
        self._host: RayHost | None = None
        self._reviving = asyncio.Lock()
        self._actor_class: Any = None
        self._owner: Owner
        self._lister: Any = None
        self._listing: asyncio.Task[_Nodes] | None = None

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
            adopted = await self._adopt_left(starting) if self._config.ray_address is not None else {}
            if len(adopted) < len(starting):
                STAGES.info("loading %s", self._config.summary)
            for worker_id in starting:
                self._prepared[worker_id] = asyncio.create_task(self._first(worker_id, adopted.get(worker_id)))
            await self._until_served()
        except BaseException as error:
            await self.stop()
            if isinstance(error, WorkerLost):
                raise PoolStartError(str(error)) from error
            raise

    async def stop(self, *, is_final: bool = False) -> None:
        """End every worker unless they are kept for the next coordinator, and a private Ray. Idempotent."""
        incarnations, self._incarnations = list(self._incarnations.values()), {}
        for incarnation in incarnations:
            incarnation.end("the pool was stopped")
        await asyncio.gather(*(self._drop_prepared(worker_id) for worker_id in list(self._prepared)))
        is_kept = self._config.keep_workers and not is_final
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
        result: BatchResult = unpack(await self._incarnation(worker_id).call("run", pack(batch), group="work"))
        return result

    async def start_sample(self, worker_id: str, request: SampleRequest) -> None:
        """Hand over a sample request. Raises WorkerLost."""
        await self._incarnation(worker_id).call("start_sample", pack(request))

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
        await self._begin(worker_id)
        return self._incarnation(worker_id).info

    async def remove(self, worker_id: str) -> None:
        """End a worker's process, and that of a prepared incarnation."""
        if (incarnation := self._incarnations.pop(worker_id, None)) is not None:
            incarnation.end("it was removed")
            await incarnation.kill()
        await self._drop_prepared(worker_id)

    async def prepare(self, worker_id: str) -> None:
        """Start a worker's next incarnation beside the present one. Raises WorkerLost."""
        preparing = self._prepared[worker_id] = asyncio.create_task(self._started(worker_id))
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
            await self._begin(worker_id)
        return self._incarnation(worker_id).info

    async def leaving(self) -> Mapping[str, float]:
        """Return the workers on nodes that Ray drains, with the seconds until then; none on a private Ray."""
        if self._config.ray_address is None or self._host is None or self._host.ended.done():
            return {}
        left_s = await _drained(self._lister, self._host)
        found = [(worker_id, each.info.node_id) for worker_id, each in self._incarnations.items()]
        return {worker_id: left_s[node_id] for worker_id, node_id in found if node_id in left_s}

    async def _drop_prepared(self, worker_id: str) -> None:
        """End the process of a prepared incarnation, also while it starts."""
        if (preparing := self._prepared.pop(worker_id, None)) is None:
            return
        preparing.cancel()
        [prepared] = await asyncio.gather(preparing, return_exceptions=True)
        if isinstance(prepared, _Incarnation):
            prepared.end("it was removed")
            await prepared.kill()

    def _incarnation(self, worker_id: str) -> _Incarnation:
        incarnation = self._incarnations.get(worker_id)
        if incarnation is None:
            raise WorkerLost(f"{worker_id} is not running")
        return incarnation

    async def _start_ray(self) -> None:
        self._host = RayHost(self._config, self._ray_lost)
        await self._host.start()
        # One class for all workers: Ray stores a class with its first actor, and blocks for a minute if its server has
        # died by then.
        self._actor_class = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(EngineActor)
        if self._config.ray_address is not None:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            self._lister = ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=here)(_NodeLister).remote()

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

    @property
    def _namespace(self) -> str:
        """The namespace in Ray of the pool's actors."""
        return f"tinkerpool-{self._owner.pool_id}"

    async def _adopt_left(self, worker_ids: Collection[str]) -> dict[str, _Actor]:
        """Adopt actors that an earlier coordinator has left for these workers, by worker id; end its others."""
        host = self._host
        assert host is not None
        named = await asyncio.to_thread(list_named_actors, all_namespaces=True)
        names = [each["name"] for each in named if each["namespace"] == self._namespace]
        found = await asyncio.gather(*(self._adopt(name, worker_ids, host) for name in names))
        adopted: dict[str, _Actor] = {}
        for actor in filter(None, found):
            if actor.worker_id in adopted:  # its coordinator was killed before it could end a lost incarnation
                _kill(actor.handle, host)
            adopted.setdefault(actor.worker_id, actor)
        return adopted

    async def _adopt(self, name: str, worker_ids: Collection[str], host: RayHost) -> _Actor | None:
        """Adopt an actor by its name, which is its first incarnation's; end it if it is not what would be started."""
        worker_id, why = worker_of(name), "it does not reply"
        try:
            handle = await asyncio.to_thread(ray.get_actor, name, self._namespace)
        except ValueError:  # it has died
            return None
        actor = _Actor(handle, worker_id, new_incarnation(worker_id))
        try:
            async with asyncio.timeout(ADOPT_TIMEOUT_S):
                terms = self._terms(worker_id) if worker_id in worker_ids else None
                adopt = handle.adopt.options(concurrency_group="control")
                asked = adopt.remote(terms, running_version(), self._owner.epoch, actor.incarnation)
                if await _reply(asked, unless=host.ended):
                    logger.info("worker %s was left by the last coordinator and goes on as %s", name, actor.incarnation)
                    return actor
                why = "its settings or its code are not those of this coordinator"
        except (TimeoutError, RayError, _Ended) as error:
            why = _reason(error) or why
        logger.info("worker %s was left by the last coordinator and is ended: %s", name, why)
        _kill(handle, host)
        return None

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

    async def _first(self, worker_id: str, adopted: _Actor | None) -> _Incarnation:
        """Return a worker's first incarnation, with the actor that was adopted or a new one. Raises WorkerLost."""
        if adopted is not None:
            try:
                return await self._started(worker_id, adopted)
            except WorkerLost as error:
                logger.warning("%s; another one is started", error)
        return await self._started(worker_id)

    async def _begin(self, worker_id: str) -> None:
        """Start a worker's next incarnation. Raises WorkerLost."""
        self._incarnations[worker_id] = await self._started(worker_id)

    async def _started(self, worker_id: str, adopted: _Actor | None = None) -> _Incarnation:
        """Return a worker's next incarnation, when it is ready. Raises WorkerLost."""
        settings, host = self._engines[worker_id], self._host
        assert host is not None
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                actor = adopted or await self._placed_actor(worker_id, host)
                try:
                    start = actor.handle.start.options(concurrency_group="work")
                    info: WorkerInfo = await _reply(start.remote(actor.incarnation), unless=host.ended)
                    _check_version(info)
                    is_private = self._config.ray_address is None
                    return _Incarnation(info, actor.handle, host, is_on_this_machine=is_private)
                except BaseException:
                    _kill(actor.handle, host)
                    raise
        except (TimeoutError, RayError, _Ended, _OtherVersion) as error:
            reason = _reason(error)
            if isinstance(error, TimeoutError):
                reason = f"it was not ready after {self._config.start_timeout_s:g} s, with {self._claim()}"
                if self._config.ray_address is None:  # the head of a cluster may be silent
                    reason += f", {_free()}"
            raise WorkerLost(f"worker {worker_id} ({settings.model_name}) cannot start: {reason}") from error

    async def _placed_actor(self, worker_id: str, host: RayHost) -> _Actor:
        """Return a worker's new actor, whose process has begun.

        While it is pending, the nodes are examined every few seconds. If others are reachable now, a new actor takes
        its place: Ray never changes the nodes that an actor may have.
        """
        while True:
            nodes = await self._nodes(host)
            unreachable = await _unreachable(nodes)
            actor = self._new_actor(worker_id, host, unreachable)
            try:
                while not await _has_begun(actor, host):
                    nodes = nodes or await self._nodes(host)
                    if await _unreachable(nodes) != unreachable:
                        break
                else:
                    return actor
            except BaseException:
                _kill(actor.handle, host)
                raise
            _kill(actor.handle, host)

    async def _nodes(self, host: RayHost) -> _Nodes:
        """Return the live nodes of a cluster; none if Ray does not list them. Concurrent calls share an answer."""
        if self._config.ray_address is None:
            return {}
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(_listed(self._lister, host))
        return await asyncio.shield(self._listing)

    def _terms(self, worker_id: str) -> Terms:
        is_private = self._config.ray_address is None
        return Terms(
            engine=self._config.engine,
            settings=self._engines[worker_id],
            num_cpus=0.0 if is_private else self._config.num_cpus,  # a private Ray has one node
            num_gpus=self._config.num_gpus,
            lease_s=None if is_private else self._config.lease_s,
        )

    def _new_actor(self, worker_id: str, host: RayHost, unreachable: Collection[str]) -> _Actor:
        if host.ended.done():
            raise _Ended(host.ended.result())
        terms, incarnation = self._terms(worker_id), new_incarnation(worker_id)
        lasting = {"name": incarnation, "namespace": self._namespace, "lifetime": "detached"}
        actor_class = self._actor_class.options(
            **(lasting if terms.lease_s is not None else {}),
            num_cpus=terms.num_cpus,
            num_gpus=terms.num_gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
            label_selector={"ray.io/node-id": f"!in({','.join(unreachable)})"} if unreachable else None,
            runtime_env={"env_vars": thread_environment(terms.settings.num_threads)},
        )
        return _Actor(actor_class.remote(terms, worker_id, incarnation), worker_id, incarnation)

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
                f"{self._claim()}; lower num_cpus or the number of workers"
            )

    def _claim(self) -> str:
        return f"{self._config.num_cpus:g} CPUs and {self._config.num_gpus:g} GPUs claimed for each worker"


class _NodeLister:
    """Lists the nodes of a cluster, as an actor: while a head starts again, Ray can abort a process that does it."""

    def nodes(self) -> list[dict[str, Any]]:
        nodes: list[dict[str, Any]] = ray.nodes()
        return nodes

    def draining(self) -> dict[str, float]:
        """Return the nodes that are drained (preempted, scaled down), with the seconds until they end."""
        now_s = time.time()
        deadlines_ms: dict[str, int] = ray._private.state.state.get_draining_nodes()  # Ray's own libraries poll it too
        return {node: ms / 1000 - now_s if ms else math.inf for node, ms in deadlines_ms.items()}


@dataclass(frozen=True, slots=True)
class _Actor:
    """A worker's actor in Ray, and the incarnation as which it serves this coordinator."""

    handle: Any
    worker_id: str
    incarnation: str


class _Incarnation:
    """One incarnation of a worker: its actor, its stream of events, and its end."""

    def __init__(self, info: WorkerInfo, actor: Any, host: RayHost, *, is_on_this_machine: bool) -> None:
        self.info = info
        self.host = host
        """The Ray that the actor belongs to."""
        self.events: asyncio.Queue[Sequence[SampleEvent] | None] = asyncio.Queue()
        self._actor = actor
        self.is_taken = False
        """Whether another coordinator has taken over the actor."""
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process = Process.hold(info.pid) if is_on_this_machine else None
        stream = actor.events.options(num_returns="streaming", concurrency_group="events").remote(info.incarnation)
        self._pump = asyncio.create_task(self._take_events(stream))

    async def call(self, method: str, *arguments: Any, group: str = "control") -> Any:
        """Call a method of the actor; return its reply. Raises WorkerLost, or TakenOver, after the end."""
        if self._ended.done():
            raise self.lost()
        try:
            method_in_group = getattr(self._actor, method).options(concurrency_group=group)
            return await _reply(method_in_group.remote(self.info.incarnation, *arguments), unless=self._ended)
        except RayError as error:
            self._fail(error)
        except _Ended:
            pass
        raise self.lost()

    def end(self, reason: str) -> None:
        """Drop all replies and events from now on. The first reason stays."""
        if not self._ended.done():
            self._ended.set_result(reason)
            self.events.put_nowait(None)
            self._pump.cancel()

    def lost(self) -> WorkerLost | TakenOver:
        """Return an exception with the reason of the end."""
        kind = TakenOver if self.is_taken else WorkerLost
        return kind(f"{self.info.incarnation} has ended: {self._ended.result()}")

    async def kill(self) -> None:
        """End the process unless it was taken over; return when it has ended (on a cluster: when Ray was told to)."""
        if self.is_taken:
            return
        grace_s = 0.0 if self.host.ended.done() else KILL_GRACE_S
        _kill(self._actor, self.host)
        process, self._process = self._process, None
        if process is not None:
            if not await asyncio.to_thread(process.has_ended, grace_s):
                process.kill()
                await asyncio.to_thread(process.has_ended, KILL_GRACE_S)
            process.close()

    async def _take_events(self, stream: AsyncIterator[Any]) -> None:
        try:
            async for reference in stream:
                self.events.put_nowait(unpack(await reference))
        except RayError as error:
            self._fail(error)
        else:
            self.end("its stream of events ended")

    def _fail(self, error: RayError) -> None:
        if not self._ended.done():
            self.is_taken = isinstance(error, RayTaskError) and isinstance(error.cause, TakenOver)
            self.end(_reason(error))


class _OtherVersion(Exception):
    """A worker runs other code than this process; the text names both."""


class _Ended(Exception):
    """The incarnation, or its Ray, has ended; the text says why."""


async def _reply(reference: Any, *, unless: asyncio.Future[str]) -> Any:
    """Wait for a call's reply. Raises RayError if the call fails, and _Ended as soon as `unless` is done."""
    reply = asyncio.wrap_future(reference.future())
    del reference  # a traceback would keep it alive
    try:
        await asyncio.wait((reply, unless), return_when=asyncio.FIRST_COMPLETED)
        if unless.done():
            raise _Ended(unless.result())
        return reply.result()
    finally:
        if not reply.cancel():
            reply.exception()  # retrieved, so that asyncio does not report it


def _kill(actor: Any, host: RayHost) -> None:
    if host.ended.done():
        return  # Ray has ended, and all its actors with it
    with suppress(RayError, ValueError):  # the actor or Ray has died already
        ray.kill(actor, no_restart=True)


def _reason(error: BaseException) -> str:
    """Return the cause, without a traceback and without Ray's advice."""
    if isinstance(error, RayTaskError):
        return str(error.cause)
    lines = [line for line in str(error).splitlines() if line and not line.startswith(("\t", " "))]
    return " ".join(lines).partition(" Some common causes")[0]


async def _any_of(tasks: Collection[asyncio.Task[_Incarnation]]) -> None:
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


def _check_version(info: WorkerInfo) -> None:
    if info.version != running_version():
        raise _OtherVersion(
            f"the node at {info.node} runs {info.version}, and the coordinator {running_version()}: install the same "
            "on every node"
        )


async def _has_begun(actor: _Actor, host: RayHost) -> bool:
    """Return whether the actor's process begins within `PLACED_S`. Raises RayError and _Ended."""
    try:
        async with asyncio.timeout(PLACED_S):
            ping = actor.handle.ping.options(concurrency_group="ping")
            await _reply(ping.remote(actor.incarnation), unless=host.ended)
    except TimeoutError:
        return False
    except RayTaskError:
        pass  # `start` raises it too
    return True


async def _listed(lister: Any, host: RayHost) -> _Nodes:
    try:
        async with asyncio.timeout(NODES_TIMEOUT_S):
            nodes = await _reply(lister.nodes.remote(), unless=host.ended)
    except (TimeoutError, RayError, _Ended) as error:
        logger.warning("Ray does not list its nodes: %s", _reason(error) or "time-out")
        return {}
    return {node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in nodes if node["Alive"]}


async def _drained(lister: Any, host: RayHost) -> dict[str, float]:
    """Return the nodes that Ray drains, with the seconds until they end; none if Ray does not tell."""
    try:
        async with asyncio.timeout(NODES_TIMEOUT_S):
            drained: dict[str, float] = await _reply(lister.draining.remote(), unless=host.ended)
    except (TimeoutError, RayError, _Ended) as error:
        logger.debug("Ray does not tell which nodes it drains: %s", _reason(error) or "time-out")
        return {}
    return drained


async def _unreachable(nodes: _Nodes) -> frozenset[str]:
    """Return ids of nodes that accept no connection: Ray places workers on a silent node for a minute or more."""
    reachable = await asyncio.gather(*(_is_reachable(host, port) for host, port in nodes.values()))
    return frozenset(node for node, is_reachable in zip(nodes, reachable, strict=True) if not is_reachable)


async def _is_reachable(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(REACH_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            await writer.wait_closed()
    except OSError:  # a time-out is one
        return False
    return True


def _free() -> str:
    free, total = ray.available_resources(), ray.cluster_resources()
    return ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}s free" for name in ("CPU", "GPU"))
