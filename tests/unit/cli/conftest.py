"""A home directory for each test, and the command line."""

from pathlib import Path

import pytest

from tests.support.command_line import Run


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERPOOL_HOME", str(tmp_path / "home"))
    for name in ("TINKERPOOL_BASE_URL", "TINKERPOOL_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)
