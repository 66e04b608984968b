"""Garbage collections of the coordinator's process: what they walk over, and when cycles are found."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from coordinator.base import memory
from coordinator.base.memory import Collections


class Node:
    """An object with a cycle."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def collections() -> Iterator[Collections]:
    made = Collections()
    yield made
    made.close()


def test_what_survives_a_full_collection_is_left_out_of_those_that_follow(collections: Collections) -> None:
    node = Node()
    assert any(each is node for each in gc.get_objects())
    gc.collect()
    assert not any(each is node for each in gc.get_objects())


def test_a_young_cycle_is_found_as_usual(collections: Collections) -> None:
    found = weakref.ref(Node())
    gc.collect()
    assert found() is None


@pytest.mark.parametrize(("name", "is_quiet"), [("LEFT_OUT_QUIET_MAX", True), ("LEFT_OUT_MAX", False)])
def test_a_cycle_that_was_left_out_is_found_in_a_quiet_moment_or_when_there_are_too_many(
    collections: Collections, monkeypatch: pytest.MonkeyPatch, name: str, is_quiet: bool
) -> None:
    node = Node()
    gc.collect()
    found = weakref.ref(node)
    del node
    gc.collect()
    collections.sweep(is_quiet=is_quiet)
    assert found() is not None, "it is one of a few"
    monkeypatch.setattr(memory, name, -(10**9))
    collections.sweep(is_quiet=is_quiet)
    assert found() is None


@pytest.mark.parametrize("is_frozen", [True, False])
def test_after_its_end_objects_are_left_out_only_if_this_process_left_out_some_before(*, is_frozen: bool) -> None:
    gc.unfreeze()
    if is_frozen:
        gc.freeze()
    try:
        Collections().close()
        assert (gc.get_freeze_count() > 0) == is_frozen
    finally:
        gc.freeze()  # as before this test: see tests/conftest.py
