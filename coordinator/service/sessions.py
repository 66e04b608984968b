"""Sessions, capabilities and tokenizers."""

from __future__ import annotations

import asyncio
import functools
import json
import uuid
from collections.abc import Mapping
from weakref import WeakValueDictionary

from coordinator.base.config import VERSION
from coordinator.payloads.passes import check_metadata
from coordinator.runtime.core import Core
from coordinator.service.access import UseCases, metadata_of, timestamp, uninterrupted
from coordinator.storage.rows import Place, SessionRow
from coordinator.tenants.keys import Authenticator
from coordinator.tenants.principals import Principal
from tinkerpool.v1 import sessions_pb2 as pb
from workers.contract.loss_inputs import LOSS_RULES


class SessionUseCases(UseCases):
    """SessionService."""

    _creating: WeakValueDictionary[tuple[str, str], asyncio.Lock]
    """The lock of the running creations with one request id, by tenant and id: a repeat finds the first one's session.
    """

    def __init__(self, core: Core, authenticator: Authenticator) -> None:
        super().__init__(core, authenticator)
        self._creating = WeakValueDictionary()

    async def get_capabilities(
        self, principal: Principal, request: pb.GetCapabilitiesRequest
    ) -> pb.GetCapabilitiesResponse:
        """Return the base models, losses and limits of the pool."""
        limits = self._core.config.limits
        return pb.GetCapabilitiesResponse(
            base_models=[
                pb.BaseModel(
                    name=model.name,
                    num_params=model.num_params,
                    vocab_size=model.vocab_size,
                    max_sequence_tokens=model.max_seq_len,
                    max_rank=model.max_rank,
                    chunk_tokens=model.chunk_tokens,
                    num_workers=len(self._core.fleet.available(model.name)),
                    eos_token_ids=model.eos_token_ids,
                    fingerprint=model.fingerprint,
                    has_tied_unembedding=model.has_tied_unembedding,
                    weights_id=model.weights_id,
                )
                for model in self._core.fleet.models.values()
            ],
            version=VERSION,
            loss_functions=list(LOSS_RULES),
            max_message_bytes=limits.message_bytes_max,
            max_datums=limits.datums_max,
            tenant=principal.tenant_name,
            role=principal.role,
            key_id=principal.key_id,
        )

    async def get_tokenizer(self, principal: Principal, request: pb.GetTokenizerRequest) -> pb.GetTokenizerResponse:
        """Return a base model's tokenizer files."""
        return pb.GetTokenizerResponse(files=dict(self._model(request.base_model).tokenizer_files))

    @uninterrupted
    async def create_session(self, principal: Principal, request: pb.CreateSessionRequest) -> pb.CreateSessionResponse:
        """Create a session; return the existing one if the request id was used before."""
        self._core.admission.check_open()
        check_metadata(request.user_metadata, self._core.config.limits)
        creating = asyncio.Lock()
        if request.request_id:
            creating = self._creating.setdefault((principal.tenant_id, request.request_id), creating)
        try:
            async with creating:
                return await self._create_session(principal, request)
        finally:
            del creating  # the traceback of a refusal would keep it

    async def _create_session(self, principal: Principal, request: pb.CreateSessionRequest) -> pb.CreateSessionResponse:
        core, tenant_id = self._core, principal.tenant_id
        if request.request_id and (existing := core.store.sessions.of_request(tenant_id, request.request_id)):
            core.sessions.add(existing.session_id)
            return pb.CreateSessionResponse(session=self._session(existing))
        session_id = str(uuid.uuid4())
        row = SessionRow(
            session_id=session_id,
            tenant_id=tenant_id,
            request_id=request.request_id or None,
            user_metadata=_to_json(request.user_metadata),
            created_at=core.time.wall(),
        )
        storing = core.ceilings.stored_bytes.holding(tenant_id, len(row.user_metadata))
        with core.ceilings.sessions.holding(tenant_id), storing:
            core.rates.take_creation(tenant_id)
            await core.store.sessions.insert(row)
            core.sessions.add(session_id)
        return pb.CreateSessionResponse(session=self._session(self._session_row(principal, session_id)))

    async def heartbeat(self, principal: Principal, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        """Keep a session alive."""
        self._live_session(principal, request.session_id)
        return pb.HeartbeatResponse()

    @uninterrupted
    async def finish_session(self, principal: Principal, request: pb.FinishSessionRequest) -> pb.FinishSessionResponse:
        """End a session."""
        self._session_row(principal, request.session_id)
        await self._core.housekeeping.end_session(request.session_id)
        return pb.FinishSessionResponse()

    async def get_session(self, principal: Principal, request: pb.GetSessionRequest) -> pb.GetSessionResponse:
        """Return a session."""
        return pb.GetSessionResponse(session=self._session(self._session_row(principal, request.session_id)))

    async def list_sessions(self, principal: Principal, request: pb.ListSessionsRequest) -> pb.ListSessionsResponse:
        """List the tenant's live sessions, newest first."""
        read = functools.partial(self._core.store.sessions.listing, principal.tenant_id)
        listed = self._listed(principal, read, request, 20, self._session)
        sessions, token, total = await listed.page()
        return pb.ListSessionsResponse(sessions=sessions, next_page_token=token, total_size=total)

    async def session_ids(self, principal: Principal, limit: int, offset: int) -> list[str]:
        """Return the ids of the tenant's live sessions, newest first, without reading the sessions."""
        return self._core.store.sessions.listing(principal.tenant_id, limit, Place(skip=offset)).keys

    async def find_session(self, principal: Principal, user_metadata: Mapping[str, str]) -> str:
        """Return the id of the tenant's newest live session with exactly this metadata; empty if there is none."""
        row = self._core.store.sessions.live_with_metadata(principal.tenant_id, _to_json(user_metadata))
        return row.session_id if row is not None else ""

    def _session(self, row: SessionRow) -> pb.Session:
        store = self._core.store
        return pb.Session(
            session_id=row.session_id,
            user_metadata=metadata_of(row),
            adapter_ids=store.adapters.ids_of_session(row.session_id),
            sampler_ids=store.samplers.ids_of_session(row.session_id),
            create_time=timestamp(row.created_at),
            is_live=row.ended_at is None,
        )


def _to_json(user_metadata: Mapping[str, str]) -> str:
    return json.dumps(dict(user_metadata))
