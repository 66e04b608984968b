"""Miniature models of every supported architecture, made once per session, and one thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.mini_model import build_mini_model
from tests.support.numerics.base_models import SHARED
from tests.support.numerics.cases import long, with_rarer
from tests.support.numerics.harness import ALL_ARCHITECTURES, ARCHITECTURES, RARER_ARCHITECTURES
from workers.selftest import adapter_costs


@pytest.fixture(scope="session")
def model_directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model directory per architecture."""
    root = tmp_path_factory.mktemp("models")
    return {name: build_mini_model(root / name, name, seed=number) for number, name in enumerate(ALL_ARCHITECTURES)}


@pytest.fixture(params=[*ARCHITECTURES, *long(*RARER_ARCHITECTURES)])
def model_directory(request: pytest.FixtureRequest, model_directories: dict[str, Path]) -> Path:
    """Each of the most different architectures in turn."""
    return model_directories[request.param]


@pytest.fixture(params=with_rarer(ALL_ARCHITECTURES))
def any_model_directory(request: pytest.FixtureRequest, model_directories: dict[str, Path]) -> Path:
    """Each architecture in turn; only the most different ones but in long runs."""
    return model_directories[request.param]


@pytest.fixture
def qwen3(model_directories: dict[str, Path]) -> Path:
    """For tests that do not depend on the architecture."""
    return model_directories["qwen3"]


@pytest.fixture(params=["qwen3.5", "qwen3-next"])
def any_hybrid(request: pytest.FixtureRequest, model_directories: dict[str, Path]) -> Path:
    """Each order of the weights of linear attention."""
    return model_directories[request.param]


@pytest.fixture(params=["qwen3", "qwen3.5-moe", *long("gpt-oss", *RARER_ARCHITECTURES)])
def each_kind(request: pytest.FixtureRequest, model_directories: dict[str, Path]) -> Path:
    """A dense model, and a hybrid whose experts have one in common; in long runs also experts with biases."""
    return model_directories[request.param]


@pytest.fixture
def own_base_models() -> Iterator[None]:
    """Let each engine load a base model of its own: for tests that patch the loading, or change a base model."""
    with SHARED.off():
        yield


@pytest.fixture(autouse=True)
def _shared_base_models() -> Iterator[None]:
    """Share base models, and check after each test, when its patches are undone, that they are as loaded."""
    with SHARED.on():
        yield


@pytest.fixture(autouse=True)
def _short_trials() -> Iterator[None]:
    """Measure what adapters cost in one round: no result depends on it, and each size of model is tried.

    A patch of its own: `monkeypatch` would be undone after `_shared_base_models` has compared the models.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_costs, "ROUNDS_S", 0.0)
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Fix the number of threads: bits do not depend on it, and tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
