"""Finds the engine that a pool's settings name, in the thread and process that will own it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from workers.contract.protocols import Engine, EngineFactory
from workers.contract.settings import EngineSettings


def engine_factory(path: str, settings: EngineSettings) -> EngineFactory:
    """Return a factory that imports `module:attribute` when it is called, and makes the engine with that."""

    def make_engine(incarnation: str) -> Engine:
        module, _, attribute = path.partition(":")
        make = cast("Callable[[EngineSettings], EngineFactory]", getattr(importlib.import_module(module), attribute))
        return make(settings)(incarnation)

    return make_engine
