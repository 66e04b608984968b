"""Engines with models of real shapes and without weights, on the fake device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from workers import engine
from workers.bank import transfers
from workers.contract.messages import AdapterCosts
from workers.contract.settings import EngineSettings
from workers.engine import TrainingEngine
from workers.model import base_model, gpu_operations
from workers.model.base_model import BaseModel
from workers.model.pretrained import Probe
from workers.rows import RowLayout
from workers.sampling.kv_cache import PAGE_TOKENS
from workers.selftest import page_attention

MAX_SEQ_LEN = 32_768
SHORT_CHUNK = replace(
    page_attention.CHUNK,
    prompt=replace(page_attention.CHUNK.prompt, length=PAGE_TOKENS + 2),
    start=PAGE_TOKENS,
    stop=PAGE_TOKENS + 2,
)
"""Of the trial of attention: it computes every row alone, in seconds for a chunk, and a fake result has no values."""


class _PinnedBuffers:
    """Stands in for those of the bank, which pin real memory: fake tensors have none."""

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return pinned memory."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def note(self, *_: Any) -> None:
        """Take no note of a transfer: none is under way."""

    def __contains__(self, vector: torch.Tensor) -> bool:
        return vector.device.type == "cpu" and vector.is_pinned()


@contextmanager
def no_files(shape: Mapping[str, Any]) -> Iterator[None]:
    """Load a model of this shape without a file: a Qwen3, unless the shape has another `model_type`.

    Patches what reads files, the trials of values and times, which do not exist here, and the drawing of initial
    weights, which takes the processor most of a second an adapter.
    """
    numbers = {"model_type": "qwen3", "max_position_embeddings": MAX_SEQ_LEN, "dtype": torch.bfloat16, **shape}
    config = AutoConfig.for_model(**numbers)

    def load(_: Path, device: str, dtype: torch.dtype) -> Any:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        return model.eval().requires_grad_(requires_grad=False)

    with ExitStack() as stack:
        for name, stand_in in {
            "load_pretrained": load,
            "find_directory": Path,
            "tokenizer_files": lambda _: {},
            "weights_id": lambda _: "",
        }.items():
            stack.enter_context(patch.object(base_model, name, stand_in))
        # transformers leaves out waits where it takes a tensor for one that is traced, as it does fake ones.
        stack.enter_context(patch.object(masking_utils, "is_tracing", lambda *_: False))
        stack.enter_context(patch.object(gpu_operations, "has_triton", lambda: True))
        stack.enter_context(patch.object(engine, "measured_costs", lambda _: AdapterCosts()))
        stack.enter_context(patch.object(page_attention, "CHUNK", SHORT_CHUNK))
        stack.enter_context(patch.object(Probe, "of", lambda *_: None))
        stack.enter_context(patch.object(RowLayout, "initial_weights", lambda self, _: torch.empty(self.num_values)))
        stack.enter_context(patch.object(transfers, "PinnedBuffers", _PinnedBuffers))
        yield


def make_engine(**settings: Any) -> TrainingEngine:
    """Return an engine; call it in `fake_cuda` and `no_files`, and use it there."""
    defaults: dict[str, Any] = {"model_path": "none", "device": "cuda", "dtype": "bfloat16", "cache_bytes_max": None}
    made = EngineSettings(**defaults | settings)
    loaded = BaseModel("none", device=made.device, dtype=getattr(torch, made.dtype), exact=made.exact)
    return TrainingEngine(made, base_model=loaded)
