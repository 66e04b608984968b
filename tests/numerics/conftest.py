"""Miniature models of every supported architecture, made once per session, and one thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.mini_model import build_mini_model
from tests.support.numerics.harness import ALL_ARCHITECTURES, ARCHITECTURES


@pytest.fixture(scope="session")
def model_directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model directory per architecture."""
    root = tmp_path_factory.mktemp("models")
    return {name: build_mini_model(root / name, name, seed=number) for number, name in enumerate(ALL_ARCHITECTURES)}


@pytest.fixture(params=ARCHITECTURES)
def model_directory(request: pytest.FixtureRequest, model_directories: dict[str, Path]) -> Path:
    """Each of the most different architectures in turn."""
    return model_directories[request.param]


@pytest.fixture(params=ALL_ARCHITECTURES)
def any_model_directory(request: pytest.FixtureRequest, model_directories: dict[str, Path]) -> Path:
    """Each architecture in turn."""
    return model_directories[request.param]


@pytest.fixture
def qwen3(model_directories: dict[str, Path]) -> Path:
    """For tests that do not depend on the architecture."""
    return model_directories["qwen3"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Fix the number of threads: bits do not depend on it, and tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
