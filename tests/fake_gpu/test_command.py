"""`make gpu-count`, on a miniature model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_cuda import guard

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("fake_gpu")]


def test_the_command_prints_a_row_of_every_case_and_how_many_budgets_are_met(tmp_path: Path) -> None:
    if why := guard.problem():
        pytest.skip(why)
    command = [sys.executable, "-m", "scripts.bench.gpu_count", "--quick", "--waits", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "budgets are met" in done.stdout
    assert " x a copy to the host at workers/" in done.stdout
    rows = json.loads((tmp_path / "gpu_count.json").read_text())["tables"]["gpu-count"]["rows"]
    of_dense, of_others = ["passes", "optimizer", "loss", "decode", "decode", "first"], ["passes", "decode"]
    assert [row["case"].split()[0] for row in rows] == [*of_dense, *of_others, *of_others]
    assert all(row["kernels"] > 0 and row["predicted_s"] > 0 for row in rows)
