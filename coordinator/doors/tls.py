"""Certificate, key and client authorities of a door, read again when their files change. Does not depend on a protocol.

Each new connection uses what the files have then; open connections keep what they began with. Main invariant: new files
are used only if they can be read, and the key belongs to the certificate; until then the earlier ones stay in use.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.base.config import DoorConfig
from coordinator.doors.door import DoorError

_log = logging.getLogger(__name__)
_OTHER_NAME = frozenset({62, 64})
"""OpenSSL's codes for a certificate that is for another host name, or another IP address."""
Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """What the files had at one moment."""

    certificate: bytes
    """The chain, in PEM."""
    key: bytes
    authorities: bytes | None
    """Of client certificates, in PEM; None: clients need none."""
    context: ssl.SSLContext


class TlsFiles:
    """The files of one door; may be asked on any thread."""

    def __init__(self, config: DoorConfig) -> None:
        """Read the files. Raises DoorError."""
        assert config.tls_cert is not None
        assert config.tls_key is not None
        self._certificate, self._key, self._authorities = config.tls_cert, config.tls_key, config.tls_client_ca
        self._lock = threading.Lock()
        try:
            self._seen: Signature = self._signature()
            self._tls = self._read()
        except (OSError, ValueError) as error:
            raise DoorError(self._reason(error)) from error

    def current(self) -> Tls:
        """Return what to use for a new connection: the files' content, or the last one that was valid."""
        with self._lock:
            try:
                signature = self._signature()
            except OSError as error:
                if self._seen:
                    self._complain(error)
                self._seen = ()  # a file is being replaced: read them when all are there
                return self._tls
            if signature != self._seen:
                self._seen = signature
                try:
                    self._tls = self._read()
                    _log.info("%s and its key were read again", self._certificate)
                except (OSError, ValueError) as error:
                    self._complain(error)
            return self._tls

    def _complain(self, error: OSError | ValueError) -> None:
        _log.error("new connections use the earlier certificate: %s", self._reason(error))

    def _paths(self) -> list[Path]:
        return [self._certificate, self._key, *([self._authorities] if self._authorities is not None else [])]

    def _signature(self) -> Signature:
        """Return what changes when a file does. Raises OSError."""
        found = [path.stat() for path in self._paths()]
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in found)

    def _read(self) -> Tls:
        """Read the files. Raises OSError, and ValueError (also ssl.SSLError) for content that cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._certificate, self._key, password="")  # never ask for it on the terminal
        if self._authorities is not None:
            context.load_verify_locations(self._authorities)
            context.verify_mode = ssl.CERT_REQUIRED
        return Tls(
            certificate=self._certificate.read_bytes(),
            key=self._key.read_bytes(),
            authorities=self._authorities.read_bytes() if self._authorities is not None else None,
            context=context,
        )

    def _reason(self, error: OSError | ValueError) -> str:
        if isinstance(error, ssl.SSLError) or not isinstance(error, OSError):
            return f"are {self._certificate} and {self._key} a certificate and its key, in PEM? {error}"
        # `load_cert_chain` does not name the file that it cannot read.
        name = error.filename or next((path for path in self._paths() if not path.exists()), self._certificate)
        return f"cannot read {name}: {(error.strerror or str(error)).lower()}"


def server_name(config: DoorConfig, host: str) -> str:
    """Return a name that the door's certificate is for; empty if it is for `host` itself. Raises ssl.SSLError.

    A client that trusts only this certificate raises the same error: it has expired, or has no name.
    """
    try:
        _handshake(config, host, is_host_checked=True)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code not in _OTHER_NAME:
            raise
    else:
        return ""
    peer: dict[str, Any] = _handshake(config, host, is_host_checked=False)
    names = [value for kind, value in peer.get("subjectAltName", ()) if kind in {"DNS", "IP Address"}]
    names += [value for part in peer["subject"] for kind, value in part if kind == "commonName"]
    if not names:
        raise ssl.SSLError(f"{config.tls_cert} has no name")
    return str(names[0]).replace("*", "pool", 1)


def _handshake(config: DoorConfig, host: str, *, is_host_checked: bool) -> dict[str, Any]:
    """Make a handshake in memory with a client that trusts only the certificate, and return what the client sees."""
    assert config.tls_cert is not None
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(config.tls_cert, config.tls_key, password="")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(config.tls_cert)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.check_hostname = is_host_checked
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(to_client, to_server, server_hostname=host)
    there = server.wrap_bio(to_server, to_client, server_side=True)
    while True:
        try:
            here.do_handshake()
        except ssl.SSLWantReadError:
            with contextlib.suppress(ssl.SSLWantReadError):
                there.do_handshake()
        else:
            return dict(here.getpeercert() or {})
