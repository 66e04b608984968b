"""An imported adapter computes and trains as PEFT does, whatever its rank, type and modules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from coordinator.base.errors import ServiceError
from coordinator.payloads.peft_config import read_config
from coordinator.payloads.peft_weights import plan_import, state_weights
from tests.support.adapters import AdapterFiles
from tests.support.numerics.by_peft import flags_for, logprobs, trained_by_peft
from tests.support.numerics.exports import checkpoint_files, train
from tests.support.numerics.harness import Driver, make_data, make_spec
from workers.contract.adapted_modules import ModuleKind, leaf_names
from workers.contract.messages import AdamParams, AdapterSpec, AdapterState

# PEFT warns of merging an adapter of a tied unembedding; these tests do not merge.
pytestmark = [pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"), pytest.mark.slow]

DATA = make_data("cross_entropy", [23, 8, 40])
ALL: tuple[ModuleKind, ...] = ("attn", "mlp", "unembed")


def made_by_peft(model: Path, directory: Path, modules: list[str], dtype: torch.dtype | None = None) -> Path:
    """Save a random adapter of rank 12, which adds as much as the base model computes."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = peft.LoraConfig(
            r=12, lora_alpha=20, target_modules=modules, task_type="CAUSAL_LM", init_lora_weights=False
        )
        made = peft.get_peft_model(base, config)
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    made.save_pretrained(directory, save_embedding_layers=False)
    if dtype is not None:
        file = directory / "adapter_model.safetensors"
        tensors = {name: tensor.to(dtype) for name, tensor in safetensors.torch.load_file(file).items()}
        safetensors.torch.save_file(tensors, file)
    return directory


def imported(driver: Driver, directory: Path) -> AdapterSpec:
    """Install an adapter as an import does; return its spec."""
    config = (directory / "adapter_config.json").read_text()
    files = AdapterFiles(json.loads(config), (directory / "adapter_model.safetensors").read_bytes())
    plan = plan_import(read_config(config), files.header, driver.engine.info)
    spec = replace(plan.spec(seed=1), adapter_id="a")
    weights = b"".join(state_weights(plan, spec.seed, lambda start, num_bytes: files.data[start : start + num_bytes]))
    state = AdapterState(weights=weights, optimizer=None, num_steps=0, applied_seq=0, fingerprint="")
    driver.install(spec, state=state)
    return spec


def assert_computes_what_peft_does(driver: Driver, model: Path, directory: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    without = [each.detach() for each in logprobs(base, DATA)]
    expected = logprobs(peft.PeftModel.from_pretrained(base, directory).eval(), DATA)
    (result,) = driver.train(driver.forward("a", DATA))
    for actual, wanted, plain in zip(result.logprobs, expected, without, strict=True):
        torch.testing.assert_close(torch.from_numpy(actual), wanted, rtol=1e-5, atol=2e-5)
        assert float((wanted - plain).abs().max()) > 0.1, "the adapter does something"


def test_an_adapter_that_peft_made_computes_the_same_in_every_architecture(
    any_model_directory: Path, tmp_path: Path
) -> None:
    driver = Driver(any_model_directory)
    kinds = make_spec("a", **flags_for(any_model_directory)).kinds
    modules = [module for module in driver.engine.info.modules if module.kind in kinds]
    linears = {module.linear_name.rpartition(".")[2] for module in modules}
    directory = made_by_peft(any_model_directory, tmp_path, sorted(linears))
    spec = imported(driver, directory)
    assert (spec.rank, spec.alpha, spec.kinds) == (12, 20.0, kinds)
    assert_computes_what_peft_does(driver, any_model_directory, directory)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_queries_and_values_alone_in_half_precision_compute_the_same(
    qwen3: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    driver = Driver(qwen3)
    directory = made_by_peft(qwen3, tmp_path, ["q_proj", "v_proj"], dtype)
    assert imported(driver, directory).kinds == ("attn",)
    assert_computes_what_peft_does(driver, qwen3, directory)


def test_an_imported_adapter_trains_as_in_peft(qwen3: Path, tmp_path: Path) -> None:
    params, num_steps = AdamParams(learning_rate=2e-2, weight_decay=0.1, eps=1e-3, grad_clip_norm=5.0), 3
    driver = Driver(qwen3)
    directory = made_by_peft(qwen3, tmp_path, list(leaf_names(driver.engine.info.modules, "attn", "mlp")))
    imported(driver, directory)
    losses = []
    for _ in range(num_steps):
        losses.append(driver.train(driver.backward("a", DATA))[0].metrics["loss:sum"])
        driver.train(driver.step("a", params))
    expected, expected_weights = trained_by_peft(qwen3, directory, DATA, params, num_steps, driver.engine.info.modules)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-3)
    weights = driver.weights("a")
    assert weights.keys() == expected_weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("kinds", [ALL, ("attn",), ("mlp",), ("unembed",), ("attn", "mlp")], ids="-".join)
def test_an_exported_adapter_is_imported_with_equal_bits_and_exported_again_equal(
    qwen3: Path, tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    flags: dict[str, Any] = {f"train_{kind}": kind in kinds for kind in ALL}
    assert_travels(qwen3, tmp_path, **flags)


def test_an_exported_adapter_of_every_architecture_is_imported_with_equal_bits(
    any_model_directory: Path, tmp_path: Path
) -> None:
    assert_travels(any_model_directory, tmp_path)


def test_an_adapter_of_experts_is_imported_by_the_services_names_too(
    model_directories: dict[str, Path], tmp_path: Path
) -> None:
    base = model_directories["qwen3-moe"]
    driver, spec = train(base, train_unembed=False)
    for name, content in checkpoint_files(driver, spec, for_tinker=True).items():
        (tmp_path / name).write_bytes(content)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of(tmp_path).items()}
    experts = "base_model.model.model.layers.0.mlp.experts"
    assert shapes[f"{experts}.w1.lora_A.weight"] == (1, 4, 64)
    assert shapes[f"{experts}.w3.lora_B.weight"] == (8, 32, 4)
    assert shapes[f"{experts}.w2.lora_A.weight"] == (8, 4, 32)
    assert shapes[f"{experts}.w2.lora_B.weight"] == (1, 64, 4)
    again = Driver(base)
    imported(again, tmp_path)
    assert again.state("a").weights == driver.state("a").weights


@pytest.mark.parametrize("matrix", ["base_layer.lora_A", "lora_B"])
def test_an_adapter_whose_experts_share_no_factor_is_refused(
    model_directories: dict[str, Path], tmp_path: Path, matrix: str
) -> None:
    base = model_directories["qwen3-moe"]
    driver, spec = train(base, train_unembed=False)
    for name, content in checkpoint_files(driver, spec).items():
        (tmp_path / name).write_bytes(content)
    tensors = tensors_of(tmp_path)
    tensors[f"base_model.model.model.layers.1.mlp.experts.{matrix}.weight"][-1, -1] += 1
    safetensors.torch.save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ServiceError, match="differs between experts in the adapter's file"):
        imported(Driver(base), tmp_path)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = safetensors.torch.load_file(directory / "adapter_model.safetensors")
    return tensors


def assert_travels(model: Path, directory: Path, **flags: Any) -> None:
    """Assert that an adapter is the same after an export and an import, and its export too."""
    driver, spec = train(model, **flags)
    files = checkpoint_files(driver, spec)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    again = Driver(model)
    back = imported(again, directory)
    assert again.state("a").weights == driver.state("a").weights
    assert checkpoint_files(again, back) == files
