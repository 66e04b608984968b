"""State folders on disk: written atomically, read only if they match their checksum. Knows no database and no names of
users.

A folder holds `adapter_model.safetensors` and `adapter_config.json` (together a PEFT directory),
`optimizer.safetensors` if moments were saved, `gradient.safetensors` in a snapshot that was taken while a gradient was
pending, and `state.json`. It is written under a temporary name, every file and
the folder are synced, then it is renamed and the parent synced; only after that may a database row point at it. A
folder without a row is an orphan of a crash and is removed at the next start.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.errors import Code, ServiceError
from workers.messages import AdapterSpec, AdapterState, ModelInfo

WEIGHTS, CONFIG, OPTIMIZER, GRADIENT, STATE = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "optimizer.safetensors",
    "gradient.safetensors",
    "state.json",
)
_TEMPORARY = ".writing-"


@dataclass(frozen=True, slots=True)
class Saved:
    """A durable folder."""

    folder: str
    """Its name below the root."""
    sha256: str
    size_bytes: int


class StateFiles:
    """The folders below one root."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def write(self, spec: AdapterSpec, model: ModelInfo, state: AdapterState) -> Saved:
        """Make a state durable. Raises OSError if the disk does not take it; nothing is left behind then."""
        files = {
            WEIGHTS: state.weights,
            CONFIG: _to_json(peft_config(spec, model)),
            STATE: _to_json(
                {
                    "num_steps": state.num_steps,
                    "applied_seq": state.applied_seq,
                    "fingerprint": state.fingerprint,
                    "num_datums": state.num_datums,
                    "rank": spec.rank,
                    "alpha": spec.alpha,
                    "seed": spec.seed,
                    "base_model": model.name,
                }
            ),
        }
        if state.optimizer is not None:
            files[OPTIMIZER] = state.optimizer
        if state.gradient is not None:
            files[GRADIENT] = state.gradient
        name = uuid.uuid4().hex
        temporary, final = self._root / (_TEMPORARY + name), self._root / name
        try:
            temporary.mkdir()
            for file_name, content in files.items():
                _write_synced(temporary / file_name, content)
            _sync_folder(temporary)
            temporary.rename(final)
            _sync_folder(self._root)
        except OSError:
            for path in (temporary, final):
                shutil.rmtree(path, ignore_errors=True)
            raise
        return Saved(name, _digest(files), sum(map(len, files.values())))

    def read(self, folder: str, sha256: str) -> AdapterState:
        """The state in a folder. Raises ServiceError DATA_LOSS if it is not what was written."""
        files = self._verified(folder, sha256)
        state = json.loads(files[STATE])
        return AdapterState(
            weights=files[WEIGHTS],
            optimizer=files.get(OPTIMIZER),
            num_steps=state["num_steps"],
            applied_seq=state["applied_seq"],
            fingerprint=state["fingerprint"],
            gradient=files.get(GRADIENT),
            num_datums=state.get("num_datums", 0),  # folders from before gradients were kept do not say
        )

    def tar(self, folder: str, sha256: str, piece_bytes: int = 1 << 20) -> Iterator[bytes]:
        """The folder's PEFT files as a tar archive, in pieces. Raises ServiceError DATA_LOSS."""
        files = self._verified(folder, sha256)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name in (CONFIG, WEIGHTS):
                member = tarfile.TarInfo(name)
                member.size = len(files[name])
                archive.addfile(member, io.BytesIO(files[name]))
        content = buffer.getbuffer()
        for start in range(0, len(content), piece_bytes):
            yield bytes(content[start : start + piece_bytes])

    def remove(self, folder: str) -> None:
        """Delete a folder that no row points at any more."""
        assert folder, "an empty name would be the root"
        shutil.rmtree(self._root / folder, ignore_errors=True)

    def remove_orphans(self, known: set[str]) -> None:
        """Delete what a crash left between writing and the row."""
        for path in self._root.iterdir():
            if path.name not in known:
                shutil.rmtree(path, ignore_errors=True)

    def _verified(self, folder: str, sha256: str) -> dict[str, bytes]:
        try:
            files = {path.name: path.read_bytes() for path in (self._root / folder).iterdir()}
        except OSError:
            files = {}
        if _digest(files) != sha256:
            raise ServiceError(
                Code.DATA_LOSS,
                "CHECKSUM_MISMATCH",
                "the stored state does not match its checksum and was not loaded: its files were damaged on disk; "
                "use another checkpoint",
            )
        return files


def peft_config(spec: AdapterSpec, model: ModelInfo) -> dict[str, Any]:
    """`adapter_config.json` for PEFT's `LoraConfig`: the modules by leaf name, scaling alpha / rank."""
    modules = (
        (model.attn_modules if spec.train_attn else ())
        + (model.mlp_modules if spec.train_mlp else ())
        + (model.unembed_modules if spec.train_unembed else ())
    )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
    }


def _to_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"


def _digest(files: dict[str, bytes]) -> str:
    """SHA-256 over names, sizes and contents, in order of names."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return digest.hexdigest()


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
