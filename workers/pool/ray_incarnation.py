"""One incarnation of a worker on Ray: its calls, its stream of sample events, and its end.

Main invariant: after the end no result or event reaches a caller. Every call waits for its reply or the end, and drops
a late reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ray.exceptions import RayError, RayTaskError

from workers.contract.messages import SampleEvent, WorkerInfo
from workers.contract.protocols import TakenOver, WorkerLost
from workers.pool.actor import unpack
from workers.pool.processes import Process
from workers.pool.ray_calls import Ended, kill, reason, reply
from workers.pool.ray_host import RayHost

REPLY_S = 5.0
"""Seconds for the ping after the end of a stream of events."""
KILL_GRACE_S = 1.0
"""Seconds that Ray has to end a process before the pool kills it: Ray takes long to end a process that is stopped."""


class Incarnation:
    """One incarnation of a worker: its actor, its stream of events, and its end."""

    def __init__(self, info: WorkerInfo, actor: Any, host: RayHost, *, is_on_this_machine: bool) -> None:
        self.info = info
        self.host = host
        """The Ray that the actor belongs to."""
        self.events: asyncio.Queue[Sequence[SampleEvent] | None] = asyncio.Queue()
        self.starting_sample = asyncio.Lock()
        """Samples are handed over in the order of the calls: a later one may need the weights of an earlier one."""
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
            return await reply(method_in_group.remote(self.info.incarnation, *arguments), unless=self._ended)
        except RayError as error:
            self._fail(error)
        except Ended:
            pass
        raise self.lost()

    async def call_contents(self, method: str, /, *arguments: Any) -> Any:
        """Call a method of the actor's `Aside`, as `call`."""
        return await self.call("contents", method, *arguments, group="contents")

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
        kill(self._actor, self.host)
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
            await self._find_end()

    async def _find_end(self) -> None:
        """End after the stream of events; the reply to a ping tells whether another coordinator has the worker."""
        try:
            async with asyncio.timeout(REPLY_S):
                await self._actor.ping.options(concurrency_group="ping").remote(self.info.incarnation)
        except RayError as error:
            self._fail(error)
        except TimeoutError:
            pass
        self.end("its stream of events ended")

    def _fail(self, error: RayError) -> None:
        if not self._ended.done():
            self.is_taken = isinstance(error, RayTaskError) and isinstance(error.cause, TakenOver)
            self.end(reason(error))
