"""The ASGI application: the handler of each path, and the rules for every call.

Every call is authenticated before its body is read, and every response has an id and a JSON body, errors too. Liveness
(`/healthz`), readiness (`/readyz`) and the files of the page for browsers need no key. Other paths are those of the
Tinker and OpenAI protocols, and the contract's RPCs in JSON. Ids in paths contain colons; a checkpoint's id contains a
slash.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.http.calls import Call, DoorContext, api_key, caller_of
from coordinator.doors.http.connections import WITH_KEY, WhileConnected
from coordinator.doors.http.request_ids import RequestIds
from coordinator.doors.http.responses import ReadResponse, Streamed, num_retries
from coordinator.doors.openai import endpoints as openai
from coordinator.doors.openai.errors import error_response as openai_error_response
from coordinator.doors.rpcs import use_case_name
from coordinator.doors.tinker import futures, models, runs, sampling, sessions, training
from coordinator.doors.tinker.errors import error_response
from coordinator.doors.web import cycles, page
from coordinator.doors.web import rpcs as web
from coordinator.limits.results import UNCOUNTED_BYTES
from coordinator.service.roles import LEAST_ROLES
from coordinator.tenants.principals import Principal, Role

PREFIX = "/api/v1"
Handler = Callable[[Call], Awaitable[Response]]
ErrorResponse = Callable[[Exception, str, int], Response]
"""Makes a protocol's response of an exception, the name of the call, and how often the client has repeated it."""
METHODS = ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"]

_CHECKPOINTS = "/training_runs/{run}/checkpoints"
_CHECKPOINT = f"{_CHECKPOINTS}/{{kind}}/{{name}}"
"""A checkpoint's id has two parts, so that a checkpoint named `publish` is not taken for the endpoint."""

HANDLERS: tuple[tuple[str, str, Handler, str], ...] = (
    ("POST", "/client/config", sessions.client_config, "get_capabilities"),
    ("POST", "/client/dynamic_config", sessions.dynamic_config, "get_capabilities"),
    ("POST", "/telemetry", sessions.telemetry, "get_capabilities"),
    ("GET", "/get_server_capabilities", sessions.server_capabilities, "get_capabilities"),
    ("POST", "/create_session", sessions.create_session, "create_session"),
    ("POST", "/session_heartbeat", sessions.heartbeat, "heartbeat"),
    ("POST", "/sessions/{session}/finish", sessions.finish_session, "finish_session"),
    ("POST", "/create_model", models.create_model, "create_adapter"),
    ("POST", "/get_info", models.get_info, "get_adapter"),
    ("POST", "/unload_model", models.unload_model, "delete_adapter"),
    ("POST", "/load_weights", models.load_weights, "create_adapter"),
    ("POST", "/forward_backward", training.forward_backward, "forward_backward"),
    ("POST", "/forward", training.forward_backward, "forward"),
    ("POST", "/optim_step", training.optim_step, "optim_step"),
    ("POST", "/save_weights", training.save_weights, "save_state"),
    ("POST", "/save_weights_for_sampler", training.save_weights_for_sampler, "save_weights_for_sampler"),
    ("POST", "/save_weights_external", training.save_weights_external, "save_weights_for_sampler"),
    ("POST", "/create_sampling_session", sampling.create_sampling_session, "create_sampler"),
    ("GET", "/samplers/{sampler}", sampling.get_sampler, "get_sampler"),
    ("POST", "/asample", sampling.asample, "sample"),
    ("POST", "/join_sampling_session", sampling.join_sampling_session, "create_sampler"),
    ("POST", "/retrieve_future", futures.retrieve_future, "wait_operations"),
    ("POST", "/retrieve_futures", futures.retrieve_futures, "wait_operations"),
    ("POST", "/cancel_future", futures.cancel_future, "cancel_operation"),
    ("GET", "/sessions", sessions.list_sessions, "list_sessions"),
    ("GET", "/sessions/{session}", sessions.get_session, "get_session"),
    ("GET", "/sessions/{session}/trace_export", runs.trace_export, "export_session_trace"),
    ("GET", "/training_runs", runs.list_runs, "list_adapters"),
    ("GET", "/training_runs/{run}", runs.get_run, "get_adapter"),
    ("GET", _CHECKPOINTS, runs.list_of_run, "list_checkpoints"),
    ("GET", "/checkpoints", runs.list_all, "list_checkpoints"),
    ("POST", "/copy_weights", runs.copy_weights, "copy_checkpoint"),
    ("POST", "/weights_info", runs.weights_info, "get_checkpoint"),
    ("GET", f"{_CHECKPOINT}/external_weights_urls", runs.download_urls, "export_checkpoint"),
    ("GET", f"{_CHECKPOINT}/archive", runs.download_archive, "export_checkpoint"),
    ("POST", f"{_CHECKPOINT}/publish", runs.publish, "set_checkpoint_access"),
    ("DELETE", f"{_CHECKPOINT}/publish", runs.unpublish, "set_checkpoint_access"),
    ("PUT", f"{_CHECKPOINT}/ttl", runs.set_ttl, "set_checkpoint_ttl"),
    # also for a path that is not a checkpoint's id
    ("DELETE", f"{_CHECKPOINTS}/{{checkpoint:path}}", runs.delete, "delete_checkpoint"),
)
"""Method, path and handler of each endpoint, and the use case whose least role its callers need."""


def make_app(door: DoorContext) -> ASGIApp:
    """Make the ASGI application. A call ends when its client leaves; what it has begun to write is written."""
    healthz = Route("/healthz", _healthz(door))
    routes: list[BaseRoute] = [healthz, Route("/download/{file}", _download(door), name="download")]
    routes += [
        Route(path, _Guarded(handler, door, LEAST_ROLES[use_case]), methods=[method])
        for method, path, handler, use_case in HANDLERS
    ]
    routes.append(Route("/{path:path}", _Guarded(_unknown, door, Role.READ_ONLY), methods=METHODS))
    for_openai = _openai_routes(door)
    mounts = [Mount(PREFIX, routes=routes), *(Mount(prefix, routes=for_openai) for prefix in openai.PREFIXES)]
    app = Starlette(
        routes=[healthz, Route("/readyz", _readyz(door)), *mounts, *_web_routes(door), *page.files(), *routes[-1:]],
        exception_handlers={Exception: _fault},
    )
    return RequestIds(WhileConnected(app))


def _openai_routes(door: DoorContext) -> list[BaseRoute]:
    own = openai.OpenAi()
    handlers: tuple[tuple[list[str], str, Handler, str], ...] = (
        (["POST"], "/completions", own.completions, "sample"),
        (["POST"], "/chat/completions", own.chat, "sample"),
        (["GET"], "/models", own.list_models, "get_capabilities"),
        (["GET"], "/models/{model:path}", own.get_model, "get_capabilities"),
        (METHODS, "/{path:path}", openai.unknown, "get_capabilities"),
    )
    return [
        Route(path, _Guarded(handler, door, LEAST_ROLES[use_case], openai_error_response), methods=methods)
        for methods, path, handler, use_case in handlers
    ]


def _web_routes(door: DoorContext) -> list[BaseRoute]:
    handlers: list[tuple[str, str, Handler, str]] = [
        ("POST", "/ui/sign-in", page.sign_in, "get_capabilities"),
        ("POST", "/ui/sign-out", page.sign_out, "get_capabilities"),
        ("GET", cycles.PATH, cycles.CycleFeeds(door.service).watch, "watch_cycles"),
    ]
    handlers += [("POST", path, web.handler_of(rpc), use_case_name(rpc)) for path, rpc in web.unary().items()]
    return [
        Route(path, _Guarded(handler, door, LEAST_ROLES[use_case], web.error_response), methods=[method])
        for method, path, handler, use_case in handlers
    ]


@dataclass(frozen=True, slots=True)
class _Guarded:
    """Admits a call whose key has at least a role, then runs its handler; turns exceptions into responses."""

    handler: Handler
    door: DoorContext
    least: Role
    to_response: ErrorResponse = error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a call. What it holds for its response is given back when that was sent."""
        request = Request(scope, receive, send)
        with ExitStack() as held:
            try:
                response = await self._respond(request, held)
            except ClientDisconnect:
                response = Response(status_code=499)  # the client has left: never sent
            except Exception as error:  # noqa: BLE001  # from here its text would reach the client
                name = f"{request.method} {request.url.path}"
                response = self.to_response(error, name, num_retries(request))
            await response(scope, receive, send)

    def _admitted(self, request: Request) -> Principal:
        keys, caller = self.door.backend.authenticator, caller_of(request, self.door.config.host)
        if key := api_key(request):
            return keys.admit(key, caller, self.least)
        if key_id := self.door.sign_ins.key_id(request):
            return keys.admit_holder(key_id, caller, self.least)
        raise ServiceError(
            Code.UNAUTHENTICATED,
            "API_KEY_MISSING",
            "no API key: set TINKER_API_KEY (with OpenAI's clients OPENAI_API_KEY), or send it as X-API-Key or as a "
            "bearer token",
        )

    async def _respond(self, request: Request, held: ExitStack) -> Response:
        door = self.door
        door.gate.check_open()
        if (traces := door.backend.traces) is not None:
            traces.receive(request.headers.get("traceparent", ""))
        principal = self._admitted(request)
        request.scope[WITH_KEY] = True
        held.enter_context(door.running.holding(principal.tenant_id))
        room = held.enter_context(door.backend.responses.room(principal.tenant_id))
        with door.backend.authenticator.while_valid(principal), door.bodies.of_call(principal.tenant_id) as body:
            response = await self.handler(Call(request, principal, door, body, room))
        num_bytes = len(getattr(response, "body", b""))  # a stream has none yet
        if not isinstance(response, Streamed):  # which holds its room until it is sent
            room.fit(num_bytes)
        return ReadResponse(response) if num_bytes > UNCOUNTED_BYTES else response


async def _unknown(call: Call) -> Response:
    raise ServiceError(
        Code.NOT_FOUND,
        "NO_SUCH_ENDPOINT",
        f"{call.request.method} {call.request.url.path[:200]} is not an endpoint of this pool: check the path and the "
        "version of the SDK",
    )


def _healthz(door: DoorContext) -> Callable[[Request], Awaitable[Response]]:
    """Serve liveness: whether this process is to go on. Lost workers and a full disk are no reason to end it."""

    async def respond(_request: Request) -> Response:
        if door.backend.has_failed:
            return _unhealthy("failed", door.backend.unready_reason())
        return JSONResponse({"status": "ok"})

    return respond


def _readyz(door: DoorContext) -> Callable[[Request], Awaitable[Response]]:
    """Serve readiness: whether new work is taken and makes progress, as gRPC's health service says it."""

    async def respond(_request: Request) -> Response:
        reason = door.backend.unready_reason()
        return _unhealthy("not ready", reason) if reason else JSONResponse({"status": "ready"})

    return respond


def _unhealthy(status: str, reason: str) -> Response:
    return JSONResponse({"status": status, "reason": reason}, status_code=503)


def _download(door: DoorContext) -> Callable[[Request], Awaitable[Response]]:
    """Serve downloads. Their signed URLs take the place of an API key."""

    async def respond(request: Request) -> Response:
        try:
            door.gate.check_open()
            return await runs.download(request, door)
        except Exception as error:  # noqa: BLE001  # from here its text would reach the client
            return error_response(error, "a download")

    return respond


async def _fault(request: Request, error: Exception) -> Response:
    return error_response(error, f"{request.method} {request.url.path}")
