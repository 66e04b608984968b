"""The base of the tables' classes: SQL results as typed rows. Does not depend on any table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Generic, TypeVar

from coordinator.storage.database import Connection, Database, Row
from coordinator.storage.rows import Page

R = TypeVar("R")
Converters = list[tuple[str, Callable[[Any], Any] | None]]
_known: dict[type[Any], Converters] = {}


class Table(Generic[R]):
    """Reads one table, or a join, as rows of one type."""

    def __init__(self, database: Database, row_type: type[R], source: str) -> None:
        """`source` follows FROM; it has a column for each field of `row_type`."""
        self._database = database
        self._row_type = row_type
        self._select = f"SELECT {columns(row_type)} FROM {source}"  # noqa: S608 (our names)

    def _all(self, rest: str, parameters: Sequence[Any] = ()) -> list[R]:
        """Return the rows; `rest` follows FROM: joins, conditions and order."""
        rows = self._database.read(f"{self._select} {rest}", parameters)
        return [typed(self._row_type, row) for row in rows]

    def _one(self, rest: str, parameters: Sequence[Any] = ()) -> R | None:
        """Return the first row, or None."""
        row = self._database.read_one(f"{self._select} {rest}", parameters)
        return typed(self._row_type, row) if row is not None else None

    def _page(self, rest: str, parameters: Sequence[Any], limit: int, offset: int) -> Page[R]:
        """Return at most `limit` rows from row `offset` on; `rest` ends in ORDER BY."""
        counted = self._database.read_one(f"SELECT COUNT(*) FROM ({self._select} {rest})", parameters)  # noqa: S608
        assert counted is not None
        rows = self._all(f"{rest} LIMIT ? OFFSET ?", (*parameters, limit + 1, offset))
        return Page(rows[:limit], len(rows) > limit, counted[0])


def columns(row_type: type[Any]) -> str:
    """Return the columns of a row type, as a list in SQL."""
    return ", ".join(field.name for field in fields(row_type))


def typed(row_type: type[R], row: Row) -> R:
    """Return a typed row from an SQL row that has the columns of its type."""
    return row_type(**{name: convert(row[name]) if convert else row[name] for name, convert in _converters(row_type)})


def insert(db: Connection, table: str, row: Any, **more: Any) -> None:
    """Insert a typed row; `more` has columns that are not fields of it."""
    values = {name: getattr(row, name) for name, _ in _converters(type(row))} | more
    names, marks = ", ".join(values), ", ".join("?" * len(values))
    db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(values.values()))  # noqa: S608 (our names)


def _converters(row_type: type[Any]) -> Converters:
    """Return each field with the conversion from its SQL value, if it needs one: SQLite has no booleans."""
    if row_type not in _known:
        _known[row_type] = [(each.name, bool if each.type in ("bool", bool) else None) for each in fields(row_type)]
    return _known[row_type]
