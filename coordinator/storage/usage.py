"""The metered usage of all tenants: totals by kind of operation, tokens by month, and sums by day, model and adapter.

All SQL of usage. Does not depend on what an operation costs. Main invariants: the sums of a tenant's days are its
totals, because one transaction writes both, and older sums are merged and never dropped; a tenant without a row, which
was deleted, gets none.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence

from coordinator.storage.database import Database
from coordinator.storage.rows import FileUse, UsageRow, typed
from coordinator.storage.sqlite import Connection

DAYS_KEPT = 400
"""Newest days with usage that are kept apart; sums of earlier ones become sums of day 0, without adapters."""
ADAPTER_ROWS_MAX = 10_000
"""Sums of a tenant that name an adapter; beyond it those of its oldest days lose their adapters."""
MERGED_MAX = 500
"""Sums that one transaction merges, in milliseconds: the writes of cycles wait for it."""
SEVERAL = "*"
"""The adapter of a sum of several adapters."""
IS_TENANT = "EXISTS (SELECT 1 FROM tenants WHERE tenant_id = ?)"
"""Condition for rows that are written later than what they count: a deleted tenant's would fail the whole commit."""

_SUMS = ("num_operations", "num_tokens", "engine_s", "file_bytes", "file_s")
_GROUPS = {
    "tenant": ("tenant_name", "name", "''"),
    "kind": ("kind", "kind", "''"),
    "model": ("base_model", "base_model", "NULL"),
    "adapter": ("adapter_id", "adapter_id", "NULL"),
    "day": ("day", "day", "NULL"),
}
"""Group to its field of `UsageRow`, its column, and the value of rows that are summed over it."""
_ADD = f"ON CONFLICT DO UPDATE SET {', '.join(f'{name} = {name} + excluded.{name}' for name in _SUMS)}"

_ADD_TO_DAY = f"""INSERT INTO usage_days SELECT tenant_id, :day,
    COALESCE((SELECT base_model FROM adapters WHERE adapter_id = :target),
        (SELECT base_model FROM samplers WHERE sampler_id = :target), ''),
    COALESCE((SELECT adapter_id FROM adapters WHERE adapter_id = :target),
        (SELECT adapter_id FROM samplers WHERE sampler_id = :target), ''),
    :kind, 1, :num_tokens, :engine_s, 0, 0 FROM tenants WHERE tenant_id = :tenant {_ADD}"""  # noqa: S608 (our names)


class Usage:
    """The usage of all tenants."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._numbers = itertools.count()

    def of(self, tenant_id: str | None) -> list[UsageRow]:
        """Return a tenant's usage by kind of operation, since the beginning; None: the usage of every tenant."""
        condition, values = ("TRUE", ()) if tenant_id is None else ("tenant_id = ?", (tenant_id,))
        return list(self._sums("usage", ("tenant", "kind"), condition, values))

    def by(self, groups: Sequence[str], tenant_id: str, since: int) -> Iterator[UsageRow]:
        """Return a tenant's usage from a day on, see `day_of`; 0: since the beginning. Rows are made as they are taken.

        `groups`: of `tenant`, `model`, `adapter`, `kind` and `day`. A row has no value for the others.
        """
        return self._sums("usage_days", groups, "tenant_id = ? AND day >= ?", (tenant_id, since))

    def first_day(self) -> int:
        """Return the first day that is kept apart, or was counted; 0: all of them, since the beginning."""
        return self._database.meta("usage_day")

    def of_month(self, month: int) -> dict[str, int]:
        """Return the tokens of each tenant in a calendar month, see `month_of`."""
        rows = self._database.read("SELECT tenant_id, num_tokens FROM usage_months WHERE month = ?", (month,))
        return {row["tenant_id"]: row["num_tokens"] for row in rows}

    def note(self, use: FileUse) -> None:
        """Add a use of files. Becomes durable with the next write; a crash before that loses it."""
        day = self._database.day()
        self._database.ride(f"use {next(self._numbers)}", lambda db: add_file_use(db, use, day))

    async def merge(self, days_kept: int, adapter_rows_max: int) -> None:
        """Merge the sums of all but the newest days, and those of each tenant's oldest days beyond `adapter_rows_max`.

        Days are counted, not compared with the clock: one that runs ahead for a moment makes no day old.
        """
        days = self._database.read("SELECT day FROM used_days ORDER BY day DESC LIMIT 2 OFFSET ?", (days_kept - 1,))
        if len(days) > 1:
            await self._merge_days(before=days[0]["day"])
        rows = self._database.read("SELECT tenant_id FROM tenants WHERE usage_adapter_rows > ?", (adapter_rows_max,))
        for row in rows:
            while (num_left := self._num_adapter_rows(row["tenant_id"]) - adapter_rows_max) > 0:
                await self._merge(row["tenant_id"], "adapter_id NOT IN ('', ?)", SEVERAL, min(num_left, MERGED_MAX))

    async def _merge_days(self, before: int) -> None:
        """Merge the sums of all days before this one. After a crash it begins again."""
        await self._database.execute("UPDATE meta SET value = MAX(value, ?) WHERE key = 'usage_day'", (before,))
        for row in self._database.read("SELECT tenant_id FROM tenants"):
            is_old = "day > 0 AND day < ?"
            while await self._merge(row["tenant_id"], is_old, before, MERGED_MAX, keeps_days=False) == MERGED_MAX:
                pass
        await self._database.execute("DELETE FROM used_days WHERE day < ?", (before,))

    def _num_adapter_rows(self, tenant_id: str) -> int:
        row = self._database.read_one("SELECT usage_adapter_rows FROM tenants WHERE tenant_id = ?", (tenant_id,))
        return int(row["usage_adapter_rows"]) if row is not None else 0

    def _merge(
        self, tenant_id: str, condition: str, value: object, num_max: int, *, keeps_days: bool = True
    ) -> asyncio.Future[int]:
        """Merge the adapters of some of a tenant's sums, oldest days first, and without `keeps_days` their days.

        The future has the number of these sums.
        """

        def write(db: Connection) -> int:
            names = ("day", "base_model", "adapter_id", "kind", *_SUMS)
            merged = db.execute(
                f"SELECT {', '.join(names)} FROM usage_days WHERE tenant_id = ? AND {condition}"  # noqa: S608
                " ORDER BY day, base_model, adapter_id, kind LIMIT ?",
                (tenant_id, value, num_max),
            ).fetchall()
            for day, base_model, adapter_id, kind, *sums in merged:
                db.execute(
                    "DELETE FROM usage_days WHERE (tenant_id, day, base_model, adapter_id, kind) = (?, ?, ?, ?, ?)",
                    (tenant_id, day, base_model, adapter_id, kind),
                )
                key = (tenant_id, day if keeps_days else 0, base_model, SEVERAL, kind)
                db.execute(f"INSERT INTO usage_days VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) {_ADD}", (*key, *sums))  # noqa: S608
            return len(merged)

        return self._database.write(write)

    def _sums(
        self, table: str, groups: Sequence[str], condition: str, values: tuple[object, ...]
    ) -> Iterator[UsageRow]:
        """Return the rows of a table that meet a condition, summed by groups, and sorted by them."""
        shown = [
            f"{column if group in groups else absent} AS {name}" for group, (name, column, absent) in _GROUPS.items()
        ]
        columns = ", ".join([*shown, *(f"SUM({name}) AS {name}" for name in _SUMS)])
        by = ", ".join(_GROUPS[group][1] for group in groups)
        rows = self._database.read(
            f"SELECT {columns} FROM {table} JOIN tenants USING (tenant_id) WHERE {condition}"  # noqa: S608 (our names)
            f" GROUP BY {by} ORDER BY {by}",
            values,
        )
        return (typed(UsageRow, row) for row in rows)


def add_usage(
    db: Connection, tenant_id: str, target_id: str, kind: str, day: int, *, num_tokens: int, engine_s: float
) -> None:
    """Add a finished operation to its tenant's usage, totals and day. `target_id`: its adapter or sampler."""
    db.execute(
        "INSERT INTO usage (tenant_id, kind, num_operations, num_tokens, engine_s)"
        f" SELECT ?, ?, 1, ?, ? WHERE {IS_TENANT} {_ADD}",
        (tenant_id, kind, num_tokens, engine_s, tenant_id),
    )
    values = {"tenant": tenant_id, "target": target_id, "kind": kind, "day": day}
    db.execute(_ADD_TO_DAY, values | {"num_tokens": num_tokens, "engine_s": engine_s})


def add_month(db: Connection, tenant_id: str, month: int, num_tokens: int) -> None:
    """Add the tokens of a finished operation to its tenant's month."""
    db.execute(
        f"INSERT INTO usage_months SELECT ?, ?, ? WHERE {IS_TENANT} ON CONFLICT (tenant_id, month) DO UPDATE SET"
        " num_tokens = num_tokens + excluded.num_tokens",
        (tenant_id, month, num_tokens, tenant_id),
    )


def add_file_use(db: Connection, use: FileUse, day: int) -> None:
    """Add a use of files to its tenant's usage, totals and day; an operation is counted by its outcome."""
    sums = (0 if use.is_operation else 1, 0, 0, use.num_bytes, use.seconds)
    for table, key in (
        ("usage", (use.tenant_id, use.kind)),
        ("usage_days", (use.tenant_id, day, use.base_model, use.adapter_id, use.kind)),
    ):
        values = (*key, *sums)
        marks = ", ".join("?" * len(values))
        sql = f"INSERT INTO {table} SELECT {marks} WHERE {IS_TENANT} {_ADD}"
        db.execute(sql, (*values, use.tenant_id))
