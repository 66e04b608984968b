"""The benchmark of memory runs, and what it measures is what it says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.passes import USED_FRACTION

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_memory.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quick_benchmark_prints_a_table_that_makes_sense_and_draws_it(tmp_path: Path) -> None:
    picture = tmp_path / "memory.png"
    paths = os.pathsep.join([str(SCRIPT.parents[1]), str(SCRIPT.parent)])
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick", "--picture", picture],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| 1,024")]
    assert [row[1] for row in rows] == ["512", "2,048"]
    for _, _, kept, kept_estimate, again, again_estimate, _ in rows:
        assert 0 < int(again) < int(kept)
        # The estimate counts tensors. For the heap around them the engine leaves room, and a few MiB it always takes.
        assert int(kept) <= int(kept_estimate) / USED_FRACTION + 8
        assert int(again) <= int(again_estimate) / USED_FRACTION + 8
    assert int(rows[1][2]) > 2 * int(rows[0][2])
    assert picture.read_bytes().startswith(b"\x89PNG")
