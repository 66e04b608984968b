"""The ASGI application: the handler of each path, and the rules for every call.

Every call is authenticated before its body is read, and every response has a JSON body, errors too. Paths are those of
the Tinker and OpenAI protocols. Ids in paths contain colons; a checkpoint's id contains a slash.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.http.calls import Call, DoorContext, api_key
from coordinator.doors.http.connections import WITH_KEY
from coordinator.doors.http.responses import num_retries
from coordinator.doors.openai import endpoints as openai
from coordinator.doors.openai.errors import error_response as openai_error_response
from coordinator.doors.tinker import futures, models, runs, sampling, sessions, training
from coordinator.doors.tinker.errors import error_response

PREFIX = "/api/v1"
Handler = Callable[[Call], Awaitable[Response]]
ErrorResponse = Callable[[Exception, str, int], Response]
"""Makes a protocol's response of an exception, the name of the call, and how often the client has repeated it."""
METHODS = ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"]

_CHECKPOINTS = "/training_runs/{run}/checkpoints"
_CHECKPOINT = f"{_CHECKPOINTS}/{{kind}}/{{name}}"
"""A checkpoint's id has two parts, so that a checkpoint named `publish` is not taken for the endpoint."""

HANDLERS: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/client/config", sessions.client_config),
    ("POST", "/client/dynamic_config", sessions.dynamic_config),
    ("POST", "/telemetry", sessions.telemetry),
    ("GET", "/get_server_capabilities", sessions.server_capabilities),
    ("POST", "/create_session", sessions.create_session),
    ("POST", "/session_heartbeat", sessions.heartbeat),
    ("POST", "/sessions/{session}/finish", sessions.finish_session),
    ("POST", "/create_model", models.create_model),
    ("POST", "/get_info", models.get_info),
    ("POST", "/unload_model", models.unload_model),
    ("POST", "/load_weights", models.load_weights),
    ("POST", "/forward_backward", training.forward_backward),
    ("POST", "/forward", training.forward_backward),
    ("POST", "/optim_step", training.optim_step),
    ("POST", "/save_weights", training.save_weights),
    ("POST", "/save_weights_for_sampler", training.save_weights_for_sampler),
    ("POST", "/save_weights_external", training.save_weights_external),
    ("POST", "/create_sampling_session", sampling.create_sampling_session),
    ("GET", "/samplers/{sampler}", sampling.get_sampler),
    ("POST", "/asample", sampling.asample),
    ("POST", "/join_sampling_session", sampling.join_sampling_session),
    ("POST", "/retrieve_future", futures.retrieve_future),
    ("POST", "/retrieve_futures", futures.retrieve_futures),
    ("POST", "/cancel_future", futures.cancel_future),
    ("GET", "/sessions", sessions.list_sessions),
    ("GET", "/sessions/{session}", sessions.get_session),
    ("GET", "/training_runs", runs.list_runs),
    ("GET", "/training_runs/{run}", runs.get_run),
    ("GET", _CHECKPOINTS, runs.list_of_run),
    ("GET", "/checkpoints", runs.list_all),
    ("POST", "/copy_weights", runs.copy_weights),
    ("POST", "/weights_info", runs.weights_info),
    ("GET", f"{_CHECKPOINT}/external_weights_urls", runs.download_urls),
    ("GET", f"{_CHECKPOINT}/archive", runs.download_archive),
    ("POST", f"{_CHECKPOINT}/publish", runs.publish),
    ("DELETE", f"{_CHECKPOINT}/publish", runs.unpublish),
    ("PUT", f"{_CHECKPOINT}/ttl", runs.set_ttl),
    (
        "DELETE",
        f"{_CHECKPOINTS}/{{checkpoint:path}}",
        runs.delete,
    ),  # also for a path that is not a checkpoint's id
)


def make_app(door: DoorContext) -> Starlette:
    """Make the ASGI application."""
    routes: list[BaseRoute] = [Route("/healthz", _healthz), Route("/download/{file}", _download(door), name="download")]
    routes += [Route(path, _guarded(handler, door), methods=[method]) for method, path, handler in HANDLERS]
    routes.append(Route("/{path:path}", _guarded(_unknown, door), methods=METHODS))
    for_openai = _openai_routes(door)
    mounts = [Mount(PREFIX, routes=routes), *(Mount(prefix, routes=for_openai) for prefix in openai.PREFIXES)]
    return Starlette(
        routes=[Route("/healthz", _healthz), *mounts, *routes[-1:]],
        exception_handlers={Exception: _fault},
    )


def _openai_routes(door: DoorContext) -> list[BaseRoute]:
    own = openai.OpenAi()
    handlers: tuple[tuple[list[str], str, Handler], ...] = (
        (["POST"], "/completions", own.completions),
        (["POST"], "/chat/completions", own.chat),
        (["GET"], "/models", own.list_models),
        (["GET"], "/models/{model:path}", own.get_model),
        (METHODS, "/{path:path}", openai.unknown),
    )
    return [
        Route(path, _guarded(handler, door, openai_error_response), methods=methods)
        for methods, path, handler in handlers
    ]


def _guarded(
    handler: Handler, door: DoorContext, to_response: ErrorResponse = error_response
) -> Callable[[Request], Awaitable[Response]]:
    """Authenticate a call, then run its handler; turn exceptions into responses."""

    async def respond(request: Request) -> Response:
        try:
            door.gate.check_open()
            key = api_key(request)
            if not key:
                raise ServiceError(
                    Code.UNAUTHENTICATED,
                    "API_KEY_MISSING",
                    "no API key: set TINKER_API_KEY (with OpenAI's clients OPENAI_API_KEY), or send it as X-API-Key "
                    "or as a bearer token",
                )
            principal = door.backend.authenticator.authenticate(key)
            request.scope[WITH_KEY] = True
            with door.backend.authenticator.while_valid(principal), door.bodies.of_call(principal.tenant_id) as held:
                return await handler(Call(request, principal, door, held))
        except ClientDisconnect:
            return Response(status_code=499)  # the client has left: never sent
        except Exception as error:  # noqa: BLE001  # from here its text would reach the client
            return to_response(error, f"{request.method} {request.url.path}", num_retries(request))

    return respond


async def _unknown(call: Call) -> Response:
    raise ServiceError(
        Code.NOT_FOUND,
        "NO_SUCH_ENDPOINT",
        f"{call.request.method} {call.request.url.path[:200]} is not an endpoint of this pool: check the path and the "
        "version of the SDK",
    )


async def _healthz(_request: Request) -> Response:
    return JSONResponse({"status": "ok"})


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
