"""Loads a base model and runs the trials that decide how it computes."""

from __future__ import annotations

from pathlib import Path

import torch

from workers.model.base_model import BaseModel
from workers.selftest.rows import find_numerics


def load_base_model(
    path: Path | str,
    *,
    name: str = "",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
) -> BaseModel:
    """Return a base model that has passed every trial; arguments as of `BaseModel`.

    Raises UnsupportedModelError, OSError.
    """
    base_model = BaseModel(path, name=name, device=device, dtype=dtype, exact=exact)
    base_model.use(find_numerics(base_model))
    base_model.probe()
    return base_model
