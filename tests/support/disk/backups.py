"""Backups for tests: a pool with states of every kind, progress that is not shown, and what a copy has lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from coordinator.storage.copies import checksum, named_states, read_database
from tests.support.toy_pool import ToyPool


def quiet(_step: str, _done: int, _all: int) -> None:
    """Show no progress."""


async def trained(pool: ToyPool) -> str:
    """Return an adapter named `trained` with a checkpoint, a named and an unnamed sampler, and a snapshot."""
    adapter = await pool.adapter(name="trained", user_metadata={"team": "nlp"})
    await pool.wait(*[await pool.submit(adapter, seq) for seq in range(1, 4)])
    await pool.save(adapter, 4, "kept")
    await pool.publish(adapter, 5, "named")
    await pool.publish(adapter, 6)
    await pool.written()
    return adapter


def lost(backup: Path) -> list[str]:
    """Return the states that a backup's database names and that are not in it, or damaged."""
    states = read_database(backup, named_states)
    assert states
    return [
        state.label
        for state in states
        if state.root != "samplers"
        and not ((backup / state.path).is_dir() and checksum(backup / state.path, lambda _: None) == state.sha256)
    ]


def folder_of(data_dir: Path, end: str) -> Path:
    """Return the folder of the state whose path, or adapter, ends so."""
    [state] = [state for state in read_database(data_dir, named_states) or [] if state.owner.endswith(end)]
    return data_dir / state.path


def flip_a_byte(folder: Path) -> None:
    """Damage a state folder."""
    content = bytearray((folder / "state.json").read_bytes())
    content[3] ^= 1
    (folder / "state.json").write_bytes(content)


@contextmanager
def unreadable(folder: Path, error: int = errno.EIO) -> Iterator[None]:
    """Make reads of a file in a state folder fail, by default as those of a bad sector."""
    bad, real = (folder / "state.json").stat().st_ino, os.read

    def read(file: int, num_bytes: int) -> bytes:
        if os.fstat(file).st_ino == bad:
            raise OSError(error, os.strerror(error))
        return real(file, num_bytes)

    with mock.patch.object(os, "read", read):
        yield
