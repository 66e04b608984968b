"""The program for Node prints what the same scenario prints in Python, with the shipped model over real gRPC."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.doors import node
from tests.support.served_pool import shipped_pool

pytestmark = pytest.mark.long  # `make clients` runs such programs, also in CI


def test_a_program_that_has_only_the_protos_prints_the_same_bits_as_python(tmp_path: Path) -> None:
    program = tmp_path / "node"
    node.install(program)
    with shipped_pool(tmp_path / "pool") as pool:
        found, wanted = (
            subprocess.run(
                command, cwd=node.ROOT, env=variables, capture_output=True, text=True, timeout=120, check=False
            )
            for command, variables in (
                (["node", str(program / "train.mjs")], node.environment(pool, "alice")),
                ([sys.executable, "-m", "scripts.clients.languages.reference"], node.environment(pool, "bob")),
            )
        )
    assert (wanted.returncode, found.returncode) == (0, 0), wanted.stderr + found.stderr
    assert found.stdout == wanted.stdout
    assert len([line for line in found.stdout.splitlines() if line.startswith("step ")]) == 20
    assert found.stdout.splitlines()[-1] == "done"
