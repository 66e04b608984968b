"""Loads a causal language model by transformers, and refuses architectures that the fused pass does not support.

Does not depend on adapters or passes.

Main invariant: a model is read from a local directory or the local hub cache, never fetched, and its code never runs.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_LOADING = threading.Lock()
"""transformers changes global state of torch while it loads. If two threads load at once, one of them may get a model
whose weights were never filled."""


class UnsupportedModelError(ValueError):
    """The model has a feature that the fused pass would compute wrongly."""


def find_directory(path: Path | str) -> Path:
    """Return a model directory: `path` itself, or the directory in the local hub cache of a model with that name."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(path), local_files_only=True))


def load_pretrained(directory: Path, device: str, dtype: torch.dtype) -> Any:
    """Return transformers' model, frozen, in this dtype on this device. Raises UnsupportedModelError, OSError."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    _check_config(config)
    with _LOADING:
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            attn_implementation="sdpa",
        )
    return model.to(device).eval().requires_grad_(requires_grad=False)


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Return the files of a model directory from which clients make the tokenizer, by name."""
    files = [directory / name for name in TOKENIZER_FILES]
    return {file.name: file.read_bytes() for file in files if file.is_file()}


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """Return the tokens that end a text, by the generation config, or else by the model's."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config, "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)


def _check_config(config: Any) -> None:
    """Raise UnsupportedModelError for features known to be unsupported; the message is better than the probe's."""
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if num_experts := getattr(config, key, None):
            raise UnsupportedModelError(
                f"{config.model_type} is a mixture of {num_experts} experts ({key} in config.json), and adapters of "
                "experts cannot be trained yet; take a dense model: Llama 3, Qwen 2 or 3, Mistral, SmolLM2 or Gemma 3"
            )
    refused = {
        "attn_logit_softcapping": "attention logit soft-capping",
        "final_logit_softcapping": "soft-capping of the output logits",
        "use_bidirectional_attention": "bidirectional attention",
        "vision_config": "a vision tower",
        "audio_config": "an audio tower",
    }
    for key, feature in refused.items():
        if getattr(config, key, None):
            raise UnsupportedModelError(f"models with {feature} ({key} in config.json) are not supported")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError("encoder-decoder models are not supported; take a causal language model")
