"""The kernels of our own compile for an H100, which the interpreter does not show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = 48 << 10
"""What a block has without asking for more: so several blocks share a processor."""


@pytest.mark.slow
def test_kernels_compile_and_spill_no_registers(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton brings the compiler; it is not installed here")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.numerics.compiled"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[0])
    assert {name for name, _ in found} == {"_shrink", "_expand", "_rotate", "_join", "_squares", "_update"}
    for name, resources in found:
        assert resources["spilled"] == 0, name
        assert resources["shared"] <= SHARED_BYTES, name
