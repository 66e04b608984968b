"""`make demo --quick` as a user runs it: a pool in a process of its own, three tenants over gRPC."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "workers" / "models" / "kjv-2m"
TENANTS = ("scribe", "poet", "judge")


def run_demo(output: Path, pool: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "scripts.demo", "--quick", "--seed", "0", "--threads", "1"]
    command += ["--output", str(output), "--pool", pool]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    return summary


# In Ray, as is the default, a newcomer's first program trains in each run: `tests/robustness/test_newcomer.py`.
@pytest.mark.parametrize("pool", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.long])])
@pytest.mark.xdist_group("scripts")
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True")  # advice on merging
def test_the_demo_trains_three_tenants_and_writes_a_picture_and_adapters(tmp_path: Path, pool: str) -> None:
    output = tmp_path / "demo-output"
    summary = run_demo(output, pool)
    scribe, poet, judge = (summary["tenants"][name]["results"] for name in TENANTS)

    assert scribe["loss_end"] < 0.85 * scribe["loss_start"]
    assert scribe["test_loss_end"] < scribe["test_loss_start"]
    assert poet["reward_end"] > poet["reward_start"] + 0.1
    assert abs(poet["kl_sample_train"]) <= poet["kl_sample_train_max"] < 1e-5
    assert min(poet[f"seconds_{part}"] for part in ("publishing", "sampling", "training")) > 0
    assert judge["margin_end"] > judge["margin_start"] + 0.1
    assert judge["accuracy_end"] >= judge["accuracy_start"]
    assert summary["num_shared_cycles"] >= 5

    solo = {cost["loop"]: cost["cycles_per_step"] for cost in summary["clock"] if cost["num_others"] == 0}
    assert solo["naive"] == 2
    # One, unless the client waits for a core between its two requests.
    assert 1 <= solo["paired"] < solo["naive"]
    assert solo["pipelined"] == 1
    assert math.isfinite(summary["latency"]["service_s"])

    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert_adapters_load(output / "adapters")


def assert_adapters_load(folder: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tokens = torch.tensor([[5, 6, 7, 8]])
    for name in TENANTS:
        base = AutoModelForCausalLM.from_pretrained(str(MODEL))
        with torch.no_grad():
            before = base(tokens).logits
            after = PeftModel.from_pretrained(base, str(folder / name)).eval()(tokens).logits
        assert torch.isfinite(after).all()
        assert not torch.equal(before, after), f"{name}: the adapter changes nothing"
