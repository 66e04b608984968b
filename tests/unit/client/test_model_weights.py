"""What tells the weights of one directory from those of another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tinkerpool.model_weights import INDEX, SINGLE, weight_files, weights_id

Tensors = Mapping[str, NDArray[np.float32]]


def tensors(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Return a large tensor, a small one and an empty one."""
    random = np.random.default_rng(seed)
    shapes = {"large": (64, 1024), "small": (3,), "empty": (0, 4)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def written(directory: Path, files: Mapping[str, Tensors]) -> Path:
    """Write files of tensors, with an index if their names are several."""
    directory.mkdir()
    for name, content in files.items():
        save_file(dict(content), directory / name)
    if set(files) != {SINGLE}:
        places = {tensor: name for name, content in files.items() for tensor in content}
        (directory / INDEX).write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    return directory


def test_the_same_tensors_in_other_files_have_the_same_id(tmp_path: Path) -> None:
    whole = tensors()
    single = written(tmp_path / "single", {SINGLE: whole})
    parts = {"b.safetensors": {"large": whole["large"]}, "a.safetensors": {n: whole[n] for n in ("small", "empty")}}
    assert weights_id(single) == weights_id(written(tmp_path / "parts", parts)) != ""


@pytest.mark.parametrize("what", ["values", "a value of a small tensor", "type", "shape", "name"])
def test_other_tensors_have_another_id(tmp_path: Path, what: str) -> None:
    before = written(tmp_path / "before", {SINGLE: tensors()})
    changed: dict[str, NDArray[np.float32]] = tensors()
    if what == "values":
        changed["large"] = tensors(1)["large"]
    elif what == "a value of a small tensor":
        changed["small"][1] += 1
    elif what == "type":
        changed["large"] = changed["large"].view(np.int32).astype(np.int32)
    elif what == "shape":
        changed["large"] = changed["large"].reshape(1024, 64)
    else:
        changed["other"] = changed.pop("large")
    assert weights_id(before) != weights_id(written(tmp_path / "after", {SINGLE: changed}))


def test_a_single_file_is_read_beside_the_index_of_other_files_as_transformers_does(tmp_path: Path) -> None:
    directory = written(tmp_path / "model", {SINGLE: tensors()})
    before = weights_id(directory)
    (directory / INDEX).write_text(json.dumps({"weight_map": {"large": "gone.safetensors"}}), encoding="utf-8")
    assert weight_files(directory) == [directory / SINGLE]
    assert weights_id(directory) == before


def test_files_of_pickles_are_told_apart_too_and_a_directory_without_weights_has_no_id(tmp_path: Path) -> None:
    assert weights_id(tmp_path) == ""
    pickle = tmp_path / "pytorch_model.bin"
    pickle.write_bytes(bytes(100_000))
    before = weights_id(tmp_path)
    pickle.write_bytes(bytes(99_999) + b"\1")
    assert "" != weights_id(tmp_path) != before


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": 1}', "no JSON"])
def test_a_damaged_index_is_said_to_be_one(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"is no index of weights|Expecting value"):
        weights_id(tmp_path)
