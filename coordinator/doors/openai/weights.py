"""Which weights the name of a model means to a tenant: a base model, an adapter's newest saved weights, a checkpoint.

Looked up anew at every request: so what was deleted, or is public no longer, is not sampled from, and a name that was
saved over means the new weights. Nothing is saved here: that would take a place in the order of whoever trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.http.calls import Call
from coordinator.doors.openai.errors import no_model, refused
from tinkerpool import names
from tinkerpool.v1 import checkpoints_pb2, sessions_pb2
from tinkerpool.v1.adapters_pb2 import GetAdapterRequest

LISTED_MAX = 1000
"""Checkpoints in a listing of models, the newest of them."""
_SAMPLED = (checkpoints_pb2.CHECKPOINT_KIND_TRAINING, checkpoints_pb2.CHECKPOINT_KIND_SAMPLER)
"""What an adapter's newest weights are looked for among."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a name means now."""

    base_model: sessions_pb2.BaseModel
    checkpoint: checkpoints_pb2.Checkpoint | None
    """None: the bare base model."""

    @property
    def name(self) -> str:
        """The one name that means these weights: a base model's, or a checkpoint's path."""
        return self.checkpoint.path if self.checkpoint is not None else self.base_model.name

    @property
    def version(self) -> str:
        """Changes with the weights behind the name."""
        return f"{self.name}@{self.checkpoint.seq}" if self.checkpoint is not None else self.name


async def find(call: Call, name: str) -> Weights:
    """What a name means. Raises ServiceError: NOT_FOUND, or INVALID_ARGUMENT for an adapter that has saved nothing."""
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
            f"this pool serves {', '.join(served) or 'no base model'}; beside these it takes the id of an adapter of "
            f"yours, and {names.SCHEME}<adapter id>/sampler_weights/<name>",
        )
    if checkpoint.base_model not in served:
        raise no_model(name, f"its base model {checkpoint.base_model} is not served by this pool")
    return Weights(base_model=served[checkpoint.base_model], checkpoint=checkpoint)


async def describe(call: Call, name: str) -> dict[str, Any]:
    """A model as OpenAI's API shows it, under the name that was asked for. Raises what `find` raises."""
    weights = await find(call, name)
    if weights.checkpoint is None:
        return _base_model(call, weights.base_model)
    return _fine_tuned(call, name, weights.checkpoint, weights.base_model)


async def listing(call: Call) -> list[dict[str, Any]]:
    """Everything that the tenant may name, but for others' public checkpoints: base models, adapters, checkpoints."""
    served = await _base_models(call)
    request = checkpoints_pb2.ListCheckpointsRequest(page_size=LISTED_MAX)
    saved = (await call.service.list_checkpoints(call.principal, request)).checkpoints
    usable = [each for each in saved if each.kind in _SAMPLED and each.base_model in served]
    newest: dict[str, checkpoints_pb2.Checkpoint] = {}
    for each in usable:
        newest.setdefault(each.adapter_id, each)
    named = [*newest.items(), *((each.path, each) for each in usable)]
    return [_base_model(call, model) for model in served.values()] + [
        _fine_tuned(call, name, each, served[each.base_model]) for name, each in named
    ]


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
        f"{adapter_id} has saved no weights yet, and only saved ones can be sampled from: call "
        "save_weights_for_sampler(name) where it is trained; its id then means the newest weights that were saved",
        "NO_SAVED_WEIGHTS",
    )


def _base_model(call: Call, model: sessions_pb2.BaseModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": int(call.door.wall()),
        "owned_by": "tinkerpool",
        "root": model.name,
        "max_model_len": model.max_sequence_tokens,
    }


def _fine_tuned(
    call: Call, name: str, checkpoint: checkpoints_pb2.Checkpoint, model: sessions_pb2.BaseModel
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": checkpoint.create_time.seconds,
        "owned_by": call.principal.tenant_name,
        "root": model.name,
        "max_model_len": model.max_sequence_tokens,
    }
