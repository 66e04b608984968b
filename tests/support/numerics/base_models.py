"""Base models that the engines of one process share: each is loaded once, because loading takes longer than most tests.

Main invariant: a shared model is as it was when it was loaded. Tests that patch the loading, or change a model, ask for
the fixture `own_base_models`; any other test that leaves a shared model changed fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from workers.contract.settings import EngineSettings
from workers.model.base_model import BaseModel
from workers.selftest.loading import load_base_model

PER_PASS = {"routing", "num_base_matmuls"}
"""What each pass sets anew, or only counts."""


class SharedBaseModels:
    """The loaded models, by all that decides how a model is loaded."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[Any, ...], tuple[BaseModel, object]] = {}
        self._is_on = True

    def get(self, settings: EngineSettings) -> BaseModel | None:
        """Return the model of these settings; None if the engine must load one of its own."""
        if not self._is_on:
            return None
        how = (settings.model_name, settings.device, settings.dtype, settings.exact)
        key = (settings.model_path, *how, torch.get_num_threads())
        if key not in self._loaded:
            model = load_base_model(settings)
            self._loaded[key] = model, state_of(model)
        return self._loaded[key][0]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let every engine load a model of its own."""
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True

    def assert_unchanged(self) -> None:
        """Raise AssertionError if a model differs from what was loaded, and drop that model."""
        for key, (model, state) in list(self._loaded.items()):
            if state_of(model) != state:
                del self._loaded[key]
                raise AssertionError("this test changed a base model that tests share; ask for `own_base_models`")


def state_of(model: BaseModel) -> object:
    """Return what no pass may change: attributes, ways to compute, and the version counter of each weight."""
    # A patch that was undone leaves the method itself among the attributes.
    attributes = {name: id(value) for name, value in vars(model).items() if not isinstance(value, MethodType)}
    current = {name: value for name, value in vars(model.current).items() if name not in PER_PASS}
    products = [id(group.products) for group in model.groups]
    weights = [(name, weight._version) for name, weight in model.model.state_dict().items()]
    return attributes, current, products, weights


SHARED = SharedBaseModels()
"""The models of this process."""
