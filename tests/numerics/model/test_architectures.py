"""Facts of a loaded model, and the models that are refused: by name, or because the fused pass gets them wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

from tests.support.mini_model import build_mini_model, build_mini_vision_model, write_random_model
from tests.support.numerics.harness import DATA, Driver, make_spec
from workers.contract.adapted_modules import adapter_params, leaf_names
from workers.contract.settings import EngineSettings
from workers.model.families import TESTED
from workers.model.linears import CurrentPass
from workers.model.pretrained import UnsupportedModelError
from workers.model.replacement import adapted_modules, replace_products
from workers.pool.description import describe
from workers.selftest.loading import load_base_model


def test_info_has_the_facts_of_the_model(model_directory: Path) -> None:
    engine = Driver(model_directory).engine
    info, delta = engine.info, ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "out_proj")
    assert (info.vocab_size, info.max_seq_len, info.max_rank, info.chunk_tokens) == (258, 512, 64, 1024)
    names = (*(delta if engine.base_model.delta_layers else ()), "q_proj", "k_proj", "v_proj", "o_proj")
    assert leaf_names(info.modules, "attn") == names
    is_mixture, dense = bool(engine.base_model.expert_layers), ("gate_proj", "up_proj", "down_proj")
    has_dense = not is_mixture or hasattr(engine.base_model.model.model.layers[0].mlp, "shared_expert")
    assert leaf_names(info.modules, "mlp") == (*(("w1", "w3", "w2") * is_mixture), *(dense * has_dense))
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
    "num_hidden_layers": 1,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            transformers.Llama4TextConfig(**SMALL, num_local_experts=4, intermediate_size_mlp=128, head_dim=16),
            "the experts of .* have down_proj, gate_up_proj; supported are experts of transformers' interface .* take ",
        ),
        (
            transformers.Glm4MoeConfig(**SMALL, n_routed_experts=4, first_k_dense_replace=0),
            "experts, gate, shared_experts; supported are experts behind one linear router, .* take ",
        ),
        (
            transformers.MiniMaxM2Config(
                **SMALL, num_local_experts=4, head_dim=16, bos_token_id=None, eos_token_id=None
            ),
            "takes hidden_states, e_score_correction_bias; supported are routers that take hidden states alone; take ",
        ),
        (
            transformers.DogeConfig(**SMALL),
            r"attention that hides tokens by their values \(keep_window_size in config.json\) are not supported; take ",
        ),
    ],
    ids=["llama4", "glm4_moe", "minimax_m2", "doge"],
)
def test_a_mixture_of_another_form_is_refused_with_what_it_has(tmp_path: Path, config: Any, reason: str) -> None:
    assert_refused(write_random_model(tmp_path, config), "float32", reason)


def assert_refused(directory: Path, dtype: Any, reason: str) -> None:
    """Check that a pool refuses a model when it loads it, and says so before."""
    settings = EngineSettings(model_path=str(directory), dtype=dtype)
    (problem,) = describe(settings).problems
    assert re.search(reason, problem)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_base_model(settings)


@pytest.mark.parametrize(
    ("config", "dtype", "reason"),
    [
        (
            transformers.Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=4, moe_intermediate_size=30),
            "float32",
            r"the inner size of .*\.experts is 30; .* in float32 take multiples of 4 \(16 bytes\); take ",
        ),
        (
            transformers.MixtralConfig(**SMALL | {"intermediate_size": 28}, num_local_experts=4),
            "bfloat16",
            r"the inner size of .*\.experts is 28; .* in bfloat16 take multiples of 8 \(16 bytes\); take ",
        ),
        (
            transformers.GptOssConfig(
                **SMALL | {"hidden_size": 66}, num_local_experts=4, head_dim=16, rope_parameters={}
            ),
            "float32",
            r"the hidden size of .*\.experts is 66; .* in float32 take multiples of 4 \(16 bytes\); take ",
        ),
    ],
    ids=["qwen3_moe", "mixtral", "gpt_oss"],
)
def test_experts_of_a_width_that_no_product_takes_are_refused_with_those_it_takes(
    tmp_path: Path, config: Any, dtype: str, reason: str
) -> None:
    assert_refused(write_random_model(tmp_path, config), dtype, reason)


def test_a_model_that_makes_masks_of_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its config does not say so: the config's keys are only those that are known."""
    monkeypatch.setattr("workers.model.pretrained._check_config", lambda _: None)
    write_random_model(tmp_path, transformers.DogeConfig(**SMALL))
    with pytest.raises(UnsupportedModelError, match=r"makes masks of its own, in DogeAttention; .* take "):
        load_base_model(EngineSettings(model_path=str(tmp_path)))


LARGE: dict[str, Any] = {"linear_num_key_heads": 16, "num_key_value_heads": 4, "head_dim": 256}


def hybrid(hidden: int, inner: int, num_layers: int, num_heads: int, num_value_heads: int) -> Any:
    return transformers.Qwen3_5TextConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        linear_num_value_heads=num_value_heads,
        **LARGE,
    )


def mixture(hidden: int, inner: int, num_layers: int, num_heads: int, num_value_heads: int, *, num_experts: int) -> Any:
    return transformers.Qwen3_5MoeTextConfig(
        hidden_size=hidden,
        moe_intermediate_size=inner,
        shared_expert_intermediate_size=inner,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        linear_num_value_heads=num_value_heads,
        num_experts=num_experts,
        **LARGE | {"num_key_value_heads": 2},
    )


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        (hybrid(2560, 9216, 32, 16, 32), (897_024, 1_130_496, 250_880)),
        (hybrid(4096, 12288, 32, 16, 32), (1_130_496, 1_572_864, 252_416)),
        (hybrid(5120, 17408, 64, 24, 48), (2_965_504, 4_325_376, 253_440)),
        (mixture(2048, 512, 40, 16, 32, num_experts=256), (1_013_760, 16_281_600, 250_368)),
        (mixture(4096, 1024, 60, 32, 64, num_experts=512), (2_841_600, 96_030_720, 252_416)),
    ],
    ids=["4B", "9B", "27B", "35B-A3B", "397B-A17B"],
)
def test_an_adapter_of_qwen_3_5_has_as_many_parameters_as_the_hosted_services(
    config: Any, counts: tuple[int, ...]
) -> None:
    """Of rank 1: attention, MLP and unembedding, as Tinker's cookbook 0.6.1 counts them (`hyperparam_utils`)."""
    assert params_of(config) == counts


def test_an_adapter_of_the_experts_of_qwen_3_has_as_many_parameters_as_the_hosted_services() -> None:
    """Of rank 1, as Tinker's documentation counts them for Qwen3-30B-A3B."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_experts=128, head_dim=128
    )
    assert params_of(config)[1] == 14_450_688


def test_an_adapter_of_the_experts_of_gpt_oss_has_as_many_parameters_as_the_hosted_services() -> None:
    """Of rank 1, for gpt-oss-20b."""
    assert params_of(transformers.GptOssConfig(num_hidden_layers=24, num_local_experts=32))[1] == 6_842_880


def params_of(config: Any) -> tuple[int, ...]:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    modules = adapted_modules(model, replace_products(model, CurrentPass()))
    return tuple(adapter_params(modules, kind) for kind in ("attn", "mlp", "unembed"))


@pytest.mark.parametrize("is_tied", [True, False])
def test_of_a_checkpoint_that_can_see_the_text_model_is_served(tmp_path: Path, is_tied: bool) -> None:
    directory = build_mini_vision_model(tmp_path, is_tied=is_tied)
    driver = Driver(directory)
    driver.install(make_spec("a", 4))
    (result,) = driver.train(driver.forward("a", DATA))
    sees = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    for datum, logprobs in zip(DATA, result.logprobs, strict=True):
        with torch.no_grad():
            logits = sees(input_ids=torch.from_numpy(datum.tokens).long()[None], use_cache=False).logits[0]
        targets = torch.from_numpy(datum.loss_inputs["target_tokens"]).long()
        expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(logprobs), expected, rtol=0, atol=1e-4)
    told = describe(driver.engine.settings)
    assert (told.family, told.title, told.problems) == ("qwen3_5", TESTED["qwen3_5_text"].title, [])


def test_a_checkpoint_that_lacks_a_tensor_is_refused_instead_of_filled_with_noise(tmp_path: Path) -> None:
    config = build_mini_vision_model(tmp_path) / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    with pytest.raises(UnsupportedModelError, match=r"lack lm_head\.weight"):
        load_base_model(EngineSettings(model_path=str(tmp_path)))


def test_other_checkpoints_that_can_see_are_refused(tmp_path: Path) -> None:
    transformers.Gemma3Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="a vision tower"):
        load_base_model(EngineSettings(model_path=str(tmp_path)))
