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
    ("reply", "reward"), [("30 + 86 = 116", 1), ("116", 1), ("30 + 86 = 16", 0), ("116 = 30 + 86", 0), ("", 0)]
)
def test_a_reply_is_right_if_its_last_number_is_the_answer(reply: str, reward: float) -> None:
    assert arithmetic.is_right(arithmetic.task((30, "+", 86)), reply) == reward
