"""The file with a private Ray's mark and folder: read back, or ignored if malformed."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.pool.ray_host import Belongings


def test_belongings_are_read_as_they_were_written(tmp_path: Path) -> None:
    belongings = Belongings(mark="0a1b", folder="/tmp/tinkerpool-1234")
    belongings.write(tmp_path / "ray.json")
    assert Belongings.read(tmp_path / "ray.json") == belongings
    assert [path.name for path in tmp_path.iterdir()] == ["ray.json"]
    assert Belongings.read(tmp_path / "other.json") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"mark": "0a1b", "fol',
        "[]",
        '{"mark": "0a1b"}',
        '{"mark": "", "folder": null}',
        '{"mark": "0a1b", "folder": "/home/somebody"}',
    ],
)
def test_malformed_file_removes_no_process_or_folder(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ray.json"
    path.write_text(text)
    assert Belongings.read(path) is None
    assert "cannot be read, so nothing is removed" in caplog.text
