"""The credentials files of this machine: addresses and API keys of its pools; and the certificates of clients.

A pool that starts writes its address, an API key, its data directory and where its certificate is to
`~/.tinkerpool/credentials.json`, readable by its owner only, and clients on this machine need no arguments; the file of
another pool is kept next to it. `TINKERPOOL_HOME` names another folder. Which pool is meant is decided in
`tinkerpool.pools`. Does not depend on the client or the pool; both use it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tinkerpool.errors import ConfigurationError

DEFAULT_PORT = 7600
FILE_NAME = "credentials.json"
_KEPT_GLOB = "credentials.*.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The certificate of a pool with TLS, for clients on its machine to trust.

    The file and not its content: a renewed certificate has the same path.
    """

    path: str
    """Certificate chain, in PEM."""
    server_name: str = ""
    """A name that the certificate is for, if it is not for the host of the pool's URL."""

    def read(self) -> bytes:
        """Return the file's content. Raises ConfigurationError."""
        try:
            return Path(self.path).read_bytes()
        except OSError as error:
            raise ConfigurationError(
                f"cannot read {self.path}, the certificate of the pool on this machine: {error.strerror}; pass "
                "root_certificates, or start the pool again, which writes where its certificate is"
            ) from None

    @classmethod
    def of(cls, fields: Mapping[str, Any] | None) -> Certificate | None:
        """Return the certificate of a JSON object; None if there is none. Raises KeyError for another form."""
        return cls(path=str(fields["path"]), server_name=str(fields.get("server_name", ""))) if fields else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCertificate:
    """The certificate of a client, for pools that require one, and its private key.

    The files and not their content: a renewed certificate has the same paths.
    """

    path: str
    """Certificate chain, in PEM."""
    key_path: str
    """Private key without a password, in PEM; may be the same file."""

    def read(self) -> tuple[bytes, bytes]:
        """Return chain and key, as the files have them. Raises ConfigurationError unless they belong together."""
        try:
            # Checked here: gRPC says of wrong files only that it cannot make a handshake.
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(self.path, self.key_path, password="")
            return Path(self.path).read_bytes(), Path(self.key_path).read_bytes()
        except OSError as error:  # also ssl.SSLError
            raise ConfigurationError(
                f"cannot use {self.path} and {self.key_path}: expected the certificate of this client and its private "
                f"key, in PEM and without a password ({error.strerror or error})"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Address and API key of a pool."""

    url: str
    """`http://<host>:<port>`, or `https://` for TLS."""
    api_key: str
    """An API key of that pool."""
    note: str = ""
    """What the key may do, for people who read the file."""
    data_dir: str = ""
    """Data directory of the pool on this machine. Empty: not known."""
    certificate: Certificate | None = None
    """What to trust for `https://`. None: the authorities of this machine."""


def home() -> Path:
    """Return the folder of tinkerpool's files for this user: `TINKERPOOL_HOME`, or else `~/.tinkerpool`."""
    return Path(os.environ.get("TINKERPOOL_HOME") or Path.home() / ".tinkerpool").expanduser()


def default_data_dir() -> Path:
    """Return the data directory of a pool that is started without `--data-dir`."""
    return home() / "pool"


def start_command(data_dir: Path) -> str:
    """Return the command that starts a pool on a data directory."""
    return f"tinkerpool up{data_dir_option(data_dir)}"


def data_dir_option(data_dir: Path) -> str:
    """Return ` --data-dir DIR`, for a command; nothing for the default data directory."""
    return "" if data_dir == default_data_dir().absolute() else f" --data-dir {shlex.quote(str(data_dir))}"


def credentials_file() -> Path:
    """Return the path of the credentials file, which may not exist."""
    return home() / FILE_NAME


def read_credentials() -> Credentials | None:
    """Read the credentials file; None if there is none. Raises ValueError for a file of another form."""
    return _read(credentials_file())


def kept_credentials() -> Iterator[Credentials]:
    """Yield the credentials in the file, then those of other pools, newest first. Skips files of another form."""
    for _, credentials in _kept():
        yield credentials


def _kept() -> Iterator[tuple[Path, Credentials]]:
    others = sorted(home().glob(_KEPT_GLOB), key=_modification_ns, reverse=True)
    for path in (credentials_file(), *others):
        with contextlib.suppress(ValueError):
            if (credentials := _read(path)) is not None:
                yield path, credentials


def _modification_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # a pool that starts has just removed it
        return 0


def _read(path: Path) -> Credentials | None:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Credentials(
            url=str(fields["url"]),
            api_key=str(fields["api_key"]),
            note=str(fields.get("note", "")),
            data_dir=str(fields.get("data_dir", "")),
            certificate=Certificate.of(fields.get("certificate")),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"cannot read {path}: expected a JSON object with 'url' and 'api_key'; mend or delete it"
        ) from error


def write_credentials(credentials: Credentials) -> Path:
    """Write the credentials of the pool in use, readable by this user only; return the file.

    Those of another pool in it are kept next to it.
    """
    path = credentials_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(ValueError):
        previous = read_credentials()
        if previous is not None and not _is_replaced(previous, credentials):
            path.rename(_free_name(path))
    _write(path, credentials)
    for kept, other in _kept():
        if kept != path and _is_replaced(other, credentials):
            kept.unlink(missing_ok=True)
    return path


def _is_replaced(before: Credentials, now: Credentials) -> bool:
    """Return whether both have one key, and are of one pool: with its folder moved, perhaps.

    A restored pool has the keys of its source, whose folder is still there.
    """
    is_source = now.data_dir not in ("", before.data_dir) and bool(before.data_dir) and Path(before.data_dir).is_dir()
    return before.api_key == now.api_key and not is_source


def replace_key(replaced: str, api_key: str) -> Path | None:
    """Replace a key in the file that has it, and return the file; None if no file has it. Raises OSError."""
    for path, credentials in _kept():
        if credentials.api_key == replaced:
            _write(path, dataclasses.replace(credentials, api_key=api_key))
            return path
    return None


def _write(path: Path, credentials: Credentials) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".credentials-")  # mode 0600
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(credentials), file, indent=2)
        file.write("\n")
    Path(temporary).rename(path)


def _free_name(path: Path) -> Path:
    number = 1
    while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return kept


def find_client_certificate(
    path: str | os.PathLike[str] | None, key_path: str | os.PathLike[str] | None
) -> ClientCertificate | None:
    """Return the certificate of this client, from arguments, else the environment; None if there is none.

    Without the path of a key, the key is in the certificate's file. Raises ConfigurationError for a key alone.
    """
    if path is None and key_path is None:
        path = os.environ.get("TINKERPOOL_CLIENT_CERTIFICATE") or None
        key_path = os.environ.get("TINKERPOOL_CLIENT_KEY") or None
    if path is None:
        if key_path is not None:
            raise ConfigurationError(f"{os.fspath(key_path)} is a client's key: give its certificate, too")
        return None
    return ClientCertificate(path=os.fspath(path), key_path=os.fspath(key_path or path))


def parse_target(base_url: str) -> tuple[str, bool]:
    """Return the `host:port` of a URL, and whether it asks for TLS. Raises ConfigurationError.

    Accepts `http://host:7600`, `https://host` (TLS, port 443) and `host:port`.
    """
    url = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
    try:
        port = url.port
    except ValueError:
        port = -1
    if url.scheme not in {"http", "https"} or not url.hostname or port == -1 or url.path.strip("/") or url.query:
        raise ConfigurationError(f"expected a URL such as http://127.0.0.1:{DEFAULT_PORT}, got {base_url!r}")
    is_tls = url.scheme == "https"
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{host}:{port or (443 if is_tls else DEFAULT_PORT)}", is_tls
