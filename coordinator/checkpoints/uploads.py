"""Holds uploads: the weights of adapters that are being imported, in temporary files.

In memory, and gone with an epoch: its files are temporary folders, which the next start deletes. An upload lives as
long as its session, so heartbeats decide when it is abandoned. Each counts among its tenant's checkpoints as what its
import will save. Does not depend on the content of files.

Main invariants: an upload has exactly the bytes 0 to `num_bytes`, whatever is repeated or cancelled; a file is written,
read and removed under its upload's lock, so none is removed while a thread uses it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from coordinator.base.errors import Code, ServiceError, invalid, not_found
from coordinator.operations.holdings import NO_CLAIM, Claim, Holdings
from coordinator.payloads.peft_weights import ImportPlan
from coordinator.storage.folders import StateFiles, TemporaryFile

Write = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs a write on a thread."""


@dataclass(slots=True, kw_only=True, eq=False)
class Upload:
    """One upload."""

    tenant_id: str
    session_id: str
    upload_id: str
    payload: bytes
    """The canonical request: a repeat has the same."""
    plan: ImportPlan
    claim: Claim
    """What its import will save, as long as that is counted."""
    file: TemporaryFile
    num_bytes: int = 0
    """Bytes that it has."""
    is_removed: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_complete(self) -> bool:
        """Whether it has all bytes."""
        return self.num_bytes == self.plan.num_bytes


class Uploads:
    """The uploads of live sessions."""

    def __init__(self, files: StateFiles, holdings: Holdings) -> None:
        """`files`: where temporary files are made."""
        self._files = files
        self._holdings = holdings
        self._uploads: dict[tuple[str, str], Upload] = {}

    def find(self, session_id: str, upload_id: str) -> Upload | None:
        """Return the upload of this id, if the session has one."""
        return self._uploads.get((session_id, upload_id))

    def get(self, session_id: str, upload_id: str) -> Upload:
        """Return an upload. Raises ServiceError."""
        if (upload := self.find(session_id, upload_id)) is None:
            raise not_found("upload", upload_id)
        return upload

    def add(
        self, tenant_id: str, session_id: str, upload_id: str, payload: bytes, plan: ImportPlan, claim: Claim
    ) -> Upload:
        """Begin an upload of a live session, and count its claim."""
        assert (session_id, upload_id) not in self._uploads
        upload = Upload(
            tenant_id=tenant_id,
            session_id=session_id,
            upload_id=upload_id,
            payload=payload,
            plan=plan,
            claim=claim,
            file=self._files.temporary(),
        )
        self._uploads[session_id, upload_id] = upload
        self._holdings.claim(tenant_id, claim)
        return upload

    @asynccontextmanager
    async def using(self, upload: Upload) -> AsyncIterator[None]:
        """Keep an upload, alone, while the block uses its file. Raises ServiceError if it has ended."""
        async with upload.lock:
            if upload.is_removed:
                raise not_found("upload", upload.upload_id)
            yield

    async def append(self, upload: Upload, offset: int, data: bytes, write: Write) -> None:
        """Write the next bytes by `write`, which calls its argument on a thread; nothing if the upload has them.

        Raises ServiceError, and OSError.
        """
        async with self.using(upload):
            end = offset + len(data)
            if not data or end > upload.plan.num_bytes:
                raise invalid(
                    f"the part has {len(data)} bytes from {offset} on, of an upload of {upload.plan.num_bytes}: send "
                    "at least one byte, and none behind the end"
                )
            if offset >= 0 and end <= upload.num_bytes:
                return
            if offset != upload.num_bytes:
                raise ServiceError(
                    Code.FAILED_PRECONDITION,
                    "UPLOAD_OFFSET",
                    f"the upload has {upload.num_bytes} bytes, and the part begins at {offset}: go on from "
                    f"{upload.num_bytes}",
                    metadata={"num_bytes": str(upload.num_bytes)},
                )
            await write(functools.partial(upload.file.write, offset, data))
            upload.num_bytes = end

    def uncount(self, upload: Upload) -> None:
        """Stop counting what its import will save. Idempotent."""
        self._holdings.claim(upload.tenant_id, upload.claim, -1)
        upload.claim = NO_CLAIM

    async def remove(self, upload: Upload) -> None:
        """End an upload: its claim now, its file when no thread uses it. Idempotent."""
        if self._uploads.get((upload.session_id, upload.upload_id)) is upload:
            del self._uploads[upload.session_id, upload.upload_id]
        self.uncount(upload)
        async with upload.lock:
            if not upload.is_removed:
                upload.is_removed = True
                await asyncio.to_thread(upload.file.remove)

    async def end_session(self, session_id: str) -> None:
        """Remove the uploads of a session that has ended."""
        for upload in [each for each in self._uploads.values() if each.session_id == session_id]:
            await self.remove(upload)
