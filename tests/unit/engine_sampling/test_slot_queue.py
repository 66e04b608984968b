"""The order of slots: scopes take turns, a scope's items are served in order, every wait is bounded."""

from __future__ import annotations

from workers.sampling.slot_queue import SlotOrder


def always(_item: str) -> bool:
    return True


def test_scopes_take_turns_however_long_their_queues_are() -> None:
    order: SlotOrder[str] = SlotOrder(patience=3)
    for number in range(4):
        order.add("busy", f"busy{number}")
    order.add("small", "small0")
    served = []
    while (item := order.serve(always)) is not None:
        served.append(item)
        order.remove(item[:-1], item)
    assert served == ["busy0", "small0", "busy1", "busy2", "busy3"]
    assert not order


def test_head_that_stays_is_served_again_when_its_scope_has_its_turn() -> None:
    order: SlotOrder[str] = SlotOrder(patience=3)
    order.add("a", "a")
    order.add("b", "b")
    assert [order.serve(always) for _ in range(4)] == ["a", "b", "a", "b"]


def test_item_that_does_not_fit_is_passed_over_a_bounded_number_of_times() -> None:
    order: SlotOrder[str] = SlotOrder(patience=3)
    order.add("large", "large")
    order.add("small", "small")
    served = [order.serve(lambda item: item == "small") for _ in range(5)]
    assert served == ["small"] * 3 + [None] * 2
    assert order.serve(always) == "large"


def test_removed_item_does_not_block_the_others() -> None:
    order: SlotOrder[str] = SlotOrder(patience=0)
    order.add("large", "large")
    order.add("small", "small")
    assert order.serve(lambda item: item == "small") is None
    order.remove("large", "large")
    order.remove("large", "large")
    assert order.serve(always) == "small"


def test_item_at_its_limit_is_skipped_without_counting_as_passed_over() -> None:
    order: SlotOrder[str] = SlotOrder(patience=1)
    order.add("busy", "busy")
    order.add("small", "small")
    assert order.serve(lambda item: item == "small") == "small"
    served = [order.serve(always, is_at_limit=lambda item: item == "busy") for _ in range(5)]
    assert served == ["small"] * 5
    assert order.serve(lambda item: item == "small") is None, "it was passed over once before, and may not be again"
    assert order.serve(always, is_at_limit=always) is None
    assert order.serve(always) == "busy"
