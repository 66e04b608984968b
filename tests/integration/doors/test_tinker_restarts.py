"""The official SDK while the pool stops and restarts: it waits, and gets the results of its promises."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from tests.support.doors.sdk import LEAKS, datum, sdk
from tests.support.restartable_pool import restartable_pool
from tests.support.serving import TOY, Terminal
from tests.support.toy_engine import ToyEngine
from tests.support.waiting import wait_until

pytestmark = [LEAKS, pytest.mark.slow]
WAIT_S = 60
NUM_STEPS = 40
ADAM = types.AdamParams(learning_rate=1e-3)


def test_pending_results_of_the_sdk_survive_a_restart_of_the_pool(tmp_path: Path) -> None:
    with restartable_pool(tmp_path / "data", poll_s=0.5) as pool, sdk(pool.http_url, pool.key()) as service:
        client: Any = service.create_lora_training_client("toy", rank=8).result(WAIT_S)
        client.forward_backward([datum(1)], "cross_entropy")
        client.optim_step(ADAM).result(WAIT_S)
        engine: ToyEngine = pool.pool.engines["w0"][-1]
        engine.may_run.clear()
        passed = client.forward_backward([datum(2, 3), datum(4)], "cross_entropy")
        step = client.optim_step(ADAM)
        client.forward([datum(1)], "cross_entropy")
        wait_until(lambda: f"{client.model_id}:5" in {o.name for o in list(pool.pool.coordinator.core.in_flight.all())})
        threading.Timer(0.3, engine.may_run.set).start()  # a stop waits for the running cycle
        pool.stop()
        assert not step.future().done() or step.result()
        pool.start()
        assert step.result(WAIT_S).metrics["num_datums:sum"] == 2
        assert [d["logprobs"].shape for d in passed.result(WAIT_S).loss_fn_outputs] == [[2], [1]]
        sampler = client.save_weights_and_get_sampling_client().result(WAIT_S)
        params = types.SamplingParams(max_tokens=3, seed=1)
        assert len(sampler.sample(types.ModelInput.from_ints([1]), 1, params).result(WAIT_S).sequences) == 1
        assert client.optim_step(ADAM).result(WAIT_S).metrics["num_datums:sum"] == 0


def test_steps_under_way_survive_a_killed_pool_and_run_once_each(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path / "home")
    with terminal.serve(*TOY) as (process, serving):
        key = json.loads((terminal.home / "credentials.json").read_text())["api_key"]
        again = ("--port", serving.url.rpartition(":")[2], "--http-port", serving.http_url.rpartition(":")[2])
        with sdk(serving.http_url, key) as service:
            client: Any = service.create_lora_training_client(serving.models[0], rank=8).result(WAIT_S)
            steps = []
            for _ in range(NUM_STEPS):
                client.forward_backward([datum(1, 2)], "cross_entropy")
                steps.append(client.optim_step(ADAM))
            steps[2].result(WAIT_S)
            process.kill()
            process.wait(30)
            assert not all(step.future().done() for step in steps)
            with terminal.serve(*TOY[:-2], *again):
                metrics = [step.result(WAIT_S).metrics for step in steps]
                after = client.optim_step(ADAM).result(WAIT_S).metrics
                service.close("success").result(WAIT_S)  # while the pool still runs
        assert [m["num_datums:sum"] for m in metrics] == [1] * NUM_STEPS
        assert after["num_datums:sum"] == 0
