"""The seam between the client and the network, and the gRPC side of it. The only file that imports grpc.

A transport makes one attempt at a call, and raises an `ApiError` if it fails; `retry` decides whether to repeat it.
Tests put a fake in its place.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tinkerpool.client.calls.futures import FORKED
from tinkerpool.client.calls.handshake import is_certificate_refused, mistake_in
from tinkerpool.client.calls.methods import RequestT, ResponseT, ServerStream, Unary
from tinkerpool.client.calls.tracing import traceparent
from tinkerpool.credentials import (
    Certificate,
    ClientCertificate,
    find_client_certificate,
    parse_target,
    start_command,
)
from tinkerpool.errors import ApiError, ClientClosed, Code, ConfigurationError, api_error
from tinkerpool.pools import credentials_at, find_service

SEND_BYTES_MAX = 16 << 20
"""Largest request."""
RECEIVE_BYTES_MAX = 256 << 20
"""Largest response."""
CALLS_MAX = 256
"""Most calls at a time, streams not counted; more are queued. The service refuses more than 1,000 of both."""

_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", SEND_BYTES_MAX),
    ("grpc.max_receive_message_length", RECEIVE_BYTES_MAX),
    # An idle stream notices within 40 s that the other side has vanished.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A restarted coordinator is found soon; gRPC's own backoff would grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # The client retries by itself, because it can tell which refusals are final.
    ("grpc.enable_retries", 0),
    # Each client has its own connection: closing one never affects another.
    ("grpc.use_local_subchannel_pool", 1),
]


@functools.cache
def _grpc_pid() -> int:
    """Return the process that opened the first channel. In its forks gRPC hangs or crashes, also with all closed."""
    return os.getpid()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and credentials of a connection to a pool; can be pickled for another process."""

    base_url: str
    api_key: str = field(repr=False)
    root_certificates: bytes | None = field(default=None, repr=False)
    """Authorities to trust, in PEM. None: `certificate`, or those of this machine."""
    certificate: Certificate | None = None
    """The pool's own certificate, if it runs on this machine."""
    client_certificate: ClientCertificate | None = None
    """What to show to a pool that requires a certificate of its clients."""

    @classmethod
    def find(
        cls,
        base_url: str | None = None,
        api_key: str | None = None,
        root_certificates: bytes | None = None,
        client_certificate: str | os.PathLike[str] | None = None,
        client_key: str | os.PathLike[str] | None = None,
    ) -> Endpoint:
        """Return the endpoint of a pool, from what `ServiceClient` takes. Raises ConfigurationError."""
        found = find_service(base_url, api_key)
        own = find_client_certificate(client_certificate, client_key)
        return cls(found.url, found.api_key, root_certificates, found.certificate, own)


@dataclass(frozen=True, slots=True)
class _Tls:
    """What a channel trusts and shows, in PEM."""

    roots: bytes | None
    """None: the authorities of this machine."""
    client: tuple[bytes, bytes] | None
    """Certificate chain and private key of this client."""


class Transport(Protocol):
    """One attempt at a call. All methods run on the client's background loop."""

    async def call(self, method: Unary[RequestT, ResponseT], request: RequestT, *, timeout_s: float) -> ResponseT:
        """Send a request and return the response. Raises ApiError."""
        ...

    def stream(self, method: ServerStream[RequestT, ResponseT], request: RequestT) -> AsyncGenerator[ResponseT, None]:
        """Send a request and yield the responses. Raises ApiError, also after some. Closing the stream cancels it."""
        ...

    async def close(self) -> None:
        """End all calls and close the connection. Idempotent."""
        ...


class GrpcTransport:
    """Calls over one gRPC channel, which is opened at the first call, on the loop that makes it.

    Certificates are read from their files when the channel is opened, and again when one is refused: after a renewal a
    new channel takes the next calls.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._target, is_tls = parse_target(endpoint.base_url)
        self._is_tls = is_tls or endpoint.root_certificates is not None
        self._certificate = endpoint.certificate if self._is_tls and endpoint.root_certificates is None else None
        self._client_certificate = endpoint.client_certificate if self._is_tls else None
        self._metadata = (("authorization", f"Bearer {endpoint.api_key}"),)
        self._channel: grpc.aio.Channel | None = None
        self._tls: _Tls | None = None
        """Of the channel; None before it is opened, and without TLS."""
        self._replaced: list[grpc.aio.Channel] = []
        """Channels with earlier certificates: running streams end on them."""
        self._calls: dict[Unary[Any, Any], Any] = {}
        self._call_slots = asyncio.Semaphore(CALLS_MAX)

    async def call(self, method: Unary[RequestT, ResponseT], request: RequestT, *, timeout_s: float) -> ResponseT:
        """See `Transport`. Raises UNAVAILABLE at once if nothing listens at the address."""
        async with self._call_slots:
            call = self._callable(method)
            tls = self._tls
            try:
                response: ResponseT = await call(request, timeout=timeout_s, metadata=self._metadata_now())
            except grpc.aio.AioRpcError as error:
                raise await self._error(error, tls) from None
            except asyncio.CancelledError:
                _raise_if_closed()
                raise
            return response

    async def stream(
        self, method: ServerStream[RequestT, ResponseT], request: RequestT
    ) -> AsyncGenerator[ResponseT, None]:
        """See `Transport`."""
        call = self._callable(method)(request, metadata=self._metadata_now())
        tls = self._tls
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise await self._error(error, tls) from None
        except asyncio.CancelledError:
            _raise_if_closed()
            raise
        finally:
            call.cancel()

    async def close(self) -> None:
        """See `Transport`."""
        channels = [*self._replaced, *([self._channel] if self._channel is not None else [])]
        self._channel, self._replaced = None, []
        self._calls.clear()
        for channel in channels:
            await channel.close()

    def _metadata_now(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call: the key, and the caller's span if there is one."""
        parent = traceparent()
        return (*self._metadata, ("traceparent", parent)) if parent else self._metadata

    def _callable(self, method: Unary[RequestT, ResponseT]) -> Any:
        if method not in self._calls:
            channel = self._open_channel()
            kind = channel.unary_stream if isinstance(method, ServerStream) else channel.unary_unary
            self._calls[method] = kind(
                method.path,
                request_serializer=method.request_type.SerializeToString,
                response_deserializer=method.response_type.FromString,
            )
        return self._calls[method]

    def _open_channel(self) -> grpc.aio.Channel:
        """Return the channel, opened if there is none. Raises ClientClosed in a process in which gRPC cannot work."""
        if _grpc_pid() != os.getpid():
            raise ClientClosed(FORKED)
        if self._channel is None:
            if not self._is_tls:
                self._channel = grpc.aio.insecure_channel(self._target, options=_CHANNEL_OPTIONS)
                return self._channel
            options = list(_CHANNEL_OPTIONS)
            if self._certificate is not None and self._certificate.server_name:
                options.append(("grpc.ssl_target_name_override", self._certificate.server_name))
            self._tls = self._read_tls()
            chain, key = self._tls.client or (None, None)
            credentials = grpc.ssl_channel_credentials(self._tls.roots, key, chain)
            self._channel = grpc.aio.secure_channel(self._target, credentials, options=options)
        return self._channel

    def _read_tls(self) -> _Tls:
        """Return what a new channel trusts and shows. Raises ConfigurationError."""
        roots = self._certificate.read() if self._certificate is not None else self.endpoint.root_certificates
        return _Tls(roots, self._client_certificate.read() if self._client_certificate is not None else None)

    async def _error(self, error: grpc.aio.AioRpcError, tls: _Tls | None) -> ApiError | ConfigurationError:
        """Return the exception for a failed attempt on a channel with `tls`."""
        refusal = refusal_of(error)
        message = error.details() or "no details"
        if refusal is not None:
            return refusal
        code = Code.of(error.code().value[0])
        if code is not Code.UNAVAILABLE:
            return api_error(code, f"{message} (at {self._target})")
        if tls is not None and is_certificate_refused(message) and self._is_renewed(tls):
            return api_error(code, f"the certificate of {self.endpoint.base_url}, or of this client, was renewed")
        mistake = await mistake_in(
            self.endpoint.base_url,
            message,
            is_tls=self._is_tls,
            certificate=self._certificate,
            client_certificate=self._client_certificate,
        )
        if mistake is not None:
            return mistake
        known = credentials_at(self.endpoint.base_url)
        start = start_command(Path(known.data_dir)) if known is not None and known.data_dir else "tinkerpool up"
        return api_error(code, _UNREACHABLE.format(target=self._target, start=start, message=message))

    def _is_renewed(self, tls: _Tls) -> bool:
        """Return whether the files have other certificates than `tls`; if so, the next call opens a channel."""
        if self._read_tls() == tls:
            return False
        if self._channel is not None and self._tls == tls:
            self._replaced.append(self._channel)
            self._channel = None
            self._calls.clear()
        return True


def refusal_of(error: grpc.aio.AioRpcError) -> ApiError | None:
    """Return the error that the service made; None if the network or gRPC made it."""
    reason, metadata, retry_delay_s = "", {}, None
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # has what a grpc.Call is asked for
    for detail in status.details if status else ():
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_delay_s = retry.retry_delay.ToNanoseconds() / 1e9
    if not reason:
        return None
    return api_error(
        Code.of(error.code().value[0]),
        error.details() or "no details",
        reason=reason,
        metadata=metadata,
        retry_delay_s=retry_delay_s,
    )


_UNREACHABLE = "no pool replies at {target}: start it with `{start}`, or give the address of another ({message})"


def _raise_if_closed() -> None:
    """Raise ClientClosed for a cancelled call whose task is not cancelled: then the channel was closed meanwhile."""
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise ClientClosed("the client was closed before the reply came") from None
