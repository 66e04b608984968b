"""Functions of the Tinker cookbook, as the cookbook has them: those that need a pool in a process of their own."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import safetensors.numpy
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tinkerpool
from tests.support.mini_model import HYBRID, build_mini_model, build_mini_vision_model, write_random_model
from tests.support.numerics.by_peft import logprobs
from tests.support.numerics.exports import DATA, checkpoint_files, train
from tests.support.served_pool import ServedPool, shipped_pool

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[2] / "support" / "doors" / "cookbook_weights.py"
COOKBOOK = Path(sys.prefix) / "beside" / "tinker_cookbook-0.6.1"
NOT_INSTALLED = "tinker_cookbook 0.6.1 is not installed beside the environment; `make test` does that"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("models")
    return {
        "tied": build_mini_model(where / "tied"),
        "untied": build_mini_model(where / "untied", "llama"),
        "sees": build_mini_vision_model(where / "sees", is_tied=False),
        "experts": build_mini_model(where / "experts", "qwen3-moe"),
        "gpt-oss": build_mini_model(where / "gpt-oss", "gpt-oss"),
    }


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[ServedPool]:
    if not COOKBOOK.is_dir():
        pytest.skip(NOT_INSTALLED)
    with shipped_pool(tmp_path_factory.mktemp("pool"), models) as pool:
        yield pool


class Program:
    """The program, for the tests of this module: importing what it needs takes longer than a test."""

    def __init__(self, pool: ServedPool, log: Path) -> None:
        key = f"tml-{pool.key('cook')}"
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", PROGRAM, pool.http_url, key],
                env={**os.environ, "PYTHONPATH": str(COOKBOOK), "TINKER_TELEMETRY": "0", "TINKER_API_KEY": key},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def downloaded_and_merged(self, model: str, base: Path, out: Path, *options: str) -> Any:
        """Return the report of a line."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the program has ended, and its log says why
            self._process.stdin.write(json.dumps([model, str(base), str(out), *options]) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("report "):
                return json.loads(line.removeprefix("report "))
        raise AssertionError(self._log.read_text()[-3000:])

    def close(self) -> None:
        """End the program."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def program(pool: ServedPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    program = Program(pool, tmp_path_factory.mktemp("program") / "errors.log")
    yield program
    program.close()


def forward_of_import(pool: ServedPool, model: str, adapter: Path) -> list[float]:
    """Import a download; return the log-probabilities of the program's tokens."""
    tokens = [5, 9, 60, 61, 5, 9, 60, 62, 63, 64, 65]
    datum = tinkerpool.Datum(tokens[:-1], {"target_tokens": tokens[1:]})
    with pool.client("cook") as service:
        imported = service.create_rest_client().import_checkpoint(adapter, base_model=model).result(60)
        trainer = service.get_training_client(imported.model_id)
        [output] = trainer.forward([datum], "cross_entropy").result(60).loss_fn_outputs
    found: list[float] = output["logprobs"].to_numpy().tolist()
    return found


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param("untied", ["train_unembed"], marks=pytest.mark.long),  # as "sees"
        ("tied", []),
        ("sees", ["train_unembed"]),
        ("experts", ["shard", "to_peft"]),
        pytest.param("gpt-oss", ["shard", "to_vllm"], marks=pytest.mark.long),
    ],
)
def test_the_cookbook_downloads_a_training_checkpoint_and_merges_what_the_pool_computes(
    pool: ServedPool, program: Program, models: dict[str, Path], tmp_path: Path, model: str, options: list[str]
) -> None:
    report = program.downloaded_and_merged(model, models[model], tmp_path, *options)
    assert report["files"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert report["left"] == 0, "the temporary export was not deleted"
    assert np.allclose(report["merged"], report["forward"], atol=2e-4)
    if "to_peft" in options:
        assert np.allclose(report["in_peft"], report["forward"], atol=2e-4)
    if "to_vllm" in options:
        assert report["of_experts"] < 1e-6
    assert -np.mean(report["forward"]) < 4.0, "the adapter changed little: the comparison would show nothing"
    assert np.array_equal(forward_of_import(pool, model, tmp_path / "adapter"), report["forward"]), "the way back"


def test_the_cookbook_adds_a_trained_unembedding_to_the_shared_matrix_of_a_tied_model(
    program: Program, models: dict[str, Path], tmp_path: Path
) -> None:
    """So the merged model is another one: docs/tinker.md says to export it merged by the pool's own command."""
    report = program.downloaded_and_merged("tied", models["tied"], tmp_path, "train_unembed")
    adapter = safetensors.numpy.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    name = "base_model.model.model.unembed_tokens.lora_{}.weight"
    change = adapter[name.format("B")] @ adapter[name.format("A")] * (config["lora_alpha"] / config["r"])
    base, merged = (
        safetensors.numpy.load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
        for directory in (models["tied"], tmp_path / "merged")
    )
    assert np.allclose(merged, base + change, atol=1e-5)
    assert np.abs(change).max() > 0.01
    assert not np.allclose(report["merged"], report["forward"], atol=1e-2)


SHAPE: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 257,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
@pytest.mark.parametrize(
    ("family", "options", "is_right"),
    [
        ("olmoe", {}, True),
        pytest.param("qwen3_moe", {}, True, marks=pytest.mark.long),
        pytest.param("qwen3_moe", {"mlp_only_layers": [1]}, False, marks=pytest.mark.long),
        ("mixtral", {}, False),
        pytest.param("qwen2_moe", {}, False, marks=pytest.mark.long),
        pytest.param("qwen3_next", HYBRID, False, marks=pytest.mark.long),
        pytest.param("qwen3_5_moe_text", HYBRID, False, marks=pytest.mark.long),
        pytest.param("gpt_oss", {}, False, marks=pytest.mark.long),
    ],
)
def test_of_some_mixtures_alone_peft_computes_what_the_cookbook_converts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, options: dict[str, Any], is_right: bool
) -> None:
    """Of the others it leaves out factors: docs/export.md says of which, and what to do."""
    if not COOKBOOK.is_dir():
        pytest.skip(NOT_INSTALLED)
    base = write_random_model(tmp_path / "base", type(AutoConfig.for_model(family))(**SHAPE | options))
    driver, spec = train(base, train_unembed=False)
    download = tmp_path / "download"
    download.mkdir()
    for name, content in checkpoint_files(driver, spec, for_tinker=True).items():
        (download / name).write_bytes(content)
    monkeypatch.syspath_prepend(COOKBOOK)
    weights = importlib.import_module("tinker_cookbook.weights")
    converted = tmp_path / "converted"
    weights.build_lora_adapter(base_model=str(base), adapter_path=str(download), output_path=str(converted))
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), converted)
    (result,) = driver.train(driver.forward("a", DATA))
    with torch.no_grad():
        in_peft = np.concatenate([own.numpy() for own in logprobs(model.eval(), DATA)])
    difference = np.abs(in_peft - np.concatenate(result.logprobs)).max()
    assert (difference < 3e-5) if is_right else (difference > 0.1)
