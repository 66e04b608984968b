"""Refusals on the wire: the status of a call that ends in an error, with its details. Does not depend on RPCs."""

from __future__ import annotations

from typing import NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from coordinator.base.errors import ServiceError

Context = grpc.aio.ServicerContext[bytes, bytes]

ERROR_DOMAIN = "tinkerpool"
"""`ErrorInfo.domain` of every refusal."""

MESSAGE_BYTES_MAX = 1500
"""Longest error text: HTTP/2 headers carry it twice, encoding can triple it, and clients limit headers to 8 KiB."""


async def abort(context: Context, error: ServiceError) -> NoReturn:
    """End a call with a refusal. Raises what ends the handler of the call."""
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details or "", status.trailing_metadata or ())


def to_status(error: ServiceError) -> status_pb2.Status:
    """Return a refusal's status: with `ErrorInfo` always, with `RetryInfo` exactly if the call may succeed later.

    A used-up quota is in `QuotaFailure`, whether or not waiting clears it.
    """
    message = error.message
    if len(message.encode()) > MESSAGE_BYTES_MAX:
        message = message.encode()[: MESSAGE_BYTES_MAX - 4].decode(errors="ignore") + " ..."
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=error.metadata)
    ]
    if error.retry_delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_delay_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if error.quota is not None:
        violation = error_details_pb2.QuotaFailure.Violation(subject=error.quota.limit, description=str(error.quota))
        details.append(error_details_pb2.QuotaFailure(violations=[violation]))
    status = status_pb2.Status(code=int(error.code), message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status
