"""The pools of this machine, and which of them is meant: one rule for all commands and for `ServiceClient()`.

The pool in use is the one that was started last, or chosen since by `tinkerpool use`: credentials.json has it. Commands
and clients that name no pool call it. If it does not run and others do, they call the newest of these, and say so.

Invariants: a key is sent to its own pool only; a pool that an argument, an option or the environment names is never
replaced by another one. Does not depend on the client or the pool.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from tinkerpool.credentials import (
    DEFAULT_PORT,
    Credentials,
    credentials_file,
    kept_credentials,
    parse_target,
    read_credentials,
)
from tinkerpool.errors import ConfigurationError
from tinkerpool.serving import READY_FILE, Serving, running_pid

_log = logging.getLogger("tinkerpool")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPool:
    """A pool that the credentials files of this machine know."""

    credentials: Credentials
    """Its newest ones."""
    pid: int | None
    """Its process. None: it does not run, or its data directory is not known."""

    @property
    def data_dir(self) -> Path | None:
        """Its data directory; None: not known."""
        return Path(self.credentials.data_dir) if self.credentials.data_dir else None

    @property
    def serving(self) -> Serving | None:
        """What it serves; None unless it is ready."""
        return Serving.read(self.data_dir / READY_FILE) if self.pid is not None and self.data_dir is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Meant:
    """The pool that is meant where nothing names one."""

    credentials: Credentials | None
    """None: no pool was started on this machine."""
    note: str = ""
    """Says that this is not the pool in use, and why. Empty: it is."""


def known_pools() -> list[KnownPool]:
    """Return the pools of the credentials files, each once: first that of credentials.json, the others newest first."""
    found: dict[str, KnownPool] = {}
    for credentials in kept_credentials():
        key = _place(credentials)
        if key not in found:
            found[key] = _known(credentials)
    return list(found.values())


def ready_pools() -> list[KnownPool]:
    """Return the known pools that can be called, newest first."""
    return [pool for pool in known_pools() if pool.serving is not None]


def meant_pool(*, falls_back: bool) -> Meant:
    """Return the pool that is meant where nothing names one: the rule. Raises ValueError for a malformed file.

    `falls_back`: whether another pool may stand in for a pool in use that does not run.
    """
    in_use = read_credentials()
    if not falls_back or (in_use is not None and (not in_use.data_dir or _known(in_use).pid is not None)):
        return Meant(credentials=in_use)
    for pool in ready_pools():
        return Meant(credentials=pool.credentials, note=_note(in_use, pool.credentials))
    return Meant(credentials=in_use)


def credentials_at(base_url: str) -> Credentials | None:
    """Return the credentials of the pool at an address: of the one that runs, or else the newest.

    Raises ConfigurationError for a malformed URL.
    """
    target = parse_target(base_url)
    found = [credentials for credentials in kept_credentials() if _is_at(credentials, target)]
    return next((each for each in found if _known(each).pid is not None), found[0] if found else None)


def credentials_of(data_dir: Path) -> Credentials | None:
    """Return the newest credentials of the pool on a data directory; None if there are none."""
    wanted = str(data_dir.resolve())
    return next((found for found in kept_credentials() if found.data_dir and _place(found) == wanted), None)


def find_service(base_url: str | None, api_key: str | None) -> Credentials:
    """Return address and key: each from its argument, else the environment, else this machine's credentials files.

    If neither address nor key is given, another pool may stand in for the pool in use; a warning is logged then. A key
    and a certificate from a file are for the pool in that file only. Raises ConfigurationError if there is no key.
    """
    base_url = base_url or os.environ.get("TINKERPOOL_BASE_URL")
    api_key = api_key or os.environ.get("TINKERPOOL_API_KEY")
    if not base_url:
        try:
            meant = meant_pool(falls_back=not api_key)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
        if meant.note:
            _log.warning("%s", meant.note)
        base_url = meant.credentials.url if meant.credentials else f"http://127.0.0.1:{DEFAULT_PORT}"
    known = credentials_at(base_url)
    if known is not None:
        return dataclasses.replace(known, url=base_url, api_key=api_key or known.api_key)
    if not api_key:
        here = ", ".join(pool.credentials.url for pool in ready_pools())
        mend = f"or name a pool of this machine: {here}" if here else "or start a pool here with `tinkerpool up`"
        raise ConfigurationError(
            f"no API key for {base_url}: pass api_key, set TINKERPOOL_API_KEY, {mend}; the key of a pool that was "
            f"started here is in {credentials_file()}"
        )
    return Credentials(url=base_url, api_key=api_key)


def _known(credentials: Credentials) -> KnownPool:
    pid = running_pid(Path(credentials.data_dir)) if credentials.data_dir else None
    return KnownPool(credentials=credentials, pid=pid)


def _place(credentials: Credentials) -> str:
    """Return what tells two pools apart: their data directories, or else their addresses."""
    return str(Path(credentials.data_dir).resolve()) if credentials.data_dir else credentials.url


def _is_at(credentials: Credentials, target: tuple[str, bool]) -> bool:
    try:
        return parse_target(credentials.url) == target
    except ConfigurationError:
        return False


def _note(in_use: Credentials | None, other: Credentials) -> str:
    why = f"the pool in use, on {in_use.data_dir}, does not run" if in_use is not None else "no pool is in use"
    return (
        f"{why}: using the one at {other.url}, on {other.data_dir} (`tinkerpool use {shlex.quote(other.data_dir)}` "
        "chooses it)"
    )
