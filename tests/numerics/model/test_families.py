"""Every tested family trains and samples as transformers, autograd and PEFT do; others are refused with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.mini_model import HYBRID, LLAMA3_ROPE, write_random_model
from tests.support.numerics.allocations import Allocations
from tests.support.numerics.by_peft import logprobs
from tests.support.numerics.exports import checkpoint_files
from tests.support.numerics.harness import Driver, Tenant, code, make_data, make_spec
from tests.support.numerics.naive import NaiveModel, naive_pass
from tests.support.numerics.samplers import assert_same_bits, next_tokens, request, sampling
from tests.support.numerics.tenants import assert_same, train
from workers.contract.messages import AdamParams, ErrorCode
from workers.contract.settings import EngineSettings
from workers.export.merged import write_merged
from workers.model.families import REFUSED, TESTED
from workers.model.pretrained import UnsupportedModelError
from workers.pool.description import describe
from workers.selftest.loading import load_base_model
from workers.training.memory import Load, PassMemory

SHAPE: Mapping[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 257,
}
WINDOW = {"sliding_window": 7}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
WIDE = {"intermediate_size": 512}
"""What the activation keeps is most of what a pass takes."""
BY_POSITION = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MIXTURE = {"num_experts_per_tok": 2}
SHARED_EXPERT = {**MIXTURE, "num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {},
    "qwen2": {},
    "llama": {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 16},
    "mistral": WINDOW,
    "ministral": MIXED,
    "ministral3": {"rope_parameters": BY_POSITION},
    "phi": {**HALF, **WIDE, "qk_layernorm": True},
    "phi3": {**HALF, **WINDOW},
    "olmo": {},
    "olmo2": {},
    "olmo3": MIXED,
    "glm": {},
    "glm4": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": WINDOW,
    "exaone4": MIXED,
    "seed_oss": {"head_dim": 32},
    "hunyuan_v1_dense": {},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    "apertus": WIDE,
    "arcee": {},
    "ernie4_5": {"use_bias": True},
    "helium": {},
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.1,
        "logits_scaling": 0.75,
    },
    "cohere": {"logit_scale": 0.3, "use_qk_norm": True},
    "cohere2": {**MIXED, "logit_scale": 0.3},
    "nemotron": {},
    "qwen3_5_text": HYBRID,
    "qwen3_next": {**HYBRID, **SHARED_EXPERT},
    "qwen3_moe": {**MIXTURE, "num_experts": 8, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    "olmoe": {**MIXTURE, "num_experts": 8},
    "mixtral": {**MIXTURE, "num_local_experts": 8},
    "qwen2_moe": {**SHARED_EXPERT, "mlp_only_layers": [1]},
    "qwen3_5_moe_text": {**HYBRID, **SHARED_EXPERT},
    "gpt_oss": {**MIXTURE, **MIXED, **WIDE, "num_local_experts": 8, "swiglu_limit": 1.0},
}
"""What the model of each family has besides `SHAPE`."""
FAST = ("granite", "phi3")
"""The families of the fast tests: scaled logits, and linears that transformers has fused."""
SLOW = ("llama", "cohere2", "qwen3_next", "mixtral")
"""Those of `make test` beside them: the most different of those that are not among the architectures of most tests.
The others are long."""
FAMILIES = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.long)
    for name in SPECIAL
]


def config_of(family: str, **changes: Any) -> Any:
    return type(AutoConfig.for_model(family))(**{**SHAPE, **SPECIAL.get(family, {}), **changes})


MIXTURES = [
    pytest.param(name, marks=pytest.mark.slow if name == "olmoe" else pytest.mark.long)
    for name, special in SPECIAL.items()
    if "num_experts_per_tok" in special
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model directories that have been written."""
    return {"": tmp_path_factory.mktemp("families")}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Path:
    """The model directory of each family in turn."""
    name = request.param
    if name not in directories:
        directories[name] = write_random_model(directories[""] / name, config_of(name))
    return directories[name]


def test_every_family_is_tried() -> None:
    assert list(SPECIAL) == list(TESTED)


TENANTS = (
    Tenant(spec=make_spec("a", 4), passes=[make_data("cross_entropy", [23, 8, 40])]),
    Tenant(spec=make_spec("b", 16), loss_fn="ppo", passes=[make_data("ppo", [31, 5, 1])]),
)


def test_losses_and_gradients_of_a_family_are_those_of_autograd(family: Path) -> None:
    driver = Driver(family)
    train(driver, TENANTS, num_steps=1)
    results = driver.train(*(driver.backward(each.key, each.passes[0], each.loss_fn) for each in TENANTS))
    for tenant, result in zip(TENANTS, results, strict=True):
        naive = NaiveModel(family, tenant.spec, driver.weights(tenant.key))
        loss, expected, gradients = naive_pass(naive, tenant.passes[0], tenant.loss_fn, {})
        assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5, abs=1e-3)
        for actual, wanted in zip(result.logprobs, expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(actual), wanted, rtol=0, atol=3e-5)
        for name, gradient in driver.gradients(tenant.key).items():
            tolerance = 3e-5 * (1 + float(gradients[name].abs().max()))
            torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=tolerance, msg=name)


def test_co_batched_training_of_a_family_has_the_bits_of_each_tenant_solo(family: Path) -> None:
    """Also beside a tenant whose activations overflow from its second step on, and on one slot, in short passes."""
    wild = Tenant(spec=make_spec("wild", 8), passes=TENANTS[0].passes, params=AdamParams(learning_rate=1e15))
    together = train(Driver(family), TENANTS, num_steps=2, beside=[wild])
    apart = train(Driver(family, num_slots=1, pass_tokens_max=40), TENANTS, num_steps=2)
    for tenant in TENANTS:
        solo = train(Driver(family), [tenant], num_steps=2)
        assert_same(together, solo)
        assert_same(apart, solo)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("family", MIXTURES, indirect=True)
def test_co_batched_training_of_a_mixture_has_the_bits_of_each_tenant_solo_beside_adapters_that_are_not_finite(
    family: Path, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    driver = Driver(family)
    beside = [Tenant(spec=make_spec(f"{value}", 8), passes=TENANTS[0].passes) for value in (float("nan"), float("inf"))]
    driver.install(*(tenant.spec for tenant in beside))
    for tenant in beside:
        driver.engine.bank.acquire([tenant.key])[0].weights.fill_(float(tenant.key))
    together = train(driver, TENANTS, num_steps=2, beside=beside)
    for tenant in TENANTS:
        assert_same(together, train(Driver(family), [tenant], num_steps=2))
    failed = driver.run(*(driver.forward(tenant.key, tenant.passes[0]) for tenant in beside))
    assert [code(result) for result in failed] == [ErrorCode.NON_FINITE] * len(beside)


def test_samples_of_a_family_have_the_same_bits_solo_and_co_batched_and_the_trainers_logprobs(family: Path) -> None:
    s = sampling(family)
    s.publish("a")
    wanted = [
        request(
            f"{key}{length}", key and f"{key}/v", length, num_samples, seed=length, max_tokens=5, prompt_logprobs=True
        )
        for key, length, num_samples in (("a", 20, 2), ("a", 1, 1), ("", 62, 1))
    ]
    solo = [s.sequences(one)[0] for one in wanted]
    together = s.run(*wanted)
    for bits, result in zip(solo, together, strict=True):
        assert result.error is None
        assert_same_bits(result.sequences, bits)
    s.driver.install(make_spec("untrained"))
    for one, result in zip(wanted, together, strict=True):
        assert result.prompt_logprobs is not None
        tolerance = 3e-5 if one.version.key else 1e-5
        for sequence in result.sequences:
            datum = next_tokens(np.concatenate([one.prompt, sequence.tokens]))
            (forward,) = s.driver.train(s.driver.forward(one.version.key.removesuffix("/v") or "untrained", [datum]))
            reported = np.concatenate([result.prompt_logprobs[1:], sequence.logprobs])
            np.testing.assert_allclose(reported, forward.logprobs[0], rtol=0, atol=tolerance)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys did not match"
)  # PEFT looks at modules alone
def test_an_exported_adapter_of_a_family_computes_the_same_in_peft_and_merged(family: Path, tmp_path: Path) -> None:
    tenant = TENANTS[0]
    driver = Driver(family)
    train(driver, [tenant], num_steps=2)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name, content in checkpoint_files(driver, tenant.spec).items():
        (adapter / name).write_bytes(content)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(family, dtype=torch.float32), adapter)
    trained = {name for name, _ in model.named_parameters() if ".lora_" in name}
    adapted = [module for module in driver.engine.info.modules if module.kind in tenant.spec.kinds]
    assert len(trained) == 2 * len({module.linear_name for module in adapted})
    (result,) = driver.train(driver.forward("a", tenant.passes[0]))
    with torch.no_grad():
        expected = logprobs(model.eval(), tenant.passes[0])
    for actual, wanted in zip(result.logprobs, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(actual), wanted, rtol=0, atol=3e-5)
    write_merged(adapter, family, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        expected = logprobs(merged.eval(), tenant.passes[0])
    for actual, wanted in zip(result.logprobs, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(actual), wanted, rtol=0, atol=1e-4)


def test_the_estimate_of_a_pass_of_a_family_is_not_below_its_peak(family: Path) -> None:
    driver = Driver(family, recompute="off")
    driver.install(make_spec("a", 8))
    data = make_data("cross_entropy", [300, 212])
    driver.train(driver.backward("a", data))  # fills the blocks of logits, leaves a gradient pending
    load = Load(num_tokens=512, lengths=[300, 212], rank=8, pending_values=driver.gradient("a").numel())
    for item, backward in ((driver.backward("a", data), True), (driver.forward("a", data), False)):
        with Allocations() as allocations:
            driver.train(item)
        assert allocations.peak_bytes <= PassMemory(driver.engine.base_model).peak_bytes(load, backward=backward)


@pytest.mark.parametrize(
    "family",
    ["olmo2", *(pytest.param(name, marks=pytest.mark.long) for name in SPECIAL if name != "olmo2")],
    indirect=True,
)
def test_a_family_loads_in_bf16(family: Path) -> None:
    """OLMo's rotary positions stay in fp32."""
    assert load_base_model(EngineSettings(model_path=str(family), dtype="bfloat16")).dtype == torch.bfloat16


def test_scaled_logits_of_a_model_in_bf16_are_scaled_in_training_too(directories: dict[str, Path]) -> None:
    """Its losses are another code's: they are computed on the device, and read at the end of a pass."""
    directory = write_random_model(directories[""] / "cohere in bf16", config_of("cohere"))
    losses = []
    for dtype in ("float32", "bfloat16"):
        driver = Driver(directory, dtype=dtype)
        train(driver, TENANTS[:1], num_steps=1)
        (result,) = driver.train(driver.backward("a", TENANTS[0].passes[0]))
        losses.append(result.logprobs[0])
    assert float(np.abs(losses[0] - losses[1]).max()) < 0.05


def refusal(directory: Path, config: Any) -> str:
    """Return why a model of this config is refused."""
    write_random_model(directory, config)
    with pytest.raises(UnsupportedModelError) as raised:
        load_base_model(EngineSettings(model_path=str(directory)))
    return str(raised.value)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_is_refused_by_name_with_what_to_take(tmp_path: Path, family: str) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="take a text model of Gemma 3"):
        load_base_model(EngineSettings(model_path=str(tmp_path)))


def test_a_family_whose_layers_have_other_names_is_refused_with_what_to_take(tmp_path: Path) -> None:
    message = refusal(tmp_path, config_of("gpt_neox"))
    assert message.startswith("gpt_neox calls its layers 'gpt_neox' and its output layer 'lm_head'; ")
    assert "take a dense model: Qwen 3; " in message


def test_clamped_queries_are_refused_because_the_models_code_changes_them_in_place(tmp_path: Path) -> None:
    assert "clamped queries, keys and values (clip_qkv in config.json)" in refusal(
        tmp_path, config_of("olmo", clip_qkv=8.0)
    )


def test_a_quantized_model_is_refused_with_what_to_take(tmp_path: Path) -> None:
    config = config_of("llama")
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="take its unquantized original"):
        load_base_model(EngineSettings(model_path=str(tmp_path)))


def test_no_sequence_of_a_model_with_two_sets_of_frequencies_is_longer_than_the_first_set_is_for(
    tmp_path: Path,
) -> None:
    """transformers would take the second set for all rows of a pass with one such sequence, whosever they are."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 64,
    }
    config = config_of("phi3", rope_parameters=rope, sliding_window=None, original_max_position_embeddings=64)
    directory = write_random_model(tmp_path, config)
    driver = Driver(directory)
    assert driver.engine.info.max_seq_len == 64
    tenants = [
        Tenant(spec=make_spec("longest", 4), passes=[make_data("cross_entropy", [64])]),
        Tenant(spec=make_spec("short", 4), passes=[make_data("cross_entropy", [20])]),
    ]
    together = train(driver, tenants, num_steps=1)
    assert_same(together, train(Driver(directory), tenants[1:], num_steps=1))


def test_dynamic_frequencies_are_those_of_a_sequence_that_the_model_takes(tmp_path: Path) -> None:
    """transformers would wait for a GPU in each pass, to compare its length with the model's."""
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    dynamic, plain = (
        Driver(write_random_model(tmp_path / name, config_of("llama", rope_parameters=parameters)))
        for name, parameters in (("dynamic", rope), ("plain", {"rope_type": "default", "rope_theta": 10_000.0}))
    )
    types = {getattr(module, "rope_type", "default") for module in dynamic.engine.base_model.model.modules()}
    assert types == {"default"}
    longest = dynamic.engine.info.max_seq_len
    tenants = [Tenant(spec=make_spec("longest", 4), passes=[make_data("cross_entropy", [longest])])]
    assert_same(train(dynamic, tenants, num_steps=1), train(plain, tenants, num_steps=1))


def test_a_family_is_described_as_it_is_loaded(family: Path) -> None:
    driver = Driver(family)
    info = driver.engine.info
    told = describe(driver.engine.settings)
    facts = told.facts
    assert (told.problems, facts is None) == ([], False)
    assert facts is not None
    for name in ("num_params", "vocab_size", "max_seq_len", "max_rank", "modules", "has_tied_unembedding"):
        assert getattr(facts, name) == getattr(info, name), name
    for each in (facts.adapters[0], facts.adapters[-1]):
        driver.install(spec := make_spec(f"{each.rank}", each.rank))
        driver.train(driver.backward(spec.adapter_id, make_data("cross_entropy", [5])))
        entry = driver.engine.bank.entry(spec.adapter_id)
        assert each.worker_bytes == entry.host_bytes
        matrices = driver.weights(spec.adapter_id).values()
        assert each.num_params == sum(matrix.numel() for matrix in matrices)
