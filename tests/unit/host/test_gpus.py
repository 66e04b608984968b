"""Whether a machine shows a GPU: by the files of its driver, a variable and the build of torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.host.gpus import gpu_problem


def test_a_machine_without_a_drivers_files_has_no_gpu(tmp_path: Path) -> None:
    assert "this machine shows none" in gpu_problem(tmp_path, {})
    assert "docker run --gpus all" in gpu_problem(tmp_path, {})


@pytest.mark.parametrize("name", ["nvidia0", "nvhost-gpu", "dxg", "kfd"])
def test_a_gpu_that_may_work_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("workers.host.gpus.version", lambda _: "2.13.0")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / name).touch()
    assert not gpu_problem(tmp_path, {})
    assert not gpu_problem(tmp_path, {"CUDA_VISIBLE_DEVICES": "0"})
    assert "CUDA_VISIBLE_DEVICES='' hides those of this machine; unset it" in gpu_problem(
        tmp_path, {"CUDA_VISIBLE_DEVICES": ""}
    )
    monkeypatch.setattr("workers.host.gpus.version", lambda _: "2.13.0+cpu")
    assert "torch 2.13.0+cpu is the build for CPUs" in gpu_problem(tmp_path, {})
