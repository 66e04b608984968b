"""These tests run only where they are named, as `make cluster-test` does: they take a quarter of an hour."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect nothing here for a run of all tests."""
    is_named = any("cluster" in Path(argument.partition("::")[0]).parts for argument in config.args)
    return None if is_named else True
