"""Which pool a command means: one rule for all commands. `docs/operations.md` has it in words.

The first of these that is given names the pool:

1. `--data-dir DIR`: the pool with this data directory, at the address in its ready file.
2. `--url URL`, then `TINKERPOOL_BASE_URL`: the pool at this address.
3. The credentials file: the pool that was started last on this machine, with any `--data-dir`.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from tinkerpool.cli.show import CliError
from tinkerpool.credentials import (
    Certificate,
    ClientCertificate,
    Credentials,
    credentials_at,
    credentials_file,
    default_data_dir,
    find_client_certificate,
    find_service,
    home,
    kept_credentials,
    read_credentials,
    start_command,
)
from tinkerpool.errors import ConfigurationError
from tinkerpool.serving import READY_FILE, Serving

_PANEL = "Which pool"
DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        help="The pool with this data directory. Default: the pool that was started last on this machine.",
        show_default=False,
        rich_help_panel=_PANEL,
        readable=False,  # `Place.folder` says more than typer would
    ),
]
UrlOption = Annotated[
    str,
    typer.Option(
        "--url",
        metavar="URL",
        help="The pool at this address, http://HOST:PORT (https:// for TLS). Default: TINKERPOOL_BASE_URL, or else the "
        "pool that was started last on this machine.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
KeyOption = Annotated[
    str,
    typer.Option(
        "--api-key",
        metavar="KEY",
        help="API key. Default: TINKERPOOL_API_KEY, or else the one in this machine's credentials files.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
ClientCertificateOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Certificate of this client (PEM), for a pool that requires one. Default: TINKERPOOL_CLIENT_CERTIFICATE.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
ClientKeyOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Its private key (PEM). Default: TINKERPOOL_CLIENT_KEY, or else in the certificate's file.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
_OPTIONS = {
    "data_dir": (DataDirOption, None),
    "url": (UrlOption, ""),
    "api_key": (KeyOption, ""),
    "client_certificate": (ClientCertificateOption, None),
    "client_key": (ClientKeyOption, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a pool is, as far as the options, the environment and the credentials files say."""

    source: str
    """What names the pool, for messages."""
    data_dir: Path | None
    """None: it is not known on this machine."""
    url: str = ""
    """Empty: it is in the ready file of the data directory while the pool runs."""

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
        return CliError(
            f"{what} ({self.source}): start it with `{start}`, or name another one with --data-dir (commands that call "
            "a pool also take --url and --api-key)"
        )


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


def find_place(data_dir: Path | None, url: str = "") -> Place:
    """Return the place of the pool that a command means, by the rule above. Raises CliError."""
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
        last = read_credentials()
    except ValueError as error:  # also ConfigurationError
        raise CliError(str(error)) from None
    if last is not None:
        source = f"the pool that was started last on this machine, by {credentials_file()}"
        return Place(source=source, data_dir=_data_dir_in(last), url=last.url)
    source = "the default data directory; no pool was started on this machine yet"
    return Place(source=source, data_dir=default_data_dir().absolute())


def find_target(
    data_dir: Path | None,
    url: str,
    api_key: str,
    client_certificate: Path | None = None,
    client_key: Path | None = None,
) -> Target:
    """Return the pool that a command calls. Raises CliError."""
    place = find_place(data_dir, url)
    given = api_key or os.environ.get("TINKERPOOL_API_KEY", "")
    try:
        own = find_client_certificate(client_certificate, client_key)
        found = find_service(place.url, given or None) if place.url else None
    except ConfigurationError as error:
        raise CliError(str(error)) from None
    if found is not None:
        return Target(
            place=place,
            url=found.url,
            api_key=found.api_key,
            certificate=found.certificate,
            client_certificate=own,
            is_key_stored=not given,
        )
    folder = place.folder()
    serving = Serving.read(folder / READY_FILE)
    if serving is None:
        raise place.no_pool()
    found_key = given or _key_of(folder)
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

    @functools.wraps(run)
    def command(**values: Any) -> None:
        options = {name: values.pop(name) for name in _OPTIONS}
        run(target=find_target(**options), **values)

    hints = get_type_hints(run, include_extras=True)
    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=parameter.default, annotation=hints[name])
        for name, parameter in inspect.signature(run).parameters.items()
        if name != "target"
    ]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _OPTIONS.items()
    ]
    command.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]  # typer reads it
    return command


def _data_dir_in(credentials: Credentials | None) -> Path | None:
    return Path(credentials.data_dir) if credentials is not None and credentials.data_dir else None


def _key_of(data_dir: Path) -> str:
    """Return the newest key of the pool on a data directory in the credentials files; empty if there is none."""
    wanted = data_dir.resolve()
    for credentials in kept_credentials():
        if credentials.data_dir and Path(credentials.data_dir).resolve() == wanted:
            return credentials.api_key
    return ""
