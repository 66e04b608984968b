"""Every benchmark with --quick: it runs, compares equal work, and its results fill the page and the pictures.

No timing is tested: these cells are tiny and the machine is busy.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from workers.training.memory import USED_FRACTION

ROOT = Path(__file__).resolve().parents[3]
# Memory first: it forks its processes, before torch has threads.
ENGINE_ITEMS = ("memory", "planner", "engine", "hybrids", "experts", "co_batching", "swap")
SERVICE_ITEMS = ("durability", "service", "publish", "sampling", "shares", "loops", "off_policy")
OPTIONS = {"publish": "--pool local", "shares": "--pool local", "loops": "--pool local"}
# One process for many items, because importing torch takes longer than each item.
DRIVER = """
import runpy, sys
for line in sys.argv[1:]:
    sys.argv = line.split()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
Report = dict[str, Any]

# Tests of scripts are not in the group of Ray's tests: they have wide limits of time.
pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600), pytest.mark.xdist_group("scripts")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of every item's results."""
    folder = tmp_path_factory.mktemp("results")
    with ThreadPoolExecutor() as threads:
        for done in threads.map(partial(run_scripts, folder), (ENGINE_ITEMS, SERVICE_ITEMS)):
            assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run_scripts(folder: Path, items: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Measure these items one after another, in one process."""
    options = f"--quick --threads 1 --results {folder}"
    lines = [f"scripts.bench.{item} {options} {OPTIONS.get(item, '')}" for item in items]
    command = [sys.executable, "-c", DRIVER, *lines]
    environment = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)


@pytest.fixture(scope="module")
def reports(folder: Path) -> dict[str, Report]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def rows_of(report: Report) -> Iterator[dict[str, Any]]:
    for table in report["tables"].values():
        assert len(table["markdown"].splitlines()) == len(table["rows"]) + 2
        yield from table["rows"]


def test_every_script_measures_all_of_its_tables_with_equal_rounds_for_each_side(reports: dict[str, Report]) -> None:
    assert {item: set(report["tables"]) for item, report in reports.items()} == {
        "engine": {"engine-tiny"},
        "hybrids": {"hybrids-hybrid"},
        "experts": {"experts-layer-mixture", "experts-together-mixture", "experts-padding-mixture"},
        "co_batching": {"co_batching-mixed", "co_batching-scaling", "co_batching-new-tenants"},
        "swap": {"swap", "swap-registered"},
        "durability": {"durability"},
        "service": {"service-latency", "service-throughput"},
        "publish": {"publish"},
        "sampling": {"sampling-co-batched", "sampling-batch", "sampling-prompt", "sampling-first-token"},
        "shares": {"shares"},
        "loops": {"loops"},
        "off_policy": {"off_policy"},
        "planner": {"planner", "planner-idle"},
        "memory": {"memory-tokens", "memory-vocabulary"},
    }
    for item, report in reports.items():
        assert report["tables"], item
        for row in rows_of(report):
            timings = [value for value in row.values() if isinstance(value, dict) and "median_s" in value]
            assert all(math.isfinite(timing["median_s"]) for timing in timings)
            assert all(timing["median_s"] > 0 for timing in timings)
            assert len({timing["rounds"] for timing in timings}) <= 1, f"{item}: one side ran more often"


def test_the_engine_and_peft_have_equal_losses_in_every_cell(reports: dict[str, Report]) -> None:
    rows = reports["engine"]["tables"]["engine-tiny"]["rows"]
    assert [row["case"] for row in rows] == ["1 x 1 x 16", "1 x 4 x 32", "2 x 1 x 16", "2 x 4 x 32"]
    assert [row["tokens"] for row in rows] == [16, 128, 32, 256]
    for row in rows:
        assert row["loss_difference"] < 1e-5
        assert {"fused", "peft", "limit", "processes"} <= row.keys()
        assert row["flops"] > row["limit_flops"] == 4 * row["tokens"] * 114_688
        assert row["process_bytes"] > 50e6 * row["tenants"]


def test_the_service_is_measured_in_process_over_grpc_and_over_ray(reports: dict[str, Report]) -> None:
    [latency] = reports["service"]["tables"]["service-latency"]["rows"]
    for way in ("in process", "gRPC", "Ray"):
        assert latency[way]["steps"] == 2 * latency["engine"]["steps"], "two tenants, one fused step"
        assert latency[way]["p99_s"] >= latency[way]["p50_s"] > 0
    [throughput] = reports["service"]["tables"]["service-throughput"]["rows"]
    assert throughput["tokens"] == 2 * 16 * throughput["steps"]
    assert throughput["cycles_per_step"] >= 1


def test_both_ways_to_sample_are_measured_with_the_same_tokens_and_weights(reports: dict[str, Report]) -> None:
    tables = reports["sampling"]["tables"]
    assert [(row["case"], row["tokens"]) for row in tables["sampling-co-batched"]["rows"]] == [
        ("2 x 2 prompts", 16),
        ("2 x 2 samples of a prompt", 16),
    ]
    [batch] = tables["sampling-batch"]["rows"]
    assert batch["tokens"] == 4 * 4
    assert batch["logprob_difference"] < 1e-5
    assert {"lora", "base", "generate", "continuous"} <= batch.keys()
    assert batch["threads"] == {"generate": 1, "continuous": 1}


def test_both_tenants_are_charged_in_every_window(reports: dict[str, Report]) -> None:
    [row] = reports["shares"]["tables"]["shares"]["rows"]
    [window] = row["windows"]
    assert window["trains"] > 0
    assert window["samples"] > 0
    assert row["sampling_share"] == pytest.approx(window["samples"] / (window["trains"] + window["samples"]))
    [goal] = reports["shares"]["goals"]
    assert goal["measured"] == pytest.approx(abs(2 * row["sampling_share"] - 1))
    assert 0 < row["gap_p50_s"] <= row["gap_p99_s"] <= row["gap_max_s"]


def test_a_cycle_is_measured_in_all_of_its_parts_for_every_queue(reports: dict[str, Report]) -> None:
    rows = reports["planner"]["tables"]["planner"]["rows"]
    assert [(row["queue"], row["budget"]) for row in rows] == [
        (queue, budget) for queue in ("10 passes", "5 pairs", "10 optimizer steps") for budget in (2048, 16384)
    ]
    for row in rows:
        timings = {name: value["median_s"] for name, value in row.items() if isinstance(value, dict)}
        assert len(timings) == 6
        assert timings["all"] == max(timings.values())
    [goal] = reports["planner"]["goals"]
    assert goal["measured"] == pytest.approx(1e3 * max(row["all"]["median_s"] for row in rows))
    [idle] = reports["planner"]["tables"]["planner-idle"]["rows"]
    assert (idle["active"], idle["idle"]) == (8, 50)


def test_memory_is_measured_as_the_engine_expects_it(reports: dict[str, Report]) -> None:
    tables = reports["memory"]["tables"]
    fewer, more = tables["memory-tokens"]["rows"]
    assert [(row["vocab_size"], row["tokens"]) for row in (fewer, more)] == [(1024, 512), (1024, 2048)]
    assert tables["memory-vocabulary"]["rows"] == [more], "a case in both tables is measured once"
    for row in (fewer, more):
        assert 0 < row["recomputed"]["measured_bytes"] < row["kept"]["measured_bytes"]
        for way in ("recomputed", "kept"):
            # The estimate counts tensors; the engine reserves room for the heap around them, and a few MiB.
            assert row[way]["measured_bytes"] <= row[way]["estimated_bytes"] / USED_FRACTION + (8 << 20)
        assert row["logits_bytes"] == 4 * 1024 * row["tokens"]
    assert more["kept"]["measured_bytes"] > 2 * fewer["kept"]["measured_bytes"]


def test_the_page_has_a_place_for_everything_and_pictures_are_drawn(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"), encoding="utf-8")
    options = ["--results", str(folder), "--page", str(page), "--images", str(tmp_path)]
    command = [sys.executable, "-m", "scripts.bench.report", *options]
    environment = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text(encoding="utf-8")
    assert "| 2 x 4 x 32 |" in text
    assert "tiny: one tenant against PEFT" in text
    for name in ("bench-engine", "bench-service", "bench-memory", "bench-sampling"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"images/{name}.png" in text


def test_two_versions_are_measured_in_turn(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.bench.versions", str(ROOT), str(ROOT), "--only", "planner"]
    options = ["--quick", "--processes", "1", "--rounds", "2", "--seconds", "0.001", "--results", str(tmp_path)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode in (0, 2), done.stdout + done.stderr  # 2: a goal is missed, on a busy machine
    report = json.loads((tmp_path / "versions.json").read_text(encoding="utf-8"))
    rows = report["tables"]["versions"]["rows"]
    assert len(rows) == len(report["goals"]) == 6
    for row in rows:
        assert row["old"]["rounds"] == row["new"]["rounds"] == 2
        assert row["ratio"]["median"] > 0
