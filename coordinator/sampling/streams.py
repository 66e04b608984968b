"""Streams of samples to listeners: tokens as they are drawn, and at the end the finished operation.

Tokens are not kept. Does not depend on workers or scheduling. Main invariant: the operation is a stream's last event.
"""

from __future__ import annotations

import asyncio

from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import sampling_pb2

Event = sampling_pb2.SampledToken | ops_pb.Operation
"""An event for a listener; None in its queue: the coordinator stops."""


class TokenStreams:
    """The listeners of all samples."""

    def __init__(self) -> None:
        self._listeners: dict[str, list[asyncio.Queue[Event | None]]] = {}
        self._is_closed = False

    def listen(self, name: str) -> asyncio.Queue[Event | None]:
        """Return a queue of the sample's events from now on. Call before the sample is submitted."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        if self._is_closed:
            queue.put_nowait(None)
        self._listeners.setdefault(name, []).append(queue)
        return queue

    def unlisten(self, name: str, queue: asyncio.Queue[Event | None]) -> None:
        """Remove a listener."""
        queues = self._listeners.get(name, [])
        if queue in queues:
            queues.remove(queue)
        if not queues:
            self._listeners.pop(name, None)

    def has_listener(self, name: str) -> bool:
        """Return whether the sample has a listener."""
        return name in self._listeners

    def send_token(self, name: str, token: sampling_pb2.SampledToken) -> None:
        """Send a token to the sample's listeners."""
        for queue in self._listeners.get(name, ()):
            queue.put_nowait(token)

    def finish(self, name: str, operation: ops_pb.Operation) -> None:
        """Send the finished operation; the sample has no listeners after that."""
        for queue in self._listeners.pop(name, ()):
            queue.put_nowait(operation)

    def close(self) -> None:
        """End every stream."""
        self._is_closed = True
        for queues in self._listeners.values():
            for queue in queues:
                queue.put_nowait(None)
