"""Base models' tokenizers as directories: the SDK loads a tokenizer by its place, and no hub has everybody's."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from coordinator.service import Service
from coordinator.service.auth import Principal
from coordinator.storage.disk import Disk, RealDisk
from tinkerpool.v1 import sessions_pb2 as pb

_NOBODY = Principal(tenant_id="", tenant_name="", key_id="", is_admin=False)
"""What is asked here is the same for everybody."""


async def leave_tokenizers(service: Service, root: Path, disk: Disk | None = None) -> dict[str, Path]:
    """Write every base model's tokenizer below `root` unless it is there; base model to directory. Raises OSError.

    `disk` holds them; by default it is the machine's.
    """
    directories = {}
    capabilities = await service.get_capabilities(_NOBODY, pb.GetCapabilitiesRequest())
    for model in capabilities.base_models:
        found = await service.get_tokenizer(_NOBODY, pb.GetTokenizerRequest(base_model=model.name))
        if found.files:
            directories[model.name] = await asyncio.to_thread(
                _leave, disk or RealDisk(), root, model.name, dict(found.files)
            )
    return directories


def _leave(disk: Disk, root: Path, name: str, files: Mapping[str, bytes]) -> Path:
    """Write files under a name that changes with them, in one step: a reader sees all of them or none, ever."""
    digest = hashlib.sha256()
    for file_name in sorted(files):
        digest.update(f"{file_name}\0{len(files[file_name])}\0".encode())
        digest.update(files[file_name])
    directory = root / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('.-')[:80]}-{digest.hexdigest()[:12]}"
    disk.make_folder(root)
    if directory.name in disk.names(root):
        return directory
    temporary = root / f".writing-{directory.name}"
    disk.make_folder(temporary)
    for file_name, content in files.items():
        path = temporary / Path(file_name).name
        disk.write(path, content)
        disk.sync(path)
    disk.sync(temporary)  # or after a power cut the name could be there, and the files not
    disk.rename(temporary, directory)
    return directory
