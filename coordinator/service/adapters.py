"""Adapters: create, look up, rename, delete.

Does not depend on how an adapter runs. Main invariant: a repeated creation returns the adapter of the first call.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace

from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.base.errors import Code, exists, invalid, not_found, unavailable, unmet
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.registry import adapter_of_row
from coordinator.operations.sessions import Session
from coordinator.payloads.canonical import serialize
from coordinator.payloads.passes import check_metadata
from coordinator.runtime.core import Core
from coordinator.service.access import (
    UseCases,
    check_adapter_name,
    check_index,
    metadata_of,
    request_id_taken,
    timestamp,
    uninterrupted,
)
from coordinator.service.listings import SLICE_ROWS, Listed
from coordinator.storage.rows import AdapterRow, CheckpointRow, FileUse, SnapshotRow, SortKey
from coordinator.storage.sqlite import ConflictError, StorageError, StoreBrokenError
from coordinator.tenants.keys import Authenticator
from coordinator.tenants.principals import Principal
from tinkerpool import names
from tinkerpool.v1 import adapters_pb2 as pb
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1.imports_pb2 import ImportCheckpointRequest
from workers.contract.messages import ALPHA_MAX, AdapterSpec, ModelInfo

DEFAULT_RANK = 32
DEFAULT_ALPHA = 32.0
CreateRequest = pb.CreateAdapterRequest | ImportCheckpointRequest
"""A request that creates an adapter: by index or request id."""
Start = tuple[SnapshotRow, FileUse]
"""The state that an adapter starts from, and what it took to write it."""
WriteStart = Callable[[AdapterLog], Awaitable[Start]]


class AdapterUseCases(UseCases):
    """AdapterService."""

    _deletions: dict[str, asyncio.Future[None]]
    """Running deletions by adapter: a repeated call waits for the same one."""

    def __init__(self, core: Core, authenticator: Authenticator) -> None:
        super().__init__(core, authenticator)
        self._deletions = {}

    @uninterrupted
    async def create_adapter(self, principal: Principal, request: pb.CreateAdapterRequest) -> pb.CreateAdapterResponse:
        """Create an adapter; return the existing one if the index or request id was used before."""
        self._core.admission.check_open()
        session = self._live_session(principal, request.session_id)
        check_metadata(request.user_metadata, self._core.config.limits)
        check_index(request)
        check_adapter_name(request.name)
        async with session.creating:
            return await self._create_adapter(principal, request, session, creation_payload(request))

    async def _create_adapter(
        self, principal: Principal, request: pb.CreateAdapterRequest, session: Session, payload: bytes
    ) -> pb.CreateAdapterResponse:
        if existing := self._existing_adapter(request):
            return pb.CreateAdapterResponse(adapter=self._message(self._same(existing, payload)))
        self._check_unused(request)
        source = self._readable_checkpoint(principal, request.from_path) if request.from_path else None
        model, spec = self._spec(request, source)
        write_start = None
        if source is not None:
            write_start = functools.partial(self._copy_start, source=source, with_optimizer=request.with_optimizer)
        row = await self._new_adapter(principal, request, session, payload, request.name, model.name, spec, write_start)
        return pb.CreateAdapterResponse(adapter=self._message(row))

    async def _new_adapter(
        self,
        principal: Principal,
        request: CreateRequest,
        session: Session,
        payload: bytes,
        name: str,
        base_model: str,
        spec: AdapterSpec,
        write_start: WriteStart | None,
    ) -> AdapterRow:
        """Make an adapter durable, with the state that it starts from, and register it; return its row.

        `spec` is without its id. Call it with `session.creating` held. Raises ServiceError.
        """
        self._core.quotas.check_permitted(principal.tenant_id, base_model, spec.rank)
        num_bytes = self._core.holdings.state_bytes(spec, base_model) + len(payload)
        with (
            self._core.ceilings.adapters.holding(principal.tenant_id),
            self._core.ceilings.stored_bytes.holding(principal.tenant_id, num_bytes),
        ):
            self._core.rates.take_creation(principal.tenant_id)
            index = session.take_adapter_index(request.index if request.HasField("index") else None)
            adapter_id = names.adapter_id(session.session_id, index)
            spec, now = replace(spec, adapter_id=adapter_id), self._core.time.wall()
            row = AdapterRow(
                adapter_id=adapter_id,
                tenant_id=principal.tenant_id,
                session_id=session.session_id,
                request_id=request.request_id or None,
                payload=payload,
                base_model=base_model,
                rank=spec.rank,
                alpha=spec.alpha,
                seed=spec.seed,
                train_attn=spec.train_attn,
                train_mlp=spec.train_mlp,
                train_unembed=spec.train_unembed,
                user_metadata=json.dumps(dict(request.user_metadata)),
                created_at=now,
                name=name,
                used_at=now,
            )
            adapter = adapter_of_row(row)
            start, use = (None, None) if write_start is None else await write_start(adapter)
            try:
                await self._core.store.adapters.insert(row, start, use)
            except StoreBrokenError:
                raise  # the row may be durable: the next start moves the folder aside if it is an orphan
            except StorageError as error:
                if start is not None:
                    self._core.states.remove_soon(self._core.states.folders.snapshots, start.folder)
                if not isinstance(error, ConflictError):
                    raise
                existing = self._existing_adapter(request)
                if existing is None:
                    raise request_id_taken() from None
                return self._same(existing, payload)
            self._core.registry.add(adapter)
            return self._row(adapter_id)

    async def get_adapter(self, principal: Principal, request: pb.GetAdapterRequest) -> pb.GetAdapterResponse:
        """Return an adapter and its next sequence number."""
        adapter = self._adapter(principal, request.adapter_id)
        return pb.GetAdapterResponse(adapter=self._message(self._row(adapter.adapter_id)))

    async def list_adapters(self, principal: Principal, request: pb.ListAdaptersRequest) -> pb.ListAdaptersResponse:
        """List the tenant's adapters, newest first."""
        listed = self.listed_adapters(principal, request)
        if request.labels:
            listed = await self._labelled_adapters(principal, request)
        adapters, token, total = await listed.page()
        return pb.ListAdaptersResponse(adapters=adapters, next_page_token=token, total_size=total)

    def listed_adapters(self, principal: Principal, request: pb.ListAdaptersRequest) -> Listed[AdapterRow, pb.Adapter]:
        """Return a part of the list of the tenant's adapters, newest first, to be read in slices; of any labels."""
        read = functools.partial(
            self._core.store.adapters.listing,
            principal.tenant_id,
            name_prefix=request.name_prefix,
            reference=request.reference,
        )
        return self._listed(principal, read, request, 20, self._message_of_listed)

    async def _labelled_adapters(
        self, principal: Principal, request: pb.ListAdaptersRequest
    ) -> Listed[AdapterRow, pb.Adapter]:
        """Return a part of the list of the tenant's adapters that have the labels of a request.

        No index has labels: the metadata of all its adapters is read for each page, in slices by turns of the tenants.
        """
        adapters, tenant_id = self._core.store.adapters, principal.tenant_id
        every = adapters.sort_keys(tenant_id, name_prefix=request.name_prefix, reference=request.reference)
        found: list[SortKey] = []
        for start in range(0, len(every), SLICE_ROWS):
            async with self._core.listing_turns.turn(tenant_id) as turn:
                matching, num_bytes = adapters.with_labels(every[start : start + SLICE_ROWS], request.labels)
                turn.use(num_bytes)
            found += matching
            await asyncio.sleep(0)
        read = functools.partial(adapters.listing_of, tenant_id, found)
        return self._listed(principal, read, request, 20, self._message_of_listed)

    def _message_of_listed(self, row: AdapterRow) -> pb.Adapter | None:
        return self._message(row) if self._core.registry.get(row.adapter_id) is not None else None

    @uninterrupted
    async def rename_adapter(self, principal: Principal, request: pb.RenameAdapterRequest) -> pb.RenameAdapterResponse:
        """Give an adapter another name."""
        check_adapter_name(request.name)
        adapter = self._adapter(principal, request.adapter_id)
        await self._core.store.adapters.rename(adapter.adapter_id, request.name)
        adapter.name = request.name
        return pb.RenameAdapterResponse(adapter=self._message(self._row(adapter.adapter_id)))

    async def delete_adapter(self, principal: Principal, request: pb.DeleteAdapterRequest) -> pb.DeleteAdapterResponse:
        """Delete an adapter; its unfinished operations fail."""
        row = self._core.store.adapters.of_tenant(principal.tenant_id, request.adapter_id)
        if row is not None and row.deleted_at is not None:
            return pb.DeleteAdapterResponse()
        if row is None or request.adapter_id not in self._deletions:
            deletion = self._deletion(self._adapter(principal, request.adapter_id), request)
            task = asyncio.ensure_future(self._core.tasks.uninterrupted(deletion))
            self._deletions[request.adapter_id] = task
            task.add_done_callback(functools.partial(self._deletion_ended, request.adapter_id))
        await asyncio.shield(self._deletions[request.adapter_id])
        return pb.DeleteAdapterResponse()

    async def _deletion(self, adapter: AdapterLog, request: pb.DeleteAdapterRequest) -> None:
        """Delete an adapter. No operation is accepted between the check of its use and the begin of its deletion."""
        if request.HasField("unless_used_after"):
            _check_unused_since(adapter, request.unless_used_after)
        error = ops_pb.OperationError(code=Code.CANCELLED, reason="ADAPTER_DELETED", message="the adapter was deleted")
        await self._core.deletions.delete(adapter, error)

    def _deletion_ended(self, adapter_id: str, task: asyncio.Task[None]) -> None:
        del self._deletions[adapter_id]
        if not task.cancelled():
            task.exception()  # mark it retrieved: all its callers may have been cancelled

    def _existing_adapter(self, request: CreateRequest) -> AdapterRow | None:
        if request.HasField("index"):
            adapter_id = names.adapter_id(request.session_id, request.index)
            return self._core.store.adapters.get(adapter_id)
        if not request.request_id:
            return None
        return self._core.store.adapters.of_request(request.session_id, request.request_id)

    def _made_before(self, principal: Principal, request: CreateRequest) -> AdapterRow | None:
        """Return the adapter that an earlier call made, also if its session has ended. Raises ServiceError."""
        self._session_row(principal, request.session_id, "SESSION_UNKNOWN")
        existing = self._existing_adapter(request)
        return self._same(existing, creation_payload(request)) if existing is not None else None

    def _check_unused(self, request: CreateRequest) -> None:
        """Refuse an index without a row that may have had an adapter, so that no id is given twice."""
        if request.HasField("index") and request.index < self._core.store.sessions.adapters_gone(request.session_id):
            raise unmet(
                "ADAPTER_DELETED",
                f"{names.adapter_id(request.session_id, request.index)} may have existed and been deleted long ago: "
                "use an index that this session has not used, or a request_id",
            )

    def _same(self, row: AdapterRow, payload: bytes) -> AdapterRow:
        if row.payload != payload:
            raise exists(
                "ADAPTER_EXISTS",
                f"{row.adapter_id} was created before with other settings: use another index or request_id",
            )
        return row

    def _spec(self, request: pb.CreateAdapterRequest, source: CheckpointRow | None) -> tuple[ModelInfo, AdapterSpec]:
        """Return the base model and the spec of the new adapter, with every default but without its id."""
        if not request.base_model and source is None:
            raise invalid(f"base_model is empty: name one of {', '.join(self._core.fleet.models)}")
        if source is not None and request.base_model not in ("", source.base_model):
            raise invalid(f"the checkpoint belongs to base model {source.base_model}, not {request.base_model}")
        model = self._model(request.base_model or (source.base_model if source else ""))
        origin = self._core.registry.spec(source.adapter_id) if source is not None else None
        rank = request.rank or (origin.rank if origin else min(DEFAULT_RANK, model.max_rank))
        is_imported = origin is not None and rank == origin.rank
        if rank < 1 or rank > model.max_rank or (rank & (rank - 1) and not is_imported):
            allowed = ", ".join(str(1 << i) for i in range(model.max_rank.bit_length()) if 1 << i <= model.max_rank)
            raise invalid(f"rank {rank} is not allowed: for {model.name} use one of {allowed}", "RANK_NOT_ALLOWED")
        alpha = request.alpha if request.HasField("alpha") else (origin.alpha if origin else DEFAULT_ALPHA)
        if not 0 < alpha <= ALPHA_MAX:
            raise invalid(f"alpha must be above 0 and at most {ALPHA_MAX:g}, not {alpha}")
        seed = request.seed if request.HasField("seed") else (origin.seed if origin else 0)
        flags = {}
        for name in ("train_attn", "train_mlp", "train_unembed"):
            flags[name] = getattr(request, name) if request.HasField(name) else getattr(origin, name, True)
        if not any(flags.values()):
            raise invalid("train_attn, train_mlp and train_unembed are all false: set at least one")
        if origin is not None and (rank, *flags.values()) != (
            origin.rank,
            origin.train_attn,
            origin.train_mlp,
            origin.train_unembed,
        ):
            raise invalid("rank and train_* must be those of the checkpoint: leave them out")
        spec = AdapterSpec(adapter_id="", rank=rank, alpha=alpha, seed=seed, **flags)
        self._check_size(model, spec)
        return model, spec

    def _check_size(self, model: ModelInfo, spec: AdapterSpec) -> None:
        """Refuse an adapter that takes more host memory, or more of a GPU, than any worker of the model offers."""
        fleet = self._core.fleet
        num_bytes, most = fleet.copy_bytes(model.name, spec), fleet.copy_bytes_max(model.name)
        if most is None or num_bytes <= most:
            return
        fitting = [
            str(rank)
            for rank in (1 << i for i in range(spec.rank.bit_length()))
            if fleet.copy_bytes(model.name, replace(spec, rank=rank)) <= most
        ]
        ways = [f"a rank of at most {fitting[-1]}"] if fitting else []
        needed = "--host-memory" if model.bank_bytes_max is None else "--host-memory and larger GPUs"
        ways += ["train_mlp=False"] if spec.train_mlp and (spec.train_attn or spec.train_unembed) else []
        instead = f"take {' or '.join(ways)}, or " if ways else ""
        raise invalid(
            f"an adapter of rank {spec.rank} of these modules of {model.name} takes {num_bytes / 1e6:,.0f} MB in a "
            f"worker (weights, moments, gradient), and its workers keep at most {most / 1e6:,.0f} MB of adapters: "
            f"{instead}ask for workers with more {needed}",
            "ADAPTER_TOO_LARGE",
        )

    async def move_adapter(self, principal: Principal, request: pb.MoveAdapterRequest) -> pb.MoveAdapterResponse:
        """Let an adapter go on on a worker."""
        core, log = self._core, self._core.registry.get(request.adapter_id)
        if log is None or not (principal.is_admin or log.tenant_id == principal.tenant_id):
            raise not_found("adapter", request.adapter_id)
        fleet, worker_id = core.fleet, request.worker_id
        if worker_id not in fleet.worker_ids() or fleet.worker(worker_id).info.model.name != log.base_model:
            raise not_found(f"worker of {log.base_model}", worker_id)
        worker = fleet.worker(worker_id)
        if worker not in fleet.available(log.base_model):
            raise unmet(
                "WORKER_NOT_READY",
                f"{worker_id} takes no work now: choose one that `tinkerpool worker list` shows ready",
            )
        core.loops[log.base_model].planning.memory.move(log, worker_id)
        return pb.MoveAdapterResponse(changes_numerics=log.fingerprint not in ("", worker.info.model.fingerprint))

    async def _copy_start(self, adapter: AdapterLog, source: CheckpointRow, with_optimizer: bool) -> Start:
        """Copy a checkpoint as the new adapter's first snapshot, so that the checkpoint may be deleted."""
        async with self._core.file_turns.turn(adapter.tenant_id) as turn:
            began = self._core.time.monotonic()
            state = await self._core.states.read_checkpoint(source)
            turn.use(2 * state.num_bytes)  # read and written
            if not with_optimizer:
                state = replace(state, optimizer=None, num_steps=0)
            start = await self._core.states.write_start(adapter, state)
            use = FileUse(
                adapter_id=adapter.adapter_id,
                base_model=adapter.base_model,
                tenant_id=adapter.tenant_id,
                kind="copy",
                num_bytes=turn.num_used,
                seconds=self._charge_files(adapter.tenant_id, adapter.base_model, began),
            )
            return start, use

    def _row(self, adapter_id: str) -> AdapterRow:
        row = self._core.store.adapters.get(adapter_id)
        assert row is not None
        return row

    def _message(self, row: AdapterRow) -> pb.Adapter:
        adapter = self._core.registry.get(row.adapter_id)
        if adapter is None and row.deleted_at is not None:
            raise unmet("ADAPTER_DELETED", f"{row.adapter_id} was deleted")
        if adapter is None:
            raise unavailable("ADAPTER_CHANGING", f"{row.adapter_id} is being deleted")
        model = self._core.fleet.models.get(row.base_model)
        return pb.Adapter(
            adapter_id=row.adapter_id,
            base_model=row.base_model,
            rank=row.rank,
            alpha=row.alpha,
            seed=row.seed,
            train_attn=row.train_attn,
            train_mlp=row.train_mlp,
            train_unembed=row.train_unembed,
            next_seq=adapter.next_seq,
            applied_seq=adapter.committed_seq,
            user_metadata=metadata_of(row),
            create_time=timestamp(row.created_at),
            session_id=row.session_id,
            trains_tied_unembedding=row.train_unembed and model is not None and model.has_tied_unembedding,
            name=row.name,
            last_use_time=timestamp(adapter.used_at),
        )


def creation_payload(request: CreateRequest) -> bytes:
    """Return the bytes that tell a repeated creation from another one."""
    canonical = copy.deepcopy(request)
    canonical.ClearField("request_id")
    return serialize(canonical)


def _check_unused_since(adapter: AdapterLog, moment: Timestamp) -> None:
    """Refuse the deletion of an adapter that was used after a moment, or has operations without an outcome."""
    used = timestamp(adapter.used_at)
    if adapter.unfinished():
        raise unmet("ADAPTER_IN_USE", f"{adapter.adapter_id} has unfinished operations")
    if used.ToNanoseconds() > moment.ToNanoseconds():
        raise unmet("ADAPTER_IN_USE", f"{adapter.adapter_id} has been used since, at {used.ToJsonString()}")
