"""Exports without the base model's weights: names of base models, notes, and what vLLM's rules refuse."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.exports import CHECKPOINT, adapter_files, export, pool_of, vllm_refuses
from tinkerpool.client import export as export_module
from tinkerpool.client.export import Exporter
from tinkerpool.errors import ExportError
from tinkerpool.model_weights import SINGLE, weights_id
from workers.contract.settings import SHIPPED_MODELS_DIR

LAYER = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")
ALL = (*LAYER, "lm_head")


def config_of(directory: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((directory / "adapter_config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("pool_name", "given", "expected"),
    [
        ("kjv-2m", "", str(SHIPPED_MODELS_DIR / "kjv-2m")),
        ("organisation/model", "", "organisation/model"),
        ("alias", "organisation/model", "organisation/model"),
        ("alias", "kjv-2m", str(SHIPPED_MODELS_DIR / "kjv-2m")),
        ("alias", str(SHIPPED_MODELS_DIR / "kjv-2m"), str(SHIPPED_MODELS_DIR / "kjv-2m")),
    ],
)
def test_an_export_names_a_base_model_that_resolves(tmp_path: Path, pool_name: str, given: str, expected: str) -> None:
    exporter = export(adapter_files(LAYER, base_model=pool_name), tmp_path / "out", base_model=given)
    assert config_of(tmp_path / "out")["base_model_name_or_path"] == expected
    assert exporter.notes == []


def test_a_pools_name_that_does_not_resolve_is_noted_and_never_taken_for_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alias").mkdir()
    monkeypatch.chdir(tmp_path)
    exporter = export(adapter_files(LAYER, base_model="alias"), tmp_path / "out")
    assert config_of(tmp_path / "out")["base_model_name_or_path"] == "alias"
    [note] = exporter.notes
    assert "--base-model" in note
    with pytest.raises(ExportError, match="needs the files of the base model 'alias'"):
        export(adapter_files(LAYER, base_model="alias"), tmp_path / "merged", format="merged")


def test_a_note_says_what_peft_leaves_out_of_a_qwen3_next_without_experts(tmp_path: Path) -> None:
    modules = ["model.layers.0.linear_attn.in_proj_qkvz", "model.layers.0.mlp.gate_proj"]
    exporter = export(adapter_files(modules, base_model="a/b"), tmp_path / "dense")
    [note] = exporter.notes
    assert "Export with --format merged" in note
    assert json.loads((tmp_path / "dense" / "tinkerpool.json").read_text())["notes"] == [note]
    assert export(adapter_files(modules[:1], base_model="a/b"), tmp_path / "attention").notes == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "gguf"}, "one of peft, merged, vllm"),
        ({"base_model": "nowhere"}, "no base model 'nowhere'"),
        ({"base_model": "/"}, r"no config\.json"),
        ({"format": "vllm", "whole_unembedding": True}, "not vllm"),
    ],
)
def test_options_that_cannot_work_are_refused_before_the_download(options: dict[str, object], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        Exporter(checkpoint=CHECKPOINT, **options)  # type: ignore[arg-type]


def test_merging_without_the_pools_libraries_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(**_: str) -> list[EntryPoint]:
        return [EntryPoint("merged", "not_installed.module:write", export_module.ENTRY_POINTS)]

    monkeypatch.setattr(export_module, "entry_points", find)  # as on a machine with the light client
    with pytest.raises(ExportError, match=r"not_installed is not installed: pip install 'tinkerpool\[pool\]'"):
        Exporter(checkpoint=CHECKPOINT, format="merged")
    monkeypatch.setattr(export_module, "entry_points", lambda **_: [])  # as in a checkout that was set up before
    with pytest.raises(ExportError, match="install it again"):
        Exporter(checkpoint=CHECKPOINT, format="merged")


@pytest.mark.parametrize(
    ("is_tied", "expected"), [(True, "ties its unembedding"), (False, None), (None, "may tie its unembedding")]
)
def test_a_trained_unembedding_of_a_tied_base_model_is_noted(
    tmp_path: Path, is_tied: bool | None, expected: str | None
) -> None:
    files = adapter_files(ALL, base_model="kjv-2m")
    notes = export(files, tmp_path / "out", pool_of("kjv-2m", is_tied=is_tied)).notes
    assert [note for note in notes if "unembedding" in note] == [
        note for note in notes if expected and expected in note
    ]
    assert len(notes) == (expected is not None)
    facts = json.loads((tmp_path / "out" / "tinkerpool.json").read_text())
    assert (facts["notes"], facts["checkpoint"], facts["trains_unembedding"]) == (notes, CHECKPOINT, True)


def test_a_whole_unembedding_needs_a_trained_one_and_another_module(tmp_path: Path) -> None:
    for modules, message in ((LAYER, "does not train the unembedding"), (("lm_head",), "another adapted module")):
        with pytest.raises(ExportError, match=message):
            export(adapter_files(modules, base_model="kjv-2m"), tmp_path / "out", whole_unembedding=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("modules", "rank", "message"),
    [
        (ALL, 8, "train_unembed=False"),
        ((*LAYER, "model.layers.0.mlp.router"), 8, "adapts router"),
        (LAYER, 1024, "at most 512"),
    ],
)
def test_what_vllm_refuses_is_refused_and_leaves_no_directory(
    tmp_path: Path, modules: tuple[str, ...], rank: int, message: str
) -> None:
    files = adapter_files(modules, rank=rank, base_model="kjv-2m")
    export(files, tmp_path / "peft")
    assert vllm_refuses(tmp_path / "peft", max_lora_rank=512), "vLLM itself would refuse it"
    with pytest.raises(ExportError, match=message):
        export(files, tmp_path / "vllm", format="vllm")
    assert [path.name for path in tmp_path.iterdir()] == ["peft"]


@pytest.mark.parametrize(("rank", "max_lora_rank"), [(1, 8), (8, 8), (32, 32), (128, 128), (512, 512)])
def test_an_export_for_vllm_names_the_least_rank_to_serve_it_with(
    tmp_path: Path, rank: int, max_lora_rank: int
) -> None:
    exporter = export(adapter_files(LAYER, rank=rank, base_model="kjv-2m"), tmp_path / "out", format="vllm")
    assert vllm_refuses(tmp_path / "out", max_lora_rank) == []
    assert any(f"--max-lora-rank {max_lora_rank} " in note for note in exporter.notes)


@pytest.mark.parametrize("export_format", ["peft", "merged", "vllm"])
def test_an_encrypted_checkpoint_is_not_exported_but_said_to_be_encrypted(tmp_path: Path, export_format: str) -> None:
    files = {f"{name}.age": content for name, content in adapter_files(LAYER).items()}
    with pytest.raises(ExportError, match="the checkpoint is encrypted"):
        export(files, tmp_path / "out", format=export_format)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_checkpoint_that_is_no_adapter_is_refused(tmp_path: Path, name: str) -> None:
    for content in (b"", b"\xff" * 100, b"[]", bytes(8), b"\2" + bytes(7) + b"{}"):
        with pytest.raises(ExportError, match="the pool sent a checkpoint"):
            export(adapter_files(LAYER) | {name: content}, tmp_path / "out", format="vllm")
    assert list(tmp_path.iterdir()) == []


def base_models(folder: Path) -> tuple[Path, str]:
    """Return a directory with weights, and the id of others of the same shapes."""
    for seed in (0, 1):
        (folder / str(seed)).mkdir(parents=True)
        (folder / str(seed) / "config.json").write_text("{}")
        values = np.random.default_rng(seed).normal(size=(4, 6)).astype(np.float32)
        save_file({"model.weight": values}, folder / str(seed) / SINGLE)
    return folder / "0", weights_id(folder / "1")


@pytest.mark.parametrize("options", [{}, {"format": "vllm"}, {"format": "merged"}, {"whole_unembedding": True}])
def test_a_base_model_of_the_same_shapes_with_other_weights_is_refused(
    tmp_path: Path, options: dict[str, object]
) -> None:
    directory, trained = base_models(tmp_path / "models")
    with pytest.raises(ExportError, match=rf"has other weights .* than toy in the pool \({trained}\)"):
        export(
            adapter_files(LAYER),
            tmp_path / "out",
            pool_of("toy", weights_id=trained),
            base_model=str(directory),
            **options,
        )
    assert not (tmp_path / "out").exists()


def test_an_export_says_that_a_model_of_this_machine_has_other_weights(tmp_path: Path) -> None:
    exporter = export(adapter_files(LAYER, base_model="kjv-2m"), tmp_path / "out", pool_of("kjv-2m", weights_id="a"))
    [note] = exporter.notes
    assert "has other weights" in note
    facts = json.loads((tmp_path / "out" / "tinkerpool.json").read_text())
    assert (facts["base_weights_id"], facts["notes"]) == ("a", [note])
