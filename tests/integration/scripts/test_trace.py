"""`make trace`: it records three processes, and the path of a step stays short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.trace.requests import SAMPLE, STEP

ROOT = Path(__file__).resolve().parents[3]
STEP_FILES_MAX = 115
"""Files of a step through gRPC, one or two more than docs/architecture.md says: a busy machine adds some."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the steps of each path, by door and request."""
    file = tmp_path_factory.mktemp("trace") / "paths.json"
    command = [sys.executable, "-m", "scripts.trace", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {(path["door"], path["request"]): path["steps"] for path in json.loads(file.read_text(encoding="utf-8"))}


@pytest.mark.ray
@pytest.mark.xdist_group("scripts")
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_step_executes_a_bounded_number_of_files(paths: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    assert len({step["file"] for step in paths["gRPC", STEP]}) <= STEP_FILES_MAX


@pytest.mark.ray
@pytest.mark.xdist_group("scripts")
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("request_name", [STEP, SAMPLE])
@pytest.mark.parametrize("door", ["gRPC", "HTTP"])
def test_a_path_leads_from_a_door_to_the_engine(
    paths: dict[tuple[str, str], list[dict[str, Any]]], door: str, request_name: str
) -> None:
    steps = paths[door, request_name]
    assert [step["at_ms"] for step in steps] == sorted(step["at_ms"] for step in steps)
    files = [(step["process"], step["file"]) for step in steps]
    assert any(process == "client" for process, _ in files) == (door == "gRPC"), "the SDK is not the product's"
    protocol = "grpc" if door == "gRPC" else "tinker"
    first_of_door = next(n for n, (_, file) in enumerate(files) if file.startswith(f"coordinator/doors/{protocol}/"))
    assert first_of_door < files.index(("worker", "workers/engine.py"))
    assert ("worker", "workers/pool/actor.py") in files, "threads that Ray started are recorded"
    assert not any("heartbeat" in step["function"].lower() or step["function"].endswith(".ping") for step in steps)
