"""Why a connection cannot be made that no retry mends: another port, another protocol, a certificate without trust.

gRPC reports all of these as UNAVAILABLE, as it does a pool that restarts; only its text tells them apart, and for a
connection that is closed at once not even that: then one TLS handshake without gRPC finds out. Does not depend on grpc.
"""

from __future__ import annotations

import asyncio
import ssl

from tinkerpool.credentials import Certificate, ClientCertificate, parse_target
from tinkerpool.errors import ConfigurationError

PROBE_TIMEOUT_S = 2.0
"""Longest time for that handshake."""

_OTHER_NAME = (
    "the certificate of {url} is for other names: give the pool's address with a name that is in its certificate, or "
    "start the pool with a certificate for this one"
)
_EXPIRED = (
    "the certificate of {url} has expired, or is not valid yet: renew it at the pool, which serves a new one without a "
    "restart, and check the clock of this machine"
)
_UNTRUSTED = (
    "the certificate of {url} is not trusted on this machine: pass the certificate of its authorities, or its own, in "
    "PEM as root_certificates, or name the file in the environment variable GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"
)
_NOT_KEPT = (
    "the certificate of {url} is not the one that its pool left in this machine's credentials file, {path}: does "
    "another program listen there? A pool writes its own when it starts"
)
_NO_TLS = "{url} does not speak TLS: give the address with http://"
_HTTP_PORT = (
    "{url} is an HTTP port, and this client speaks gRPC: give the pool's gRPC port, which `tinkerpool status` shows "
    "(by default 7600); the HTTP port is for TINKER_BASE_URL and for OpenAI's clients"
)
_TLS = "{url} speaks TLS: give the address with https://"
_NO_CLIENT_CERTIFICATE = (
    "{url} closes connections after the TLS handshake: a pool with --tls-client-ca takes only clients with a "
    "certificate of their own. Pass client_certificate and client_key (commands: --client-certificate, --client-key), "
    "or set TINKERPOOL_CLIENT_CERTIFICATE and TINKERPOOL_CLIENT_KEY"
)
_OTHER_CLIENT_CERTIFICATE = (
    "{url} closes connections after the TLS handshake with the client certificate {client}: is it valid now, and "
    "signed by an authority that the pool was started with (--tls-client-ca)?"
)
_BY_TEXT = (
    ("Hostname Verification Check failed", _OTHER_NAME),
    ("certificate has expired", _EXPIRED),
    ("certificate is not yet valid", _EXPIRED),
    ("CERTIFICATE_VERIFY_FAILED", _UNTRUSTED),
    ("WRONG_VERSION_NUMBER", _NO_TLS),
    ("ALPN", _HTTP_PORT),
    ("http1.x server", _HTTP_PORT),
    ("Failed parsing HTTP/2", _HTTP_PORT),
)
"""Parts of gRPC's text about a failed connection, the more special ones first."""


def is_certificate_refused(details: str) -> bool:
    """Return whether a connection may have failed because of a certificate, the pool's or the client's own.

    `details`: gRPC's text about it.
    """
    return "CERTIFICATE_VERIFY_FAILED" in details or _is_closed(details)


async def mistake_in(
    base_url: str,
    details: str,
    *,
    is_tls: bool,
    certificate: Certificate | None = None,
    client_certificate: ClientCertificate | None = None,
) -> ConfigurationError | None:
    """Return what to change, for gRPC's text about a failed connection; None if a retry may succeed.

    `certificate`: the only one that the connection trusts, None for any other trust. `client_certificate`: what it
    shows to the pool.
    """
    text = next((text for part, text in _BY_TEXT if part in details), None)
    if text is None and _is_closed(details):
        text = await _mistake_of_closed(base_url, client_certificate, is_tls=is_tls)
    if text is None:
        return None
    if text is _UNTRUSTED and certificate is not None:
        text = _NOT_KEPT
    path = certificate.path if certificate is not None else ""
    client = client_certificate.path if client_certificate is not None else ""
    return ConfigurationError(text.format(url=base_url, path=path, client=client))


def _is_closed(details: str) -> bool:
    return "failed to connect" in details and "Socket closed" in details


async def _mistake_of_closed(
    base_url: str, client_certificate: ClientCertificate | None, *, is_tls: bool
) -> str | None:
    """Make a TLS handshake with a port that closes connections; return what is wrong, None if it is not clear."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = parse_target(base_url)[0].rpartition(":")
    try:
        if client_certificate is not None:
            context.load_cert_chain(client_certificate.path, client_certificate.key_path, password="")
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
            try:
                if not is_tls:
                    return _TLS
                # A server of gRPC speaks first. It asks for the client's certificate after the client's handshake.
                if await reader.read(1):
                    return None
                return _NO_CLIENT_CERTIFICATE if client_certificate is None else _OTHER_CLIENT_CERTIFICATE
            finally:
                writer.transport.abort()
    except OSError:  # also ssl.SSLError and TimeoutError
        return None
