"""The official SDK while the pool is killed and restarted: it waits, and gets the results of its promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tinker import types

from tests.support.doors.sdk import LEAKS, datum, sdk
from tests.support.serving import TOY, Terminal

pytestmark = [LEAKS, pytest.mark.slow]
WAIT_S = 60
NUM_STEPS = 40
ADAM = types.AdamParams(learning_rate=1e-3)


def test_running_steps_survive_a_killed_pool_and_run_once_each(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path / "home")
    with terminal.serve(*TOY) as (process, serving):
        key = terminal.credentials()["api_key"]
        again = ("--port", serving.url.rpartition(":")[2], "--http-port", serving.http_url.rpartition(":")[2])
        with sdk(serving.http_url, key) as service:
            client: Any = service.create_lora_training_client(serving.models[0], rank=8).result(WAIT_S)
            steps = []
            for _ in range(NUM_STEPS):
                client.forward_backward([datum(1, 2)], "cross_entropy")
                steps.append(client.optim_step(ADAM))
            steps[2].result(WAIT_S)
            process.kill()
            process.wait(60)
            assert not all(step.future().done() for step in steps)
            with terminal.serve(*TOY[:-2], *again):
                metrics = [step.result(WAIT_S).metrics for step in steps]
                after = client.optim_step(ADAM).result(WAIT_S).metrics
                service.close("success").result(WAIT_S)  # while the pool still runs
        assert [m["num_datums:sum"] for m in metrics] == [1] * NUM_STEPS
        assert after["num_datums:sum"] == 0
