"""Modules that transformers joins leave the pool as one, for PEFT; for Tinker's tools as they are."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from coordinator.storage.disk import RealDisk
from coordinator.storage.folders import StateFiles
from coordinator.storage.identity import Identity
from tests.support.adapters import PREFIX, Tensors, random_tensors
from tests.support.joined_modules import D_IN, ROWS, expert_modules, experts_in_peft, hybrid_modules
from tests.support.toy_engine import toy_model_info
from workers.contract.adapted_modules import AdaptedModule
from workers.contract.messages import AdapterSpec, AdapterState

RANK, ALPHA = 3, 7.5


@pytest.fixture
def files(tmp_path: Path) -> StateFiles:
    files = StateFiles(tmp_path / "states", "checkpoint", RealDisk())
    files.begin_epoch(Identity(pool_id=1, epoch=2))
    return files


def exported(
    files: StateFiles,
    modules: tuple[AdaptedModule, ...],
    piece_bytes: int = 1 << 20,
    *,
    for_tinker: bool = False,
    **flags: bool,
) -> tuple[dict[str, Any], Tensors, Tensors]:
    """Return configuration and tensors of an export, and the tensors of the state."""
    kinds = {"train_attn": True, "train_mlp": True, "train_unembed": True} | flags
    spec = AdapterSpec(adapter_id="s:train:0", rank=RANK, alpha=ALPHA, seed=3, **kinds)
    stored = random_tensors([module for module in modules if module.kind in spec.kinds], RANK)
    weights = safetensors.numpy.save(stored, {"format": "pt"})
    state = AdapterState(weights=weights, optimizer=None, num_steps=4, applied_seq=9, fingerprint="toy")
    saved = files.write(spec, replace(toy_model_info(), modules=modules), state)
    pieces = list(files.archive(saved.folder, saved.sha256, piece_bytes, for_tinker=for_tinker).pieces())
    with tarfile.open(fileobj=io.BytesIO(b"".join(piece.data for piece in pieces))) as archive:
        content = {name: archive.extractfile(name).read() for name in archive.getnames()}  # type: ignore[union-attr]
    for name, sent in content.items():
        alone = list(files.file(saved.folder, saved.sha256, name, piece_bytes, for_tinker=for_tinker).pieces())
        assert b"".join(piece.data for piece in alone) == sent
        assert max(len(piece.data) for piece in alone) <= piece_bytes
    assert sum(piece.num_read for piece in pieces if piece.data) >= sum(tensor.nbytes for tensor in stored.values())
    config = json.loads(content["adapter_config.json"])
    return config, safetensors.numpy.load(content["adapter_model.safetensors"]), stored


@pytest.mark.parametrize("piece_bytes", [7, 100, 1 << 20])
@pytest.mark.parametrize("linear", ROWS)
def test_for_peft_a_linear_has_its_modules_matrices_one_below_the_other_and_in_blocks(
    files: StateFiles, linear: str, piece_bytes: int
) -> None:
    config, tensors, stored = exported(files, hybrid_modules(linear), piece_bytes)
    num_parts, num_rows = len(ROWS[linear]), sum(map(len, ROWS[linear].values()))
    assert config["target_modules"] == sorted([linear, "out_proj", "up_proj", "lm_head"])
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
    assert config["rank_pattern"] == {linear: num_parts * RANK}
    assert config["alpha_pattern"] == {linear: num_parts * ALPHA}
    for layer in range(2):
        parent = f"{PREFIX}model.layers.{layer}.linear_attn."
        A, B = np.zeros((num_parts * RANK, D_IN), np.float32), np.zeros((num_rows, num_parts * RANK), np.float32)
        for number, (leaf, rows) in enumerate(ROWS[linear].items()):
            own = slice(number * RANK, (number + 1) * RANK)
            A[own] = stored.pop(f"{parent}{leaf}.lora_A.weight")
            B[rows, own] = stored.pop(f"{parent}{leaf}.lora_B.weight")
        np.testing.assert_array_equal(tensors.pop(f"{parent}{linear}.lora_A.weight"), A)
        np.testing.assert_array_equal(tensors.pop(f"{parent}{linear}.lora_B.weight"), B)
    assert tensors.keys() == stored.keys()
    for name, values in stored.items():
        np.testing.assert_array_equal(tensors[name], values)


def test_for_tinker_the_modules_are_as_the_service_names_them(files: StateFiles) -> None:
    config, tensors, stored = exported(files, hybrid_modules("in_proj_qkv"), for_tinker=True, train_unembed=False)
    assert config["target_modules"] == ["in_proj_k", "in_proj_q", "in_proj_v", "out_proj", "up_proj"]
    assert "rank_pattern" not in config
    assert tensors.keys() == stored.keys()


def test_an_adapter_without_attention_has_no_patterns_and_its_tensors(files: StateFiles) -> None:
    config, tensors, stored = exported(files, hybrid_modules("in_proj_qkvz"), train_attn=False)
    assert config["target_modules"] == ["lm_head", "up_proj"]
    assert not config.get("rank_pattern")
    assert not config.get("alpha_pattern")
    assert tensors.keys() == stored.keys()
    for name, values in stored.items():
        np.testing.assert_array_equal(tensors[name], values)


@pytest.mark.parametrize("piece_bytes", [7, 100, 500, 1 << 20])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_for_peft_experts_have_one_matrix_of_all_with_the_rows_of_gates_and_ups_in_the_models_order(
    files: StateFiles, piece_bytes: int, *, is_interleaved: bool
) -> None:
    config, tensors, stored = exported(files, expert_modules(is_interleaved=is_interleaved), piece_bytes)
    assert config["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    assert (config["rank_pattern"], config["alpha_pattern"]) == (
        {"gate_up_proj": 2 * RANK},
        {"gate_up_proj": 2 * ALPHA},
    )
    expected = experts_in_peft(stored, RANK, is_interleaved=is_interleaved)
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(tensors[name], values)
