"""Models in training: created fresh or from a checkpoint, and described. A model of the protocol is an adapter."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from coordinator.base.errors import invalid
from coordinator.doors.http.calls import Call
from coordinator.doors.tinker import schemas
from coordinator.doors.tinker.errors import unsupported
from coordinator.doors.tinker.futures import CREATED, LOADED, UNLOADED, promise_of_model
from coordinator.doors.tinker.training import load_into, no_access_tokens
from coordinator.doors.tinker.unreadable import consumes_seq
from tinkerpool.v1 import adapters_pb2 as pb
from tinkerpool.v1 import training_pb2

ADAMW = {"type": "adamw"}


async def create_model(call: Call) -> Response:
    """POST /create_model. The model exists when this returns."""
    asked = await call.json(schemas.CreateModel)
    _check_optimizer(asked.optimizer_config)
    lora = asked.lora_config.model_dump() if asked.lora_config is not None else {}
    request = pb.CreateAdapterRequest(
        session_id=asked.session_id,
        index=asked.model_seq_id,
        base_model=asked.base_model,
        user_metadata=asked.user_metadata or {},
        **lora,
    )
    created = await call.service.create_adapter(call.principal, request)
    return promise_of_model(CREATED, created.adapter.adapter_id)


@consumes_seq(training_pb2.LoadStateRequest)
async def load_weights(call: Call) -> Response:
    """POST /load_weights: into a model, or into a new one, which exists when this returns."""
    asked = await call.json(schemas.LoadWeights)
    if asked.model_id is not None:
        return await load_into(call, asked.model_id, asked)
    if asked.session_id is None or asked.model_seq_id is None:
        raise invalid("send the model_id to load into, or session_id and model_seq_id for a new model")
    _check_optimizer(asked.optimizer_config)
    if asked.weights_access_token:
        raise no_access_tokens()
    request = pb.CreateAdapterRequest(
        session_id=asked.session_id,
        index=asked.model_seq_id,
        base_model=asked.base_model or "",
        user_metadata=asked.user_metadata or {},
        from_path=asked.path,
        with_optimizer=asked.optimizer,
    )
    created = await call.service.create_adapter(call.principal, request)
    return promise_of_model(LOADED, created.adapter.adapter_id)


async def unload_model(call: Call) -> Response:
    """POST /unload_model of clients before 0.26. Changes nothing: an idle model gives its place to others by itself."""
    adapter = await adapter_of(call, (await call.json(schemas.OfModel)).model_id)
    return promise_of_model(UNLOADED, adapter.adapter_id)


async def get_info(call: Call) -> Response:
    """POST /get_info."""
    asked = await call.json(schemas.OfModel)
    adapter = await adapter_of(call, asked.model_id)
    data: dict[str, Any] = {"model_name": adapter.base_model}
    if directory := call.door.tokenizers.get(adapter.base_model):
        data["tokenizer_id"] = str(directory)
    return JSONResponse(
        {
            "type": "get_info",
            "model_id": adapter.adapter_id,
            "model_data": data,
            "model_name": adapter.base_model,
            "optimizer_config": ADAMW,
            "is_lora": True,
            "lora_rank": adapter.rank,
        }
    )


async def adapter_of(call: Call, adapter_id: str) -> pb.Adapter:
    """Return an adapter. Raises ServiceError NOT_FOUND."""
    found = await call.service.get_adapter(call.principal, pb.GetAdapterRequest(adapter_id=adapter_id))
    return found.adapter


def _check_optimizer(config: schemas.OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise unsupported(f"optimizer {config.type[:40]!r}", "use adamw")
