"""Base models that the engines of one process share: each is loaded once, because loading takes longer than most tests.

Main invariant: a shared model is as it was when it was loaded. Models are shared in `tests/numerics` alone, whose tests
fail if they leave one changed. A test that patches the loading, or changes a model, asks for `own_base_models` there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch

from workers.contract.settings import EngineSettings
from workers.model.base_model import BaseModel
from workers.selftest.loading import load_base_model

PER_PASS = {"recur", "routing", "num_base_matmuls"}
"""What each pass sets anew, or only counts."""


class SharedBaseModels:
    """The loaded models, by all that decides how a model is loaded."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[Any, ...], tuple[BaseModel, object]] = {}
        self._used: set[tuple[Any, ...]] = set()
        """Keys of those that the current block has asked for."""
        self._is_on = False

    def get(self, settings: EngineSettings) -> BaseModel | None:
        """Return the model of these settings; None if the engine must load one of its own."""
        if not self._is_on:
            return None
        how = (settings.model_name, settings.device, settings.dtype, settings.exact)
        made_ns = Path(settings.model_path).stat().st_mtime_ns  # a later test's folder may have the same name
        key = (settings.model_path, made_ns, *how, torch.get_num_threads())
        if key not in self._loaded:
            model = load_base_model(settings)
            self._loaded[key] = model, state_of(model)
        self._used.add(key)
        return self._loaded[key][0]

    @contextmanager
    def on(self) -> Iterator[None]:
        """Share models in this block. At its end, drop a model that it asked for and that differs from what was loaded.

        Raises AssertionError if there is one.
        """
        self._used.clear()
        with self._switched(is_on=True):
            yield
        used = {key: self._loaded[key] for key in self._used}
        for model, _ in used.values():
            _forget_patches(model)
        changed = [key for key, (model, state) in used.items() if state_of(model) != state]
        for key in changed:
            del self._loaded[key]
        assert not changed, "this test changed a base model that tests share; ask for `own_base_models`"

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let every engine in this block load a model of its own."""
        with self._switched(is_on=False):
            yield

    @contextmanager
    def _switched(self, *, is_on: bool) -> Iterator[None]:
        before, self._is_on = self._is_on, is_on
        try:
            yield
        finally:
            self._is_on = before


def state_of(model: BaseModel) -> object:
    """Return what no pass may change: attributes, ways to compute, and the version counter of each weight."""
    attributes = {name: id(value) for name, value in vars(model).items()}
    current = {name: value for name, value in vars(model.current).items() if name not in PER_PASS}
    products = [id(group.products) for group in model.groups]
    weights = [(name, weight._version) for name, weight in model.model.state_dict().items()]
    return attributes, current, products, weights


def _forget_patches(model: BaseModel) -> None:
    """Delete methods among the attributes: an undone patch leaves one, and it would hide a patch of the class."""
    for name in [name for name, value in vars(model).items() if isinstance(value, MethodType)]:
        delattr(model, name)


SHARED = SharedBaseModels()
"""The models of this process."""
