"""Sends a PEFT directory to a pool, which makes a checkpoint of it.

The pool decides whether an adapter can be imported; here only the form of the files is checked. Main invariant: the
weights are sent only after the pool has accepted configuration and header, and from one open file, so that they belong
to that header.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

from tinkerpool import types
from tinkerpool.client.calls import methods
from tinkerpool.client.calls.connection import Connection
from tinkerpool.client.export import BASE_WEIGHTS, CONFIG, FACTS, WEIGHTS, served_model
from tinkerpool.client.session import Session
from tinkerpool.errors import NotFound, NotImportable
from tinkerpool.names import is_adapter_name, is_checkpoint_name
from tinkerpool.tensor_files import read_header_text
from tinkerpool.v1 import imports_pb2, sessions_pb2

UPLOAD_ID = "adapter"
"""Each import has a session of its own."""
UPLOADS_MAX = 5
"""Most uploads of one import: a pool that restarts has lost the one before."""
HEADER_BYTES_MAX = 1 << 20
"""Most characters of a header: four times that of a model of 100 layers. The pool refuses longer ones, too."""
PICKLED = "adapter_model.bin"

OnProgress = Callable[[int, int], None]
"""Called with the bytes that were sent and those of the whole upload, on the client's background thread."""


@dataclass(slots=True, kw_only=True)
class Adapter:
    """The files of an adapter, the weights open. A context manager, which closes them."""

    directory: Path
    config: str
    header: str
    weights: BinaryIO
    data_offset: int
    """Where the tensors begin in the file of the weights."""
    num_bytes: int
    """Bytes of the tensors, by the size of the file."""
    base_weights: str = ""
    """Which weights of the base model it was trained on, if an export of a pool says it."""

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Raises NotImportable for a directory without an adapter in safetensors, and OSError."""
        if not directory.is_dir():
            raise NotImportable(f"{directory} is not a directory: give the one that save_pretrained wrote")
        names = {path.name for path in directory.iterdir()}
        if CONFIG not in names:
            merged = f", and its {FACTS} is of an export: a merged model has no adapter" if FACTS in names else ""
            raise NotImportable(
                f"there is no {CONFIG} in {directory}{merged}: give the directory that PEFT's save_pretrained wrote"
            )
        if WEIGHTS not in names:
            why = f"{PICKLED} is a pickle, which can run code: " if PICKLED in names else ""
            raise NotImportable(
                f"there is no {WEIGHTS} in {directory}. {why}Load the adapter with PEFT, and save it again with "
                "save_pretrained(DIR, safe_serialization=True)"
            )
        weights = (directory / WEIGHTS).open("rb")
        try:
            config = (directory / CONFIG).read_text(encoding="utf-8")
            header, data_offset = read_header_text(weights)
            if len(header) > HEADER_BYTES_MAX:
                raise ValueError(f"the header of {WEIGHTS} has {len(header)} characters, which no LoRA adapter needs")
            num_bytes = weights.seek(0, 2) - data_offset
        except ValueError as error:
            weights.close()
            raise NotImportable(f"{directory} cannot be read: {error}") from None
        return cls(
            directory=directory,
            config=config,
            header=header,
            weights=weights,
            data_offset=data_offset,
            num_bytes=num_bytes,
            base_weights=_base_weights(directory / FACTS),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.weights.close()

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return bytes of the tensors."""
        self.weights.seek(self.data_offset + start)
        return self.weights.read(num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """What to make of an adapter."""

    name: str
    base_model: str = ""
    seed: int | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    ttl_seconds: int = 0
    adapter_name: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for a name that no checkpoint or adapter can have, before anything is sent."""
        if not is_checkpoint_name(self.name):
            raise ValueError(
                f"name {self.name[:80]!r} is not allowed: 1 to 128 of letters, digits, '-', '_' and '.', not beginning "
                "with a dot"
            )
        if self.adapter_name and not is_adapter_name(self.adapter_name):
            raise ValueError(
                f"adapter_name {self.adapter_name[:120]!r} is not allowed: at most 100 printable characters, no '/', "
                "no space at the ends"
            )


async def import_adapter(
    connection: Connection, adapter: Adapter, what: Import, on_progress: OnProgress | None
) -> types.ImportCheckpointResponse:
    """Import an adapter in a session of its own, so that nothing is left of an upload that fails.

    Raises ApiError, and NotImportable if the file has another size than its header says.
    """
    session = Session(connection, {})
    try:
        return await _import(connection, await session.id(), adapter, what, on_progress or (lambda done, total: None))
    finally:
        await session.close()


async def _import(
    connection: Connection, session_id: str, adapter: Adapter, what: Import, on_progress: OnProgress
) -> types.ImportCheckpointResponse:
    create = imports_pb2.CreateUploadRequest(
        session_id=session_id,
        upload_id=UPLOAD_ID,
        adapter_config=adapter.config,
        weights_header=adapter.header,
        base_model=what.base_model,
    )
    finish = imports_pb2.ImportCheckpointRequest(
        session_id=session_id,
        index=0,
        upload_id=UPLOAD_ID,
        name=what.name,
        user_metadata=what.user_metadata,
        seed=what.seed,
        ttl_seconds=what.ttl_seconds,
        adapter_name=what.adapter_name,
    )
    for attempt in range(UPLOADS_MAX):
        upload = (await connection.call(methods.CREATE_UPLOAD, create)).upload
        if upload.size_bytes != adapter.num_bytes:
            raise NotImportable(
                f"{WEIGHTS} has {adapter.num_bytes} bytes of tensors, its header says {upload.size_bytes}: the file "
                "is not complete; copy it again"
            )
        try:
            await _send(connection, session_id, adapter, upload, on_progress)
            checkpoint = (await connection.call(methods.IMPORT_CHECKPOINT, finish)).checkpoint
        except NotFound:
            if attempt == UPLOADS_MAX - 1:
                raise
            continue  # the pool was restarted: its uploads are gone
        return types.ImportCheckpointResponse(
            path=checkpoint.path,
            model_id=checkpoint.adapter_id,
            base_model=upload.base_model,
            lora_rank=upload.rank,
            lora_alpha=upload.alpha,
            notes=(*upload.notes, *await _notes_on_weights(connection, adapter, upload.base_model)),
        )
    raise AssertionError("every upload ends in a return or an error")


async def _notes_on_weights(connection: Connection, adapter: Adapter, base_model: str) -> list[str]:
    """Return a note if the adapter was trained on other weights than the base model has here."""
    if not adapter.base_weights:
        return []
    pool = await connection.call(methods.GET_CAPABILITIES, sessions_pb2.GetCapabilitiesRequest())
    served = served_model(pool, base_model)
    if served is None or served.weights_id in {"", adapter.base_weights}:
        return []
    return [
        f"the adapter was trained on other weights ({adapter.base_weights}) than {base_model} has in this pool "
        f"({served.weights_id}): here it computes something else"
    ]


def _base_weights(facts: Path) -> str:
    """Return what an export's facts say of the base model; empty: there are none, or they say nothing."""
    try:
        return str(json.loads(facts.read_text(encoding="utf-8"))[BASE_WEIGHTS])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


async def _send(
    connection: Connection, session_id: str, adapter: Adapter, upload: imports_pb2.Upload, on_progress: OnProgress
) -> None:
    """Send what the upload lacks."""
    done = upload.num_bytes
    on_progress(done, upload.size_bytes)
    while done < upload.size_bytes:
        data = await asyncio.to_thread(adapter.read, done, upload.part_bytes_max)
        part = imports_pb2.UploadPartRequest(session_id=session_id, upload_id=UPLOAD_ID, offset=done, data=data)
        done = (await connection.call(methods.UPLOAD_PART, part)).num_bytes
        on_progress(done, upload.size_bytes)
