"""Lines that take turns: first come first served within a line, and nobody waits for ever."""

from __future__ import annotations

from workers.sampling.turns import Turns


def always(_item: str) -> bool:
    return True


def test_lines_take_turns_however_long_they_are() -> None:
    turns: Turns[str] = Turns(patience=3)
    for number in range(4):
        turns.add("hog", f"hog{number}")
    turns.add("small", "small0")
    served = []
    while (item := turns.serve(always)) is not None:
        served.append(item)
        turns.remove(item[:-1], item)
    assert served == ["hog0", "small0", "hog1", "hog2", "hog3"]
    assert not turns


def test_head_that_stays_is_served_again_when_its_line_has_its_turn() -> None:
    turns: Turns[str] = Turns(patience=3)
    turns.add("a", "a")
    turns.add("b", "b")
    assert [turns.serve(always) for _ in range(4)] == ["a", "b", "a", "b"]
    assert list(turns) == ["a", "b"]


def test_what_does_not_fit_is_passed_over_a_bounded_number_of_times() -> None:
    turns: Turns[str] = Turns(patience=3)
    turns.add("large", "large")
    turns.add("small", "small")
    served = [turns.serve(lambda item: item == "small") for _ in range(5)]
    assert served == ["small"] * 3 + [None] * 2
    assert turns.serve(always) == "large"


def test_item_that_gave_up_is_no_longer_in_the_way() -> None:
    turns: Turns[str] = Turns(patience=0)
    turns.add("large", "large")
    turns.add("small", "small")
    assert turns.serve(lambda item: item == "small") is None
    turns.remove("large", "large")
    turns.remove("large", "large")
    assert turns.serve(always) == "small"


def test_who_has_enough_is_neither_served_nor_passed_over_nor_waited_for() -> None:
    turns: Turns[str] = Turns(patience=1)
    turns.add("hog", "hog")
    turns.add("small", "small")
    assert turns.serve(lambda item: item == "small") == "small"
    served = [turns.serve(always, has_enough=lambda item: item == "hog") for _ in range(5)]
    assert served == ["small"] * 5
    assert turns.serve(lambda item: item == "small") is None, "it was passed over once before, and may not be again"
    assert turns.serve(always, has_enough=always) is None
    assert turns.serve(always) == "hog"
