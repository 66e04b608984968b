"""Loads a base model and runs the trials that decide how it computes."""

from __future__ import annotations

import torch

from workers.contract.settings import EngineSettings
from workers.model.base_model import BaseModel
from workers.selftest.row_invariance import find_numerics


def load_base_model(settings: EngineSettings) -> BaseModel:
    """Return a base model that has passed its trials. Raises UnsupportedModelError, OSError."""
    is_cuda = torch.device(settings.device).type == "cuda"
    is_bf16 = settings.dtype == "bfloat16" or (settings.dtype == "auto" and is_cuda)
    base_model = BaseModel(
        settings.model_path,
        name=settings.model_name,
        device=settings.device,
        dtype=torch.bfloat16 if is_bf16 else torch.float32,
        exact=settings.exact,
    )
    base_model.use(find_numerics(base_model))
    base_model.probe()
    return base_model
