"""Operations without a committed outcome, and the waits for them; the numbers of samples, and finished samples.

In memory; finished operations are read from the store. `InFlightTable` has the operations by name. A wait does not
poll: it has a queue that gets each operation once, when its outcome has committed. The table counts the payloads of
unfinished requests by tenant, and bounds the memory of all requests and unread results: beyond it they are read from
the store when they are needed, and so are large results, once there is room for the response (`responses`).

`FinishedSamples` is for clients that poll for their samples with a cursor; a client's samples have sequence numbers in
a block of its own. A client's list begins with the finished samples in the store that were not fetched, read as the
client takes them, so a list may be dropped at any time: its client then gets some samples twice.

Does not depend on which operation runs next. Main invariants: a wait yields each operation once; no two samples of a
sampler get the same number, in any epoch; cursors only grow, over all epochs, and a sample that finishes later is
behind every earlier cursor.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from coordinator.base.errors import unavailable
from coordinator.base.time import month_of
from coordinator.limits.results import UNCOUNTED_BYTES
from coordinator.operations.holdings import NO_CLAIM, Claim
from coordinator.operations.operation import Kind, Operation
from coordinator.payloads.passes import DecodedPass
from coordinator.storage.rows import CheckpointRow
from coordinator.storage.store import Store
from tinkerpool.v1 import operations_pb2 as ops_pb

REQUEST_BYTES_MAX = 40 << 20
"""Memory for the unfinished requests of all tenants, as payloads and decoded. Beyond it requests of tenants with more
than their equal part are not kept decoded, and the payloads of their passes stay in the log until they run."""
RESULT_BYTES_MAX = 8 << 20
"""Memory for small results in the queues of waits. Beyond it a result is read from the store when its client has read
those before it."""
CLIENT_SEQS = 10**9
"""Numbers in a client's block."""
CLIENTS_MAX = 4096
"""Lists that are kept; beyond that, the list polled least recently is dropped."""
UNREPORTED_MAX = 4096
"""Samples in one list; a list that grows longer, because it is not polled, is dropped."""
REPORTED_MAX = 1000
"""Samples in one response, and in one read of the store: 15 ms."""
_POSITION_BITS = 32
"""Low bits of a cursor: the position within an epoch. The epoch is in the bits above."""


_WaitQueue = asyncio.Queue[ops_pb.Operation | str | None]
"""Finished operations, or their names if they are large or there was no memory; None: the coordinator stops."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A sample that has finished."""

    name: str
    is_failed: bool
    num_bytes: int
    """Size of its result."""


@dataclass(frozen=True, slots=True)
class Unfetched:
    """Finished samples in the store that were not fetched, by sequence number."""

    samples: Sequence[Finished]
    read_to: int | None
    """The number up to which the store was read; None: to the last one."""


ReadUnfetched = Callable[[int], Unfetched]
"""Reads some of a client's unfetched samples, at most `REPORTED_MAX`, behind a sequence number."""


@dataclass(slots=True, eq=False)
class _List:
    unreported: deque[tuple[int, Finished]] = field(default_factory=deque)
    """Samples with their positions, ascending."""
    read_to: int | None = 0
    """As in `Unfetched`; samples behind it are in the store alone."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the list has grown or was dropped."""


class FinishedSamples:
    """The finished samples of all clients that poll."""

    def __init__(self, epoch: int) -> None:
        """`epoch`: the coordinator's present epoch."""
        self._epoch = epoch
        self._positions = count(1)
        self._clients = count(1)
        self._lists: OrderedDict[tuple[str, int], _List] = OrderedDict()
        self._is_closed = False

    def new_client(self) -> int:
        """Return a number, not 0, that no other client of any sampler has, in this epoch or the hundreds before."""
        return 1 + ((self._epoch << 20) + next(self._clients)) % (CLIENT_SEQS - 1)

    def note(self, operation: ops_pb.Operation) -> None:
        """Add a finished operation, whose outcome has committed, to its client's list."""
        key = (operation.target_id, (operation.seq - 1) // CLIENT_SEQS)
        found = self._lists.get(key)
        if found is None:
            return
        if found.read_to is not None and operation.seq > found.read_to:
            return
        is_failed = operation.state == ops_pb.OPERATION_STATE_FAILED
        self._add(found, Finished(operation.name, is_failed, operation.ByteSize()))
        found.changed.set()
        if len(found.unreported) > UNREPORTED_MAX:
            del self._lists[key]

    async def since(
        self, target_id: str, client: int, cursor: int, timeout_s: float, unfetched: ReadUnfetched
    ) -> tuple[list[Finished], int]:
        """Return the samples that finished since a cursor (0: any), oldest first, and the next cursor.

        Waits for the first one, at most for `timeout_s`. Samples up to the cursor are dropped from the list.
        Raises ServiceError UNAVAILABLE when the coordinator stops.
        """
        position = cursor & ((1 << _POSITION_BITS) - 1) if cursor >> _POSITION_BITS == self._epoch else 0
        reported: list[tuple[int, Finished]] = []
        try:
            async with asyncio.timeout(timeout_s):
                while not reported:
                    found = self._list((target_id, client))
                    while found.unreported and found.unreported[0][0] <= position:
                        found.unreported.popleft()
                    if not found.unreported and found.read_to is not None:
                        self._read(found, unfetched)
                    reported = list(islice(found.unreported, REPORTED_MAX))
                    if not reported and found.read_to is None:
                        found.changed.clear()
                        await found.changed.wait()
        except TimeoutError:
            pass
        last = reported[-1][0] if reported else position
        return [finished for _, finished in reported], (self._epoch << _POSITION_BITS) + last

    def forget(self, target_ids: Collection[str]) -> None:
        """Drop the lists of samplers whose session has ended; a late poll reads its list from the store again."""
        for key in [key for key in self._lists if key[0] in target_ids]:
            self._lists.pop(key).changed.set()

    def close(self) -> None:
        """End every wait; polls after the next start return the remaining samples."""
        self._is_closed = True
        for found in self._lists.values():
            found.changed.set()

    def _list(self, key: tuple[str, int]) -> _List:
        if self._is_closed:
            raise unavailable("SHUTTING_DOWN", "the pool is shutting down: ask again")
        found = self._lists.get(key)
        if found is None:
            found = self._lists[key] = _List()
        self._lists.move_to_end(key)
        if len(self._lists) > CLIENTS_MAX:
            _, dropped = self._lists.popitem(last=False)
            dropped.changed.set()
        return found

    def _read(self, found: _List, unfetched: ReadUnfetched) -> None:
        assert found.read_to is not None
        more = unfetched(found.read_to)
        for finished in more.samples:
            self._add(found, finished)
        found.read_to = more.read_to

    def _add(self, found: _List, finished: Finished) -> None:
        found.unreported.append((next(self._positions), finished))


class InFlightTable:
    """The operations in flight and their waits."""

    def __init__(self, finished_samples: FinishedSamples) -> None:
        """`finished_samples` gets the outcomes of committed samples."""
        self._finished_samples = finished_samples
        self._operations: dict[str, Operation] = {}
        self._waiters: dict[str, list[_WaitQueue]] = {}
        self._open_queues: set[_WaitQueue] = set()
        self._bytes_by_tenant: Counter[str] = Counter()
        self._num_by_target: Counter[str] = Counter()
        self._num_by_tenant: Counter[str] = Counter()
        self._num_by_kind: Counter[Kind] = Counter()
        self._arrivals: dict[Kind, dict[str, float]] = {}
        """Operations that were accepted in this epoch to the time, by kind, in the order of their acceptance."""
        self._claims: dict[str, Claim] = {}
        self._tokens_by_month: defaultdict[int, Counter[str]] = defaultdict(Counter)
        """By month for which they are stored, tokens of each tenant's outcomes that became visible in this epoch."""
        self._by_request_id: dict[tuple[str, str], Operation] = {}
        self._request_bytes: dict[str, int] = {}
        """Operation to the memory of its request."""
        self._num_request_bytes = 0
        self._request_bytes_by_tenant: Counter[str] = Counter()
        self._droppable: dict[str, dict[str, Operation]] = {}
        """Durable passes whose requests are in memory, by tenant, in the order of their acceptance."""
        self._num_result_bytes = 0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._operations)

    def add(self, operation: Operation) -> None:
        """Add an operation that is being appended, or is in the log."""
        self._operations[operation.name] = operation
        self._hold_request(operation, len(operation.payload))
        self._bytes_by_tenant[operation.tenant_id] += operation.num_bytes
        self._num_by_target[operation.target_id] += 1
        self._num_by_tenant[operation.tenant_id] += 1
        self._num_by_kind[operation.kind] += 1
        if operation.timeline.arrived is not None:
            self._arrivals.setdefault(operation.kind, {})[operation.name] = operation.timeline.arrived
        self._claims[operation.tenant_id] = self.claimed(operation.tenant_id).plus(operation.claim)
        if operation.request_id:
            self._by_request_id.setdefault((operation.target_id, operation.request_id), operation)
        self.spill(operation)

    def keep_decoded(self, operation: Operation, decoded: DecodedPass) -> None:
        """Hold an operation's payload decoded until it has run, if there is memory for it.

        A tenant within its part gets the memory of those above theirs.
        """
        self._drop_requests(decoded.num_bytes)
        if self._num_request_bytes + decoded.num_bytes <= REQUEST_BYTES_MAX:
            operation.keep_decoded(decoded)
            self._hold_request(operation, decoded.num_bytes)

    def spill(self, operation: Operation) -> None:
        """Let the payload of a durable pass be left to the log, now or when the memory for requests is exceeded."""
        if operation.kind.is_pass and operation.is_durable and operation.name in self._request_bytes:
            self._droppable.setdefault(operation.tenant_id, {})[operation.name] = operation
            self._drop_requests(0)

    def get(self, name: str) -> Operation | None:
        """Return the operation of this name, if its outcome has not committed."""
        return self._operations.get(name)

    def all(self) -> Iterable[Operation]:
        """Return all operations in flight."""
        return self._operations.values()

    def of_request(self, target_id: str, request_id: str) -> Operation | None:
        """Return the operation that a request id made on an adapter or sampler, if its outcome has not committed."""
        return self._by_request_id.get((target_id, request_id))

    def num_by_kind(self) -> dict[Kind, int]:
        """Return the number of operations in flight of each kind that has some."""
        return dict(+self._num_by_kind)

    def oldest(self, kind: Kind) -> float | None:
        """Return when the oldest operation in flight of a kind was accepted; None: before the last start."""
        return next(iter(self._arrivals.get(kind, {}).values()), None)

    def tenants(self) -> Collection[str]:
        """Return the tenants with operations in flight."""
        return self._num_by_tenant.keys()

    def num_of_target(self, target_id: str) -> int:
        """Return the number of operations in flight of an adapter or sampler."""
        return self._num_by_target[target_id]

    def num_of_tenant(self, tenant_id: str) -> int:
        """Return the number of a tenant's operations in flight."""
        return self._num_by_tenant[tenant_id]

    def bytes_of_tenant(self, tenant_id: str) -> int:
        """Return the bytes of a tenant's payloads in flight."""
        return self._bytes_by_tenant[tenant_id]

    def claimed(self, tenant_id: str) -> Claim:
        """Return the sum of what a tenant's operations in flight may add to what it holds."""
        return self._claims.get(tenant_id, NO_CLAIM)

    def deleted(self, row: CheckpointRow) -> None:
        """Let the saves that overwrite a checkpoint claim its place and bytes themselves: its row was deleted."""
        if not self.num_of_target(row.adapter_id):
            return
        for operation in self._operations.values():
            if operation.claim.overwrites == row.path:
                claim = operation.claim.without_overwritten()
                self._claims[row.tenant_id] = self.claimed(row.tenant_id).plus(claim).plus(operation.claim, -1)
                operation.claim = claim

    def tokens_of_month(self, month: int) -> Mapping[str, int]:
        """Return the tokens, by tenant, of outcomes of a month, see `month_of`, that became visible in this epoch."""
        return self._tokens_by_month.get(month, {})

    def all_tokens(self) -> dict[str, int]:
        """Return the tokens of every tenant's outcomes that became visible in this epoch."""
        return dict(sum(self._tokens_by_month.values(), Counter[str]()))

    def remove(self, operation: Operation) -> None:
        """Remove an operation that finished, or whose append failed."""
        if self._operations.get(operation.name) is not operation:
            return
        del self._operations[operation.name]
        self._bytes_by_tenant[operation.tenant_id] -= operation.num_bytes
        self._num_by_target[operation.target_id] -= 1
        self._num_by_tenant[operation.tenant_id] -= 1
        self._num_by_kind[operation.kind] -= 1
        self._arrivals.get(operation.kind, {}).pop(operation.name, None)
        self._claims[operation.tenant_id] = self.claimed(operation.tenant_id).plus(operation.claim, -1)
        if self._claims[operation.tenant_id] == NO_CLAIM:
            del self._claims[operation.tenant_id]
        for counter, key in (
            (self._bytes_by_tenant, operation.tenant_id),
            (self._num_by_target, operation.target_id),
            (self._num_by_tenant, operation.tenant_id),
        ):
            if not counter[key]:
                del counter[key]
        self._free_request(operation)
        request = (operation.target_id, operation.request_id)
        if self._by_request_id.get(request) is operation:
            del self._by_request_id[request]

    def finish(self, operation: Operation, day: int = 0) -> None:
        """Make a committed outcome visible: wake the waits for it.

        `day`: that its tokens were stored for; one without tokens needs none.
        """
        operation.commit()
        self.remove(operation)
        assert operation.outcome is not None
        if operation.outcome.num_tokens:
            assert day, f"{operation.name} has tokens"
            self._tokens_by_month[month_of(day)][operation.tenant_id] += operation.outcome.num_tokens
        for queue in self._waiters.pop(operation.name, ()):
            num_bytes = operation.outcome.ByteSize()
            if num_bytes > UNCOUNTED_BYTES or self._num_result_bytes + num_bytes > RESULT_BYTES_MAX:
                queue.put_nowait(operation.name)
            else:
                queue.put_nowait(operation.outcome)
                self._num_result_bytes += num_bytes
        if operation.kind is Kind.SAMPLE:
            self._finished_samples.note(operation.outcome)

    async def wait(self, names: Iterable[str]) -> AsyncIterator[ops_pb.Operation | str]:
        """Yield each named operation once, when it is finished; fewer if the coordinator stops.

        An operation that is not in flight, or has a large result, is yielded as its name: the store has it.
        """
        queue: _WaitQueue = asyncio.Queue()
        unique = dict.fromkeys(names)
        done = [name for name in unique if name not in self._operations]
        waiting = [name for name in unique if name in self._operations]
        for name in waiting:
            self._waiters.setdefault(name, []).append(queue)
        self._open_queues.add(queue)
        try:
            for name in done:
                yield name
            for _ in waiting if not self._is_closed else ():
                finished = await queue.get()
                if finished is None:
                    return
                yield finished if isinstance(finished, str) else self._taken(finished)
        finally:
            while not queue.empty():
                if isinstance(unread := queue.get_nowait(), ops_pb.Operation):
                    self._taken(unread)
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

    def _part(self) -> float:
        """Return the equal part of the memory for requests of each tenant that has some."""
        return REQUEST_BYTES_MAX / max(1, len(self._request_bytes_by_tenant))

    def _drop_requests(self, num_bytes: int) -> None:
        """Leave requests to the log until these bytes fit: the newest ones of the tenant that holds the most.

        A tenant that holds no more than its part loses none.
        """
        while self._num_request_bytes + num_bytes > REQUEST_BYTES_MAX and self._droppable:
            tenant_id = max(self._droppable, key=lambda each: self._request_bytes_by_tenant[each])
            if self._request_bytes_by_tenant[tenant_id] <= self._part():
                return
            operation = next(reversed(self._droppable[tenant_id].values()))
            operation.drop_payload()
            self._free_request(operation)

    def _hold_request(self, operation: Operation, num_bytes: int) -> None:
        if num_bytes:
            self._request_bytes[operation.name] = self._request_bytes.get(operation.name, 0) + num_bytes
            self._request_bytes_by_tenant[operation.tenant_id] += num_bytes
            self._num_request_bytes += num_bytes

    def _free_request(self, operation: Operation) -> None:
        tenant_id, num_bytes = operation.tenant_id, self._request_bytes.pop(operation.name, 0)
        self._num_request_bytes -= num_bytes
        self._request_bytes_by_tenant[tenant_id] -= num_bytes
        if not self._request_bytes_by_tenant[tenant_id]:
            del self._request_bytes_by_tenant[tenant_id]
        droppable = self._droppable.get(tenant_id, {})
        droppable.pop(operation.name, None)
        if not droppable:
            self._droppable.pop(tenant_id, None)

    def _taken(self, outcome: ops_pb.Operation) -> ops_pb.Operation:
        self._num_result_bytes -= outcome.ByteSize()
        return outcome


class SampleNumbers:
    """The highest number of each sampler's samples; the first one is read from the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: dict[str, int] = {}

    def next(self, sampler_id: str) -> int:
        """Return a number that no sample of this sampler has had."""
        if sampler_id not in self._last:
            self._last[sampler_id] = self._store.operations.last_seq(sampler_id)
        self._last[sampler_id] += 1
        return self._last[sampler_id]

    def note(self, sampler_id: str, seq: int) -> None:
        """Record that a sample has this number."""
        self._last[sampler_id] = max(seq, self._last.get(sampler_id, 0))

    def forget(self, sampler_id: str) -> None:
        """Drop the numbering of a sampler whose session has ended."""
        self._last.pop(sampler_id, None)
