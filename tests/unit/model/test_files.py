"""Where a base model's files are, and which of them are missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from workers.contract.settings import SHIPPED_MODELS_DIR
from workers.model.files import check_files, find_directory


def test_a_model_that_is_not_in_the_hub_cache_is_refused_with_the_command_that_downloads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="run `hf download nobody/nothing` first"):
        find_directory("nobody/nothing")


def test_a_model_directory_that_lacks_a_file_is_refused_with_the_names_of_all_that_are_missing(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(SHIPPED_MODELS_DIR / "kjv-2m", model)
    check_files(model)
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"there is no model-00002-of-00002\.safetensors in it"):
        check_files(model)
    (model / "model-00002-of-00002.safetensors").touch()
    check_files(model)
    for path in model.iterdir():
        path.unlink()
    missing = r"no config\.json, and no tokenizer \(.*\), and no file of weights \(model\.safetensors\) in it"
    with pytest.raises(FileNotFoundError, match=missing):
        check_files(model)
