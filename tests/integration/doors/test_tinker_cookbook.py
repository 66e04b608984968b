"""Functions of the Tinker cookbook that need a pool, as the cookbook has them, in a process of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import tinkerpool
from tests.support.mini_model import build_mini_model, build_mini_vision_model
from tests.support.served_pool import ServedPool, shipped_pool

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[2] / "support" / "doors" / "cookbook_weights.py"
COOKBOOK = Path(sys.prefix) / "beside" / "tinker_cookbook-0.6.1"


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
        pytest.skip("tinker_cookbook 0.6.1 is not installed beside the environment; `make test` does that")
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
