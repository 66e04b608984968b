"""What the engine computes and writes is what PEFT computes and reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load
from transformers import AutoModelForCausalLM

from tests.numerics.harness import Driver, make_data, make_spec
from workers.messages import AdamParams, AdapterSpec, AdapterState

# PEFT warns of merging an adapter of a tied unembedding; nobody merges here.
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")

DATA = make_data("cross_entropy", [23, 8, 40])


def trained(model: Path, spec: AdapterSpec) -> Driver:
    driver = Driver(model)
    driver.install(spec)
    for _ in range(2):
        driver.train(driver.backward(spec.adapter_id, DATA))
        driver.train(driver.step(spec.adapter_id, AdamParams(learning_rate=3e-2)))
    return driver


def write_peft_directory(directory: Path, driver: Driver, spec: AdapterSpec, state: AdapterState) -> None:
    """As an export does: the weights' bytes as they are, and a configuration."""
    info = driver.engine.info
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "target_modules": [*info.attn_modules, *info.mlp_modules, *info.unembed_modules],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "adapter_model.safetensors").write_bytes(state.weights)


def logprobs(model: Any) -> list[torch.Tensor]:
    results = []
    for datum in DATA:
        logits = model(input_ids=torch.from_numpy(datum.tokens).long()[None], use_cache=False).logits[0]
        targets = torch.from_numpy(datum.loss_inputs["target_tokens"]).long()
        results.append(logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])
    return results


def test_exported_weights_load_in_peft_with_the_same_log_probabilities_and_gradients(
    model_directory: Path, tmp_path: Path
) -> None:
    spec = make_spec("a", 4)
    driver = trained(model_directory, spec)
    write_peft_directory(tmp_path, driver, spec, driver.state("a"))
    (result,) = driver.train(driver.backward("a", DATA))

    base = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True).eval()
    expected = logprobs(model)
    for actual, wanted in zip(result.logprobs, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(actual), wanted, rtol=1e-5, atol=2e-5)

    weights = [torch.from_numpy(datum.loss_inputs["weights"]) for datum in DATA]
    loss = -torch.stack([(p * w).sum() for p, w in zip(expected, weights, strict=True)]).sum()
    loss.backward()
    parameters = dict(model.named_parameters())
    gradients = driver.gradients("a")
    assert gradients
    for name, gradient in gradients.items():
        wanted = parameters["base_model.model." + name.replace(".weight", ".default.weight")].grad
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5 * (1 + float(wanted.abs().max())))


def test_exported_names_are_exactly_those_that_peft_saves(model_directory: Path, tmp_path: Path) -> None:
    spec = make_spec("a", 16)
    driver = trained(model_directory, spec)
    state = driver.state("a")
    write_peft_directory(tmp_path, driver, spec, state)
    base = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path)
    saved = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    ours = load(state.weights)
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: t.shape for n, t in saved.items()}
    assert all(torch.equal(ours[name], saved[name]) for name in ours)
