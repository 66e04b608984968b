"""The process's switch for adding in a fixed order, for several engines of one process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch.utils import deterministic

from workers.model.fixed_order import CUBLAS_WORKSPACE, fixed_order, prepare


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", True)  # as it is at first
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_switch_stays_on_until_the_last_backward_of_the_process_has_ended() -> None:
    first, second = fixed_order(), fixed_order()
    with first:
        second.__enter__()
    assert torch.are_deterministic_algorithms_enabled()
    second.__exit__(None, None, None)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_backward_that_fails_leaves_the_switch_off() -> None:
    with pytest.raises(ZeroDivisionError), fixed_order():
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()


def test_products_have_a_fixed_workspace_and_new_memory_is_not_filled() -> None:
    prepare()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == CUBLAS_WORKSPACE
    with fixed_order():
        # Filled memory would be NaN everywhere; what is not filled may have one by chance.
        assert not all(torch.empty(1 << 12).isnan().all() for _ in range(8))


def test_an_operators_workspace_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    prepare()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
