"""The operations' results at the service: fetched several times through stubs, and compared.

A pool drops a result an hour after it was first fetched. Later fetches leave out results that may be dropped by then.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from scripts.reliability.chaos.pool import ServedPool, Violation
from scripts.reliability.chaos.tenants import Journal, Line, operation_digest
from tinkerpool.client.calls import methods
from tinkerpool.names import operation_name
from tinkerpool.v1 import operations_pb2

RETENTION_S = 3600.0
"""A result can be fetched again for at least this long after its first fetch."""
BATCH_MAX = 1000
"""Operations in one stream."""
CALLS_MAX = 200
"""Calls at a time. A pool takes 256 on a connection, and refuses those of a client that does not know it yet."""
SHOWN_MAX = 3
"""Differences that a message names."""
FETCH_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFetch:
    """A result at its first fetch."""

    sha256: str
    """Of its bytes on the wire."""
    digest: str
    """Of `operation_digest`."""
    fetched_s: float
    """On the monotonic clock."""


class Results:
    """The results of one tenant."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.journal = Journal()
        self._first: dict[str, FirstFetch] = {}

    @property
    def digests(self) -> dict[str, str]:
        """Digests of all fetched results, by the operation's name."""
        return {name: first.digest for name, first in self._first.items()}

    def fetch_new(self, pool: ServedPool) -> None:
        """Fetch the journal's operations that are not fetched yet.

        Raises Violation unless each has succeeded, with the result that the client got.
        """
        seen: dict[str, str] = {}
        for line, start in _with_start(self.journal.lines):
            names = [operation_name(self.journal.adapter_id, seq) for seq in range(start, line.next_seq)]
            names += [name for name, _ in line.results if name not in names]
            if any(name not in self._first for name in names):
                seen |= dict.fromkeys(names, "") | dict(line.results)
        for name, response in fetch_each(pool, self.key, list(seen)).items():
            operation = operations_pb2.GetOperationResponse.FromString(response).operation
            if operation.state != operations_pb2.OPERATION_STATE_SUCCEEDED:
                raise Violation(f"{name} has not succeeded: {operation}")
            digest, sha256 = operation_digest(operation), hashlib.sha256(response).hexdigest()
            if seen[name] and seen[name] != digest:
                raise Violation(f"{name} returned {seen[name]} to its client, but {digest} in a later fetch")
            self._first[name] = FirstFetch(sha256=sha256, digest=digest, fetched_s=time.monotonic())

    def fetch_again(self, pool: ServedPool, *, is_streamed: bool) -> int:
        """Fetch all results again; return how many may have been dropped. Raises Violation if bytes differ."""
        latest = time.monotonic() - RETENTION_S
        kept = [name for name, first in self._first.items() if first.fetched_s > latest]
        fetched = (fetch_streamed if is_streamed else fetch_each)(pool, self.key, kept)
        check_equal(
            {name: self._first[name].sha256 for name in kept},
            {name: hashlib.sha256(response).hexdigest() for name, response in fetched.items()},
            "bytes that differ from the first fetch",
        )
        return len(self._first) - len(kept)

    def by_position(self) -> dict[str, str]:
        """Return digests by sequence number and step instead of by name: equal in every run of the same steps."""
        digests, positions = self.digests, {}
        for line, start in _with_start(self.journal.lines):
            for seq in range(start, line.next_seq):
                positions[f"seq {seq}"] = digests[operation_name(self.journal.adapter_id, seq)]
            for index, (name, seen) in enumerate(line.results):
                positions[f"step {line.step}, result {index}"] = seen or digests[name]
        return positions


def fetch_each(pool: ServedPool, key: str, names: Sequence[str]) -> dict[str, bytes]:
    """Return the bytes of GetOperation's responses, by name. Raises Violation."""
    call: Any = pool.channel().unary_unary(
        methods.GET_OPERATION.path,
        request_serializer=operations_pb2.GetOperationRequest.SerializeToString,
        response_deserializer=None,
    )
    fetched: dict[str, bytes] = {}
    for part in _slices(names, CALLS_MAX):
        calls = {
            name: call.future(
                operations_pb2.GetOperationRequest(name=name), metadata=pool.metadata(key), timeout=FETCH_TIMEOUT_S
            )
            for name in part
        }
        for name, future in calls.items():
            try:
                fetched[name] = future.result()
            except grpc.RpcError as error:
                raise Violation(f"{name} cannot be fetched: {error}") from None
    return fetched


def fetch_streamed(pool: ServedPool, key: str, names: Sequence[str]) -> dict[str, bytes]:
    """Return the bytes of WaitOperations' responses, by name; they equal GetOperation's. Raises Violation."""
    call: Any = pool.channel().unary_stream(
        methods.WAIT_OPERATIONS.path,
        request_serializer=operations_pb2.WaitOperationsRequest.SerializeToString,
        response_deserializer=None,
    )
    fetched: dict[str, bytes] = {}
    for part in _slices(names, BATCH_MAX):
        request = operations_pb2.WaitOperationsRequest(names=part)
        try:
            for response in call(request, metadata=pool.metadata(key), timeout=FETCH_TIMEOUT_S):
                fetched[operations_pb2.WaitOperationsResponse.FromString(response).operation.name] = response
        except grpc.RpcError as error:
            raise Violation(f"WaitOperations did not return all of {len(part)} operations: {error}") from None
    return fetched


def check_equal(expected: Mapping[str, str], found: Mapping[str, str], what: str) -> None:
    """Raise Violation with the differences, if there are any."""
    wrong = [name for name in expected if found.get(name) != expected[name]]
    wrong += [name for name in found if name not in expected]
    if wrong:
        shown = "; ".join(
            f"{name}: {found.get(name, 'nothing')[:16]}, expected {expected.get(name, 'nothing')[:16]}"
            for name in wrong[:SHOWN_MAX]
        )
        raise Violation(f"{what} ({len(wrong)} of {len(expected)}): {shown}")


def _with_start(lines: Sequence[Line]) -> Iterator[tuple[Line, int]]:
    """Yield each step with its first sequence number."""
    start = 1
    for line in list(lines):
        yield line, start
        start = line.next_seq


def _slices(names: Sequence[str], size: int) -> Iterable[Sequence[str]]:
    return (names[start : start + size] for start in range(0, len(names), size))
