"""The random miniature models of other tests."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.mini_model import VOCAB_SIZE_MIN, Architecture, build_mini_model

ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_same_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path: Path, architecture: Architecture) -> None:
    first, again, other = (
        contents(build_mini_model(tmp_path / name, architecture, seed=seed))
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]
    assert first["config.json"] == other["config.json"]


def test_tokens_are_bytes(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(build_mini_model(tmp_path), local_files_only=True)
    text = "héllo, 世界\n\x00"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (256, 257, VOCAB_SIZE_MIN)


def test_gemma_has_a_sliding_and_a_full_layer(tmp_path: Path) -> None:
    config = AutoModelForCausalLM.from_pretrained(build_mini_model(tmp_path, "gemma3")).config
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.sliding_window == 8


def test_mistral_has_a_window_only_on_request_and_llama3_scales_its_positions(tmp_path: Path) -> None:
    windows = [
        AutoModelForCausalLM.from_pretrained(build_mini_model(tmp_path / name, name)).config.sliding_window
        for name in ("mistral", "mistral-window")
    ]
    assert windows == [None, 8]
    model = AutoModelForCausalLM.from_pretrained(build_mini_model(tmp_path / "llama3", "llama3"))
    assert model.model.rotary_emb.rope_type == "llama3"
    unscaled = AutoModelForCausalLM.from_pretrained(build_mini_model(tmp_path / "llama", "llama"))
    assert not torch.equal(model.model.rotary_emb.inv_freq, unscaled.model.rotary_emb.inv_freq)
