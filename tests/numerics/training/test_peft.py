"""The engine trains as PEFT does, and its files load in PEFT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.numerics.by_peft import cross_entropy, flags_for, logprobs, own_gradients, trained_by_peft
from tests.support.numerics.exports import checkpoint_files
from tests.support.numerics.harness import Driver, Tenant, make_data, make_spec
from workers.contract.messages import AdamParams, AdapterSpec

# PEFT warns of merging an adapter of a tied unembedding; these tests do not merge.
pytestmark = [pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"), pytest.mark.slow]

DATA = make_data("cross_entropy", [23, 8, 40])


def trained(model: Path, spec: AdapterSpec) -> Driver:
    driver = Driver(model)
    driver.install(spec)
    for _ in range(2):
        driver.train(driver.backward(spec.adapter_id, DATA))
        driver.train(driver.step(spec.adapter_id, AdamParams(learning_rate=3e-2)))
    return driver


def write_peft_directory(directory: Path, driver: Driver, spec: AdapterSpec) -> None:
    """Write the files of an export."""
    for name, content in checkpoint_files(driver, spec).items():
        (directory / name).write_bytes(content)


@pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys did not match"
)  # PEFT looks at modules alone
def test_exported_weights_load_in_peft_with_the_same_log_probabilities_and_gradients(
    model_directory: Path, tmp_path: Path
) -> None:
    spec = make_spec("a", 4)
    driver = trained(model_directory, spec)
    write_peft_directory(tmp_path, driver, spec)
    (result,) = driver.train(driver.backward("a", DATA))

    base = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True).eval()
    expected = logprobs(model, DATA)
    for actual, wanted in zip(result.logprobs, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(actual), wanted, rtol=1e-5, atol=2e-5)

    cross_entropy(expected, DATA).backward()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    expected_gradients = own_gradients(theirs, driver.engine.info.modules)
    gradients = driver.gradients("a")
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        wanted = expected_gradients[name]
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5 * (1 + float(wanted.abs().max())))


NUM_STEPS = 6
PARAMS = AdamParams(learning_rate=2e-2, weight_decay=0.1, eps=1e-3, grad_clip_norm=5.0)
"""Adam divides a gradient by its own size. With an eps below the rounding errors, a gradient that is only a rounding
error would give a full step, in a direction that differs between the two sides."""
HYBRID_PARAMS = replace(PARAMS, eps=0.1)
"""Linear attention divides queries and keys by their lengths, and errors grow where these are small. With the eps above
PEFT's own weights move by up to 1e-3 if the base model's change in their last bits; with this one by 1e-5."""


def test_two_co_batched_tenants_equal_peft_training_of_each_solo(any_model_directory: Path, tmp_path: Path) -> None:
    driver = Driver(any_model_directory)
    params = HYBRID_PARAMS if driver.engine.base_model.delta_layers else PARAMS
    a, b = (make_spec(key, rank, **flags_for(any_model_directory)) for key, rank in (("a", 4), ("b", 16)))
    tenants = [
        Tenant(spec=a, passes=[make_data("cross_entropy", [23, 8, 70], seed=1)], params=params),
        Tenant(spec=b, passes=[make_data("cross_entropy", [5, 41], seed=2)], params=params),
    ]
    driver.install(*(tenant.spec for tenant in tenants))
    losses: dict[str, list[float]] = {tenant.key: [] for tenant in tenants}
    for tenant in tenants:
        (tmp_path / tenant.key).mkdir()
        write_peft_directory(tmp_path / tenant.key, driver, tenant.spec)
    num_matmuls = driver.engine.base_model.num_base_matmuls
    for _ in range(NUM_STEPS):
        results = driver.train(*(driver.backward(tenant.key, tenant.passes[0]) for tenant in tenants))
        for tenant, result in zip(tenants, results, strict=True):
            losses[tenant.key].append(result.metrics["loss:sum"])
        driver.train(*(driver.step(tenant.key, tenant.params) for tenant in tenants))
    linears = sum(len(shape.names) for shape in driver.engine.base_model.group_shapes)
    assert driver.engine.base_model.num_base_matmuls - num_matmuls == NUM_STEPS * linears, "each step has one pass"

    for tenant in tenants:
        modules = driver.engine.info.modules
        expected, expected_weights = trained_by_peft(
            any_model_directory, tmp_path / tenant.key, tenant.passes[0], params, NUM_STEPS, modules
        )
        assert expected[-1] < expected[0], "the loss decreases"
        torch.testing.assert_close(torch.tensor(losses[tenant.key]), torch.tensor(expected), rtol=1e-5, atol=1e-3)
        weights = driver.weights(tenant.key)
        assert weights.keys() == expected_weights.keys()
        for name, weight in weights.items():
            # Weights move by up to 0.12 and the two sides round differently by 4e-6; no weight decay would be 2e-3.
            torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=2e-5)
