"""An older official SDK in its own process: JSON passes, and calls that later versions no longer make."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

import pytest

from tests.support.doors import older_sdk
from tests.support.served_pool import restartable_pool

pytestmark = pytest.mark.long  # `make sdk-versions` runs more with it, also in CI

ROOT = Path(__file__).resolve().parents[3]
OLDER = Path(sys.prefix) / "beside" / "tinker-0.18.2"


def test_an_sdk_from_before_protobuf_trains_saves_and_samples(tmp_path: Path) -> None:
    if not OLDER.is_dir():
        pytest.skip("tinker 0.18.2 is not installed beside the environment; `make test` does that")
    with restartable_pool(tmp_path / "data", poll_s=0.5) as pool:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(older_sdk.__file__), pool.http_url, f"tml-{pool.key()}"],
            env={**os.environ, "PYTHONPATH": str(OLDER), "TINKER_TELEMETRY": "0"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        report = json.loads(done.stdout.splitlines()[-1])
        with urllib.request.urlopen(report["archive"], timeout=30) as response:
            content = response.read()
    assert report["version"] == "0.18.2"
    assert report["shapes"] == [[3], [1]]
    assert report["forward"] == report["backward"]
    assert report["num_datums"] == 2
    assert ["LENGTH_MISMATCH" in report["refusals"][0], "WINDOW_CLOSED" in report["refusals"][1]] == [True, True]
    assert report["path"] == f"tinker://{report['model_id']}/weights/old"
    assert report["num_tokens"] == [3, 3]
    assert report["prompt_logprobs"][0] is None
    assert set(report["runs"]) == {report["model_id"], report["again"]}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        names = archive.getnames()
    assert sorted(names) == ["adapter_config.json", "adapter_model.safetensors"]
