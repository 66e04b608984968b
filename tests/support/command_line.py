"""The `tinkerpool` command in the process of the test."""

from __future__ import annotations

import sys
from typing import NamedTuple

import pytest

from tinkerpool.cli.main import main


class Done(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    err: str


class Run:
    """Runs commands, whose output pytest captures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Done:
        """Run `tinkerpool <arguments>` to its end."""
        self._monkeypatch.setattr(sys, "argv", ["tinkerpool", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int | None)
        return Done(ended.value.code or 0, *self._capsys.readouterr())
