"""Tokenizers of the base models as directories on this machine: the SDK loads a tokenizer by path or from a hub, and a
hub does not have those of private models.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from coordinator.service import Service
from coordinator.storage.disk import FULL, Disk, RealDisk
from coordinator.tenants.principals import Principal, Role
from tinkerpool.v1 import sessions_pb2 as pb

_log = logging.getLogger(__name__)
_NO_TENANT = Principal(tenant_id="", tenant_name="", key_id="", role=Role.READ_ONLY)
"""Capabilities and tokenizers do not depend on the tenant."""


async def write_tokenizers(service: Service, root: Path, disk: Disk | None = None) -> dict[str, Path]:
    """Write every base model's tokenizer below `root` unless it exists; return the directory of each base model.

    A full disk leaves base models out: their clients load the tokenizer through the pool. `disk` is the machine's by
    default. Raises OSError.
    """
    directories = {}
    capabilities = await service.get_capabilities(_NO_TENANT, pb.GetCapabilitiesRequest())
    for model in capabilities.base_models:
        found = await service.get_tokenizer(_NO_TENANT, pb.GetTokenizerRequest(base_model=model.name))
        if not found.files:
            continue
        try:
            directories[model.name] = await asyncio.to_thread(
                _write, disk or RealDisk(), root, model.name, dict(found.files)
            )
        except OSError as error:
            if error.errno not in FULL:
                raise
            _log.warning("the disk is full: the tokenizer of %s is not written for clients", model.name)
    return directories


def _write(disk: Disk, root: Path, name: str, files: Mapping[str, bytes]) -> Path:
    """Write files into a directory named after their digest, atomically: a reader sees all of them or none."""
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
    disk.sync(temporary)  # else the rename could become durable before the files
    disk.rename(temporary, directory)
    return directory
