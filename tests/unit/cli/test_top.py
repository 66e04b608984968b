"""`tinkerpool top`, over real gRPC to a fake service: its screen, its lines for scripts, and how it ends."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console

from coordinator.base.errors import Code, ServiceError
from tests.support.command_line import Run
from tests.support.doors.fake_service import KEY, FakeService
from tests.support.doors.open_doors import open_door
from tinkerpool.cli import show
from tinkerpool.credentials import Credentials, write_credentials
from tinkerpool.v1 import pool_pb2
from tinkerpool.v1.history_pb2 import WAIT_REASON_BUDGET, WAIT_REASON_ORDER, WAIT_REASON_SLOTS

INTERVAL = ("--interval", "0.1")


@pytest.fixture
def service() -> Iterator[FakeService]:
    fake = FakeService()
    with open_door(fake) as url:
        write_credentials(Credentials(url=url, api_key=KEY))
        yield fake


class Terminal:
    """A terminal in memory, with what was drawn on it."""

    def __init__(self, width: int, height: int) -> None:
        self._drawn = io.StringIO()
        self.console = Console(file=self._drawn, force_terminal=True, width=width, height=height, highlight=False)

    def frames(self) -> list[list[str]]:
        """Return the lines of every screen that was drawn, without colours."""
        texts = self._drawn.getvalue().split("\x1b[H")[1:]
        plain = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text) for text in texts]
        return [[line.rstrip() for line in text.splitlines()] for text in plain]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Terminal]:
    def make(width: int, height: int) -> Terminal:
        made = Terminal(width, height)
        monkeypatch.setattr(show, "console", made.console)  # what pytest captures is no terminal
        return made

    return make


def ended_by_ctrl_c(*responses: pool_pb2.GetPoolStatusResponse | Exception) -> Callable[..., Any]:
    """Return a use case that gives these responses, and then presses Ctrl-C."""
    left = list(responses)

    async def respond(*_: object) -> pool_pb2.GetPoolStatusResponse | Exception:
        if len(left) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return left.pop(0) if len(left) > 1 else left[0]

    return respond


def status(num_workers: int = 2, num_tenants: int = 2, **values: Any) -> pool_pb2.GetPoolStatusResponse:
    response = pool_pb2.GetPoolStatusResponse(
        version="9.9", num_queued=30, num_running=2, num_tenants=num_tenants, uptime_seconds=200, **values
    )
    for index in range(num_workers):
        response.workers.add(
            worker_id=f"w{index}",
            base_model="kjv-2m",
            num_slots=16,
            num_adapters=3,
            resident_bytes=1_200_000_000,
            num_samples=1,
            trained_tokens_per_second=1000,
            is_live=True,
            state=pool_pb2.WORKER_STATE_LOST if index == num_workers - 1 else pool_pb2.WORKER_STATE_READY,
        )
    for index in range(num_tenants):
        tenant = response.tenants.add(
            tenant=f"tenant-with-a-long-name-{index:03}",
            num_queued=index + 10,
            num_running=1,
            num_running_adapters=1,
            oldest_seconds=12,
            trained_tokens_per_second=1000,
        )
        tenant.waiting.add(reason=WAIT_REASON_ORDER, num_operations=index + 7)
        tenant.waiting.add(reason=WAIT_REASON_BUDGET, num_operations=2)
        tenant.waiting.add(reason=WAIT_REASON_SLOTS, num_operations=1)
    return response


def words(lines: list[str]) -> list[str]:
    return [" ".join(line.split()) for line in lines]


def test_top_once_prints_workers_tenants_and_what_the_queue_waits_for(run: Run, service: FakeService) -> None:
    service.responses["get_pool_status"] = status()
    done = run("top", "--once")
    assert done.code == 0, done.err
    lines = words(done.out.splitlines())
    assert "30 operations queued, 2 running, 0 sample requests open, of 2 tenants" in lines
    assert "2,000 tokens/s trained, 0 sampled" in lines
    assert "w0 3/16 1 1.2 GB 1,000 0 ready" in lines
    assert "w1 3/16 1 1.2 GB 1,000 0 lost, being replaced" in lines
    assert "GPU" not in done.out
    assert "tenant-with-a-long-name-001 11 1 1 12 s 1,000 0 order 8, budget 2, slots 1" in lines
    assert "15 order behind earlier operations of its adapter" in lines
    assert "4 budget for room in a cycle, while others had their turn" in lines


def test_a_member_sees_no_column_of_memory_and_others_as_one(run: Run, service: FakeService) -> None:
    response = status(num_tenants=1)
    for worker in response.workers:
        worker.resident_bytes = 0
    response.tenants.add(num_queued=7)
    service.responses["get_pool_status"] = response
    out = run("top", "--once").out
    assert "memory" not in out
    assert "(others) 7 0 0 0 0" in words(out.splitlines())
    assert "sampled for you" in out


def test_top_prints_json_or_tables_again_and_again_until_ctrl_c(run: Run, service: FakeService) -> None:
    service.responses["get_pool_status"] = ended_by_ctrl_c(status(), status(), status())
    done = run("top", "--json", *INTERVAL)
    assert done.code == 0, done.err
    shown = [json.loads(line) for line in done.out.splitlines()]
    assert len(shown) >= 2
    assert [each["tenants"][1]["num_queued"] for each in shown] == ["11"] * len(shown)
    assert shown[0]["num_samples"] == "0", "zeros are there, too"
    service.responses["get_pool_status"] = ended_by_ctrl_c(status(), status(), status())
    done = run("top", *INTERVAL)
    assert (done.code, done.out.count("tinkerpool 9.9 at")) in [(0, 2), (0, 3)]


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (72, 20)])
@pytest.mark.parametrize(("num_workers", "num_tenants"), [(2, 2), (100, 3), (3, 100), (100, 100)])
def test_a_screen_fits_the_terminal_and_says_how_much_it_leaves_out(
    run: Run,
    service: FakeService,
    terminal: Callable[[int, int], Terminal],
    size: tuple[int, int],
    num_workers: int,
    num_tenants: int,
) -> None:
    width, height = size
    shown = terminal(width, height)
    response = status(num_workers, num_tenants, problem="no room on the disk, and a long explanation of why " * 3)
    service.responses["get_pool_status"] = ended_by_ctrl_c(response, response)
    assert run("top", *INTERVAL).code == 0
    lines = shown.frames()[1][:height]
    assert all(len(line) <= width for line in lines)
    text = words(lines)
    assert any(line.startswith("worker ") for line in text)
    assert any(line.startswith("tenant ") for line in text)
    assert any(line.startswith("queued ") for line in text), "the last table is on the screen"
    num_left_out = sum(int(found.group(1)) for found in map(re.compile(r"\.\.\. and (\d+) more").match, text) if found)
    num_shown = sum(re.match(r"(w\d|tenant-w|[\d,]+ (order|budget|slots))", line) is not None for line in text)
    assert num_shown + num_left_out == num_workers + num_tenants + 3
    assert any("lost, being replaced" in line for line in text), "the worker that is lost is never left out"
    assert any(line.startswith("tenant-wi") and f" {num_tenants + 9} " in line for line in text), "nor the busiest"


def test_top_says_that_the_pool_is_away_and_comes_back_with_it(
    run: Run, service: FakeService, terminal: Callable[[int, int], Terminal]
) -> None:
    shown = terminal(80, 24)
    away = ServiceError(Code.UNAVAILABLE, "SHUTTING_DOWN", "the pool is shutting down")
    service.responses["get_pool_status"] = ended_by_ctrl_c(status(), away, status(), status())
    done = run("top", *INTERVAL)
    assert done.code == 0, done.err
    first_lines = [lines[0].split(" at ")[0] for lines in shown.frames() if lines and lines[0]]
    assert first_lines[:3] == ["tinkerpool 9.9", "No pool replies", "tinkerpool 9.9"]


def test_top_without_a_pool_and_with_a_refused_key_ends_with_an_error(run: Run, service: FakeService) -> None:
    service.responses["get_pool_status"] = ServiceError(Code.UNAVAILABLE, "SHUTTING_DOWN", "the pool is shutting down")
    assert (run("top").code, run("top").err) == (1, "Error: the pool is shutting down\n")
    done = run("top", "--api-key", "tp_wrong")
    assert (done.code, "refused the API key" in done.err) == (1, True)
