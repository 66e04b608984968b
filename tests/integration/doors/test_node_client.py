"""The program for Node, run as its README describes, with the shipped model over real gRPC."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.served_pool import shipped_pool

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
NODE_CLIENT = ROOT / "scripts" / "clients" / "node"
INSTALL_TIMEOUT_S = 60


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the program, its packages and a copy of the contract."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    root = tmp_path_factory.mktemp("node")
    shutil.copytree(ROOT / "protos", root / "protos")
    folder = root / "scripts" / "clients" / "node"
    shutil.copytree(NODE_CLIENT, folder, ignore=shutil.ignore_patterns("node_modules"))
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefer-offline", "--fetch-retries=0"]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip("npm could not fetch the two gRPC packages in time")
    if done.returncode != 0:
        pytest.skip(f"npm cannot fetch the two gRPC packages here: {done.stderr.strip().splitlines()[0]}")
    return folder


def test_a_program_that_has_only_the_protos_trains_and_samples(program: Path, tmp_path: Path) -> None:
    with shipped_pool(tmp_path / "pool") as pool:
        environment = os.environ | {"TINKERPOOL_BASE_URL": pool.url, "TINKERPOOL_API_KEY": pool.key("alice")}
        done = subprocess.run(
            ["node", "train.mjs"], cwd=program, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    output = done.stdout
    losses = [float(loss) for loss in re.findall(r"^step .* loss ([\d.]+)$", output, re.MULTILINE)]
    cycles = [int(cycle) for cycle in re.findall(r"^step .* cycle (\d+) ", output, re.MULTILINE)]
    assert len(losses) == 16
    assert losses[-1] < 0.1 * losses[0], output
    assert cycles == sorted(set(cycles)), "one step in each cycle"
    assert "sample: And the engineer said, Let all the tenants ride in one cycle." in output
