"""Operations with a place in an adapter's order: passes, steps, loads, saves."""

from __future__ import annotations

from typing import NoReturn

from google.protobuf.message import Message

from coordinator.base.errors import Code, ServiceError, invalid
from coordinator.operations.adapter_log import AdapterQueue
from coordinator.operations.admission import Draft
from coordinator.operations.canonical import serialize
from coordinator.operations.chunks import Chunk, cut_chunks
from coordinator.operations.operation import Kind, Operation
from coordinator.operations.payloads import PassRequest, canonical_adam, canonical_pass, check_fits, check_metadata
from coordinator.service.auth import Principal
from coordinator.service.base import UseCases, check_number, check_ttl
from tinkerpool import names
from tinkerpool.v1 import checkpoints_pb2 as checkpoints_pb
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import training_pb2 as pb
from workers.contract.messages import ModelInfo

Built = tuple[bytes, tuple[Chunk, ...]]
SaveRequest = checkpoints_pb.SaveStateRequest | checkpoints_pb.SaveWeightsForSamplerRequest
PlacedRequest = PassRequest | pb.OptimStepRequest | pb.LoadStateRequest | SaveRequest


class TrainingUseCases(UseCases):
    """TrainingService, and the two methods of CheckpointService that are operations."""

    async def forward(self, principal: Principal, request: pb.ForwardRequest) -> pb.ForwardResponse:
        """Queue a forward."""
        adapter, model = self._served(principal, request.adapter_id)
        [operation] = await self._submit(
            adapter, request.seq, request.request_id, self._pass(request, model, Kind.FORWARD)
        )
        return pb.ForwardResponse(operation=operation)

    async def forward_backward(
        self, principal: Principal, request: pb.ForwardBackwardRequest
    ) -> pb.ForwardBackwardResponse:
        """Queue a forward_backward."""
        adapter, model = self._served(principal, request.adapter_id)
        draft = self._pass(request, model, Kind.FORWARD_BACKWARD)
        [operation] = await self._submit(adapter, request.seq, request.request_id, draft)
        return pb.ForwardBackwardResponse(operation=operation)

    async def optim_step(self, principal: Principal, request: pb.OptimStepRequest) -> pb.OptimStepResponse:
        """Queue an optimizer step."""
        adapter, _ = self._served(principal, request.adapter_id)
        [operation] = await self._submit(adapter, request.seq, request.request_id, self._step(request))
        return pb.OptimStepResponse(operation=operation)

    async def train_step(self, principal: Principal, request: pb.TrainStepRequest) -> pb.TrainStepResponse:
        """Queue a forward_backward and the step after it."""
        adapter, model = self._served(principal, request.adapter_id)
        drafts = (self._pass(request, model, Kind.FORWARD_BACKWARD), self._step(request))
        forward_backward, optim_step = await self._submit(adapter, request.seq, request.request_id, *drafts)
        return pb.TrainStepResponse(forward_backward=forward_backward, optim_step=optim_step)

    async def load_state(self, principal: Principal, request: pb.LoadStateRequest) -> pb.LoadStateResponse:
        """Queue a load."""
        adapter, _ = self._served(principal, request.adapter_id)

        def check() -> None:
            row = self._readable_checkpoint(principal, request.path)
            if row.kind != names.TRAINING:
                raise invalid(f"{request.path} has weights for sampling only: load a checkpoint made by save_state")
            if row.base_model != adapter.base_model:
                raise invalid(f"{request.path} belongs to base model {row.base_model}, not {adapter.base_model}")

        def build() -> Built:
            body = pb.LoadStateRequest(
                adapter_id=request.adapter_id, path=request.path, with_optimizer=request.with_optimizer
            )
            return serialize(body), ()

        draft = Draft(Kind.LOAD_STATE, request, build, check=check)
        [operation] = await self._submit(adapter, request.seq, request.request_id, draft)
        return pb.LoadStateResponse(operation=operation)

    async def save_state(
        self, principal: Principal, request: checkpoints_pb.SaveStateRequest
    ) -> checkpoints_pb.SaveStateResponse:
        """Queue a checkpoint of weights and moments."""
        adapter, _ = self._served(principal, request.adapter_id)
        [operation] = await self._submit(adapter, request.seq, request.request_id, self._save(request, Kind.SAVE_STATE))
        return checkpoints_pb.SaveStateResponse(operation=operation)

    async def save_weights_for_sampler(
        self, principal: Principal, request: checkpoints_pb.SaveWeightsForSamplerRequest
    ) -> checkpoints_pb.SaveWeightsForSamplerResponse:
        """Queue a checkpoint of weights, or an unnamed sampler."""
        adapter, _ = self._served(principal, request.adapter_id)
        draft = self._save(request, Kind.SAVE_WEIGHTS_FOR_SAMPLER)
        [operation] = await self._submit(adapter, request.seq, request.request_id, draft)
        return checkpoints_pb.SaveWeightsForSamplerResponse(operation=operation)

    async def refuse(self, principal: Principal, kind: Kind, request: PlacedRequest, error: ServiceError) -> NoReturn:
        """Record at its place that a door could not make a request of what came; `request` has what it could read.

        Raises `error`, which then names the failed operation, or why nothing can have that place.
        """
        adapter, _ = self._served(principal, request.adapter_id)

        def build() -> Built:
            raise error

        await self._submit(adapter, request.seq, "", Draft(kind, request, build))
        raise AssertionError("what cannot be built was taken in")

    async def _submit(self, adapter: AdapterQueue, seq: int, request_id: str, *drafts: Draft) -> list[ops_pb.Operation]:
        operations: list[Operation] = await self._core.uninterrupted(
            self._core.admission.to_adapter(adapter, seq, request_id, drafts, lambda: self._core.touch(adapter))
        )
        return [operation.as_message() for operation in operations]

    def _served(self, principal: Principal, adapter_id: str) -> tuple[AdapterQueue, ModelInfo]:
        adapter = self._adapter(principal, adapter_id)
        self._core.sessions.touch(adapter.session_id)
        if adapter.base_model not in self._core.models:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "BASE_MODEL_NOT_SERVED",
                f"{adapter_id} belongs to base model {adapter.base_model}, which this pool does not serve now",
            )
        return adapter, self._core.models[adapter.base_model]

    def _pass(self, request: PassRequest, model: ModelInfo, kind: Kind) -> Draft:
        def build() -> Built:
            payload, decoded = canonical_pass(request, model, self._core.config.limits)
            return payload, cut_chunks(decoded.lengths, model.chunk_tokens)

        def check() -> None:
            lengths = [datum.tokens.shape[0] for datum in request.data]
            check_fits(cut_chunks(lengths, model.chunk_tokens), model)

        return Draft(kind, request, build, model.chunk_tokens, check=check)

    def _step(self, request: pb.OptimStepRequest | pb.TrainStepRequest) -> Draft:
        def build() -> Built:
            return canonical_adam(request.adapter_id, request.adam), ()

        return Draft(Kind.OPTIM_STEP, request, build)

    def _save(self, request: SaveRequest, kind: Kind) -> Draft:
        def build() -> Built:
            _check_name(request)
            check_ttl(request.ttl_seconds)
            check_metadata(request.user_metadata, self._core.config.limits)
            return serialize(_without_place(request)), ()

        return Draft(kind, request, build)


def _check_name(request: SaveRequest) -> None:
    """Refuse a name that is none, and what goes only with one or only without."""
    sampler = request if isinstance(request, checkpoints_pb.SaveWeightsForSamplerRequest) else None
    if (request.name or sampler is None) and not names.is_checkpoint_name(request.name):
        raise invalid(
            f"name {request.name[:80]!r} is not allowed: 1 to 128 of letters, digits, '-', '_' and '.', not "
            "beginning with a dot"
        )
    if not request.name and request.ttl_seconds:
        raise invalid("ttl_seconds is for a checkpoint with a name; a sampler without one ends with its session")
    if sampler is not None and not request.name and sampler.for_export:
        raise invalid("for_export is for a checkpoint with a name: give it one")
    if sampler is not None and request.name and sampler.is_inflight:
        raise invalid("is_inflight is for a sampler without a name: a checkpoint never changes")
    if sampler is not None and sampler.HasField("sampler_index"):
        check_number("sampler_index", sampler.sampler_index)
        if request.name:
            raise invalid("sampler_index is for a sampler without a name: leave one of the two out")


def _without_place(request: Message) -> Message:
    body = type(request)()
    body.CopyFrom(request)
    body.ClearField("seq")
    body.ClearField("request_id")
    return body
