"""Finds the base models on this machine. Imports neither torch nor transformers; reads directories alone."""

from __future__ import annotations

from pathlib import Path

from workers.contract.settings import SHIPPED_MODELS_DIR


def find_directory(name: str) -> Path | None:
    """Return the directory of a model that comes with tinkerpool, or of `organisation/model` in the local hub cache."""
    if name in {path.parent.name for path in SHIPPED_MODELS_DIR.glob("*/config.json")}:
        return SHIPPED_MODELS_DIR / name
    if name.count("/") != 1:
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ModuleNotFoundError:  # the light client
        return None
    try:
        config = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name of the hub
        return None
    return Path(config).parent if isinstance(config, str) else None
