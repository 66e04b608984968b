"""The in-flight table: operations without a committed outcome, by name, and the waits for them.

In memory; finished operations are read from the store. A wait does not poll: it has a queue that gets each operation
once, when its outcome has committed. The table also counts the memory of unfinished requests: payloads by tenant, and
decoded payloads in total. Does not depend on which operation runs next.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable

from coordinator.operations.operation import Kind, Operation
from coordinator.operations.samples import FinishedSamples
from coordinator.payloads.passes import DecodedPass
from tinkerpool.v1 import operations_pb2 as ops_pb

DECODED_BYTES_MAX = 256 << 20
"""Memory for decoded payloads of queued operations, of all tenants. Beyond it payloads are decoded when they run."""


class InFlightTable:
    """The operations in flight and their waits."""

    def __init__(self, finished_samples: FinishedSamples) -> None:
        """`finished_samples` gets the outcomes of committed samples."""
        self._finished_samples = finished_samples
        self._operations: dict[str, Operation] = {}
        self._waiters: dict[str, list[asyncio.Queue[ops_pb.Operation | None]]] = {}
        self._open_queues: set[asyncio.Queue[ops_pb.Operation | None]] = set()
        self._bytes_by_tenant: Counter[str] = Counter()
        self._num_by_target: Counter[str] = Counter()
        self._by_request_id: dict[tuple[str, str], Operation] = {}
        self._decoded_bytes: dict[str, int] = {}
        """Operation to the memory of its decoded payload."""
        self._num_decoded_bytes = 0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._operations)

    def add(self, operation: Operation) -> None:
        """Add an accepted operation."""
        self._operations[operation.name] = operation
        self._bytes_by_tenant[operation.tenant_id] += operation.num_bytes
        self._num_by_target[operation.target_id] += 1
        if operation.request_id:
            self._by_request_id.setdefault((operation.target_id, operation.request_id), operation)

    def keep_decoded(self, operation: Operation, decoded: DecodedPass) -> None:
        """Hold an operation's payload decoded until it has run, if there is memory for it."""
        num_bytes = decoded.num_bytes
        if self._num_decoded_bytes + num_bytes <= DECODED_BYTES_MAX:
            operation.keep_decoded(decoded)
            self._decoded_bytes[operation.name] = num_bytes
            self._num_decoded_bytes += num_bytes

    def get(self, name: str) -> Operation | None:
        """Return the operation of this name, if its outcome has not committed."""
        return self._operations.get(name)

    def all(self) -> Iterable[Operation]:
        """Return all operations in flight."""
        return self._operations.values()

    def of_request(self, target_id: str, request_id: str) -> Operation | None:
        """Return the operation that a request id made on an adapter or sampler, if its outcome has not committed."""
        return self._by_request_id.get((target_id, request_id))

    def num_of_target(self, target_id: str) -> int:
        """Return the number of operations in flight of an adapter or sampler."""
        return self._num_by_target[target_id]

    def bytes_of_tenant(self, tenant_id: str) -> int:
        """Return the bytes of a tenant's payloads in flight."""
        return self._bytes_by_tenant[tenant_id]

    def remove(self, operation: Operation) -> None:
        """Remove an operation that finished, or whose append failed."""
        if self._operations.get(operation.name) is not operation:
            return
        del self._operations[operation.name]
        self._bytes_by_tenant[operation.tenant_id] -= operation.num_bytes
        self._num_by_target[operation.target_id] -= 1
        for counter, key in ((self._bytes_by_tenant, operation.tenant_id), (self._num_by_target, operation.target_id)):
            if not counter[key]:
                del counter[key]
        self._num_decoded_bytes -= self._decoded_bytes.pop(operation.name, 0)
        request = (operation.target_id, operation.request_id)
        if self._by_request_id.get(request) is operation:
            del self._by_request_id[request]

    def finish(self, operation: Operation) -> None:
        """Make a committed outcome visible: wake the waits for it."""
        operation.commit()
        self.remove(operation)
        assert operation.outcome is not None
        for queue in self._waiters.pop(operation.name, ()):
            queue.put_nowait(operation.outcome)
        if operation.kind is Kind.SAMPLE:
            self._finished_samples.note(operation.outcome)

    async def wait(
        self, names: Iterable[str], read_finished: Callable[[str], ops_pb.Operation]
    ) -> AsyncIterator[ops_pb.Operation]:
        """Yield each named operation once, when it is finished; fewer if the coordinator stops.

        `read_finished` gets the names that are not in flight, one by one, and may raise.
        """
        queue: asyncio.Queue[ops_pb.Operation | None] = asyncio.Queue()
        unique = dict.fromkeys(names)
        done = [name for name in unique if name not in self._operations]
        waiting = [name for name in unique if name in self._operations]
        for name in waiting:
            self._waiters.setdefault(name, []).append(queue)
        self._open_queues.add(queue)
        try:
            for name in done:
                yield read_finished(name)
            for _ in waiting if not self._is_closed else ():
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
        """End every wait; unfinished operations resume after the next start."""
        self._is_closed = True
        for queue in self._open_queues:
            queue.put_nowait(None)
