"""Holds uploads: adapters that are being imported, each in a temporary file.

A file has the request that began the upload, then the data. In memory an upload is a few hundred bytes, whatever was
sent, and it is gone with an epoch: temporary folders are deleted by the next start. An upload lives as long as its
session, so heartbeats decide when it is abandoned. It counts among its tenant's checkpoints as what its import will
save. Does not depend on the content of files.

Main invariants: an upload has exactly the bytes 0 to `num_bytes` of its data, whatever is repeated or cancelled; a file
is written, read and removed under its upload's lock, so none is removed while a thread uses it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from coordinator.base.errors import invalid, not_found, unmet
from coordinator.operations.holdings import NO_CLAIM, Claim, Holdings
from coordinator.storage.folders import StateFiles, TemporaryFile

Write = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs a write on a thread."""


@dataclass(slots=True, kw_only=True, eq=False)
class Upload:
    """One upload."""

    tenant_id: str
    session_id: str
    upload_id: str
    request_hash: bytes
    """Of the request that began it: a repeat has the same."""
    base_model: str
    size_bytes: int
    """Of its data, when it is complete."""
    claim: Claim
    """What its import will save, and its request takes; as long as that is counted."""
    file: TemporaryFile
    head_bytes: int
    """Of the request, before the data."""
    num_bytes: int = 0
    """Of the data that it has."""
    is_removed: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_complete(self) -> bool:
        """Whether it has all data."""
        return self.num_bytes == self.size_bytes

    def read_request(self) -> bytes:
        """Return the request that began it. Raises OSError."""
        return self.file.read(0, self.head_bytes)

    def read_data(self, start: int, num_bytes: int) -> bytes:
        """Return a part of its data. Raises OSError."""
        return self.file.read(self.head_bytes + start, num_bytes)


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

    def new_file(self) -> TemporaryFile:
        """Return the file of a new upload, which is made when it is first written."""
        return self._files.temporary()

    async def add(self, upload: Upload, request: bytes, write: Write) -> None:
        """Begin an upload of a live session: it is found, and its claim counted, before anything is awaited.

        Raises OSError; there is no upload then.
        """
        assert (upload.session_id, upload.upload_id) not in self._uploads
        self._uploads[upload.session_id, upload.upload_id] = upload
        self._holdings.claim(upload.tenant_id, upload.claim)
        try:
            async with self.using(upload):
                await write(functools.partial(upload.file.write, 0, request))
        except OSError:
            await self.remove(upload)
            raise

    @asynccontextmanager
    async def using(self, upload: Upload) -> AsyncIterator[None]:
        """Keep an upload, alone, while the block uses its file. Raises ServiceError if it has ended."""
        async with upload.lock:
            if upload.is_removed:
                raise not_found("upload", upload.upload_id)
            yield

    async def append(self, upload: Upload, offset: int, data: bytes, write: Write) -> None:
        """Write the next bytes of the data; nothing if the upload has them. Raises ServiceError, and OSError."""
        async with self.using(upload):
            end = offset + len(data)
            if not data or end > upload.size_bytes:
                raise invalid(
                    f"the part has {len(data)} bytes from {offset} on, of an upload of {upload.size_bytes}: send "
                    "at least one byte, and none behind the end"
                )
            if offset >= 0 and end <= upload.num_bytes:
                return
            if offset != upload.num_bytes:
                raise unmet(
                    "UPLOAD_OFFSET",
                    f"the upload has {upload.num_bytes} bytes, and the part begins at {offset}: go on from "
                    f"{upload.num_bytes}",
                    metadata={"num_bytes": str(upload.num_bytes)},
                )
            await write(functools.partial(upload.file.write, upload.head_bytes + offset, data))
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
