"""Samplers and samples: create a sampler, queue a sample, stream its tokens, list the finished samples of a client.

Does not depend on which worker runs a sample. Main invariants: a sample is submitted only once it is durable; the
clients of a sampler, of which the Tinker protocol has several, never share a sequence number.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import closing

from coordinator.base.errors import ServiceError, invalid, not_found, sampler_exists, unavailable, unmet
from coordinator.operations.admission import Request
from coordinator.operations.holdings import claim_of_sample
from coordinator.operations.in_flight import CLIENT_SEQS, REPORTED_MAX, Finished, Unfetched
from coordinator.operations.operation import Kind, Operation
from coordinator.operations.sessions import Session
from coordinator.payloads.canonical import serialize
from coordinator.payloads.samples import canonical_sample, check_sample_fits
from coordinator.sampling.sample import Event, Listener
from coordinator.service.access import UseCases, check_index, refusal_of, request_id_taken, streamed, uninterrupted
from coordinator.storage.rows import SamplerRow
from coordinator.storage.sqlite import ConflictError
from coordinator.tenants.principals import Principal
from tinkerpool import names
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import sampling_pb2 as pb


class SamplingUseCases(UseCases):
    """SamplingService."""

    @uninterrupted
    async def create_sampler(self, principal: Principal, request: pb.CreateSamplerRequest) -> pb.CreateSamplerResponse:
        """Create a sampler; return the existing one if the index or request id was used before."""
        self._core.admission.check_open()
        session = self._live_session(principal, request.session_id)
        if bool(request.model_path) == bool(request.base_model):
            raise invalid("name exactly one of model_path and base_model")
        check_index(request)
        canonical = pb.CreateSamplerRequest()
        canonical.CopyFrom(request)
        canonical.ClearField("request_id")
        payload = serialize(canonical)
        async with session.creating:
            return await self._create_sampler(principal, request, session, payload)

    async def _create_sampler(
        self, principal: Principal, request: pb.CreateSamplerRequest, session: Session, payload: bytes
    ) -> pb.CreateSamplerResponse:
        if existing := self._existing_sampler(request):
            return pb.CreateSamplerResponse(sampler=_message(_same(existing, payload)))
        source = self._readable_checkpoint(principal, request.model_path) if request.model_path else None
        model = self._model(source.base_model if source else request.base_model)
        self._core.quotas.check_permitted(principal.tenant_id, model.name)
        index = request.index if request.HasField("index") else session.next_sampler
        sampler_id = names.sampler_id(session.session_id, index)
        try:
            adding = self._core.ceilings.adding_sampler(principal.tenant_id, session.session_id, len(payload))
            with session.reserving(index), adding:
                self._core.rates.take_creation(principal.tenant_id)
                row = SamplerRow(
                    sampler_id=sampler_id,
                    tenant_id=principal.tenant_id,
                    session_id=session.session_id,
                    request_id=request.request_id or None,
                    payload=payload,
                    base_model=model.name,
                    model_path=request.model_path,
                    adapter_id=source.adapter_id if source else "",
                    version=names.operation_name(source.adapter_id, source.seq) if source else "",
                    created_at=self._core.time.wall(),
                )
                await self._core.store.samplers.insert(row)
        except ConflictError:
            existing = self._existing_sampler(request)
            if existing is None:
                raise request_id_taken() from None
            return pb.CreateSamplerResponse(sampler=_message(_same(existing, payload)))
        return pb.CreateSamplerResponse(sampler=_message(self._sampler(principal, sampler_id)))

    async def get_sampler(self, principal: Principal, request: pb.GetSamplerRequest) -> pb.GetSamplerResponse:
        """Return a sampler."""
        return pb.GetSamplerResponse(sampler=_message(self._sampler(principal, request.sampler_id)))

    async def sample(self, principal: Principal, request: pb.SampleRequest) -> pb.SampleResponse:
        """Queue a sample."""
        operation, _ = await self._begin(principal, request, None)
        is_running = self._core.samples.is_running(operation.name)
        return pb.SampleResponse(operation=operation.as_message(is_running=is_running))

    @streamed
    def stream_sample(
        self, principal: Principal, request: pb.StreamSampleRequest
    ) -> AsyncGenerator[pb.StreamSampleResponse, None]:
        """Queue a sample; stream its tokens, and at the end the finished operation."""
        return self._stream(principal, request.request, takes_tokens=True)

    @streamed
    def stream_outcome(
        self, principal: Principal, request: pb.StreamSampleRequest
    ) -> AsyncGenerator[pb.StreamSampleResponse, None]:
        """Queue a sample; yield an empty response once it is accepted, and at the end the finished operation.

        Its tokens are sent to nobody: a stream that needs the whole result is not woken for each of them.
        """
        return self._stream(principal, request.request, takes_tokens=False)

    async def _stream(
        self, principal: Principal, request: pb.SampleRequest, *, takes_tokens: bool
    ) -> AsyncGenerator[pb.StreamSampleResponse, None]:
        streams = self._core.samples.streams
        # Closed also if this call is cancelled in `_begin`, which then goes on and lets the listener follow the sample.
        with closing(streams.listener(principal.tenant_id, takes_tokens=takes_tokens)) as listener:
            operation, is_followed = await self._begin(principal, request, listener)
            if not is_followed:
                yield pb.StreamSampleResponse(operation=operation.as_message())
                return
            try:
                if not takes_tokens:
                    yield pb.StreamSampleResponse()
                while True:
                    event = await self._next_event(listener, operation)
                    if isinstance(event, ops_pb.Operation):
                        yield pb.StreamSampleResponse(operation=event)
                        if self._core.traces is not None:
                            self._core.traces.deliver(operation.name)
                        return
                    yield pb.StreamSampleResponse(token=event)
            finally:
                streams.unlisten(operation.name, listener)

    async def join_sampler(self, principal: Principal, sampler_id: str) -> int:
        """Return the number of a new client. Its sequence numbers begin after number x `CLIENT_SEQS`."""
        sampler = self._sampler(principal, sampler_id)
        self._live_session(principal, sampler.session_id)
        return self._core.finished_samples.new_client()

    async def finished_samples(
        self, principal: Principal, sampler_id: str, client: int, cursor: int, timeout_s: float
    ) -> tuple[list[Finished], int]:
        """Return a client's samples that finished since a cursor (0: any), and the next cursor."""
        self._sampler(principal, sampler_id)
        return await self._core.finished_samples.since(
            sampler_id, client, cursor, timeout_s, lambda behind: self._unfetched(sampler_id, client, behind)
        )

    @uninterrupted
    async def _begin(
        self, principal: Principal, request: pb.SampleRequest, listener: Listener | None
    ) -> tuple[Operation, bool]:
        """Accept and submit a sample; return it, and whether a listener follows it: not if it has finished."""
        sampler = self._sampler(principal, request.sampler_id)
        self._live_session(principal, sampler.session_id)
        model = self._model(sampler.base_model)
        if not request.seq and not request.request_id:
            raise invalid("seq is 0 and request_id is empty: set one of them, so that the call is safe to repeat")
        payload, decoded = canonical_sample(request, model, self._core.config.limits, _seed(request))
        accepted = Request(
            kind=Kind.SAMPLE,
            raw=request,
            payload=payload,
            refusal=self._unpublished(principal, sampler) or refusal_of(check_sample_fits, decoded, model),
            claim=claim_of_sample(decoded),
        )
        acceptance = self._core.admission.accept_sample(
            principal.tenant_id, request.sampler_id, request.seq, request.request_id, accepted
        )
        [operation] = await acceptance.until_durable()
        is_followed = listener is not None and not operation.is_committed
        if listener is not None and is_followed:
            self._core.samples.streams.listen(operation.name, listener)
        if acceptance.is_new:
            if self._core.sessions.get(sampler.session_id) is None:
                operation.cancel()  # it ended while the sample was being logged
            self._core.samples.submit(operation, sampler, decoded)
        return operation, is_followed

    async def _next_event(self, events: Listener, operation: Operation) -> Event:
        event = await events.get()
        if event is None:
            raise unavailable(
                "SHUTTING_DOWN",
                f"the pool is shutting down; {operation.name} resumes after its restart: wait for it then",
            )
        return event

    def _sampler(self, principal: Principal, sampler_id: str) -> SamplerRow:
        row = self._core.store.samplers.of_tenant(principal.tenant_id, sampler_id)
        if row is None:
            raise not_found("sampler", sampler_id)
        return row

    def _unpublished(self, principal: Principal, sampler: SamplerRow) -> ServiceError | None:
        """Return the refusal of new samples if the sampler's checkpoint is another tenant's and not public any more."""
        found = self._core.store.checkpoints.by_path(sampler.model_path) if sampler.model_path else None
        if found is None or found.is_public or found.tenant_id == principal.tenant_id:
            return None
        return unmet(
            "CHECKPOINT_UNPUBLISHED",
            f"the owner of {sampler.model_path}, from which {sampler.sampler_id} samples, has made it private again: "
            "ask the owner to publish it, or sample from a checkpoint of yours",
        )

    def _existing_sampler(self, request: pb.CreateSamplerRequest) -> SamplerRow | None:
        if request.HasField("index"):
            sampler_id = names.sampler_id(request.session_id, request.index)
            return self._core.store.samplers.get(sampler_id)
        if not request.request_id:
            return None
        return self._core.store.samplers.of_request(request.session_id, request.request_id)

    def _unfetched(self, sampler_id: str, client: int, behind: int) -> Unfetched:
        """Read finished samples that were not fetched, without those still in the in-flight table."""
        first_seq, last_seq = max(behind, client * CLIENT_SEQS) + 1, (client + 1) * CLIENT_SEQS
        rows = self._core.store.operations.unfetched(sampler_id, first_seq, last_seq, REPORTED_MAX)
        found = [(names.operation_name(sampler_id, row.seq), row) for row in rows]
        samples = [
            Finished(name, row.is_failed, row.num_bytes)
            for name, row in found
            if self._core.in_flight.get(name) is None
        ]
        return Unfetched(samples, rows[-1].seq if len(rows) == REPORTED_MAX else None)


def _seed(request: pb.SampleRequest) -> int:
    """Return a seed for a request without one: different for each request, the same for a repeat of it."""
    digest = hashlib.sha256(f"{request.sampler_id}\0{request.seq}\0{request.request_id}".encode())
    return int.from_bytes(digest.digest()[:8], "little") >> 1


def _same(row: SamplerRow, payload: bytes) -> SamplerRow:
    if row.payload != payload:
        raise sampler_exists(row.sampler_id)
    return row


def _message(row: SamplerRow) -> pb.Sampler:
    return pb.Sampler(sampler_id=row.sampler_id, base_model=row.base_model, model_path=row.model_path)
