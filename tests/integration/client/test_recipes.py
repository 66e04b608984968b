"""The recipes and the pages about them, with the shipped model on one pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.code_blocks import run_page
from tests.support.served_pool import ServedPool, shipped_pool

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    with shipped_pool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.mark.parametrize("page", ["docs/data.md"])
def test_the_code_of_a_page_runs(
    pool: ServedPool, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINKERPOOL_BASE_URL", pool.url)
    monkeypatch.setenv("TINKERPOOL_API_KEY", pool.key("reader"))
    monkeypatch.chdir(tmp_path)
    names = run_page(page)
    names["client"].get_info()
    assert "loss per token" in capsys.readouterr().out
