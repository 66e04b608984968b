"""Merging metrics, by the SDK's rules."""

import pytest

from tinkerpool.metrics import merge_metrics


def test_every_reduction_merges_by_its_definition() -> None:
    first = {"a:sum": 1, "b:mean": 1, "c:min": 1, "d:max": 1, "e:slack": 1, "f:hash2": 2**63, "g:unique": 7}
    second = {"a:sum": 2, "b:mean": 4, "c:min": 4, "d:max": 4, "e:slack": 4, "f:hash2": 2**63, "g:unique": 8}
    assert merge_metrics([first, second], [2, 1]) == {
        "a:sum": 3,
        "b:mean": 2,
        "c:min": 1,
        "d:max": 4,
        "e:slack": 2,
        "f:hash2": 0,
        "g:unique": 7,
        "g:unique_1": 8,
    }


def test_metrics_that_a_part_lacks_and_unknown_reductions_are_dropped() -> None:
    assert merge_metrics([{"a:sum": 1, "b:sum": 1, "c:odd": 1}, {"a:sum": 1, "c:odd": 1}], [1, 1]) == {"a:sum": 2}


def test_a_metric_that_a_part_lacks_can_be_kept() -> None:
    parts = [{"a:sum": 1.0}, {"a:sum": 1.0, "mask:max": 1.0, "m:mean": 3.0}]
    assert merge_metrics(parts, [1, 1], keep_partial=True) == {"a:sum": 2, "mask:max": 1, "m:mean": 3}


def test_a_sum_adds_from_left_to_right() -> None:
    values = [1e16, 1.0, 1.0, -1e16]
    assert merge_metrics([{"a:sum": value} for value in values], [1] * 4) == {"a:sum": ((1e16 + 1.0) + 1.0) - 1e16}


@pytest.mark.parametrize("key", ["loss", "a:b:sum"])
def test_a_metric_without_exactly_one_colon_is_an_error(key: str) -> None:
    with pytest.raises(ValueError, match="one colon"):
        merge_metrics([{key: 1.0}], [1])
