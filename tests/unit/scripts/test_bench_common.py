"""Comparison, output and the page of results of the benchmarks. No timing is tested."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from scripts.bench.common import Column, Effort, Goal, Results, Timing, check_losses, measure_alternating
from scripts.bench.report.page import filled, texts_of


def test_sides_take_turns_and_each_begins_as_often_as_the_other() -> None:
    order: list[str] = []
    sides = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    timings = measure_alternating(sides, Effort(seconds=0, rounds_min=4, rounds_max=4, warm_up=1))
    assert "".join(order) == "ba" + "abbaabba"
    assert {name: len(timing.seconds) for name, timing in timings.items()} == {"a": 4, "b": 4}


def test_sides_that_prepare_one_another_keep_their_order() -> None:
    order: list[str] = []
    sides = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    measure_alternating(sides, Effort(seconds=0, rounds_min=3, rounds_max=3, warm_up=0), in_order=True)
    assert "".join(order) == "ababab"


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 5), (1e9, 7)])
def test_rounds_are_at_least_the_least_and_at_most_the_most(seconds: float, expected: int) -> None:
    timings = measure_alternating({"a": lambda: None}, Effort(seconds=seconds, rounds_min=5, rounds_max=7))
    assert len(timings["a"].seconds) == expected


def test_a_ratio_compares_within_rounds() -> None:
    # The machine was ten times slower in the second round, for both sides.
    slow, fast = Timing((2.0, 20.0, 2.0)), Timing((1.0, 10.0, 1.0))
    assert slow.ratio_to(fast) == {"median": 2.0, "quartiles": [2.0, 2.0]}


def test_sides_that_do_not_train_the_same_are_not_compared() -> None:
    assert check_losses([100.0, 50.0], [100.001, 50.0]) == pytest.approx(1e-5, rel=1e-3)
    with pytest.raises(RuntimeError, match=r"differ by 1\.0e-02: their times cannot be compared"):
        check_losses([100.0, 50.0], [100.0, 49.504950495])
    with pytest.raises(RuntimeError, match="differ by nan"):
        check_losses([float("nan")], [1.0])


def test_quantiles_lie_between_two_values() -> None:
    timing = Timing((4.0, 1.0, 3.0, 2.0))
    assert (timing.quantile(0), timing.quantile(0.5), timing.quantile(1)) == (1.0, 2.5, 4.0)
    assert timing.summary() == {"median_s": 2.5, "quartiles_s": [1.75, 3.25], "rounds": 4}


@pytest.mark.parametrize(
    ("measured", "is_floor", "is_met"), [(1.0, True, True), (0.9, True, False), (1.0, False, True), (1.1, False, False)]
)
def test_a_goal_is_met_on_its_own_side(measured: float, is_floor: bool, is_met: bool) -> None:
    goal = Goal(what="it", target=1.0, is_floor=is_floor, measured=measured, unit=" x")
    assert goal.is_met == is_met
    assert ("**no**" in goal.line()) != is_met


def test_printed_tables_and_goals_are_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Results("item", argparse.Namespace(results=tmp_path, threads=1)) as results:
        table = results.table("table", (Column("a", lambda row: str(row["a"])), Column("b", lambda row: row["b"])))
        table.add({"a": 1, "b": "x", "raw": [1.5]})
        results.goal("it", 2.0, at_least=1.0, unit=" x")
    kept = json.loads((tmp_path / "item.json").read_text())
    assert kept["tables"]["table"]["rows"] == [{"a": 1, "b": "x", "raw": [1.5]}]
    assert kept["tables"]["table"]["markdown"] == "| a | b |\n|---|---|\n| 1 | x |"
    assert kept["tables"]["table"]["markdown"] in capsys.readouterr().out
    texts = texts_of({"item": kept})
    assert texts["goals"].splitlines()[2] == "| it | ≥ 1 x | 2 x | yes |"
    assert texts["table"] == kept["tables"]["table"]["markdown"]


def test_a_run_that_failed_leaves_the_last_results(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Results("item", argparse.Namespace(results=tmp_path, threads=1)):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


PAGE = "prose\n<!-- bench:one -->\nold\n<!-- /bench -->\nmore\n<!-- bench:many-* -->\nold\n<!-- /bench -->\nend\n"


def test_only_marks_with_results_are_replaced() -> None:
    page = filled(PAGE, {"one": "new"})
    assert page == PAGE.replace("old", "new", 1)
    assert filled(page, {"one": "new"}) == page, "filling again changes nothing"


def test_marks_with_a_star_take_every_table_with_that_prefix() -> None:
    page = filled(PAGE, {"many-a": "| A |", "many-b": "| B |"})
    assert page.count("old") == 1
    assert page.index("**a**") < page.index("| A |") < page.index("**b**") < page.index("| B |")


def test_a_table_without_marks_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no marks for other: add the lines '<!-- bench:other -->'"):
        filled(PAGE, {"one": "new", "other": "new"})
