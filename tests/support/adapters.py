"""Adapters as PEFT saves them: configuration and weights, for imports."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from workers.contract.adapted_modules import AdaptedModule

PREFIX = "base_model.model."
Tensors = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The two files of an adapter."""

    config: dict[str, Any]
    weights: bytes

    @property
    def header(self) -> str:
        return self.weights[8 : 8 + self._header_bytes].decode()

    @property
    def data(self) -> bytes:
        return self.weights[8 + self._header_bytes :]

    @property
    def _header_bytes(self) -> int:
        return int.from_bytes(self.weights[:8], "little")

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "adapter_config.json").write_text(json.dumps(self.config))
        (directory / "adapter_model.safetensors").write_bytes(self.weights)
        return directory


def random_tensors(modules: Iterable[AdaptedModule], rank: int, seed: int = 0, dtype: str = "float32") -> Tensors:
    """Return A and B of these modules in the shapes of a state, no value of them zero."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for module in modules:
        tensors[PREFIX + module.A_name] = rng.uniform(0.5, 1, module.A_shape(rank)).astype(dtype)
        tensors[PREFIX + module.B_name] = rng.uniform(0.5, 1, module.B_shape(rank)).astype(dtype)
    return tensors


def adapter_files(modules: Iterable[AdaptedModule], rank: int = 4, alpha: float = 8, **config: Any) -> AdapterFiles:
    """Return a random adapter of these modules; `config` are more settings of its configuration, or other ones."""
    adapted = list(modules)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "toy",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({module.leaf_name for module in adapted}),
        "bias": "none",
    }
    return AdapterFiles(settings | config, safetensors.numpy.save(random_tensors(adapted, rank), {"format": "pt"}))


def with_header(files: AdapterFiles, **entries: Any) -> str:
    """Return the header of files with other entries; None removes one."""
    header = json.loads(files.header)
    for name, entry in entries.items():
        if entry is None:
            del header[name]
        else:
            header[name] = entry
    return json.dumps(header)
