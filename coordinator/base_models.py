"""Resolves the base models that an operator names. Reads directories; does not load a model."""

from __future__ import annotations

import re
from pathlib import Path

from workers.contract.settings import SHIPPED_MODELS_DIR, PoolModel

DEFAULT_MODEL = "kjv-2m"
"""The base model that comes with tinkerpool."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def shipped_models() -> list[str]:
    """Return the names of the base models that come with tinkerpool."""
    return sorted(path.parent.name for path in SHIPPED_MODELS_DIR.glob("*/config.json"))


def resolve_model(text: str, num_workers: int) -> PoolModel:
    """Return the base model of `[NAME=]PATH_OR_NAME`. Raises ValueError, which names the choices.

    PATH_OR_NAME is a Hugging Face directory, the name of a shipped model, or `organisation/model` in the local hub
    cache. Without NAME, its name in the pool is that of the directory, or PATH_OR_NAME itself.
    """
    name, _, source = text.rpartition("=")
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} is no model directory: there is no config.json in it")
        return PoolModel(name=name or path.resolve().name, path=str(path.resolve()), num_workers=num_workers)
    if source in shipped_models():
        return PoolModel(name=name or source, path=str(SHIPPED_MODELS_DIR / source), num_workers=num_workers)
    if _HUB_NAME.fullmatch(source):
        return PoolModel(name=name or source, path=source, num_workers=num_workers)
    raise ValueError(
        f"no model {source!r}: give a Hugging Face directory that exists, organisation/model from the local hub cache, "
        f"or a model that comes with tinkerpool ({', '.join(shipped_models())})"
    )
