"""Which architectures a test takes in `make test`, and which in `make test-long` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.numerics.harness import ARCHITECTURES, RARER_ARCHITECTURES


def long(*values: Any) -> list[Any]:
    """Return parameters, tuples for tests with several, that only `make test-long` takes."""
    sets = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*each, marks=pytest.mark.long) for each in sets]


def with_rarer(names: Iterable[str]) -> list[Any]:
    """Return architectures as parameters: the most different ones for every run, the others for long ones."""
    return [pytest.param(name, marks=[] if name in ARCHITECTURES else pytest.mark.long) for name in names]


MODELS_BY_THREADS = [
    *((name, 2 if name == "qwen3.5-moe" else 1) for name in ARCHITECTURES),
    *long(*((name, 1 if name == "qwen3.5-moe" else 2) for name in ARCHITECTURES)),
    *long(*((name, num_threads) for name in RARER_ARCHITECTURES for num_threads in (1, 2))),
]
"""Values of `model_directory` and of a number of threads: two threads for the model with most kinds of products, and in
long runs for the others."""
