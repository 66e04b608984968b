"""Operations of adapters, which run by sequence number: passes, steps, loads, saves.

Checks and decodes requests; does not depend on when or where they run. Main invariant: a method returns only after its
operation is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

import numpy as np
from google.protobuf.message import Message

from coordinator.base.config import Limits
from coordinator.base.errors import MESSAGE_LENGTH_MAX, ServiceError, invalid, unmet
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.admission import Request, refused_payload
from coordinator.operations.holdings import SaveRequest, claim_of_pass
from coordinator.operations.operation import Kind
from coordinator.payloads.canonical import serialize
from coordinator.payloads.passes import (
    PassRequest,
    batch_of,
    canonical_adam,
    canonical_pass,
    check_fits,
    check_metadata,
    cut_chunks,
    decode_pass,
    is_large,
)
from coordinator.payloads.provenance import RECORDED_TOKENS_MAX, Key, RecordedSequence, resolved, sequences_of
from coordinator.service.access import UseCases, check_number, check_ttl, refusal_of
from coordinator.storage.exports import check_recipients
from coordinator.storage.rows import SequenceRow
from coordinator.tenants.principals import Principal
from tinkerpool import names
from tinkerpool.v1 import checkpoints_pb2 as checkpoints_pb
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import training_pb2 as pb
from tinkerpool.v1 import types_pb2
from workers.contract.loss_inputs import LOSS_RULES
from workers.contract.messages import UNMARKED, ModelInfo, RequestBatch

SequencedRequest = PassRequest | pb.OptimStepRequest | pb.LoadStateRequest | pb.DiscardGradientRequest | SaveRequest
_KINDS: Mapping[type[SequencedRequest], tuple[Kind, ...]] = {
    pb.ForwardRequest: (Kind.FORWARD,),
    pb.ForwardBackwardRequest: (Kind.FORWARD_BACKWARD,),
    pb.OptimStepRequest: (Kind.OPTIM_STEP,),
    pb.TrainStepRequest: (Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP),
    pb.LoadStateRequest: (Kind.LOAD_STATE,),
    pb.DiscardGradientRequest: (Kind.DISCARD_GRADIENT,),
    checkpoints_pb.SaveStateRequest: (Kind.SAVE_STATE,),
    checkpoints_pb.SaveWeightsForSamplerRequest: (Kind.SAVE_WEIGHTS_FOR_SAMPLER,),
}
"""The operations that each request asks for."""
_RECORDED_LOSSES = frozenset(
    types_pb2.LossFunction.Value(f"LOSS_FUNCTION_{name.upper()}") for name, rule in LOSS_RULES.items() if rule.recorded
)
Records = Mapping[Key, RecordedSequence]
READS_AT_ONCE = 100
"""Records that are read in one turn of the event loop: some milliseconds."""
SEQUENCED_REQUESTS = tuple(_KINDS)


class TrainingUseCases(UseCases):
    """TrainingService, and the two methods of CheckpointService that are operations."""

    async def forward(self, principal: Principal, request: pb.ForwardRequest) -> pb.ForwardResponse:
        """Queue a forward."""
        log = self._served(principal, request)
        [operation] = await self._submit(log, request, await self._pass(request, log, Kind.FORWARD))
        return pb.ForwardResponse(operation=operation)

    async def forward_backward(
        self, principal: Principal, request: pb.ForwardBackwardRequest
    ) -> pb.ForwardBackwardResponse:
        """Queue a forward_backward."""
        log = self._served(principal, request)
        [operation] = await self._submit(log, request, await self._pass(request, log, Kind.FORWARD_BACKWARD))
        return pb.ForwardBackwardResponse(operation=operation)

    async def optim_step(self, principal: Principal, request: pb.OptimStepRequest) -> pb.OptimStepResponse:
        """Queue an optimizer step."""
        log = self._served(principal, request)
        [operation] = await self._submit(log, request, self._step(request))
        return pb.OptimStepResponse(operation=operation)

    async def train_step(self, principal: Principal, request: pb.TrainStepRequest) -> pb.TrainStepResponse:
        """Queue a forward_backward and the step after it."""
        log = self._served(principal, request)
        requests = (await self._pass(request, log, Kind.FORWARD_BACKWARD), self._step(request))
        forward_backward, optim_step = await self._submit(log, request, *requests)
        return pb.TrainStepResponse(forward_backward=forward_backward, optim_step=optim_step)

    async def load_state(self, principal: Principal, request: pb.LoadStateRequest) -> pb.LoadStateResponse:
        """Queue a load."""
        log = self._served(principal, request)
        payload = pb.LoadStateRequest(
            adapter_id=request.adapter_id, path=request.path, with_optimizer=request.with_optimizer
        )

        def check() -> None:
            row = self._readable_checkpoint(principal, request.path)
            if row.kind != names.TRAINING:
                raise invalid(f"{request.path} has weights for sampling only: load a checkpoint made by save_state")
            if row.base_model != log.base_model:
                raise invalid(f"{request.path} belongs to base model {row.base_model}, not {log.base_model}")

        load = Request(kind=Kind.LOAD_STATE, raw=request, payload=serialize(payload), refusal=refusal_of(check))
        [operation] = await self._submit(log, request, load)
        return pb.LoadStateResponse(operation=operation)

    async def discard_gradient(
        self, principal: Principal, request: pb.DiscardGradientRequest
    ) -> pb.DiscardGradientResponse:
        """Queue a discard of the pending gradient."""
        log = self._served(principal, request)
        discard = Request(kind=Kind.DISCARD_GRADIENT, raw=request, payload=serialize(_without_seq(request)))
        [operation] = await self._submit(log, request, discard)
        return pb.DiscardGradientResponse(operation=operation)

    async def save_state(
        self, principal: Principal, request: checkpoints_pb.SaveStateRequest
    ) -> checkpoints_pb.SaveStateResponse:
        """Queue a checkpoint of weights and moments."""
        log = self._served(principal, request)
        [operation] = await self._submit(log, request, self._save(log, request, Kind.SAVE_STATE))
        return checkpoints_pb.SaveStateResponse(operation=operation)

    async def save_weights_for_sampler(
        self, principal: Principal, request: checkpoints_pb.SaveWeightsForSamplerRequest
    ) -> checkpoints_pb.SaveWeightsForSamplerResponse:
        """Queue a checkpoint of weights, or an unnamed sampler."""
        log = self._served(principal, request)
        [operation] = await self._submit(log, request, self._save(log, request, Kind.SAVE_WEIGHTS_FOR_SAMPLER))
        return checkpoints_pb.SaveWeightsForSamplerResponse(operation=operation)

    def is_next(self, principal: Principal, adapter_id: str, seq: int) -> bool:
        """Return whether a forward_backward's seq is the next to arrive: every one before it has, and none behind it.

        For a door whose protocol tells by the order of requests which of them are a batch of their own. For a repeated
        request it was so if the first one was marked as such a batch.
        """
        log = self._adapter(principal, adapter_id)
        if seq >= log.next_seq or (seq > log.snapshot_seq and seq not in log.operations):
            return log.is_next(seq)
        found = self._core.admission.find(adapter_id, seq)
        return found is not None and found.batch == RequestBatch(seq, seq)

    async def refuse(self, principal: Principal, request: SequencedRequest, error: ServiceError) -> NoReturn:
        """Record at its seq that a door could not decode a request; `request` has the fields that it could decode.

        Raises `error`, which then names the failed operation, or the reason why that seq cannot be recorded.
        """
        log = self._served(principal, request)
        batch = batch_of(request) if isinstance(request, pb.ForwardBackwardRequest) else UNMARKED
        if isinstance(request, pb.OptimStepRequest):
            error = _refused_step(error)
        refused = [Request(kind=kind, raw=request, batch=batch, malformed=error) for kind in _KINDS[type(request)]]
        await self._submit(log, request, *refused)
        raise AssertionError("a malformed request was accepted")

    async def _submit(self, log: AdapterLog, request: SequencedRequest, *requests: Request) -> list[ops_pb.Operation]:
        """Accept consecutive operations; return them once they are durable."""
        acceptance = self._core.admission.accept(log, request.seq, request.request_id, requests)
        operations = await acceptance.until_durable()
        return [operation.as_message(is_running=log.copy.is_running(operation)) for operation in operations]

    def _served(self, principal: Principal, request: SequencedRequest) -> AdapterLog:
        """Return the adapter. Raises ServiceError if its base model is not served, or there is no room."""
        log = self._adapter(principal, request.adapter_id)
        self._core.sessions.keep_alive(log.session_id)
        if log.base_model not in self._core.fleet.models:
            raise unmet(
                "BASE_MODEL_NOT_SERVED",
                f"{log.adapter_id} belongs to base model {log.base_model}, which this pool does not serve now",
            )
        num_tokens_min = 1 if isinstance(request, PassRequest) else 0
        self._core.admission.check_room(log, request.seq, request.request_id, num_tokens_min)
        return log

    async def _pass(self, request: PassRequest, log: AdapterLog, kind: Kind) -> Request:
        """Decode a pass; a large one on a thread, in a turn of its tenant."""
        model, limits = self._core.fleet.models[log.base_model], self._core.config.limits
        records = await self._records(log.tenant_id, request)
        if not is_large(request):
            return _decoded(request, kind, model, limits, records)
        async with self._core.decode_turns.turn(log.tenant_id):
            return await asyncio.to_thread(_with_record, request, kind, model, limits, records)

    async def _records(self, tenant_id: str, request: PassRequest) -> Records | ServiceError:
        """Return the recorded sequences that a pass names, those that there are; the refusal of too many.

        Lets others run between slices of reads: a request may name thousands.
        """
        records: dict[Key, RecordedSequence] = {}
        if request.loss_function not in _RECORDED_LOSSES:
            return records
        num_tokens = 0
        for number, key in enumerate(sequences_of(request.data), 1):
            if number % READS_AT_ONCE == 0:
                await asyncio.sleep(0)
            if (row := self._core.store.records.find(tenant_id, *key)) is None:
                continue
            records[key] = recorded_sequence(row)
            num_tokens += len(records[key].tokens)
            if num_tokens > RECORDED_TOKENS_MAX:
                return invalid(
                    f"the sequences that the request's spans name have more than {RECORDED_TOKENS_MAX} tokens: send "
                    "several requests"
                )
        return records

    def _step(self, request: pb.OptimStepRequest | pb.TrainStepRequest) -> Request:
        try:
            payload = canonical_adam(request.adapter_id, request.adam)
        except ServiceError as error:
            return Request(kind=Kind.OPTIM_STEP, raw=request, malformed=_refused_step(error))
        return Request(kind=Kind.OPTIM_STEP, raw=request, payload=payload)

    def _save(self, log: AdapterLog, request: SaveRequest, kind: Kind) -> Request:
        try:
            _check_name(request)
            if isinstance(request, checkpoints_pb.SaveWeightsForSamplerRequest):
                check_recipients(request.age_recipients)
            check_ttl(request.ttl_seconds)
            check_metadata(request.user_metadata, self._core.config.limits)
        except ServiceError as error:
            return Request(kind=kind, raw=request, malformed=error)
        claim = self._core.holdings.claim_of_save(log.spec, log.base_model, request)
        return Request(kind=kind, raw=request, payload=serialize(_without_seq(request)), claim=claim)


def _refused_step(error: ServiceError) -> ServiceError:
    """Return the refusal of an optimizer step, which says that the step ends its gradient window like any other."""
    effect = "; a refused step drops its gradient: submit it again with its forward_backwards"
    error.message = error.message[: MESSAGE_LENGTH_MAX - len(effect)] + effect
    return error


def _decoded(
    request: PassRequest, kind: Kind, model: ModelInfo, limits: Limits, records: Records | ServiceError
) -> Request:
    batch = UNMARKED
    try:
        batch = batch_of(request)
        payload, decoded = canonical_pass(request, model, limits)
    except ServiceError as error:
        return Request(kind=kind, raw=request, batch=batch, malformed=error)
    chunks = cut_chunks(decoded.lengths, model.chunk_tokens)
    made = Request(
        kind=kind,
        raw=request,
        payload=payload,
        decoded=decoded,
        chunks=chunks,
        chunk_tokens=model.chunk_tokens,
        batch=batch,
        claim=claim_of_pass(chunks),
        refusal=refusal_of(check_fits, chunks, model),
    )
    return _with_samples(made, records) if request.loss_function in _RECORDED_LOSSES else made


def recorded_sequence(row: SequenceRow) -> RecordedSequence:
    """Return a recorded sequence from its row."""
    return RecordedSequence(
        tokens=np.frombuffer(row.tokens, "<i4"),
        logprobs=np.frombuffer(row.logprobs, "<f4"),
        temperature=row.temperature,
        sampler_version=row.sampler_version,
        num_prompt_tokens=row.num_prompt_tokens,
    )


def _with_samples(request: Request, records: Records | ServiceError) -> Request:
    """Add what the records of samples say to a pass. A missing record is no refusal of a repeat."""
    try:
        if isinstance(records, ServiceError):
            raise records
        payload = resolved(request.payload, records)
    except ServiceError as error:
        return replace(request, identity=request.payload, decoded=None, refusal=request.refusal or error)
    used = tuple(dict.fromkeys((sampler_id, seq) for sampler_id, seq, _ in records))
    return replace(request, identity=request.payload, payload=payload, decoded=decode_pass(payload), records=used)


def _with_record(
    request: PassRequest, kind: Kind, model: ModelInfo, limits: Limits, records: Records | ServiceError
) -> Request:
    """Decode a pass, and make the record of its refusal, if it is refused."""
    made = _decoded(request, kind, model, limits, records)
    is_refused = made.malformed is not None or made.refusal is not None
    return replace(made, refused_payload=refused_payload(request)) if is_refused else made


def _check_name(request: SaveRequest) -> None:
    """Refuse an invalid name, and fields that need a name or exclude one."""
    sampler = request if isinstance(request, checkpoints_pb.SaveWeightsForSamplerRequest) else None
    if (request.name or sampler is None) and not names.is_checkpoint_name(request.name):
        raise invalid(
            f"name {request.name[:80]!r} is not allowed: 1 to 128 of letters, digits, '-', '_' and '.', not "
            "beginning with a dot"
        )
    if not request.name and request.ttl_seconds:
        raise invalid("ttl_seconds is for a checkpoint with a name; a sampler without one ends with its session")
    if not request.name and request.overwrite:
        raise invalid("overwrite is for a checkpoint with a name: a sampler without one replaces nothing")
    if sampler is not None and not request.name and sampler.for_export:
        raise invalid("for_export is for a checkpoint with a name: give it one")
    if sampler is not None and sampler.age_recipients and not sampler.for_export:
        raise invalid("age_recipients are for weights that are exported: set for_export")
    if sampler is not None and request.name and sampler.is_inflight:
        raise invalid("is_inflight is for a sampler without a name: a checkpoint never changes")
    if sampler is not None and sampler.HasField("sampler_index"):
        check_number("sampler_index", sampler.sampler_index)
        if request.name:
            raise invalid("sampler_index is for a sampler without a name: leave one of the two out")


def _without_seq(request: Message) -> Message:
    payload = type(request)()
    payload.CopyFrom(request)
    payload.ClearField("seq")
    payload.ClearField("request_id")
    return payload
