"""The measuring modules of the version under test, in either layout of the project.

A version is measured through its own `scripts`, which drive its engine, planner and pools. Old: commit 3c6fa14 and
before, with flat scripts (`bench_sides.py`). New: scripts in packages.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

MODULES = {
    "models": ("bench_models", "scripts.bench.models"),
    "training": ("bench_sides", "scripts.bench.sides.training"),
    "samplers": ("bench_samplers", "scripts.bench.sides.samplers"),
    "planner": ("bench_planner", "scripts.bench.planner"),
    "tenants": ("bench_pools", "scripts.bench.sides.pools"),
    "pool": ("demo", "scripts.embedded_pool"),
}
"""By name: the module in the old and in the new layout."""


def module(name: str) -> Any:
    """Import a measuring module of the version under test. Import `models` first: it configures torch's threads."""
    old, new = MODULES[name]
    is_old = find_spec(MODULES["training"][0]) is not None
    return importlib.import_module(old if is_old else new)


def attribute(name: str, new: str, old: str) -> Any:
    """Return an attribute of a measuring module by its new name, or by its old one."""
    found = module(name)
    return getattr(found, new) if hasattr(found, new) else getattr(found, old)
