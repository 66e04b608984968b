"""Runs functions in a process in which torch was imported after the guard. Imports no torch."""

from __future__ import annotations

import importlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tests.support.fake_cuda import guard


class FakeCudaProcess:
    """One process with the fake device, for many functions: importing torch takes longer than most of them."""

    def __init__(self) -> None:
        """Start it with the first call. Raises `guard.NoGuardError` if the device cannot be built."""
        if why := guard.problem():
            raise guard.NoGuardError(why)
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=guard.load)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call `module:function` there; return its result, or raise its exception.

        The name is text, because importing the module here would import torch for nothing.
        """
        return self._pool.submit(_call, name, args, kwargs).result()

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()


def _call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)(*args, **kwargs)
