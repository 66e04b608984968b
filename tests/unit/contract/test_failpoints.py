"""Failpoints: no effect unless armed; a file in the folder kills one process."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.contract import failpoints
from workers.contract.failpoints import failpoint

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.disarm()


def test_a_failpoint_has_no_effect_unless_it_is_armed() -> None:
    hits: list[str] = []
    failpoint("worker.applied")
    failpoints.arm("worker.applied", lambda: hits.append("hit"))
    failpoint("worker.applied")
    failpoint("worker.received")
    failpoints.disarm()
    failpoint("worker.applied")
    assert hits == ["hit"]


def test_an_unknown_failpoint_cannot_be_armed() -> None:
    with pytest.raises(AssertionError, match="no failpoint"):
        failpoints.arm("worker.aplied", lambda: None)


def test_every_failpoint_in_the_code_is_described_and_every_described_one_is_in_the_code() -> None:
    code = "\n".join(
        path.read_text() for package in ("coordinator", "workers") for path in (ROOT / package).rglob("*.py")
    )
    for name in failpoints.POINTS:
        first, _, second = name.partition(".")
        is_literal = f'failpoint("{name}")' in code
        is_of_a_kind = f'failpoint(f"{{kind}}.{second}")' in code and f'"{first}"' in code
        assert is_literal or is_of_a_kind, f"no code contains {name}"


def test_a_file_in_the_folder_kills_the_first_process_that_reaches_its_point(tmp_path: Path) -> None:
    program = "from workers.contract.failpoints import failpoint; failpoint('worker.applied'); print('done')"
    command = [sys.executable, "-c", program]
    environment = {"TINKERPOOL_FAILPOINTS": str(tmp_path), "PYTHONPATH": str(ROOT)}
    (tmp_path / "worker.applied").touch()
    killed = subprocess.run(command, env=environment, check=False, capture_output=True)
    survived = subprocess.run(command, env=environment, check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert (survived.returncode, survived.stdout.strip()) == (0, b"done")
