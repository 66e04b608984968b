"""`make chaos` with three kills: real processes, SQLite, gRPC, Ray and the shipped model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUM_KILLS = 3
SEED = 14739
"""A seed whose first kills are one of each kind: both processes, the coordinator, a worker that hangs."""


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(600)
def test_kills_lose_no_operation_cause_no_client_error_and_change_no_bit(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "scripts.reliability.chaos"]
    arguments = ["--kills", str(NUM_KILLS), "--seed", str(SEED), "--pause", "0.05", "--dir", str(tmp_path / "run")]
    done = subprocess.run([*program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))
    assert report["kills"] == NUM_KILLS
    assert {kind.partition(",")[0] for kind in report["kills_by_kind"]} == {"worker", "coordinator", "both"}
    assert "worker, hang" in report["kills_by_kind"]
    assert report["client_errors"] == report["tracebacks_in_log"] == 0
    assert min(report["operations"].values()) > 0
