"""`serve` and `up` with `--log-format json`, as processes with a toy engine; and what no log has."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tinkerpool
from coordinator.cli.options import RAY_FILE
from coordinator.cli.process import LOG_FILE
from tests.support.serving import TOY, TOY_ON_RAY, Terminal
from tests.support.toy_engine import KILL_TOKEN, POISON_TOKEN
from tinkerpool.serving import Serving, running_pid

pytestmark = pytest.mark.slow

JSON = ("--log-format", "json", "--log-level", "debug")
MARK = "xylophone quartz"
"""Text of requests that no log may have."""
TOKENS = [71, 73, 79, 83, 89, 97, 71, 73]
"""Tokens of requests that no log may have."""
WRONG_KEY = "tp_0123456789ab_" + "x" * 43


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path / "home")
    yield terminal
    if running_pid(terminal.data_dir) is not None:
        terminal.run("down")


def events_of(log: Path) -> list[dict[str, Any]]:
    """Return the events of a log in which every line is one."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def datum(*tokens: int) -> tinkerpool.Datum:
    return tinkerpool.Datum(
        list(tokens[:-1]), {"target_tokens": tokens[1:], "weights": [0.8765432] * (len(tokens) - 1)}
    )


def send_marked_requests(serving: Serving, keys: list[str]) -> None:
    """Send text, tokens and keys that are marked through both doors, in requests that work and in those that fail."""
    with tinkerpool.ServiceClient(serving.url, keys[0], user_metadata={"note": MARK}) as service:
        client = service.create_lora_training_client(rank=4)
        client.train_step([datum(*TOKENS)], "cross_entropy").result(60)
        sampler = client.save_weights_and_get_sampling_client()
        prompt = tinkerpool.ModelInput.from_ints(TOKENS)
        sampler.sample(prompt, 1, tinkerpool.SamplingParams(max_tokens=4, stop=[MARK])).result(60)
        for token in (POISON_TOKEN, KILL_TOKEN):
            client = service.create_lora_training_client(rank=4)
            with pytest.raises(tinkerpool.TinkerpoolError):
                client.forward_backward([datum(token, *TOKENS)], "cross_entropy").result(60)
    with pytest.raises(tinkerpool.AuthenticationError):
        tinkerpool.ServiceClient(serving.url, WRONG_KEY).create_lora_training_client(rank=4)
    for key in (*keys, WRONG_KEY):
        with httpx.Client(base_url=serving.http_url, headers={"authorization": f"Bearer {key}"}) as http:
            message = {"role": "user", "content": MARK}
            http.post("/v1/chat/completions", json={"model": "kjv-2m", "messages": [message]})
            http.post("/v1/completions", json={"model": "kjv-2m", "prompt": MARK, "max_tokens": MARK})
            http.post("/v1/completions", content=f'{{"prompt": "{MARK}", ')
            http.post("/api/v1/asample", json={"prompt": MARK, "api_key": key})
            http.get(f"/v1/{MARK}", params={"key": key})


def test_every_line_of_a_log_in_json_is_an_event_with_its_ids_and_none_has_a_request_or_a_key(
    terminal: Terminal,
) -> None:
    with terminal.serve(*TOY, *JSON) as (_, serving):
        keys = [terminal.credentials()["api_key"], terminal.run("key", "create", "carol").stdout.strip()]
        send_marked_requests(serving, keys)
    events = events_of(terminal.log)
    messages = {event["message"] for event in events}
    assert {f"tinkerpool is ready at {serving.url}", "Stopped."} <= messages

    [first, *_] = [event for event in events if "lost: it has died" in event["message"]]
    assert (first["level"], first["logger"]) == ("warning", "coordinator.scheduling.worker_losses")
    assert (first["worker"], first["incarnation"].startswith("w0-")) == ("w0", True)
    [poison] = [event for event in events if "while it ran solo" in event["message"]]
    assert poison["message"].startswith(f"{poison['operation']} ended its worker")
    failed = [event for event in events if "exception" in event]
    assert any(event["exception"].count("\n") > 5 for event in failed), "a traceback is a field of its event"

    log = terminal.log.read_text(encoding="utf-8")
    secrets = [key.split("_", 2)[2] for key in (*keys, WRONG_KEY)]
    for private in (MARK, *MARK.split(), ", ".join(map(str, TOKENS[:4])), "0.8765432", *secrets):
        assert private not in log


@pytest.mark.ray
@pytest.mark.long
def test_a_worker_in_ray_logs_in_the_format_of_its_pool_with_its_tracebacks(terminal: Terminal) -> None:
    with terminal.serve(*TOY_ON_RAY, "--log-format", "json") as (_, serving):
        folder = json.loads((terminal.data_dir / RAY_FILE).read_text(encoding="utf-8"))["folder"]
        with tinkerpool.ServiceClient(serving.url, terminal.credentials()["api_key"]) as service:
            client = service.create_lora_training_client(rank=4)
            with pytest.raises(tinkerpool.TinkerpoolError):
                client.forward_backward([datum(KILL_TOKEN, *TOKENS)], "cross_entropy").result(60)
        files = Path(folder).glob("ray/session_latest/logs/worker-*.err")
        lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    failed = [event for event in events if event["logger"] == "workers.pool.loop"]
    assert failed
    for event in failed:
        assert (event["level"], event["worker"], event["incarnation"].startswith("w0-")) == ("error", "w0", True)
        assert event["exception"].endswith("RuntimeError: killed by a toy token")
    assert not [line for line in lines if "Traceback" in line and not line.startswith("{")]
    assert [event["message"] for event in events_of(terminal.log)][-1] == "Stopped."


def test_up_shows_the_stages_of_a_start_whose_log_is_json_and_logs_prints_its_lines(terminal: Terminal) -> None:
    up = terminal.run("up", *TOY, "--log-format", "json", "--log-level", "error")
    assert up.returncode == 0, up.stderr
    stages = ("loading libraries", "opening the data", "recovering what was acknowledged", "ready")
    assert all(f" s  {stage}\n" in up.stdout for stage in stages)
    events = events_of(terminal.data_dir / LOG_FILE)
    assert {event["level"] for event in events} == {"info"}, "the stages, and what serve says"
    shown = terminal.run("logs").stdout.splitlines()
    assert [json.loads(line) for line in shown] == events


def test_a_refused_start_is_an_event_too(terminal: Terminal) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = terminal.run("serve", *TOY, "--log-format", "json", "--port", port)
    assert (done.returncode, done.stdout) == (1, "")
    [event] = [json.loads(line) for line in done.stderr.splitlines()]
    assert (event["level"], event["logger"]) == ("error", "tinkerpool.serve")
    assert event["message"].startswith(f"cannot listen on port {port} of 127.0.0.1")
