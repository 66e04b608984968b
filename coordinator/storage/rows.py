"""The rows of the database as frozen dataclasses; `Table`, which reads them; `Leftovers`, which deletes rows.

Fields are named as the columns; `schema` has each table's format. Times named `_at` are seconds of the wall clock,
times named `_service_s` are seconds of service time. Main invariant: a row with all columns of its table is read back
as it was inserted. Does not depend on any table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from coordinator.storage.database import Database
from coordinator.storage.sqlite import Connection, Row

EXAMINED_MAX = 200
"""Rows that one slice of a walk examines, in about a millisecond of the event loop, and deletes at most."""
R = TypeVar("R")
Converters = list[tuple[str, Callable[[Any], Any] | None]]
_known: dict[type[Any], Converters] = {}
SortKey = tuple[float, str]
"""When a row of a list was created, and its key. Lists are sorted by the first, newest first, then by the second."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part of a list begins. Rows that are created or deleted before it do not move it."""

    after: SortKey | None = None
    """It is behind this row, which may have left the list. None: it is the list's beginning."""
    skip: int = 0
    """This many rows further."""


START = Place()


@dataclass(frozen=True, slots=True)
class Listing(Generic[R]):
    """Some consecutive rows of a list whose rows may be large: their keys, and a way to read them in slices."""

    sort_keys: list[SortKey]
    has_more: bool
    """Whether rows follow these."""
    num_total: int
    """Rows of the whole list."""
    read: Callable[[Sequence[str]], list[R]]
    """Returns the rows of some keys, in their order, without those that have left the list meanwhile."""

    @property
    def keys(self) -> list[str]:
        """The keys of the rows, in their order."""
        return [key for _, key in self.sort_keys]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRow:
    """A tenant and its fair-share counter."""

    tenant_id: str
    name: str
    virtual_tokens: float
    created_at: float
    suspended_at: float | None = None
    suspension_reason: str = ""
    deletion_at: float | None = None
    """When it was marked for deletion, which continues until its row is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbationRow:
    """A tenant whose operations killed workers."""

    tenant_id: str
    num_kills: int
    """As of `killed_service_s`."""
    killed_service_s: float
    until_service_s: float
    """The end of its back-off."""
    operation: str
    """The operation of its last kill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainedWorkerRow:
    """A worker that an administrator has drained."""

    worker_id: str
    base_model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerClassRow:
    """A worker with the fingerprint that it reported last."""

    worker_id: str
    base_model: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModelRow:
    """A base model with what tells its weights from others."""

    name: str
    weights_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeyRow:
    """An API key with its tenant's name."""

    key_id: str
    tenant_id: str
    secret_sha256: bytes
    role: str
    created_at: float
    expires_at: float | None
    """The time of day; None: never."""
    revoked_at: float | None
    last_used_at: float | None
    """Up to an hour late; None: never."""
    is_local: bool
    """Whether it is an administrator's for callers on the pool's machine only, and a member's for others."""
    certificate_sha256: str
    """Fingerprint of the client's certificate that it needs; empty: none."""
    successor: str
    """The key that replaced it; empty: none."""
    tenant_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """An act of an administrator, as the audit log has it."""

    audit_id: int
    at: float
    key_id: str
    """The acting key; empty: the pool itself, by the operator's command."""
    tenant: str
    """The name of the acting key's tenant."""
    act: str
    subject: str
    details: str
    """A JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """The usage of a group of finished operations; for what it is not grouped by it has no value."""

    tenant_name: str
    """Empty: of all tenants."""
    kind: str
    """Empty: of all kinds."""
    base_model: str | None
    """None: of all models."""
    adapter_id: str | None
    """None: of all adapters. Empty: of the bare base model; `*`: of several adapters."""
    day: int | None
    """None: of all days. 0: of days that are not kept apart."""
    num_operations: int
    num_tokens: int
    engine_s: float
    file_bytes: int
    """Of states that were read, written or sent."""
    file_s: float
    """Measured seconds of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileUse:
    """What an adapter's operation, install, copy or export took of the state files."""

    adapter_id: str
    base_model: str
    tenant_id: str
    kind: str
    """The kind of the operation; `install`, `copy`, `export` or `import`, which are counted here and nowhere else."""
    num_bytes: int
    seconds: float
    is_operation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """A session; it is live while `ended_at` is None."""

    session_id: str
    tenant_id: str
    request_id: str | None
    user_metadata: str
    """A JSON object."""
    created_at: float
    ended_at: float | None = None
    adapters_gone: int = 0
    """A number below this without a row may have had an adapter, whose row is deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRow:
    """An adapter; `deleted_at` is None until its training state is deleted."""

    adapter_id: str
    tenant_id: str
    session_id: str
    request_id: str | None
    payload: bytes
    """The canonical CreateAdapterRequest, or ImportCheckpointRequest."""
    base_model: str
    rank: int
    alpha: float
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    user_metadata: str
    """A JSON object."""
    created_at: float
    deleted_at: float | None = None
    is_restored: bool = False
    """Whether its log may lack operations that its client has acknowledged: it comes from a backup."""
    fingerprint: str = ""
    """Of the numerics that ran its operations last; empty: none ran."""
    name: str = ""
    """What people call it, not unique; empty: nothing."""
    used_at: float = 0.0
    """When it was created, or its last operation was accepted; up to an hour early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRow:
    """A sampler: of a bare base model, of a checkpoint (`model_path`), or of an unnamed save (neither)."""

    sampler_id: str
    tenant_id: str
    session_id: str
    request_id: str | None = None
    payload: bytes = b""
    """The canonical CreateSamplerRequest; empty for an unnamed save."""
    base_model: str
    model_path: str = ""
    adapter_id: str = ""
    """The adapter of the weights; empty for the bare base model."""
    version: str = ""
    """Names the weights: the operation that saved them; empty for the bare base model."""
    folder: str = ""
    """Folder of an unnamed save; empty until its file is durable, and for other samplers."""
    sha256: str = ""
    created_at: float
    is_inflight: bool = False
    """Whether it samples from the newest such sampler of its adapter."""
    file_bytes: int = 0
    """Of the weights of an unnamed save, also before their file is written; 0 once its session has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """A checkpoint. Its folder is empty while weights for sampling have no durable file."""

    path: str
    tenant_id: str
    adapter_id: str
    kind: str
    folder: str = ""
    size_bytes: int
    sha256: str = ""
    seq: int
    """Sequence number of the save."""
    base_model: str
    rank: int
    fingerprint: str
    user_metadata: str
    """A JSON object."""
    created_at: float
    expires_at: float | None = None
    """As shown to the owner; None: never."""
    expires_service_s: float | None = None
    """When it is deleted, in service time, so that a step of the wall clock deletes nothing."""
    is_public: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRow:
    """A durable snapshot folder that replaces everything of its adapter up to `seq` in a recovery."""

    adapter_id: str
    seq: int
    folder: str
    sha256: str
    window: bytes = b""
    """The gradient window there, of `coordinator.operations.windows`; empty: open and without gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOperation:
    """An operation to append to the log; with an outcome if it was refused."""

    target_id: str
    """An adapter or a sampler."""
    seq: int
    append_id: int
    """Identifies this append, see `Operations.new_append_id`."""
    tenant_id: str
    kind: str
    request_id: str | None
    payload: bytes
    payload_hash: bytes
    chunk_tokens: int
    batch_first_seq: int | None = None
    batch_last_seq: int | None = None
    """The batch that a forward_backward is part of; None: it is unmarked, or another kind of operation."""
    outcome: bytes | None = None
    is_failed: bool = False
    records: tuple[tuple[str, int], ...] = ()
    """The recorded samples (sampler, seq) that it uses."""


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """One sequence of a recorded sample, n tokens."""

    tokens: bytes
    """int32, (n,)."""
    logprobs: bytes
    """float32, (n,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """The record of a finished sample, to commit with its outcome."""

    target_id: str
    """The sampler."""
    seq: int
    tenant_id: str
    session_id: str
    temperature: float
    """Of the log-probabilities, above 0."""
    logprobs_version: int
    """What they mean: a `LogprobsVersion` of the contract."""
    sampler_version: str
    """The weights that it was drawn with; empty: the bare base model."""
    num_prompt_tokens: int
    num_bytes: int
    """Counted as stored bytes of the tenant."""
    sequences: tuple[SequenceRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRow:
    """A recorded sequence as the store has it."""

    tokens: bytes
    logprobs: bytes
    temperature: float
    sampler_version: str
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedOperation:
    """An operation's outcome, to commit. It applies to the operation of this `append_id` only."""

    target_id: str
    seq: int
    append_id: int
    tenant_id: str
    kind: str
    outcome: bytes
    day: int
    """The calendar day, UTC, that its usage counts for, see `day_of`."""
    is_failed: bool = False
    num_tokens: int = 0
    engine_s: float = 0.0
    history: bytes = b""
    """Its entry in the history; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """An entry of the history."""

    tenant_id: str
    target_id: str
    seq: int
    """Of the operation; 0: metrics that the tenant has reported."""
    at_service_s: float
    entry: bytes
    """A serialized v1.HistoryEntry."""
    entry_id: int = 0
    """In the order of their commits; 0: not stored yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRow:
    """A logged operation, without its payload."""

    target_id: str
    seq: int
    append_id: int
    tenant_id: str
    kind: str
    request_id: str | None
    payload_hash: bytes
    num_bytes: int
    """Size of the payload when it was appended."""
    chunk_tokens: int
    batch_first_seq: int | None
    batch_last_seq: int | None
    outcome_bytes: int | None
    """Size of the outcome; None while undecided, 0 once dropped."""
    outcome: bytes | None
    """The serialized v1.Operation; None while undecided and once dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfetchedOperation:
    """A finished operation whose result was not fetched."""

    seq: int
    is_failed: bool
    num_bytes: int
    """Size of the outcome."""


class Table(Generic[R]):
    """Reads one table, or a join, as rows of one type."""

    def __init__(self, database: Database, row_type: type[R], source: str) -> None:
        """`source` follows FROM; it has a column for each field of `row_type`."""
        self._database = database
        self._row_type = row_type
        self._source = source
        self._select = f"SELECT {columns(row_type)} FROM {source}"  # noqa: S608 (our names)

    def _all(self, rest: str, parameters: Sequence[Any] = ()) -> list[R]:
        """Return the rows; `rest` follows FROM: joins, conditions and order."""
        rows = self._database.read(f"{self._select} {rest}", parameters)
        return [typed(self._row_type, row) for row in rows]

    def _one(self, rest: str, parameters: Sequence[Any] = ()) -> R | None:
        """Return the first row, or None."""
        row = self._database.read_one(f"{self._select} {rest}", parameters)
        return typed(self._row_type, row) if row is not None else None

    def _listing(
        self, key: str, rest: str, parameters: Sequence[Any], limit: int, place: Place, *, is_by_key: bool = False
    ) -> Listing[R]:
        """Return at most `limit` rows from a place on; `rest` is the condition of all rows, and begins with WHERE."""
        counted = self._database.read_one(f"SELECT COUNT(*) FROM {self._source} {rest}", parameters)  # noqa: S608
        assert counted is not None
        found = self._sort_keys(key, rest, parameters, limit + 1, place, is_by_key=is_by_key)
        return Listing(found[:limit], len(found) > limit, counted[0], self._reader(key, rest, parameters))

    def _sort_keys(
        self,
        key: str,
        rest: str,
        parameters: Sequence[Any],
        limit: int = -1,
        place: Place = START,
        *,
        is_by_key: bool = False,
    ) -> list[SortKey]:
        """Return at most `limit` rows from a place on, as `_listing`; -1: all. `is_by_key`: for all the time is 0."""
        time, order = ("0.0", key) if is_by_key else ("created_at", f"created_at DESC, {key}")
        values = list(parameters)
        if place.after is not None:
            created_at, after = place.after
            # SQLite begins in an index at the first comparison; for the other alone it would walk from the first row.
            rest += f" AND {time} <= ? AND ({time} < ? OR {key} > ?)"
            values += [created_at, created_at, after]
        found = self._database.read(
            f"SELECT {time} AS time, {key} AS key FROM {self._source} {rest} ORDER BY {order} LIMIT ? OFFSET ?",  # noqa: S608
            (*values, limit, place.skip),
        )
        return [(row["time"], row["key"]) for row in found]

    def _reader(self, key: str, rest: str, parameters: Sequence[Any]) -> Callable[[Sequence[str]], list[R]]:
        """Return how a listing reads the rows of some keys, in their order; `rest` is the condition of its rows."""
        # A cross join is not reordered: with `IN`, SQLite may walk over all the rows of a tenant for each slice.
        wanted = "(SELECT value AS wanted FROM json_each(?))"
        sql = f"SELECT {columns(self._row_type)} FROM {wanted} CROSS JOIN {self._source} {rest} AND {key} = wanted"  # noqa: S608

        def read(keys: Sequence[str]) -> list[R]:
            found = self._database.read(sql, (json.dumps(list(keys)), *parameters))
            rows = {row[key]: typed(self._row_type, row) for row in found}
            return [rows[each] for each in keys if each in rows]

        return read


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What one slice of a walk over a table found."""

    deleted: list[str]
    """The keys of the deleted rows."""
    is_last: bool
    """Whether the next slice begins at the table's first row."""


class Leftovers:
    """Walks over a table again and again, by its key, and deletes the rows that nothing needs.

    A slice examines a bounded number of rows, so it takes about a millisecond whatever the table has. The walk begins
    anew in each epoch.
    """

    def __init__(
        self, database: Database, table: str, key: str, is_needless: str, note: Callable[[Connection, str], Any]
    ) -> None:
        """`is_needless` is the condition of a row to delete; its parameter `:before` is a moment of service time.

        `note` gets each key before its row is deleted, in the same transaction.
        """
        self._database = database
        self._read = (
            f"SELECT {key} AS key, {is_needless} AS is_needless FROM {table} WHERE {key} > :after"  # noqa: S608
            f" ORDER BY {key} LIMIT {EXAMINED_MAX}"
        )
        # Asked again: a row may refer to it since, of a write that was queued before.
        self._is_still_needless = f"SELECT 1 FROM {table} WHERE {key} = :key AND {is_needless}"  # noqa: S608
        self._delete = f"DELETE FROM {table} WHERE {key} = :key"  # noqa: S608
        self._note = note
        self._after = ""

    async def delete_some(self, before: float) -> Slice:
        """Examine the next rows; delete those that nothing has needed since `before`. Raises StorageError."""
        rows = self._database.read(self._read, {"after": self._after, "before": before})
        found = [row["key"] for row in rows if row["is_needless"]]
        deleted = await self._database.write(lambda db: self._delete_all(db, found, before), "collect") if found else []
        is_last = len(rows) < EXAMINED_MAX
        self._after = "" if is_last else rows[-1]["key"]
        return Slice(deleted=deleted, is_last=is_last)

    def _delete_all(self, db: Connection, keys: Sequence[str], before: float) -> list[str]:
        deleted = []
        for key in keys:
            values = {"key": key, "before": before}
            if db.execute(self._is_still_needless, values).fetchone() is not None:
                self._note(db, key)
                db.execute(self._delete, {"key": key})
                deleted.append(key)
        return deleted


def marks(values: Sequence[str]) -> str:
    """Return as many parameters of a statement as there are values."""
    return ", ".join("?" * len(values))


def adapter_reference(text: str) -> tuple[str, list[str | int]]:
    """Return the condition of rows whose `adapter_id` a person may mean by a text, with its parameters.

    The id begins with it. A text with a colon is a session's beginning and the whole rest: `3f2a:train:0` does not mean
    `3f2a...:train:01`, which may be the only one left.
    """
    begin, colon, rest = text.partition(":")
    end = colon + rest
    condition = "substr(adapter_id, 1, ?) = ? AND substr(adapter_id, length(adapter_id) + 1 - ?) = ?"
    return condition, [len(begin), begin, len(end), end]


def columns(row_type: type[Any]) -> str:
    """Return the columns of a row type, as a list in SQL."""
    return ", ".join(field.name for field in fields(row_type))


def typed(row_type: type[R], row: Row) -> R:
    """Return a typed row from an SQL row that has the columns of its type."""
    return row_type(**{name: convert(row[name]) if convert else row[name] for name, convert in _converters(row_type)})


def insert(db: Connection, table: str, row: Any, *, without: Collection[str] = (), **more: Any) -> None:
    """Insert a typed row; `without` has fields that are not columns, `more` columns that are not fields."""
    values = {name: getattr(row, name) for name, _ in _converters(type(row)) if name not in without} | more
    names, marks = ", ".join(values), ", ".join("?" * len(values))
    db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(values.values()))  # noqa: S608 (our names)


def _converters(row_type: type[Any]) -> Converters:
    """Return each field with the conversion from its SQL value, if it needs one: SQLite has no booleans."""
    if row_type not in _known:
        _known[row_type] = [(each.name, bool if each.type in ("bool", bool) else None) for each in fields(row_type)]
    return _known[row_type]
