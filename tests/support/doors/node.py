"""Node's program in a folder of its own, with its packages, for tests that run it or what uses its connection."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.served_pool import ServedPool

ROOT = Path(__file__).resolve().parents[3]
NODE_CLIENT = ROOT / "scripts" / "clients" / "node"
INSTALL_TIMEOUT_S = 60


def install(folder: Path) -> None:
    """Copy the program into a folder and install its packages. Skips the test where that cannot be done."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    shutil.copytree(NODE_CLIENT, folder, ignore=shutil.ignore_patterns("node_modules"))
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefer-offline", "--fetch-retries=0"]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip("npm could not fetch the packages of gRPC in time")
    if done.returncode != 0:
        pytest.skip(f"npm cannot fetch the packages of gRPC here: {done.stderr.strip().splitlines()[0]}")


def environment(pool: ServedPool, tenant: str = "alice") -> Mapping[str, str]:
    """Return the variables of a program with a tenant's key."""
    return os.environ | {
        "TINKERPOOL_BASE_URL": pool.url,
        "TINKERPOOL_API_KEY": pool.key(tenant),
        "TINKERPOOL_PROTOS": str(ROOT / "protos"),
    }
