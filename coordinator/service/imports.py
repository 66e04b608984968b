"""Imports: an adapter is checked before its data comes, received in parts, and becomes an adapter with a checkpoint.

The adapter is made as one from a checkpoint is: with a start state. Then it is saved, as any adapter. Does not depend
on how configurations and weights are read. Main invariants: nothing of an upload is in an adapter before every name,
shape, type and value was checked; every step is safe to repeat, so the calls are.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from coordinator.base.errors import Code, ServiceError, exists, invalid, unmet
from coordinator.checkpoints.states import cannot_write
from coordinator.checkpoints.uploads import Upload, Write
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.holdings import Claim
from coordinator.payloads.canonical import digest, serialize
from coordinator.payloads.passes import check_metadata
from coordinator.payloads.peft_config import read_config
from coordinator.payloads.peft_weights import ImportPlan, is_same_model, plan_import, state_weights
from coordinator.service.access import check_adapter_name, check_index, check_ttl, uninterrupted
from coordinator.service.adapters import Start, creation_payload
from coordinator.service.checkpoints import CopyUseCases
from coordinator.storage.folders import TemporaryFile
from coordinator.storage.rows import AdapterRow, FileUse
from coordinator.tenants.principals import Principal
from tinkerpool import names
from tinkerpool.v1 import checkpoints_pb2 as checkpoints_pb
from tinkerpool.v1 import imports_pb2 as pb
from workers.contract.contents import Content
from workers.contract.messages import AdapterState, ModelInfo

PART_BYTES = 4 << 20
"""Most bytes of one part, unless a message may only have fewer."""
_HEAD_BYTES = 4096
"""Of a message with a part: everything but its data."""


class ImportUseCases(CopyUseCases):
    """ImportService, which combines use cases of several services, as a copy does."""

    @uninterrupted
    async def create_upload(self, principal: Principal, request: pb.CreateUploadRequest) -> pb.CreateUploadResponse:
        """Begin an upload of an adapter that can be imported; return the existing one if it has the same content."""
        core, uploads = self._core, self._core.states.uploads
        core.admission.check_open()
        self._live_session(principal, request.session_id)
        if not names.is_checkpoint_name(request.upload_id):
            raise invalid(
                f"upload_id {request.upload_id[:80]!r} is not allowed: take letters, digits, '-', '_' and '.'"
            )
        payload = serialize(request)
        async with core.decode_turns.turn(principal.tenant_id) as turn:
            turn.use(len(payload))
            plan = await asyncio.to_thread(self._plan, request)
        # From here to the registration nothing is awaited, so calls at the same time neither begin it twice nor exceed
        # a ceiling together.
        self._live_session(principal, request.session_id)
        if (upload := uploads.find(request.session_id, request.upload_id)) is None:
            upload = self._new_upload(principal, request, payload, plan)
            try:
                await uploads.add(upload, payload, self._writer(upload, len(payload)))
            except OSError as error:
                raise cannot_write("the upload", error) from None
        elif upload.request_hash != digest(payload, "upload"):
            raise exists(
                "UPLOAD_EXISTS",
                f"upload {upload.upload_id} was created before with other content: use another upload_id",
            )
        return pb.CreateUploadResponse(upload=self._upload_message(upload, plan))

    @uninterrupted
    async def upload_part(self, principal: Principal, request: pb.UploadPartRequest) -> pb.UploadPartResponse:
        """Write the next bytes of an upload."""
        self._core.admission.check_open()
        self._live_session(principal, request.session_id)
        uploads = self._core.states.uploads
        upload = uploads.get(request.session_id, request.upload_id)
        try:
            await uploads.append(upload, request.offset, request.data, self._writer(upload, len(request.data)))
        except OSError as error:
            raise cannot_write("the upload", error) from None
        return pb.UploadPartResponse(num_bytes=upload.num_bytes)

    async def import_checkpoint(
        self, principal: Principal, request: pb.ImportCheckpointRequest
    ) -> pb.ImportCheckpointResponse:
        """Make an adapter of a complete upload, and save it as a checkpoint."""
        core, uploads = self._core, self._core.states.uploads
        core.admission.check_open()
        check_ttl(request.ttl_seconds)
        check_index(request)
        check_metadata(request.user_metadata, core.config.limits)
        check_adapter_name(request.adapter_name)
        if not names.is_checkpoint_name(request.name):
            raise invalid(f"name {request.name[:80]!r} is not allowed: take letters, digits, '-', '_' and '.'")
        if not request.request_id and not request.HasField("index"):
            raise invalid("request_id is empty: set it, or index, so that the call is safe to repeat")
        made = self._made_before(principal, request)
        adapter = self._message(made if made is not None else await self._imported(principal, request))
        upload = uploads.find(request.session_id, request.upload_id)
        if upload is not None:
            uploads.uncount(upload)  # the save claims the same, before another call of the tenant can
        save = checkpoints_pb.SaveStateRequest(
            adapter_id=adapter.adapter_id,
            name=request.name,
            user_metadata=dict(request.user_metadata),
            ttl_seconds=request.ttl_seconds,
        )
        if not self._is_accepted(save):
            await self.save_state(principal, save)
        if upload is not None:
            await uploads.remove(upload)
        return pb.ImportCheckpointResponse(checkpoint=await self._saved(principal, save))

    @uninterrupted
    async def _imported(self, principal: Principal, request: pb.ImportCheckpointRequest) -> AdapterRow:
        """Return the adapter of an import: of an earlier call, or a new one."""
        payload = creation_payload(request)
        session = self._live_session(principal, request.session_id)
        async with session.creating:
            if existing := self._existing_adapter(request):
                return self._same(existing, payload)
            self._check_unused(request)
            upload = self._core.states.uploads.get(request.session_id, request.upload_id)
            if not upload.is_complete:
                raise unmet(
                    "UPLOAD_INCOMPLETE",
                    f"the upload has {upload.num_bytes} of {upload.size_bytes} bytes: send the rest",
                )
            plan = await self._plan_again(upload)
            return await self._new_adapter(
                principal,
                request,
                session,
                payload,
                request.adapter_name,
                plan.base_model,
                plan.spec(seed=request.seed),
                functools.partial(self._upload_start, upload=upload, plan=plan),
            )

    async def _upload_start(self, adapter: AdapterLog, upload: Upload, plan: ImportPlan) -> Start:
        """Write the state that an imported adapter starts from. Values that are not finite end the upload."""
        states, seed = self._core.states, adapter.spec.seed
        try:
            async with states.uploads.using(upload), self._core.file_turns.turn(adapter.tenant_id) as turn:
                began = self._core.time.monotonic()
                try:
                    weights = await asyncio.to_thread(_weights, plan, seed, upload, states.uploads.new_file())
                except OSError as error:
                    raise cannot_write("the upload", error) from None
                turn.use(plan.num_bytes + len(weights))  # read and written
                state = AdapterState(
                    weights=weights,
                    optimizer=None,
                    num_steps=0,
                    applied_seq=0,
                    fingerprint=self._core.fleet.models[plan.base_model].fingerprint,
                )
                start = await states.write_start(adapter, state)
                use = FileUse(
                    adapter_id=adapter.adapter_id,
                    base_model=adapter.base_model,
                    tenant_id=adapter.tenant_id,
                    kind="import",
                    num_bytes=plan.num_bytes + turn.num_used,  # the parts, too, were written
                    seconds=self._charge_files(adapter.tenant_id, plan.base_model, began),
                )
                return start, use
        except ServiceError as error:
            if error.code is Code.INVALID_ARGUMENT:
                await states.uploads.remove(upload)
            raise

    def _writer(self, upload: Upload, num_bytes: int) -> Write:
        """Return a function that runs a write of so many bytes on a thread, in a turn of the tenant."""

        async def write(work: Callable[[], None]) -> None:
            async with self._core.file_turns.turn(upload.tenant_id) as turn:
                began = self._core.time.monotonic()
                await asyncio.to_thread(work)
                turn.use(num_bytes)
                self._charge_files(upload.tenant_id, upload.base_model, began)

        return write

    def _plan(self, request: pb.CreateUploadRequest) -> ImportPlan:
        """Check configuration and header against the base model. Raises ServiceError."""
        config = read_config(request.adapter_config)
        return plan_import(config, request.weights_header, self._base_model(request.base_model, config.base_model))

    async def _plan_again(self, upload: Upload) -> ImportPlan:
        """Return the plan of an upload, from its request. Raises ServiceError."""

        def read() -> ImportPlan:
            return self._plan(pb.CreateUploadRequest.FromString(upload.read_request()))

        try:
            async with self._core.states.uploads.using(upload), self._core.decode_turns.turn(upload.tenant_id) as turn:
                turn.use(upload.head_bytes)
                return await asyncio.to_thread(read)
        except OSError as error:
            raise cannot_write("the upload", error) from None

    def _base_model(self, name: str, hint: str) -> ModelInfo:
        """Return the base model that a request names, or the only one, or the one that a configuration names."""
        models = self._core.fleet.models
        meant = [each for each in models if hint and is_same_model(hint, each)]
        if not name and len(models) != 1 and len(meant) != 1:
            raise invalid(
                f"base_model is empty, and adapter_config.json names {hint[:200]!r}: name one of {', '.join(models)}"
            )
        return self._model(name or (meant[0] if len(meant) == 1 else next(iter(models))))

    def _new_upload(
        self, principal: Principal, request: pb.CreateUploadRequest, payload: bytes, plan: ImportPlan
    ) -> Upload:
        """Return a new upload, if its import has room. Raises ServiceError."""
        core, tenant_id = self._core, principal.tenant_id
        self._core.quotas.check_permitted(principal.tenant_id, plan.base_model, plan.rank)
        spec = plan.spec(seed=0)
        self._check_size(self._model(plan.base_model), spec)
        save = checkpoints_pb.SaveStateRequest(name=request.upload_id)
        claim = core.holdings.claim_of_save(spec, plan.base_model, save).plus(Claim(num_bytes=len(payload)))
        if (refusal := core.ceilings.refusal(tenant_id, claim)) is not None:
            raise refusal
        core.ceilings.adapters.check(tenant_id)
        core.rates.take_creation(tenant_id)
        return Upload(
            tenant_id=tenant_id,
            session_id=request.session_id,
            upload_id=request.upload_id,
            request_hash=digest(payload, "upload"),
            base_model=plan.base_model,
            size_bytes=plan.num_bytes,
            claim=claim,
            file=core.states.uploads.new_file(),
            head_bytes=len(payload),
        )

    def _upload_message(self, upload: Upload, plan: ImportPlan) -> pb.Upload:
        return pb.Upload(
            base_model=plan.base_model,
            rank=plan.rank,
            alpha=plan.alpha,
            train_attn="attn" in plan.kinds,
            train_mlp="mlp" in plan.kinds,
            train_unembed="unembed" in plan.kinds,
            size_bytes=upload.size_bytes,
            num_bytes=upload.num_bytes,
            part_bytes_max=min(PART_BYTES, self._core.config.limits.message_bytes_max - _HEAD_BYTES),
            notes=plan.notes,
        )


def _weights(plan: ImportPlan, seed: int, upload: Upload, file: TemporaryFile) -> Content:
    """Return the weights of an imported adapter, by way of a file. Raises OSError and ServiceError."""
    end = 0
    try:
        for piece in state_weights(plan, seed, upload.read_data):
            file.write(end, piece)
            end += len(piece)
        return file.content()
    finally:
        file.remove()
