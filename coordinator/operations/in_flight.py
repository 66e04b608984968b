"""Operations that are not finished, by name, and who waits for them. In memory; finished ones are read from the store.

Nobody polls: a waiter is a queue that gets each operation once, when its outcome has committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from coordinator.operations.operation import Operation
from tinkerpool.v1 import operations_pb2 as ops_pb


class OperationTable:
    """Live operations and their waiters."""

    def __init__(self, note_finished: Callable[[ops_pb.Operation], None] = lambda _: None) -> None:
        """`note_finished` hears of every operation whose outcome has committed."""
        self._note_finished = note_finished
        self._live: dict[str, Operation] = {}
        self._waiters: dict[str, list[asyncio.Queue[ops_pb.Operation | None]]] = {}
        self._open_queues: set[asyncio.Queue[ops_pb.Operation | None]] = set()
        self._bytes_by_tenant: dict[str, int] = {}
        self._num_by_target: dict[str, int] = {}
        self._by_request_id: dict[tuple[str, str], Operation] = {}
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._live)

    def add(self, operation: Operation) -> None:
        """An operation was accepted."""
        self._live[operation.name] = operation
        tenant = operation.tenant_id
        self._bytes_by_tenant[tenant] = self._bytes_by_tenant.get(tenant, 0) + operation.num_bytes
        self._num_by_target[operation.target_id] = self._num_by_target.get(operation.target_id, 0) + 1
        if operation.request_id:
            self._by_request_id.setdefault((operation.target_id, operation.request_id), operation)

    def get(self, name: str) -> Operation | None:
        """The operation of that name, if it has not committed its outcome."""
        return self._live.get(name)

    def live(self) -> Iterable[Operation]:
        """All of them."""
        return self._live.values()

    def of_request(self, target_id: str, request_id: str) -> Operation | None:
        """The operation that a request id made on an adapter or sampler, if it has not committed its outcome."""
        return self._by_request_id.get((target_id, request_id))

    def num_pending(self, target_id: str) -> int:
        """Unfinished operations of an adapter or sampler."""
        return self._num_by_target.get(target_id, 0)

    def pending_bytes(self, tenant_id: str) -> int:
        """Bytes of a tenant's unfinished requests."""
        return self._bytes_by_tenant.get(tenant_id, 0)

    def remove(self, operation: Operation) -> None:
        """It is finished, or its append failed."""
        if self._live.get(operation.name) is not operation:
            return
        del self._live[operation.name]
        self._bytes_by_tenant[operation.tenant_id] -= operation.num_bytes
        self._num_by_target[operation.target_id] -= 1
        if not self._num_by_target[operation.target_id]:
            del self._num_by_target[operation.target_id]
        key = (operation.target_id, operation.request_id)
        if self._by_request_id.get(key) is operation:
            del self._by_request_id[key]

    def finished(self, operation: Operation) -> None:
        """Its outcome has committed: wake who waits."""
        operation.is_committed = True
        self.remove(operation)
        assert operation.outcome is not None
        for queue in self._waiters.pop(operation.name, ()):
            queue.put_nowait(operation.outcome)
        self._note_finished(operation.outcome)

    async def wait(
        self, names: Iterable[str], read_finished: Callable[[str], ops_pb.Operation]
    ) -> AsyncIterator[ops_pb.Operation]:
        """Each named operation once, when it is finished; fewer if the coordinator stops.

        `read_finished` gets those that are not live, one by one, and may raise.
        """
        queue: asyncio.Queue[ops_pb.Operation | None] = asyncio.Queue()
        unique = dict.fromkeys(names)
        done = [name for name in unique if name not in self._live]
        waiting = [name for name in unique if name in self._live]
        for name in waiting:
            self._waiters.setdefault(name, []).append(queue)
        self._open_queues.add(queue)
        try:
            for name in done:
                yield read_finished(name)
            for _ in waiting if not self.is_closed else ():
                finished = await queue.get()
                if finished is None:
                    return
                yield finished
        finally:
            self._open_queues.discard(queue)
            for name in waiting:
                if queue in (queues := self._waiters.get(name, [])):
                    queues.remove(queue)
                    if not queues:
                        del self._waiters[name]

    def close(self) -> None:
        """End every wait; what is unfinished goes on after the next start."""
        self.is_closed = True
        for queue in self._open_queues:
            queue.put_nowait(None)
