"""The comparison of programs in other languages: what counts as a difference, and what a missing package says."""

from __future__ import annotations

import dataclasses
import os

import pytest

from scripts.clients.languages import __main__ as comparison
from scripts.clients.languages.runs import Run
from scripts.clients.languages.toolchains import LANGUAGES, PYTHON, SHORT, ToolchainError, install

GO = dataclasses.replace(PYTHON, name="go")


def ran(language: str, output: str, fault: str = "") -> Run:
    return Run(language=language, output=output, errors="TrainStep: RATE_LIMITED; again in 1.0 s\n", fault=fault)


def report(python: Run, go: Run) -> int:
    return comparison.report([PYTHON, GO], {"go": 1.0}, {mode: [python, go] for mode in comparison.MODES})


def test_the_same_lines_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(ran("python", "step 1\n"), ran("go", "step 1\n")) == 0
    assert "4 passed, 0 failed" in capsys.readouterr().out


def test_another_bit_fails_and_is_shown_with_the_language_and_its_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(ran("python", "loss 3ff0\ndone\n"), ran("go", "loss 3ff1\ndone\n")) == 1
    shown = capsys.readouterr().out
    assert "go, plaintext, killed: it printed something else" in shown
    assert "-loss 3ff0\n+loss 3ff1" in shown
    assert "    TrainStep: RATE_LIMITED; again in 1.0 s" in shown
    assert "2 passed, 2 failed" in shown


def test_a_program_that_fails_after_the_same_lines_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(ran("python", "done\n"), ran("go", "done\n", "it ended with 3")) == 1
    assert "go, TLS, stopped: it ended with 3" in capsys.readouterr().out


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = dataclasses.replace(PYTHON, packages={"a-package-of-nobody": "", "coreutils-of-nobody": "sh"})
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ToolchainError, match=r"apt-get install a-package-of-nobody$"):
        install([missing])


def test_each_language_has_a_program_and_a_page() -> None:
    for language in LANGUAGES:
        assert (language.sources / "README.md").exists(), language.name
    assert {language.name for language in LANGUAGES} >= set(SHORT)
    folders = {path.name for path in LANGUAGES[0].sources.parent.iterdir() if (path / "README.md").exists()}
    assert folders == {language.name for language in LANGUAGES}
