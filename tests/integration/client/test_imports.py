"""Adapters travel into a pool of the shipped model and out again, over real gRPC."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import safetensors.numpy
import torch
from transformers import AutoModelForCausalLM

import tinkerpool
from tests.support.adapters import PREFIX, AdapterFiles, random_tensors
from tests.support.served_pool import SHIPPED_MODEL, ServedPool
from tinkerpool.errors import InvalidArgument
from workers.contract.messages import ModelInfo

pytestmark = pytest.mark.slow
TOKENS = [459, 342, 343, 386, 505, 12, 70, 800]
DATUM = tinkerpool.Datum(TOKENS[:-1], {"target_tokens": TOKENS[1:]})


def model_of(pool: ServedPool) -> ModelInfo:
    return pool.coordinator.core.fleet.models["kjv-2m"]


def read(directory: Path) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    tensors = safetensors.numpy.load_file(directory / "adapter_model.safetensors")
    config = json.loads((directory / "adapter_config.json").read_text())
    return tensors, {name: config[name] for name in ("r", "lora_alpha", "target_modules", "peft_type", "bias")}


def test_an_adapter_of_several_parts_travels_in_and_out_with_equal_tensors_and_configuration(
    pool: ServedPool, tmp_path: Path
) -> None:
    modules, sent = model_of(pool).modules, list[int]()
    config = {"peft_type": "LORA", "r": 100, "lora_alpha": 50.0, "bias": "none", "base_model_name_or_path": "kjv-2m"}
    targets = sorted({module.leaf_name for module in modules})
    files = AdapterFiles(config | {"target_modules": targets}, safetensors.numpy.save(random_tensors(modules, 100)))
    with pool.client("alice") as service:
        rest = service.create_rest_client()
        there = rest.import_checkpoint(files.write(tmp_path / "in"), on_progress=lambda done, _: sent.append(done))
        assert there.result(60).notes == ()
        back = rest.export_checkpoint(there.result().path, tmp_path / "out").result(60)
    assert len(sent) > 2, "several parts"
    tensors, settings = read(back)
    expected, wanted = read(tmp_path / "in")
    assert settings == wanted
    assert tensors.keys() == expected.keys()
    assert all(np.array_equal(tensors[name], values) for name, values in expected.items())


def test_what_peft_made_is_sampled_and_trained_in_the_pool(pool: ServedPool, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32)
    config = peft.LoraConfig(
        r=12, lora_alpha=20, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    made = peft.get_peft_model(base, config).eval()
    made.save_pretrained(tmp_path)
    with torch.no_grad():
        logits = made(input_ids=torch.tensor([TOKENS[:-1]])).logits[0]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].numpy()
    with pool.client("bob") as service:
        imported = service.create_rest_client().import_checkpoint(tmp_path, "from-peft").result(60)
        trainer = service.get_training_client(imported.model_id)
        forward = trainer.forward([DATUM], "cross_entropy").result(60).loss_fn_outputs[0]["logprobs"].to_numpy()
        np.testing.assert_allclose(forward, expected, rtol=1e-5, atol=2e-5)
        sampler = service.create_sampling_client(imported.path)
        sampled = sampler.compute_logprobs(tinkerpool.ModelInput.from_ints(TOKENS)).result(60)
        np.testing.assert_allclose(np.array(sampled[1:], np.float32), expected, rtol=1e-5, atol=2e-5)
        step = trainer.train_step([DATUM], "cross_entropy", tinkerpool.AdamParams(learning_rate=1e-2)).result(60)
        after = trainer.forward([DATUM], "cross_entropy").result(60)
        assert after.metrics["loss:sum"] < step.forward_backward.metrics["loss:sum"]


def test_a_refused_import_leaves_no_session_and_no_upload(pool: ServedPool, tmp_path: Path) -> None:
    module = model_of(pool).modules[0]
    tensors = random_tensors([module], 4)
    tensors[PREFIX + module.A_name][0, 0] = np.inf
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [module.name]}
    with pool.client("carol") as service:
        rest = service.create_rest_client()
        for files in (
            AdapterFiles(config | {"use_dora": True}, safetensors.numpy.save(tensors)),
            AdapterFiles(config, safetensors.numpy.save(tensors)),
        ):
            with pytest.raises(InvalidArgument) as refused:
                rest.import_checkpoint(files.write(tmp_path)).result(60)
            assert refused.value.reason == "NOT_IMPORTABLE"
        assert rest.list_sessions().result(60).sessions == []
        assert rest.list_user_checkpoints().result(60).checkpoints == []
