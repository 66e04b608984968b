"""Facts of a loaded model, and the models that are refused: by name, or because the fused pass gets them wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

from tests.support.mini_model import build_mini_model
from tests.support.numerics.harness import DATA, Driver, make_spec
from workers.contract.adapted_modules import leaf_names
from workers.contract.settings import EngineSettings
from workers.model.pretrained import UnsupportedModelError
from workers.selftest.loading import load_base_model


def test_info_has_the_facts_of_the_model(model_directory: Path) -> None:
    info = Driver(model_directory).engine.info
    assert (info.vocab_size, info.max_seq_len, info.max_rank, info.chunk_tokens) == (258, 512, 64, 1024)
    assert leaf_names(info.modules, "attn") == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert leaf_names(info.modules, "mlp") == ("gate_proj", "up_proj", "down_proj")
    assert leaf_names(info.modules, "unembed") == ("lm_head",)
    assert info.eos_token_ids == (256,)
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(info.tokenizer_files)
    assert f"{torch.get_num_threads()} threads" in info.fingerprint


def test_model_with_soft_capping_is_refused(tmp_path: Path) -> None:
    config = build_mini_model(tmp_path, "gemma3") / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"attn_logit_softcapping": null', '"attn_logit_softcapping": 50.0'))
    with pytest.raises(UnsupportedModelError, match="soft-capping"):
        load_base_model(EngineSettings(model_path=str(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_that_the_fused_pass_gets_wrong_is_refused(
    model_directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    monkeypatch.setattr("workers.model.attention.PackedAttention._mask", lambda *_: None)  # no sliding window
    with pytest.raises(UnsupportedModelError, match="other log-probabilities"):
        load_base_model(EngineSettings(model_path=str(model_directories["gemma3"]), dtype=dtype))


def test_transformers_looks_for_no_sequences_among_the_rows(
    any_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does to make masks, and waits for the device to find out whether there are several sequences."""
    driver = Driver(any_model_directory)
    driver.install(make_spec("a", 4))
    find = Mock(side_effect=AssertionError("transformers looks for packed sequences"))
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", find)
    driver.train(driver.backward("a", DATA))


SMALL: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (transformers.Qwen3MoeConfig(**SMALL, num_experts=4), "qwen3_moe"),
        (transformers.MixtralConfig(**SMALL, num_local_experts=4), "mixtral"),
    ],
)
def test_mixture_of_experts_is_refused_with_alternatives(tmp_path: Path, config: Any, name: str) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=rf"{name} is a mixture of 4 experts .* take a dense model: .*Qwen"):
        load_base_model(EngineSettings(model_path=str(tmp_path)))
