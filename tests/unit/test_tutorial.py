"""The page of the tutorial is the run that its figures come from."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from scripts.tutorial.picture import draw
from scripts.tutorial.run import reinforcement_settings, supervised_settings
from tests.support.pages import ROOT
from tinkerpool.recipes import reinforcement, supervised
from tinkerpool.recipes.options import parse

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
RESULTS = json.loads((ROOT / "docs" / "results" / "tutorial.json").read_text(encoding="utf-8"))


def command_of(recipe: str) -> list[str]:
    """Return the arguments of the page's command that runs a recipe."""
    [found] = re.findall(rf"^    python -m tinkerpool\.recipes\.{recipe} ((?:.*\\\n)*.*)$", PAGE, flags=re.MULTILINE)
    return shlex.split(found.replace("\\\n", " "))


def test_the_commands_of_the_page_are_the_runs_of_make_tutorial() -> None:
    data, runs = Path("arithmetic"), Path("runs")
    shown = parse(supervised.Settings, "", "", command_of("supervised"))
    answers = parse(reinforcement.Settings, "", "", command_of("reinforcement"))
    assert shown == supervised_settings(data, runs)
    assert answers == reinforcement_settings(data, runs)
    assert len(RESULTS["reinforcement"]["steps"]) == answers.num_steps


@pytest.mark.parametrize("page", ["docs/tutorial.md", "README.md"])
def test_the_accuracies_that_a_page_names_are_those_of_the_run(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, accuracy in RESULTS["accuracy"].items():
        assert f"{accuracy:.1%}".replace("%", " %") in text, name


def test_the_page_has_what_sharing_cost_each() -> None:
    cells = re.findall(r"([\d.]+) s(?=[ ,])", PAGE.partition("## Two users at once")[2])
    median = RESULTS["sharing"]["median_s"]
    in_turn = round(median["ada_alone"] + median["ben_alone"], 1)
    tenants = [median[f"{tenant}_{when}"] for tenant in ("ada", "ben") for when in ("alone", "together")]
    assert [float(cell) for cell in cells] == [*tenants, in_turn, median["both"]]


def test_the_picture_is_drawn_from_the_figures(tmp_path: Path) -> None:
    draw(RESULTS, tmp_path / "images" / "tutorial.png")
    assert (tmp_path / "images" / "tutorial.png").stat().st_size > 10_000
