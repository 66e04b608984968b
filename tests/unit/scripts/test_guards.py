"""`make guards` removes guards by their text, so the text must occur."""

from pathlib import Path

import pytest

from scripts.reliability.guards import GUARDS, Guard, without

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_every_guard_can_be_removed(guard: Guard) -> None:
    source = (ROOT / guard.file).read_text()
    assert without(guard, source) != source
    assert all((ROOT / test).exists() for test in guard.tests if test.startswith("tests/"))
