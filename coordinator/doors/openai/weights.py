"""The weights that a model's name stands for, and the samplers that the door uses: one for each set of weights.

A name stands for a base model, for an adapter's newest saved weights, or for a checkpoint. It is resolved at every
request: so deleted or unpublished checkpoints are never sampled from, and an overwritten name stands for the new
weights. The door saves no weights itself: a save needs a sequence number of the adapter, and those belong to the
training client.

A tenant's samplers are in one session. A sampler is identified by its request id and the session by its metadata. So
both are found again after a restart of the coordinator, and all requests for the same weights share a sampler.
Requests keep the session alive. An unused one expires, with its samplers, once no result of it is kept for a repeated
request, and the next request creates a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.http.calls import Call
from coordinator.doors.openai.errors import no_model, refused
from coordinator.operations.sessions import DOOR
from tinkerpool import names
from tinkerpool.v1 import checkpoints_pb2, sampling_pb2, sessions_pb2
from tinkerpool.v1.adapters_pb2 import GetAdapterRequest

METADATA = {DOOR: "openai"}
"""Metadata of the door's own sessions."""
HEARTBEAT_S = 10.0
LISTED_MAX = 1000
"""Most checkpoints in a listing of models, newest first."""
_SESSION_GONE = ("SESSION_ENDED", "SESSION_UNKNOWN")
"""Why a cached session takes no sampler: it expired, or its tenant finished it; later its row is deleted, too."""
_SAMPLED = (checkpoints_pb2.CHECKPOINT_KIND_TRAINING, checkpoints_pb2.CHECKPOINT_KIND_SAMPLER)
"""Kinds of checkpoints that an adapter's name can stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights that a name stands for at the moment."""

    base_model: sessions_pb2.BaseModel
    checkpoint: checkpoints_pb2.Checkpoint | None
    """None: the bare base model."""

    @property
    def name(self) -> str:
        """The base model's name, or the checkpoint's path."""
        return self.checkpoint.path if self.checkpoint is not None else self.base_model.name

    @property
    def version(self) -> str:
        """A string that changes when the name stands for other weights."""
        return f"{self.name}@{self.checkpoint.seq}" if self.checkpoint is not None else self.name


async def find(call: Call, name: str) -> Weights:
    """Resolve a name. Raises ServiceError: NOT_FOUND, or INVALID_ARGUMENT for an adapter without saved weights."""
    served = await _base_models(call)
    if name in served:
        return Weights(base_model=served[name], checkpoint=None)
    if name.startswith(names.SCHEME):
        checkpoint = await _checkpoint(call, name)
    elif names.is_adapter_id(name):
        checkpoint = await _newest(call, name)
    else:
        raise no_model(
            name,
            f"this pool serves {', '.join(served) or 'no base model'}; a model is one of these, the id of one of your "
            f"adapters, or {names.SCHEME}<adapter id>/sampler_weights/<name>",
        )
    if checkpoint.base_model not in served:
        raise no_model(name, f"its base model {checkpoint.base_model} is not served by this pool")
    return Weights(base_model=served[checkpoint.base_model], checkpoint=checkpoint)


async def describe(call: Call, name: str) -> dict[str, Any]:
    """Return a model in the form of OpenAI's API, under the requested name. Raises the errors of `find`."""
    weights = await find(call, name)
    return _shown(call, name, weights.base_model, weights.checkpoint)


async def listing(call: Call) -> list[dict[str, Any]]:
    """Return all models of the tenant: base models, adapters with saved weights, checkpoints."""
    served = await _base_models(call)
    request = checkpoints_pb2.ListCheckpointsRequest(page_size=LISTED_MAX)
    usable: list[checkpoints_pb2.Checkpoint] = []
    async with aclosing(call.service.listed_checkpoints(call.principal, request).slices()) as slices:
        async for some in slices:
            for each in some:
                each.ClearField("user_metadata")  # a thousand may have 16 MB
                if each.kind in _SAMPLED and each.base_model in served:
                    usable.append(each)
    newest: dict[str, checkpoints_pb2.Checkpoint] = {}
    for each in usable:
        newest.setdefault(each.adapter_id, each)
    named = [*newest.items(), *((each.path, each) for each in usable)]
    return [_shown(call, model.name, model) for model in served.values()] + [
        _shown(call, name, served[each.base_model], each) for name, each in named
    ]


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampler and its session."""

    session_id: str
    sampler_id: str


class Samplers:
    """The door's session of each tenant, cached; the service has them all."""

    def __init__(self) -> None:
        self._sessions: dict[str, str] = {}
        """Session id by tenant."""
        self._finding: dict[str, asyncio.Lock] = {}
        """By tenant: a tenant with many sessions delays only its own first call."""

    async def of(self, call: Call, weights: Weights) -> Sampler:
        """Return the tenant's sampler of these weights, created if needed. Raises ServiceError."""
        session_id = await self._session(call)
        try:
            return await _create(call, session_id, weights)
        except ServiceError as error:
            if error.reason not in _SESSION_GONE:
                raise
        self._sessions.pop(call.principal.tenant_id, None)
        return await _create(call, await self._session(call), weights)

    async def _session(self, call: Call) -> str:
        tenant_id = call.principal.tenant_id
        async with self._finding.setdefault(tenant_id, asyncio.Lock()):
            if tenant_id not in self._sessions:
                kept = await call.service.find_session(call.principal, METADATA)
                self._sessions[tenant_id] = kept or await _new_session(call)
            return self._sessions[tenant_id]


@contextlib.asynccontextmanager
async def kept_alive(call: Call, session_id: str) -> AsyncIterator[None]:
    """Send heartbeats for the session while the block runs."""
    beating = asyncio.create_task(_beat(call, session_id))
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def _base_models(call: Call) -> dict[str, sessions_pb2.BaseModel]:
    capabilities = await call.service.get_capabilities(call.principal, sessions_pb2.GetCapabilitiesRequest())
    return {model.name: model for model in capabilities.base_models}


async def _checkpoint(call: Call, path: str) -> checkpoints_pb2.Checkpoint:
    try:
        names.CheckpointPath.parse(path)
        request = checkpoints_pb2.GetCheckpointRequest(path=path)
        return (await call.service.get_checkpoint(call.principal, request)).checkpoint
    except ValueError as error:
        raise no_model(path, str(error)) from None
    except ServiceError as error:
        if error.code is not Code.NOT_FOUND:
            raise
        raise no_model(path, "there is no such checkpoint: check the path and the API key") from None


async def _newest(call: Call, adapter_id: str) -> checkpoints_pb2.Checkpoint:
    found = await call.service.newest_checkpoints(call.principal, [adapter_id])
    saved = [found[adapter_id, kind] for kind in _SAMPLED if (adapter_id, kind) in found]
    if saved:
        return max(saved, key=lambda each: each.seq)
    try:
        await call.service.get_adapter(call.principal, GetAdapterRequest(adapter_id=adapter_id))
    except ServiceError as error:
        if error.code is not Code.NOT_FOUND:
            raise
        raise no_model(adapter_id, "there is no such adapter: check the id and the API key") from None
    raise refused(
        "model",
        f"{adapter_id} has no saved weights, and only saved weights can be sampled from: call "
        "save_weights_for_sampler(name) in the program that trains it; the id then stands for the newest saved weights",
        "NO_SAVED_WEIGHTS",
    )


def _shown(
    call: Call, name: str, model: sessions_pb2.BaseModel, checkpoint: checkpoints_pb2.Checkpoint | None = None
) -> dict[str, Any]:
    """Return a base model, or a checkpoint of one, in the form of OpenAI's API."""
    return {
        "id": name,
        "object": "model",
        "created": checkpoint.create_time.seconds if checkpoint is not None else int(call.door.time.wall()),
        "owned_by": call.principal.tenant_name if checkpoint is not None else "tinkerpool",
        "root": model.name,
        "max_model_len": model.max_sequence_tokens,
    }


async def _beat(call: Call, session_id: str) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        await call.service.heartbeat(call.principal, sessions_pb2.HeartbeatRequest(session_id=session_id))


async def _create(call: Call, session_id: str, weights: Weights) -> Sampler:
    request = sampling_pb2.CreateSamplerRequest(
        session_id=session_id,
        model_path=weights.name if weights.checkpoint is not None else "",
        base_model=weights.name if weights.checkpoint is None else "",
        request_id=weights.version,
    )
    created = await call.service.create_sampler(call.principal, request)
    return Sampler(session_id, created.sampler.sampler_id)


async def _new_session(call: Call) -> str:
    request = sessions_pb2.CreateSessionRequest(user_metadata=METADATA, request_id=uuid.uuid4().hex)
    return (await call.service.create_session(call.principal, request)).session.session_id
