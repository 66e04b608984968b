"""The part of `sqlite3.Connection` that the store uses, over apsw, whose file systems a test can write in Python.

Does not depend on a file system. Errors are those of `sqlite3`, with their `sqlite_errorcode`.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import apsw

_CHANGES = ("INSERT", "UPDATE", "DELETE", "REPLACE")


class Row(tuple[Any, ...]):
    """A row with access by position and by name, as `sqlite3.Row`."""

    names: dict[str, int]

    def __getitem__(self, key: Any) -> Any:
        return tuple.__getitem__(self, self.names[key] if isinstance(key, str) else key)

    def keys(self) -> list[str]:
        """Return the names of the columns."""
        return list(self.names)


class Cursor:
    """The rows of one statement that has ended."""

    def __init__(self, rows: list[Row], rowcount: int) -> None:
        self._rows = rows
        self._next = 0
        self.rowcount = rowcount

    def __iter__(self) -> Iterator[Row]:
        return iter(self.fetchall())

    def fetchone(self) -> Row | None:
        """Return the next row, None at the end."""
        if self._next == len(self._rows):
            return None
        self._next += 1
        return self._rows[self._next - 1]

    def fetchall(self) -> list[Row]:
        """Return the rows that were not fetched."""
        rows, self._next = self._rows[self._next :], len(self._rows)
        return rows


class ApswConnection:
    """A connection in autocommit mode (`isolation_level=None`)."""

    def __init__(self, path: Path, *, vfs: str | None = None, is_read_only: bool = False) -> None:
        """Open the database, or create it. Raises sqlite3.OperationalError.

        `is_read_only`: change no file, as `coordinator.storage.sqlite.open_read_only`.
        """
        has_log = path.with_name(f"{path.name}-wal").exists()
        name = f"file:{path}?{'mode=ro' if has_log else 'immutable=1'}" if is_read_only else str(path)
        reading = apsw.SQLITE_OPEN_URI | apsw.SQLITE_OPEN_READONLY
        writing = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        try:
            self._db = apsw.Connection(name, flags=reading if is_read_only else writing, vfs=vfs)
        except apsw.Error as error:
            raise sqlite_error(error) from error
        self._row_types: dict[tuple[str, ...], type[Row]] = {}

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        return self._db.in_transaction

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        """Run one statement to its end. Raises sqlite3.Error."""
        try:
            cursor = self._db.execute(sql, parameters)
            try:
                row_type = self._row_type(tuple(column[0] for column in cursor.description))
                rows = [row_type(row) for row in cursor.fetchall()]
            except apsw.ExecutionCompleteError:
                rows = []
        except apsw.Error as error:
            raise sqlite_error(error) from error
        is_change = sql.lstrip()[:7].upper().startswith(_CHANGES)
        return Cursor(rows, self._db.changes() if is_change else -1)

    def close(self) -> None:
        """Close it, also during a statement. As with `sqlite3`, errors are ignored."""
        with contextlib.suppress(apsw.Error):
            self._db.close(force=True)

    def _row_type(self, columns: tuple[str, ...]) -> type[Row]:
        if columns not in self._row_types:
            names = {column: index for index, column in enumerate(columns)}
            self._row_types[columns] = type("Row", (Row,), {"names": names})
        return self._row_types[columns]


def sqlite_error(error: apsw.Error) -> sqlite3.Error:
    """Return the error that `sqlite3` would have raised."""
    kind = sqlite3.IntegrityError if isinstance(error, apsw.ConstraintError) else sqlite3.OperationalError
    other = kind(str(error))
    other.sqlite_errorcode = getattr(error, "extendedresult", 0) or getattr(error, "result", sqlite3.SQLITE_ERROR)
    return other


def locked_error() -> sqlite3.Error:
    """Return the error of a statement that needs a lock which another process holds."""
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return error
