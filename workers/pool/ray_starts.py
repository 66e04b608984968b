"""Starts workers' actors in one Ray, and adopts those that an earlier coordinator has left in a cluster.

Knows on which nodes an actor may be placed, and what it is started with; nothing of batches, and not which worker has
which incarnation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import list_named_actors

from workers.contract.messages import WorkerInfo
from workers.contract.protocols import Owner, WorkerLost
from workers.contract.settings import EngineSettings, PoolConfig
from workers.pool.actor import CONCURRENCY_GROUPS, EngineActor, Terms
from workers.pool.environment import new_incarnation, worker_environment, worker_of
from workers.pool.ray_calls import Ended, kill, reason, reply
from workers.pool.ray_host import RayHost
from workers.pool.ray_incarnation import Incarnation
from workers.pool.ray_nodes import Node, Nodes, unreachable
from workers.pool.version import running_version

logger = logging.getLogger(__name__)

ADOPT_TIMEOUT_S = 5.0
"""Seconds that an actor of an earlier coordinator has to reply; it is ended otherwise."""
PLACED_S = 5.0
"""Seconds after which the nodes are examined again for a worker whose process has not begun."""


@dataclass(frozen=True, slots=True)
class Actor:
    """A worker's actor in Ray, and the incarnation as which it serves this coordinator."""

    handle: Any
    worker_id: str
    incarnation: str
    node_id: str = ""
    """Ray's id of its node; empty: not known."""
    is_adopted: bool = False
    """Whether an earlier coordinator has started it."""


class _Unfit(Exception):
    """A worker cannot run on this node; the text says why."""


class Starts:
    """The starts of a pool's workers."""

    def __init__(self, config: PoolConfig, engines: Mapping[str, EngineSettings], owner: Owner, host: RayHost) -> None:
        """`engines`: the settings of each worker's engine, by worker id; the pool adds to it. `host` has started."""
        self._config = config
        self._engines = engines
        self._epoch = owner.epoch
        self._namespace = f"tinkerpool-{owner.pool_id}"
        self._host = host
        # One class for all workers: Ray stores a class with its first actor, and blocks for a minute if its server has
        # died by then.
        self._actor_class = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(EngineActor)
        self.nodes = Nodes(host) if config.ray_address is not None else None
        """None: a private Ray, which has one."""
        self._leaves_adopted = False

    def leave_adopted(self) -> None:
        """From now on leave adopted actors to the next coordinator when their starts are cancelled."""
        self._leaves_adopted = True

    async def adopt_left(self, worker_ids: Collection[str]) -> dict[str, Actor]:
        """Adopt actors that an earlier coordinator has left for these workers, by worker id; end its others.

        None are left in a private Ray.
        """
        if self.nodes is None:
            return {}
        named = await asyncio.to_thread(list_named_actors, all_namespaces=True)
        names = [each["name"] for each in named if each["namespace"] == self._namespace]
        found = await asyncio.gather(*(self._adopt(name, worker_ids) for name in names))
        adopted: dict[str, Actor] = {}
        for actor in filter(None, found):
            if actor.worker_id in adopted:  # its coordinator was killed before it could end a lost incarnation
                kill(actor.handle, self._host)
            adopted.setdefault(actor.worker_id, actor)
        return adopted

    async def started(self, worker_id: str, adopted: Actor | None = None) -> Incarnation:
        """Return a worker's next incarnation, when it is ready. Raises WorkerLost.

        A node on which it cannot run, because a model or a version is missing there, is named, and others are tried.
        """
        unfit: dict[str, str] = {}
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                while True:
                    actor = adopted or await self._placed(worker_id, unfit)
                    try:
                        return await self._ready(actor)
                    except (_Unfit, RayError) as error:
                        if adopted is not None:
                            logger.warning("%s cannot be adopted: %s", actor.incarnation, reason(error))
                            adopted = None
                            continue
                        if not await self._may_try_another(actor, error, unfit):
                            raise
        except (TimeoutError, RayError, Ended, _Unfit) as error:
            why = list(unfit.values())
            if isinstance(error, TimeoutError):
                why.append(f"it was not ready after {self._config.start_timeout_s:g} s, with {self._config.claim}")
                if self.nodes is None:  # the head of a cluster may be silent
                    why.append(_free())
            elif not isinstance(error, _Unfit):
                why.append(reason(error))
            model = self._engines[worker_id].model_name
            raise WorkerLost(f"worker {worker_id} ({model}) cannot start: {', '.join(why)}") from error

    async def _ready(self, actor: Actor) -> Incarnation:
        """Wait until an actor is ready. Raises _Unfit, RayError and Ended, and ends it then; see `leave_adopted`."""
        try:
            start = actor.handle.start.options(concurrency_group="work")
            info: WorkerInfo = await reply(start.remote(actor.incarnation), unless=self._host.ended)
            if info.version != running_version():
                raise _Unfit(
                    f"it would run {info.version}, and the coordinator runs {running_version()}: install the same on "
                    "every node"
                )
            return Incarnation(info, actor.handle, self._host, is_on_this_machine=self.nodes is None)
        except RayTaskError as error:
            kill(actor.handle, self._host)
            raise _Unfit(reason(error)) from error
        except BaseException as error:
            is_left = actor.is_adopted and self._leaves_adopted and isinstance(error, asyncio.CancelledError)
            if not is_left:
                kill(actor.handle, self._host)
            raise

    async def _adopt(self, name: str, worker_ids: Collection[str]) -> Actor | None:
        """Adopt an actor by its name, which is its first incarnation's; end it if it is not what would be started."""
        worker_id, why = worker_of(name), "it does not reply"
        try:
            handle = await asyncio.to_thread(ray.get_actor, name, self._namespace)
        except ValueError:  # it has died
            return None
        actor = Actor(handle, worker_id, new_incarnation(worker_id), is_adopted=True)
        try:
            async with asyncio.timeout(ADOPT_TIMEOUT_S):
                terms = self.terms(worker_id) if worker_id in worker_ids else None
                adopt = handle.adopt.options(concurrency_group="control")
                asked = adopt.remote(terms, running_version(), self._epoch, actor.incarnation)
                if await reply(asked, unless=self._host.ended):
                    logger.info("worker %s was left by the last coordinator and goes on as %s", name, actor.incarnation)
                    return actor
                why = "its settings or its code are not those of this coordinator"
        except (TimeoutError, RayError, Ended) as error:
            why = reason(error) or why
        logger.info("worker %s was left by the last coordinator and is ended: %s", name, why)
        kill(handle, self._host)
        return None

    async def _placed(self, worker_id: str, unfit: Collection[str]) -> Actor:
        """Return a worker's new actor, whose process has begun, on none of the `unfit` nodes.

        While it is pending, the nodes are examined every few seconds. If others are reachable now, a new actor takes
        its place: Ray never changes the nodes that an actor may have.
        """
        while True:
            nodes = await self._live()
            avoided = await unreachable(nodes)
            actor = self._new_actor(worker_id, avoided.union(unfit))
            try:
                while (node_id := await self._node_of(actor)) is None:
                    nodes = nodes or await self._live()
                    if await unreachable(nodes) != avoided:
                        break
                else:
                    return Actor(actor.handle, worker_id, actor.incarnation, node_id)
            except BaseException:
                kill(actor.handle, self._host)
                raise
            kill(actor.handle, self._host)

    async def _node_of(self, actor: Actor) -> str | None:
        """Return the node of an actor, if its process begins within `PLACED_S`. Raises RayError and Ended."""
        try:
            async with asyncio.timeout(PLACED_S):
                node_id: str = await reply(
                    actor.handle.node_id.options(concurrency_group="ping").remote(), unless=self._host.ended
                )
        except TimeoutError:
            return None
        return node_id

    async def _may_try_another(self, actor: Actor, error: Exception, unfit: dict[str, str]) -> bool:
        """Note an unfit node; return whether the worker could be placed on another one, once that is free."""
        if not isinstance(error, _Unfit):
            return False
        nodes = await self._live()
        place = f"on {nodes[actor.node_id].address}: " if actor.node_id in nodes else ""
        unfit[actor.node_id] = f"{place}{error}"
        claims = {"CPU": self._config.num_cpus, "GPU": self._config.num_gpus}
        others = [node.resources for node_id, node in nodes.items() if node_id not in unfit]
        if not any(all(each.get(name, 0.0) >= number for name, number in claims.items()) for each in others):
            return False
        logger.error("worker %s cannot run %s; another node is tried", actor.worker_id, unfit[actor.node_id])
        return True

    async def _live(self) -> Mapping[str, Node]:
        return await self.nodes.live() if self.nodes is not None else {}

    def terms(self, worker_id: str) -> Terms:
        """Return what a worker is started with."""
        is_private = self.nodes is None
        return Terms(
            engine=self._config.engine,
            settings=self._engines[worker_id],
            num_cpus=0.0 if is_private else self._config.num_cpus,  # a private Ray has one node
            num_gpus=self._config.num_gpus,
            lease_s=None if is_private else self._config.lease_s,
        )

    def _new_actor(self, worker_id: str, avoided: Collection[str]) -> Actor:
        if self._host.ended.done():
            raise Ended(self._host.ended.result())
        terms, incarnation = self.terms(worker_id), new_incarnation(worker_id)
        lasting = {"name": incarnation, "namespace": self._namespace, "lifetime": "detached"}
        actor_class = self._actor_class.options(
            **(lasting if terms.lease_s is not None else {}),
            num_cpus=terms.num_cpus,
            num_gpus=terms.num_gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
            label_selector={"ray.io/node-id": f"!in({','.join(avoided)})"} if avoided else None,
            runtime_env={"env_vars": worker_environment(terms.settings)},
        )
        return Actor(actor_class.remote(terms, worker_id, incarnation, self._config.log), worker_id, incarnation)


def _free() -> str:
    free, total = ray.available_resources(), ray.cluster_resources()
    return ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}s free" for name in ("CPU", "GPU"))
