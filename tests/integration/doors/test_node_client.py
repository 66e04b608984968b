"""The program for Node, run as its README describes, with the shipped model over real gRPC."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from coordinator.base.config import CoordinatorConfig, GrpcConfig
from coordinator.coordinator import Coordinator
from coordinator.doors.grpc.server import GrpcDoor
from workers.contract.settings import PoolConfig, PoolModel
from workers.pool.factory import make_pool

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
NODE_CLIENT = ROOT / "scripts" / "clients" / "node"
MODEL = ROOT / "workers" / "models" / "kjv-2m"
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


@pytest.mark.slow
async def test_a_program_with_the_protos_alone_trains_and_samples(program: Path, tmp_path: Path) -> None:
    config = PoolConfig(models=(PoolModel(name="kjv-2m", path=str(MODEL)),), kind="local", num_threads=1)
    coordinator = Coordinator(CoordinatorConfig(data_dir=tmp_path / "pool"), make_pool(config))
    door = GrpcDoor(GrpcConfig(port=0))
    door.bind()
    await coordinator.start()
    await door.start(coordinator)
    try:
        key = await coordinator.first_admin_key()
        assert key is not None
        environment = os.environ | {
            "TINKERPOOL_BASE_URL": f"http://127.0.0.1:{door.port}",
            "TINKERPOOL_API_KEY": key,
        }
        process = await asyncio.create_subprocess_exec(
            "node", "train.mjs", cwd=program, env=environment,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        stdout, stderr = await asyncio.wait_for(process.communicate(), 60)
    finally:
        await door.refuse()
        await coordinator.stop()
        await door.stop(1.0)
    output = stdout.decode()
    assert process.returncode == 0, stderr.decode()
    losses = [float(loss) for loss in re.findall(r"^step .* loss ([\d.]+)$", output, re.MULTILINE)]
    cycles = [int(cycle) for cycle in re.findall(r"^step .* cycle (\d+) ", output, re.MULTILINE)]
    assert len(losses) == 16
    assert losses[-1] < 0.1 * losses[0], output
    assert cycles == sorted(set(cycles)), "one step in each cycle"
    assert "sample: And the engineer said, Let all the tenants ride in one cycle." in output
