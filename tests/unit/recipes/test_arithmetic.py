"""The task of the tutorial: problems, their files, and the reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tinkerpool.recipes import arithmetic


def test_no_problem_is_in_two_files_and_the_same_seed_writes_the_same(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        arithmetic.write(tmp_path / folder, seed=3)
    files = {path.name: path.read_text() for path in (tmp_path / "first").iterdir()}
    assert files == {path.name: path.read_text() for path in (tmp_path / "second").iterdir()}
    lines = [json.loads(line) for text in files.values() for line in text.splitlines()]
    questions = [(line.get("messages") or line["prompt"])[1]["content"] for line in lines]
    assert len(questions) == len(set(questions)) == 90 * 90 + 90 * 91 // 2


@pytest.mark.parametrize(
    ("problem", "worked"),
    [
        ((30, "+", 86), "0 + 6 = 6, 3 + 8 = 11, so 116"),
        ((47, "+", 85), "7 + 5 = 12, 4 + 8 + 1 = 13, so 132"),
        ((58, "-", 26), "8 - 6 = 2, 5 - 2 = 3, so 32"),
        ((63, "-", 27), "13 - 7 = 6, 5 - 2 = 3, so 36"),
        ((40, "-", 38), "10 - 8 = 2, 3 - 3 = 0, so 2"),
    ],
)
def test_a_problem_is_worked_digit_by_digit(problem: arithmetic.Problem, worked: str) -> None:
    assert arithmetic.steps(problem) == worked


def test_every_worked_problem_ends_with_its_answer() -> None:
    assert all(arithmetic.is_right(arithmetic.task(p), arithmetic.steps(p)) for p in arithmetic.problems(seed=0))


@pytest.mark.parametrize(
    ("reply", "reward"), [("30 + 86 = 116", 1), ("116", 1), ("30 + 86 = 16", 0), ("116 = 30 + 86", 0), ("", 0)]
)
def test_a_reply_is_right_if_its_last_number_is_the_answer(reply: str, reward: float) -> None:
    assert arithmetic.is_right(arithmetic.task((30, "+", 86)), reply) == reward
