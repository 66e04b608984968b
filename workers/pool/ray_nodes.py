"""The nodes of a Ray cluster: which are there, which accept connections, which are about to leave.

Asks Ray in an actor, a process of its own that may die: while a head starts again, Ray can abort a process that asks.
Knows nothing of workers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from workers.pool.ray_calls import Ended, reason, reply
from workers.pool.ray_host import RayHost

logger = logging.getLogger(__name__)

REACH_TIMEOUT_S = 2.0
"""Seconds that a node has to accept a connection before it counts as unreachable."""
NODES_TIMEOUT_S = 10.0
"""Seconds that Ray has to list its nodes, in a process of its own, which starts with the pool."""


@dataclass(frozen=True, slots=True)
class Node:
    """A live node of a cluster."""

    address: str
    port: int
    """Of its raylet."""
    resources: Mapping[str, float]
    """In all, free or not."""


class Nodes:
    """The nodes of the cluster that this process has joined."""

    def __init__(self, host: RayHost) -> None:
        self._host = host
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._lister = ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=here)(_Lister).remote()
        self._listing: asyncio.Task[Mapping[str, Node]] | None = None

    async def live(self) -> Mapping[str, Node]:
        """Return the live nodes by Ray's id; none if Ray does not list them. Concurrent calls share an answer."""
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(self._listed())
        return await asyncio.shield(self._listing)

    async def leaving(self) -> Mapping[str, float]:
        """Return the nodes that Ray drains, with the seconds until they end; none if Ray does not tell."""
        try:
            async with asyncio.timeout(NODES_TIMEOUT_S):
                left_s: dict[str, float] = await reply(self._lister.draining.remote(), unless=self._host.ended)
        except (TimeoutError, RayError, Ended) as error:
            logger.debug("Ray does not tell which nodes it drains: %s", reason(error) or "time-out")
            return {}
        return left_s

    async def _listed(self) -> Mapping[str, Node]:
        try:
            async with asyncio.timeout(NODES_TIMEOUT_S):
                listed = await reply(self._lister.nodes.remote(), unless=self._host.ended)
        except (TimeoutError, RayError, Ended) as error:
            logger.warning("Ray does not list its nodes: %s", reason(error) or "time-out")
            return {}
        return {
            node["NodeID"]: Node(node["NodeManagerAddress"], node["NodeManagerPort"], node["Resources"])
            for node in listed
            if node["Alive"]
        }


async def unreachable(nodes: Mapping[str, Node]) -> frozenset[str]:
    """Return ids of nodes that accept no connection: Ray places actors on a silent node for a minute or more."""
    reachable = await asyncio.gather(*(_is_reachable(node) for node in nodes.values()))
    return frozenset(node_id for node_id, is_reachable in zip(nodes, reachable, strict=True) if not is_reachable)


class _Lister:
    """Lists the nodes, as an actor."""

    def nodes(self) -> list[dict[str, Any]]:
        nodes: list[dict[str, Any]] = ray.nodes()
        return nodes

    def draining(self) -> dict[str, float]:
        """Return the nodes that are drained (preempted, scaled down), with the seconds until they end."""
        now_s = time.time()
        deadlines_ms: dict[str, int] = ray._private.state.state.get_draining_nodes()  # Ray's own libraries poll it too
        return {node: ms / 1000 - now_s if ms else math.inf for node, ms in deadlines_ms.items()}


async def _is_reachable(node: Node) -> bool:
    try:
        async with asyncio.timeout(REACH_TIMEOUT_S):
            _, writer = await asyncio.open_connection(node.address, node.port)
            writer.close()
            await writer.wait_closed()
    except OSError:  # a time-out is one
        return False
    return True
