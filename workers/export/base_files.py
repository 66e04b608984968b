"""The files of a base model's directory: where each tensor lies, and changes of a copy in its place.

Depends on safetensors' format alone. A file is copied as it is, and a tensor in it is changed through a mapping, block
by block: no file is held in memory.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinkerpool.errors import ExportError
from tinkerpool.model_weights import INDEX, SINGLE, weight_files
from tinkerpool.tensor_files import read_header

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes of weights that can be merged, by their names in a header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file."""

    file: str
    """Name of the file."""
    dtype: str
    """As in the header."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Raises ExportError for a dtype in which an adapter cannot be merged."""
        if self.dtype not in _DTYPES:
            raise ExportError(
                f"the base model has weights in {self.dtype}: merging needs float32, bfloat16 or float16 files"
            )
        return _DTYPES[self.dtype]


def read_config(directory: Path) -> dict[str, Any]:
    """Return `config.json`. Raises ExportError for quantized models, ValueError for another form, OSError."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    if not isinstance(config, dict):
        raise ValueError("config.json is no object")
    if config.get("quantization_config"):
        raise ExportError(
            "the base model is quantized: merge into its unquantized original with --base-model, or into a copy that "
            "transformers has dequantized and saved"
        )
    return config


def read_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return a model directory's tensors by name: of its single file, as transformers does, else of its shards.

    Raises ExportError if its weights are no safetensors, ValueError for damaged files, OSError.
    """
    if not (files := weight_files(directory)):
        raise ExportError(f"{directory} has no {SINGLE} and no {INDEX}: save the base model in safetensors format")
    return {name: tensor for file in files for name, tensor in _tensors_in(file)}


def _tensors_in(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    entries, begin = read_header(path)
    size = begin + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if path.stat().st_size != size:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, and {size} by its header")
    for name, entry in entries.items():
        offset = begin + entry["data_offsets"][0]
        yield name, StoredTensor(file=path.name, dtype=entry["dtype"], shape=tuple(entry["shape"]), offset=offset)


@contextmanager
def mapped(path: Path, tensor: StoredTensor, *, is_writable: bool) -> Iterator[Tensor]:
    """Map one tensor of a file; changes of a writable one are the file's. Raises ExportError for other dtypes."""
    dtype = tensor.torch_dtype
    access = mmap.ACCESS_WRITE if is_writable else mmap.ACCESS_COPY
    with path.open("r+b" if is_writable else "rb") as stream:
        view = mmap.mmap(stream.fileno(), 0, access=access)  # closed with its last tensor
    yield torch.frombuffer(view, dtype=dtype, count=math.prod(tensor.shape), offset=tensor.offset).view(tensor.shape)
    if is_writable:
        view.flush()
