"""Which pool a command means: one rule for all commands. `docs/operations.md` has it in words.

The first of these that is given names the pool:

1. `--data-dir DIR`: the pool with this data directory, at the address in its ready file.
2. `--url URL`, then `TINKERPOOL_BASE_URL`: the pool at this address.
3. The pool in use on this machine, with any `--data-dir`; see `tinkerpool.pools`. If it does not run, a command that
   takes nothing away may call another one that does, and says so.
4. The default data directory.

Commands that call a pool need its address and a key, commands on files its data directory. What is not named is looked
up in this machine's credentials files, which hold address, key and data directory of each pool that was started here.
Invariant: a key from these files is sent to its own pool only. Does not depend on how a pool is called.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from tinkerpool.cli import show
from tinkerpool.cli.show import CliError
from tinkerpool.credentials import (
    Certificate,
    ClientCertificate,
    Credentials,
    credentials_file,
    default_data_dir,
    find_client_certificate,
    home,
    start_command,
)
from tinkerpool.errors import ConfigurationError
from tinkerpool.pools import credentials_at, credentials_of, find_service, meant_pool, ready_pools
from tinkerpool.serving import READY_FILE, Serving, is_stopped

DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        help="The pool with this data directory. Default: the pool in use; see `tinkerpool pools`.",
        show_default=False,
        readable=False,
    ),
]
"""Of commands on the files of a pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """An option that names the pool to call. Hidden: `tinkerpool --help` has these options, once for all commands."""

    type: Any
    default: Any
    metavar: str
    help: str

    def parameter(self, name: str) -> inspect.Parameter:
        """Return the option as a parameter of a typer command."""
        # Not readable: `Place.folder` says more of a folder than typer would.
        option = typer.Option(_flag(name), metavar=self.metavar, help=self.help, hidden=True, readable=False)
        annotation: Any = Annotated[self.type, option]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=annotation)


_OPTIONS = {
    "data_dir": _Option(type=Path | None, default=None, metavar="DIR", help="The pool with this data directory."),
    "url": _Option(type=str, default="", metavar="URL", help="The pool at this address: http(s)://HOST:PORT."),
    "api_key": _Option(type=str, default="", metavar="KEY", help="Its API key, if the credentials files lack it."),
    "client_certificate": _Option(
        type=Path | None, default=None, metavar="FILE", help="Certificate (PEM), if the pool requires one."
    ),
    "client_key": _Option(type=Path | None, default=None, metavar="FILE", help="Its private key, if in another file."),
}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


OPTIONS_HELP = {f"{_flag(name)} {option.metavar}": option.help for name, option in _OPTIONS.items()}
"""What `tinkerpool --help` says of the options that name a pool."""
_OPTIONS_LINE = f"Which pool: {', '.join(map(_flag, _OPTIONS))}; see tinkerpool --help."


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a pool is, as far as the options, the environment and the credentials files say."""

    source: str
    """What names the pool, for messages."""
    data_dir: Path | None
    """None: it is not known on this machine."""
    url: str = ""
    """Empty: it is in the ready file of the data directory while the pool runs."""
    in_use: Credentials | None = None
    """Of the pool in use, if nothing else names the pool. Another pool may have its address by now."""

    def folder(self) -> Path:
        """Return the data directory. Raises CliError if it is not known, does not exist or cannot be read."""
        if self.data_dir is None:
            raise CliError(
                f"the data directory of the pool at {self.url} ({self.source}) is not known on this machine: give "
                "--data-dir"
            )
        if not self.data_dir.is_dir():
            raise self.no_pool()
        if not os.access(self.data_dir, os.R_OK | os.X_OK):
            raise CliError(f"{self.data_dir} ({self.source}) is another user's: run the command as that user")
        return self.data_dir

    def no_pool(self) -> CliError:
        """Return the error for a pool of this machine that does not run, the same for every command."""
        at = f" at {self.url}" if self.url else ""
        if self.data_dir is None:
            what, start = f"no pool is running{at}", "tinkerpool up"
        elif self.data_dir.is_dir():
            what, start = f"no pool is running{at} on {self.data_dir}", start_command(self.data_dir)
        else:
            what, start = f"there is no pool on {self.data_dir}", start_command(self.data_dir)
        running = [
            f"--data-dir {shlex.quote(pool.credentials.data_dir)} ({pool.credentials.url})" for pool in ready_pools()
        ]
        if running:
            other = f"name one that runs: {', '.join(running)}; `tinkerpool use DIR` chooses it for all commands"
        else:
            other = "name another one with --data-dir (commands that call a pool also take --url and --api-key)"
        return CliError(f"{what} ({self.source}): start it with `{start}`, or {other}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A pool to call, and the API key for it."""

    place: Place
    url: str
    api_key: str
    certificate: Certificate | None
    """What to trust for a pool with TLS on this machine."""
    client_certificate: ClientCertificate | None
    """What to show to a pool that requires a certificate."""
    is_key_stored: bool
    """Whether the key is from this machine's credentials files."""

    @property
    def key_source(self) -> str:
        """Option, variable or files that the key is from, for messages."""
        return f"the credentials files in {home()}" if self.is_key_stored else "--api-key or TINKERPOOL_API_KEY"


def find_place(data_dir: Path | None, url: str = "", *, falls_back: bool = False) -> Place:
    """Return the place of the pool that a command means, by the rule above. Raises CliError.

    `falls_back`: another pool may stand in for a pool in use that does not run; a line on stderr says so.
    """
    if data_dir is not None and url:
        raise CliError("--data-dir and --url both name a pool: give one of them")
    if data_dir is not None:
        return Place(source="--data-dir", data_dir=data_dir.expanduser().absolute())
    variable = os.environ.get("TINKERPOOL_BASE_URL", "")
    try:
        if url or variable:
            known = credentials_at(url or variable)
            return Place(
                source="--url" if url else "TINKERPOOL_BASE_URL", data_dir=_data_dir_in(known), url=url or variable
            )
        meant = meant_pool(falls_back=falls_back)
    except ValueError as error:  # also ConfigurationError
        raise CliError(str(error)) from None
    if meant.note:
        show.note(f"Note: {meant.note}.")
    if meant.credentials is not None:
        source = (
            "it runs on this machine" if meant.note else f"the pool in use on this machine, by {credentials_file()}"
        )
        in_use = meant.credentials
        return Place(source=source, data_dir=_data_dir_in(in_use), url=in_use.url, in_use=in_use)
    source = "the default data directory; no pool was started on this machine yet"
    return Place(source=source, data_dir=default_data_dir().absolute())


def find_target(
    data_dir: Path | None,
    url: str,
    api_key: str,
    client_certificate: Path | None = None,
    client_key: Path | None = None,
    *,
    falls_back: bool = False,
) -> Target:
    """Return the pool that a command calls. Raises CliError.

    `falls_back`: as of `find_place`, unless a key is given: a key is for one pool.
    """
    given = api_key or os.environ.get("TINKERPOOL_API_KEY", "")
    place = find_place(data_dir, url, falls_back=falls_back and not given)
    is_at_url = bool(place.url) and place.in_use is None
    if place.data_dir is not None and not is_at_url and is_stopped(place.data_dir):
        raise place.no_pool()
    try:
        own = find_client_certificate(client_certificate, client_key)
        found = find_service(place.url, given or None) if is_at_url else place.in_use
    except ConfigurationError as error:
        raise CliError(str(error)) from None
    if found is not None:
        return Target(
            place=place,
            url=found.url,
            api_key=given or found.api_key,
            certificate=found.certificate,
            client_certificate=own,
            is_key_stored=not given,
        )
    folder = place.folder()
    serving = Serving.read(folder / READY_FILE)
    if serving is None:
        raise place.no_pool()
    known = credentials_of(folder)
    found_key = given or (known.api_key if known is not None else "")
    if not found_key:
        raise CliError(
            f"no API key for the pool on {folder} in the credentials files in {home()}: give one with "
            "--api-key, or start the pool with --new-key, which writes one there"
        )
    place = dataclasses.replace(place, url=serving.url)
    return Target(
        place=place,
        url=serving.url,
        api_key=found_key,
        certificate=serving.certificate,
        client_certificate=own,
        is_key_stored=not given,
    )


def calls_pool(run: Callable[..., None]) -> Callable[..., None]:
    """Return a typer command with the options that name a pool; `run` takes the pool as its argument `target`."""
    return _with_options(run, falls_back=True)


def calls_no_other_pool(run: Callable[..., None]) -> Callable[..., None]:
    """Return a command as `calls_pool`, for what takes something away: never from a pool that the user did not mean."""
    return _with_options(run, falls_back=False)


def _with_options(run: Callable[..., None], *, falls_back: bool) -> Callable[..., None]:
    @functools.wraps(run)
    def command(**values: Any) -> None:
        options = {name: values.pop(name) for name in _OPTIONS}
        run(target=find_target(**options, falls_back=falls_back), **values)

    hints = get_type_hints(run, include_extras=True)
    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=parameter.default, annotation=hints[name])
        for name, parameter in inspect.signature(run).parameters.items()
        if name != "target"
    ]
    options = [option.parameter(name) for name, option in _OPTIONS.items()]
    command.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]  # typer reads it
    command.__doc__ = f"{inspect.getdoc(run)}\n\n{_OPTIONS_LINE}"
    return command


def _data_dir_in(credentials: Credentials | None) -> Path | None:
    return Path(credentials.data_dir) if credentials is not None and credentials.data_dir else None
