"""Both sides of a door: the coordinator behind it, and what its callers may be told of an error.

Main invariant: text of an exception that is not a `ServiceError` never leaves the pool.
"""

from __future__ import annotations

import logging
import resource
import secrets
import socket
from typing import TYPE_CHECKING, Protocol

from coordinator.base.errors import Code, ServiceError
from coordinator.limits.ceiling import Limit
from coordinator.limits.results import Responses
from coordinator.limits.turns import Turns
from coordinator.observe.metrics import REFUSALS
from coordinator.service import Service
from coordinator.tenants.keys import Authenticator
from workers.contract.logs import about

if TYPE_CHECKING:
    from coordinator.observe.traces import Traces


class Backend(Protocol):
    """A started coordinator."""

    service: Service
    authenticator: Authenticator
    responses: Responses
    """The room of results that are being sent."""
    decode_turns: Turns
    """The turns at decoding and encoding of large messages."""
    limits: dict[str, Limit]
    """The limits on what tenants take, by name; a door adds its own."""
    traces: Traces | None
    """The traces, which are told of calls that come; None: the pool sends none."""

    @property
    def has_failed(self) -> bool:
        """Whether a fatal error was reported: the process must end."""

    def health(self) -> bool:
        """Return whether new work is taken and makes progress."""

    def unready_reason(self) -> str:
        """Return why `health` is False, in a sentence for callers without a key; empty if it is True."""


_log = logging.getLogger(__name__)
ERROR_ID = "error_id"
"""Key of an internal error's metadata: the id under which the log has the details."""


class DoorError(Exception):
    """The door cannot open. The text says why, and what to change."""


def listen_error(host: str, port: int, error: OSError, option: str) -> DoorError:
    """Return the error of a port that cannot be bound; `option` is the command line's option for the port."""
    return DoorError(
        f"cannot listen on port {port} of {host}: {(error.strerror or str(error)).lower()}; stop the process that uses "
        f"it, or choose another port with {option} (0 takes any free one)"
    )


def connections_max(wanted: int, divisor: int) -> int:
    """Return `wanted`, or this part of the files that the process may open: 2 for HTTP, 4 for gRPC.

    The last quarter is left for the database, state folders and workers.
    """
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files_max == resource.RLIM_INFINITY else min(wanted, max(1, files_max // divisor))


def check_free(host: str, port: int, option: str) -> None:
    """Bind and release a port, for the reason of a failure: grpc reports none. Raises DoorError as `listen_error`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise listen_error(host, port, error, option) from error


def to_refusal(error: Exception, where: str) -> ServiceError:
    """Return the refusal to send for an exception; `where` names the call, for the log.

    Text of an exception that is not a ServiceError never leaves the pool: it is logged under a new id, and the caller
    gets the id. A ServiceError is returned without the frames that it came through: they hold the request, which may
    hold the error, so that both would stay in memory until a garbage collection.
    """
    if isinstance(error, ServiceError):
        REFUSALS.labels(error.reason).inc()
        error.__context__ = error.__cause__ = error.__traceback__ = None
        return error
    REFUSALS.labels("INTERNAL").inc()
    error_id = secrets.token_hex(6)
    _log.error("error %s in %s", error_id, where, exc_info=error, extra=about(error_id=error_id))
    message = f"internal error {error_id}: a fault of the pool; its log has the details under this id"
    return ServiceError(Code.INTERNAL, "INTERNAL", message, metadata={ERROR_ID: error_id})
