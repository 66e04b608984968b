"""`tinkerpool serve` and `up` with the real engine and the shipped model, used from another terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tinkerpool
from coordinator.base_models import DEFAULT_MODEL
from coordinator.cli.commands import EXAMPLE
from tests.support.serving import Terminal

LOCAL = ("--pool", "local", "--port", "0", "--threads", "1")
RAY = ("--pool", "ray", "--port", "0", "--threads", "1", "--cpus", "0.5")


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    return Terminal(tmp_path / "home")


def run_example(terminal: Terminal) -> tuple[list[float], str]:
    """Run the program that `tinkerpool up` suggests; return its output: the loss of each step, and a sample."""
    done = terminal.python("-c", EXAMPLE.format(model=DEFAULT_MODEL), timeout_s=120)
    assert done.returncode == 0, done.stderr
    losses, sample = done.stdout.splitlines()[-2:]
    return json.loads(losses), sample


def usage(terminal: Terminal) -> dict[str, dict[str, str]]:
    rows = json.loads(terminal.run("usage", "--json").stdout)["rows"]
    return {row["kind"]: row for row in rows}


def check_a_cycle_runs_on_both_workers(terminal: Terminal) -> None:
    """Train four equal adapters at once: some cycle uses both workers, and both compute the same bits."""
    with terminal.client() as service:
        clients = [service.create_lora_training_client(rank=4, seed=5) for _ in range(4)]
        tokens = list(range(10, 74))
        datum = tinkerpool.Datum(
            tinkerpool.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": [1.0] * 63}
        )
        steps = [client.train_step([datum] * 4, "cross_entropy") for _ in range(3) for client in clients]
        losses = [step.result(120).forward_backward.metrics["loss:sum"] for step in steps]
        cycles = service.create_rest_client().get_pool_status(num_cycles=100).result(60).cycles
    assert any(len({entry.worker_id for entry in cycle.entries}) == 2 for cycle in cycles)
    for step in range(3):
        assert len(set(losses[4 * step : 4 * step + 4])) == 1


# In each run a newcomer's first program trains (`tests/robustness/test_newcomer.py`), and toy engines restart.
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_suggested_program_trains_on_a_local_pool_and_its_state_survives_a_restart(terminal: Terminal) -> None:
    with terminal.serve(*LOCAL, timeout_s=90) as (process, _):
        first = run_example(terminal)
        losses, sample = first
        assert losses[-1] < losses[0] / 2
        assert sample
        assert int(usage(terminal)["forward_backward"]["num_tokens"]) > 0
        status = terminal.run("status").stdout
        assert "default +step" in status
        process.terminate()
        assert process.wait(60) == 0
    (terminal.home / "ready.json").unlink(missing_ok=True)
    with terminal.serve(*LOCAL, timeout_s=90):
        [adapter] = json.loads(terminal.run("adapter", "list", "--json").stdout)["adapters"]
        assert (adapter["base_model"], adapter["applied_seq"]) == (DEFAULT_MODEL, "21")
        assert usage(terminal)["optim_step"]["num_operations"] == "10"
        # Another adapter with the same seed, in another epoch, gives the same numbers.
        assert run_example(terminal) == first


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.ray
def test_a_pool_started_in_the_background_runs_its_workers_in_processes_of_their_own(terminal: Terminal) -> None:
    up = terminal.run("up", *RAY, "--workers", "2", timeout_s=110)
    assert up.returncode == 0, up.stderr
    try:
        losses, _ = run_example(terminal)
        assert losses[-1] < losses[0] / 2
        workers = json.loads(terminal.run("status", "--json").stdout)["workers"]
        pids = {int(worker["pid"]) for worker in workers}
        assert len(pids) == 2
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        check_a_cycle_runs_on_both_workers(terminal)
    finally:
        down = terminal.run("down")
    assert down.returncode == 0, down.stderr
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
