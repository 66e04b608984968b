"""`pools` and `use`: the pools of this machine that its credentials files know, and which one is in use."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from tinkerpool.cli import show
from tinkerpool.cli.connection import JsonOption
from tinkerpool.cli.show import CliError
from tinkerpool.credentials import Credentials, home, read_credentials, start_command, write_credentials
from tinkerpool.errors import ConfigurationError
from tinkerpool.pools import KnownPool, credentials_at, credentials_of, known_pools


def pools(json: JsonOption = False) -> None:
    """List the pools of this machine: which one is in use, and which ones run.

    Commands and programs that name no pool mean the one in use: that was started last, or chosen with `tinkerpool use`.
    """
    found, in_use = known_pools(), _in_use()
    if json:
        print(json_text.dumps({"pools": [_fields(pool, in_use) for pool in found]}, indent=2))
        return
    if not found:
        show.say(f"No pool was started on this machine yet, by {home()}: `tinkerpool up` starts one.")
        return
    show.table(
        "Pools of this machine",
        ("in use", "state", "url", "data directory", "base models"),
        (
            (
                "*" if pool.credentials == in_use else "",
                _state(pool),
                pool.credentials.url,
                pool.credentials.data_dir,
                ", ".join(pool.serving.models) if pool.serving is not None else "",
            )
            for pool in found
        ),
        whole=("url", "data directory"),
        spare=("base models",),
    )


def use(
    pool: Annotated[str, typer.Argument(metavar="DIR_OR_URL", help="Its data directory or its address.")],
) -> None:
    """Choose the pool that commands and programs mean if they name none.

    A pool that is started, or chosen, later takes its place.
    """
    found = _find(pool)
    path = write_credentials(found)
    show.say(f"In use from now on: {found.url}{f', on {found.data_dir}' if found.data_dir else ''}, by {path}.")
    if any(known.credentials == found and known.pid is None for known in known_pools()) and found.data_dir:
        show.note(f"It does not run: start it with `{start_command(Path(found.data_dir))}`.")


def _in_use() -> Credentials | None:
    try:
        return read_credentials()
    except ValueError as error:
        raise CliError(str(error)) from None


def _find(text: str) -> Credentials:
    """Return the credentials of a pool. Raises CliError for one that is not known."""
    _in_use()  # a malformed file would be replaced
    if (found := credentials_of(Path(text).expanduser())) is not None:
        return found
    try:
        found = credentials_at(text)
    except ConfigurationError:
        found = None
    if found is None:
        known = ", ".join(pool.credentials.data_dir or pool.credentials.url for pool in known_pools())
        hint = f"give one of these: {known}" if known else "start one with `tinkerpool up`"
        raise CliError(f"the credentials files in {home()} know no pool {text}: {hint}")
    return found


def _state(pool: KnownPool) -> Text:
    if pool.data_dir is None:
        return Text("not known")
    if pool.pid is None:
        return Text("stopped") if pool.data_dir.is_dir() else Text("deleted", "red")
    return Text("running", "green") if pool.serving is not None else Text("starting", "yellow")


def _fields(pool: KnownPool, in_use: Credentials | None) -> dict[str, object]:
    serving = pool.serving
    return {
        "url": pool.credentials.url,
        "http_url": serving.http_url if serving is not None else "",
        "data_dir": pool.credentials.data_dir,
        "state": str(_state(pool)),
        "pid": pool.pid,
        "models": list(serving.models) if serving is not None else [],
        "is_in_use": pool.credentials == in_use,
    }
