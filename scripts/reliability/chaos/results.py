"""What the service says that each operation gave: fetched over stubs, again and again, and compared.

A pool drops results an hour after they were first fetched. So the first fetch is made soon and kept in the run's
folder, and who fetches again leaves out what may be gone by then.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from scripts.reliability.chaos.journal import Journal, JsonLines, Line
from scripts.reliability.chaos.pool import ServedPool, Violation
from scripts.reliability.chaos.tenants import operation_digest
from tinkerpool.client.calls import methods
from tinkerpool.names import operation_name
from tinkerpool.v1 import operations_pb2

RETENTION_S = 3600.0
"""How long after its first fetch a result can be fetched again, at least."""
AT_ONCE_MAX = 1000
"""Operations in one stream, and calls under way at a time."""
SHOWN_MAX = 3
"""Differences that a report names."""
FETCH_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """A result as it was when it was first fetched."""

    name: str
    sha256: str
    """Of its bytes on the wire."""
    digest: str
    """`chaos_tenants.operation_digest`."""
    wall: float
    """When, by the clock on the wall."""


class Results:
    """Those of one tenant."""

    def __init__(self, pool: ServedPool, key: str, tenant: str, journal: Journal) -> None:
        self.journal = journal
        self._key = key
        self._file = JsonLines(pool.folder / "results" / f"{tenant}.jsonl")
        self._first = {fields["name"]: First(**fields) for fields in self._file.found}

    @property
    def digests(self) -> dict[str, str]:
        """Of everything that has been fetched, by the operation's name."""
        return {name: first.digest for name, first in self._first.items()}

    def fetch_new(self, pool: ServedPool) -> None:
        """Fetch what the journal has and we have not. All has succeeded, with what the client saw."""
        seen: dict[str, str] = {}
        for line, start in _with_start(self.journal.lines):
            names = [operation_name(self.journal.adapter_id, seq) for seq in range(start, line.next_seq)]
            names += [name for name, _ in line.results if name not in names]
            if any(name not in self._first for name in names):
                seen |= dict.fromkeys(names, "") | dict(line.results)
        new: list[First] = []
        for name, response in fetch_each(pool, self._key, list(seen)).items():
            operation = operations_pb2.GetOperationResponse.FromString(response).operation
            if operation.state != operations_pb2.OPERATION_STATE_SUCCEEDED:
                raise Violation(f"{name} has not succeeded: {operation}")
            digest, sha256 = operation_digest(operation), hashlib.sha256(response).hexdigest()
            if seen[name] and seen[name] != digest:
                raise Violation(f"{name} gave {seen[name]} to its client, and {digest} to who asks again")
            new.append(First(name=name, sha256=sha256, digest=digest, wall=time.time()))
        self._file.add(*map(asdict, new))
        self._first |= {first.name: first for first in new}

    def fetch_again(self, pool: ServedPool, *, is_streamed: bool) -> int:
        """Fetch everything once more, with the same bytes; how many were old enough to be dropped."""
        latest = time.time() - RETENTION_S
        kept = [name for name, first in self._first.items() if first.wall > latest]
        fetched = (fetch_streamed if is_streamed else fetch_each)(pool, self._key, kept)
        check_equal(
            {name: self._first[name].sha256 for name in kept},
            {name: hashlib.sha256(response).hexdigest() for name, response in fetched.items()},
            "fetched again, other bytes than before",
        )
        return len(self._first) - len(kept)

    def by_place(self) -> dict[str, str]:
        """Digests by place instead of by name: the same for every run of the same steps."""
        digests, places = self.digests, {}
        for line, start in _with_start(self.journal.lines):
            for seq in range(start, line.next_seq):
                places[f"seq {seq}"] = digests[operation_name(self.journal.adapter_id, seq)]
            for index, (name, seen) in enumerate(line.results):
                places[f"step {line.step}, result {index}"] = seen or digests[name]
        return places


def fetch_each(pool: ServedPool, key: str, names: Sequence[str]) -> dict[str, bytes]:
    """The bytes that GetOperation answers with, by name. Raises Violation."""
    call: Any = pool.channel().unary_unary(
        methods.GET_OPERATION.path,
        request_serializer=operations_pb2.GetOperationRequest.SerializeToString,
        response_deserializer=None,
    )
    fetched: dict[str, bytes] = {}
    for some in _slices(names):
        calls = {
            name: call.future(
                operations_pb2.GetOperationRequest(name=name), metadata=pool.metadata(key), timeout=FETCH_TIMEOUT_S
            )
            for name in some
        }
        for name, future in calls.items():
            try:
                fetched[name] = future.result()
            except grpc.RpcError as error:
                raise Violation(f"{name} cannot be fetched: {error}") from None
    return fetched


def fetch_streamed(pool: ServedPool, key: str, names: Sequence[str]) -> dict[str, bytes]:
    """The bytes that WaitOperations answers with, by name; its field is GetOperation's. Raises Violation."""
    call: Any = pool.channel().unary_stream(
        methods.WAIT_OPERATIONS.path,
        request_serializer=operations_pb2.WaitOperationsRequest.SerializeToString,
        response_deserializer=None,
    )
    fetched: dict[str, bytes] = {}
    for some in _slices(names):
        request = operations_pb2.WaitOperationsRequest(names=some)
        try:
            for response in call(request, metadata=pool.metadata(key), timeout=FETCH_TIMEOUT_S):
                fetched[operations_pb2.WaitOperationsResponse.FromString(response).operation.name] = response
        except grpc.RpcError as error:
            raise Violation(f"WaitOperations did not give all of {len(some)} operations: {error}") from None
    return fetched


def check_equal(expected: Mapping[str, str], found: Mapping[str, str], what: str) -> None:
    """Raises Violation with what differs."""
    wrong = [name for name in expected if found.get(name) != expected[name]]
    wrong += [name for name in found if name not in expected]
    if wrong:
        shown = "; ".join(
            f"{name}: {found.get(name, 'nothing')[:16]}, expected {expected.get(name, 'nothing')[:16]}"
            for name in wrong[:SHOWN_MAX]
        )
        raise Violation(f"{what} ({len(wrong)} of {len(expected)}): {shown}")


def _with_start(lines: Sequence[Line]) -> Iterator[tuple[Line, int]]:
    """Each step with its first place."""
    start = 1
    for line in list(lines):
        yield line, start
        start = line.next_seq


def _slices(names: Sequence[str]) -> Iterable[Sequence[str]]:
    return (names[start : start + AT_ONCE_MAX] for start in range(0, len(names), AT_ONCE_MAX))
