"""Miniature models whose widths suit the kernels of a GPU; without one all tests are skipped. See `make test-gpu`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # before the import of torch, which may import Triton

import pytest
import torch

from tests.support.mini_model import Architecture, build_mini_model
from tests.support.numerics.harness import ARCHITECTURES

MODELS: tuple[Architecture, ...] = (*ARCHITECTURES, "llama")
"""Also one that is not tied and has decode steps as graphs."""


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Skip tests that need a GPU on machines without one."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def even_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model directory per architecture, all widths multiples of 8."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: build_mini_model(root / name, name, seed=number, vocab_size=264) for number, name in enumerate(MODELS)
    }


@pytest.fixture(params=MODELS)
def even_model(request: pytest.FixtureRequest, even_models: dict[str, Path]) -> Path:
    """Each architecture in turn."""
    return even_models[request.param]


@pytest.fixture
def even_qwen3(even_models: dict[str, Path]) -> Path:
    """For tests that do not depend on the architecture."""
    return even_models["qwen3"]
