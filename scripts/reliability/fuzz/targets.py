"""What is fuzzed: every RPC of the contract, also in JSON, and every route of the HTTP door; how it is sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

import grpc
import httpx
import zstandard
from google.protobuf.descriptor import MethodDescriptor
from google.rpc import status_pb2
from pydantic import BaseModel

from coordinator.doors.http_app import HANDLERS, PREFIX
from coordinator.doors.openai import schemas as openai
from coordinator.doors.rpcs import methods, path_of
from coordinator.doors.tinker import schemas
from coordinator.doors.tinker.results import PROTOBUF
from coordinator.doors.web.rpcs import unary
from scripts.reliability.fuzz.bodies import Bodies
from scripts.reliability.fuzz.messages import Messages
from scripts.reliability.fuzz.values import Values
from tinkerpool.compat import tinker_pb2 as compat

REPLY_S = 20.0
"""Seconds that a call may take that does not wait for anything."""
HOLDING_S = 0.3
"""Seconds after which a call is given up that may wait for work of others."""
RESPONSES_MAX = 5
"""Messages of a stream that are read."""
FORBIDDEN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
LEAK = re.compile(
    r"/(?:tmp|home|root|usr|var|opt|etc)/|Traceback|File \"|\.py\b|site-packages|object at 0x|sqlite", re.I
)
"""What no message to a client contains: paths, parts of a stack, names of our libraries."""

SHAPES: Mapping[str, type[BaseModel] | None] = {
    "/client/config": schemas.Nothing,
    "/client/dynamic_config": schemas.Nothing,
    "/telemetry": None,
    "/get_server_capabilities": None,
    "/create_session": schemas.CreateSession,
    "/session_heartbeat": schemas.OfSession,
    "/sessions/{session}/finish": schemas.Nothing,
    "/create_model": schemas.CreateModel,
    "/get_info": schemas.OfModel,
    "/unload_model": schemas.OfModel,
    "/load_weights": schemas.LoadWeights,
    "/forward_backward": schemas.JsonPass,
    "/forward": schemas.JsonPass,
    "/optim_step": schemas.OptimStep,
    "/save_weights": schemas.SaveWeights,
    "/save_weights_for_sampler": schemas.SaveWeightsForSampler,
    "/save_weights_external": schemas.SaveWeightsExternal,
    "/create_sampling_session": schemas.CreateSamplingSession,
    "/samplers/{sampler}": None,
    "/asample": schemas.Sample,
    "/join_sampling_session": schemas.OfSampler,
    "/retrieve_future": schemas.RetrieveFuture,
    "/retrieve_futures": schemas.RetrieveFutures,
    "/cancel_future": schemas.RetrieveFuture,
    "/sessions": None,
    "/sessions/{session}": None,
    "/sessions/{session}/trace_export": None,
    "/training_runs": None,
    "/training_runs/{run}": None,
    "/training_runs/{run}/checkpoints": None,
    "/checkpoints": None,
    "/copy_weights": schemas.CopyWeights,
    "/weights_info": schemas.OfPath,
    "/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls": None,
    "/training_runs/{run}/checkpoints/{kind}/{name}/archive": None,
    "/training_runs/{run}/checkpoints/{kind}/{name}/publish": None,
    "/training_runs/{run}/checkpoints/{kind}/{name}/ttl": schemas.SetTtl,
    "/training_runs/{run}/checkpoints/{checkpoint:path}": None,
}
"""Path of the Tinker protocol to the shape of its body; None: it has none."""
OTHERS = (
    ("POST", "/v1/completions", openai.Completion),
    ("POST", "/v1/chat/completions", openai.Chat),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/{model:path}", None),
    ("GET", f"{PREFIX}/download/{{file}}", None),
    ("POST", "/ui/sign-in", None),
    ("POST", "/ui/sign-out", None),
    ("GET", "/ui/{path:path}", None),
    ("GET", "/{path:path}", None),
)
HOLDING_RPCS = frozenset({"WaitOperations", "WatchCycles", "StreamSample", "ExportCheckpoint"})
HOLDING_ROUTES = re.compile(r"retrieve_future|completions$|/archive$")


class Fault(Exception):
    """An answer that no message may get."""


class Target(Protocol):
    """One RPC or route."""

    name: str

    def message(self, values: Values) -> Any:
        """Make a message."""

    async def send(self, message: Any, key: str | None) -> str:
        """Send it; return the status of the answer. Raises Fault."""


class Rpc:
    """One RPC."""

    def __init__(self, method: MethodDescriptor, channel: grpc.aio.Channel) -> None:
        self.name = f"{method.containing_service.name}.{method.name}"
        self._input = method.input_type
        path = f"/{method.containing_service.full_name}/{method.name}"
        self._is_streaming = method.server_streaming
        self._timeout_s = HOLDING_S if method.name in HOLDING_RPCS else REPLY_S
        self._call: Any = channel.unary_stream(path) if self._is_streaming else channel.unary_unary(path)

    def message(self, values: Values) -> bytes:
        """Return the bytes of a message."""
        return Messages(values).body(self._input)

    async def send(self, message: bytes, key: str | None) -> str:
        """Send it."""
        metadata = [] if key is None else [("authorization", f"Bearer {key}")]
        call = self._call(message, metadata=metadata, timeout=self._timeout_s)
        try:
            if self._is_streaming:
                number = 0
                async for _ in call:
                    number += 1
                    if number == RESPONSES_MAX:
                        break
            else:
                await call
        except grpc.aio.AioRpcError as error:
            return self._checked(error)
        finally:
            call.cancel()
        return "OK"

    def _checked(self, error: grpc.aio.AioRpcError) -> str:
        code, details = error.code(), error.details() or ""
        is_held = code is grpc.StatusCode.DEADLINE_EXCEEDED and self._timeout_s == HOLDING_S
        if code in FORBIDDEN or (code is grpc.StatusCode.DEADLINE_EXCEEDED and not is_held):
            raise Fault(f"{code.name}: {details}")
        if code is grpc.StatusCode.UNAVAILABLE and not _has_status(error):
            raise Fault(f"no answer: {details}")
        if LEAK.search(details):
            raise Fault(f"{code.name} shows what it should not: {details}")
        return code.name


@dataclass(frozen=True, slots=True)
class HttpMessage:
    """A request without its key."""

    path: str
    body: bytes
    headers: Mapping[str, str]


class HttpRoute:
    """One route of the HTTP door."""

    def __init__(self, method: str, path: str, shape: type[BaseModel] | None, client: httpx.AsyncClient) -> None:
        self.name = f"{method} {path}"
        self._method, self._path, self._shape, self._client = method, path, shape, client
        self._timeout_s = HOLDING_S if HOLDING_ROUTES.search(path) else REPLY_S

    def message(self, values: Values) -> HttpMessage:
        """Return a request."""
        path = re.sub(r"{(\w+)(?::path)?}", lambda found: _in_path(values, found[1]), self._path)
        path = re.sub("^//+", "/", path)  # it would be a host
        if self._method == "GET" and values.chance(0.5):
            path += f"?limit={quote(str(values.integer()))}&offset={quote(values.string('offset'))}"
        headers = {"content-type": "application/json"}
        body = b""
        if self._shape is not None:
            body = Bodies(values).body(self._shape)
        elif self._method != "GET" and values.chance(0.3):
            body = values.data()
        if self._path.endswith(("/forward_backward", "/forward")) and values.chance(0.6):
            headers["content-type"] = PROTOBUF
            body = Messages(values).body(compat.ForwardBackwardRequest.DESCRIPTOR)
        if body and values.chance(0.1):
            headers["content-encoding"] = "zstd"
            packed = zstandard.compress(body)
            body = values.damaged(packed) if values.chance(0.3) else packed
        return HttpMessage(path, body, headers)

    async def send(self, message: HttpMessage, key: str | None) -> str:
        """Send it."""
        headers = dict(message.headers) if key is None else {**message.headers, "x-api-key": key}
        try:
            response = await self._client.request(
                self._method, message.path, content=message.body, headers=headers, timeout=self._timeout_s
            )
        except httpx.ReadTimeout:
            if self._timeout_s == HOLDING_S:
                return "held"
            raise Fault(f"no answer within {self._timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise Fault(f"no answer: {error!r}") from None
        status, text = response.status_code, response.text[:5000]
        if status >= 500:
            raise Fault(f"{status}: {text}")
        if status >= 400 and LEAK.search(text):
            raise Fault(f"{status} shows what it should not: {text}")
        if status == 429 and "retry-after" not in response.headers:
            raise Fault(f"429 without a delay: {text}")
        return str(status)


class JsonRpc(HttpRoute):
    """One RPC over HTTP, in JSON."""

    def __init__(self, method: MethodDescriptor, client: httpx.AsyncClient) -> None:
        super().__init__("POST", path_of(method), None, client)
        self._input = method.input_type

    def message(self, values: Values) -> HttpMessage:
        """Return a request."""
        return HttpMessage(self._path, Messages(values).json(self._input), {"content-type": "application/json"})


def make_targets(channel: grpc.aio.Channel, client: httpx.AsyncClient) -> list[Target]:
    """Return all RPCs and routes."""
    rpcs: list[Target] = [Rpc(method, channel) for method in methods()]
    routes = [(method, f"{PREFIX}{path}", SHAPES[path]) for method, path, *_ in HANDLERS]
    in_json: list[Target] = [JsonRpc(method, client) for method in unary().values()]
    return rpcs + in_json + [HttpRoute(*route, client) for route in (*routes, *OTHERS)]


def _in_path(values: Values, name: str) -> str:
    if name == "kind":
        return str(values.choice(("weights", "sampler_weights", "x")))
    if name in {"checkpoint", "name"} and values.chance(0.7):
        _, _, rest = values.string("path").removeprefix("tinker://").partition("/")
        return quote(rest if name == "checkpoint" else rest.rpartition("/")[2])
    return quote(values.string(name)[:200], safe="" if values.chance(0.8) else "/")


def _has_status(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the pool itself made this refusal."""
    for name, value in error.trailing_metadata() or ():
        if name == "grpc-status-details-bin" and isinstance(value, bytes):
            return bool(status_pb2.Status.FromString(value).details)
    return False
