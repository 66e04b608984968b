"""Checkpoints as a pool sends them, and their exports; and vLLM's published rules for adapters, restated."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from tinkerpool.client.archive import ArchiveFile
from tinkerpool.client.export import Exporter
from tinkerpool.tensor_files import read_header
from tinkerpool.v1.checkpoints_pb2 import ExportCheckpointResponse
from tinkerpool.v1.sessions_pb2 import BaseModel, GetCapabilitiesResponse

CHECKPOINT = "tinker://s:train:0/weights/final"
Files = dict[str, bytes]


def adapter_files(modules: Iterable[str], rank: int = 8, base_model: str = "toy") -> Files:
    """Return the files of an adapter of zeros, of modules by full name."""
    names = list(modules)
    tensors = {}
    for name in names:
        tensors[f"base_model.model.{name}.lora_A.weight"] = np.zeros((rank, 4), np.float32)
        tensors[f"base_model.model.{name}.lora_B.weight"] = np.zeros((6, rank), np.float32)
    config = {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "lora_alpha": 32.0,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in names}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
    }
    return {
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": safetensors.numpy.save(tensors),
    }


def tar_of(files: Files) -> bytes:
    """Return an archive, as a pool sends it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def pieces_of(files: Files, piece_bytes: int = 1000) -> list[ExportCheckpointResponse]:
    """Return the stream of an export."""
    data = tar_of(files)
    return [
        ExportCheckpointResponse(data=data[start : start + piece_bytes]) for start in range(0, len(data), piece_bytes)
    ]


def pool_of(name: str, *, is_tied: bool | None = None, weights_id: str = "") -> GetCapabilitiesResponse:
    """Return the facts of a pool with one base model."""
    model = BaseModel(name=name, has_tied_unembedding=is_tied, weights_id=weights_id)
    return GetCapabilitiesResponse(base_models=[model])


def export(files: Files, directory: Path, pool: GetCapabilitiesResponse | None = None, **options: Any) -> Exporter:
    """Export a checkpoint's files; return the exporter with its notes."""
    exporter = Exporter(checkpoint=CHECKPOINT, **options)
    with ArchiveFile(directory) as archive:
        archive.write(tar_of(files))
        archive.publish(exporter.finish(archive, pool or GetCapabilitiesResponse()))
    return exporter


def vllm_refuses(directory: Path, max_lora_rank: int) -> list[str]:
    """Return why vLLM would refuse an adapter of a Llama, Qwen, Mistral or Gemma 3 model, by the rules of its
    `PEFTHelper` (configuration) and `LoRAModel.from_local_checkpoint` (names), version 0.11."""
    config = json.loads((directory / "adapter_config.json").read_text())
    reasons = [f"{key} is missing" for key in ("r", "lora_alpha", "target_modules") if key not in config]
    reasons += [key for key in ("modules_to_save", "use_dora") if config.get(key)]
    reasons += ["bias"] * (config.get("bias", "none") != "none")
    reasons += ["rank"] * (config["r"] > max_lora_rank)
    expected = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for name in read_header(directory / "adapter_model.safetensors")[0]:
        *path, matrix, leaf = name.split(".")
        if leaf != "weight" or matrix not in {"lora_A", "lora_B"} or path[:2] != ["base_model", "model"]:
            reasons.append(f"unsupported LoRA weight {name}")
        elif path[-1] not in expected:
            reasons.append(f"unexpected module {path[-1]}")
    return reasons
