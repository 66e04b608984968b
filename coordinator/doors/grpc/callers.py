"""Where a gRPC call comes from: the address and the certificate of its peer."""

from __future__ import annotations

import functools
import hashlib
import ssl
from urllib.parse import unquote

from coordinator.doors.grpc.statuses import Context
from coordinator.doors.peers import is_this_machine
from coordinator.tenants.principals import Caller


def caller_of(context: Context, door_host: str) -> Caller:
    """Return the caller. `door_host`: where the door listens."""
    certificate = next(iter(context.auth_context().get("x509_pem_cert", ())), None)
    return Caller(
        is_local=context.peer().startswith("unix:") or is_this_machine(address_of(context), door_host),
        certificate_sha256=_fingerprint(bytes(certificate)) if certificate is not None else "",
    )


def address_of(context: Context) -> str:
    """Return the address of the peer without its port; for a unix socket, some text that is no address."""
    # `ipv4:127.0.0.1:5000`, `ipv6:%5B::1%5D:5000` or `unix:...`
    return unquote(context.peer().partition(":")[2]).rpartition(":")[0].strip("[]")


@functools.lru_cache(maxsize=1024)
def _fingerprint(pem: bytes) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode())).hexdigest()
