"""The attack harness: what its probe measures, what it sends by hand, and which goals its report finds missed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.attack.attacks import ATTACKS
from scripts.attack.frames import FRAME_BYTES, PREFACE, WINDOW_UPDATE, Connection, frame
from scripts.attack.probe import Probe, RemoteProbe, answer_at
from scripts.attack.report import Figures, comparison, table

CALM = Figures(
    attack="saves",
    scale=1.0,
    attack_s=10.0,
    solo={"step": (50.0, 100.0)},
    attacked={"step": (60.0, 2_200.0)},
    failures={},
    reasons={},
    idle_bytes=100_000_000,
    peak_bytes=700_000_000,
    after_bytes=100_000_000,
    stopped_at_bytes=0,
    longest_cpu_ms=100.0,
    longest_name="",
    longest_collection_ms=0.0,
    longest_cpu_ms_solo=1.0,
    stall_ms=3.0,
    stall_ms_p999=2.0,
    stop_s=15.0,
    exit_code=None,
    log_bytes=0,
    tally={},
    note="",
)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    monkeypatch.setattr(asyncio.Handle, "_run", asyncio.Handle._run)  # undo what `install` does
    found = Probe()
    found.install()
    return found


def test_probe_counts_processor_time_of_callbacks_and_no_waiting(probe: Probe, tmp_path: Path) -> None:
    async def hold_the_loop(work_s: float, wait_s: float) -> None:
        end = time.thread_time() + work_s
        while time.thread_time() < end:
            pass
        time.sleep(wait_s)  # noqa: ASYNC251  # the loop stands still, without processor time

    answer_at(str(tmp_path / "probe.sock"), probe)
    remote = RemoteProbe(tmp_path / "probe.sock")
    asyncio.run(hold_the_loop(0.01, 0.2))
    waited = remote.read()
    asyncio.run(hold_the_loop(0.15, 0.0))
    worked = remote.read()
    remote.close()
    assert 10 <= waited.longest_cpu_ms < 150
    assert waited.longest_wall_ms >= 200
    assert worked.longest_cpu_ms >= 150
    assert worked.longest_name.endswith("hold_the_loop")


async def test_a_request_waits_for_the_windows_that_the_pool_opens() -> None:
    received = bytearray()
    has_ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_open = False
        while data := await reader.read(1 << 16):
            received.extend(data)
            if len(received) > 3 * FRAME_BYTES and not is_open:
                is_open = True
                for stream in (0, 1):
                    writer.write(frame(WINDOW_UPDATE, 0, stream, (1 << 16).to_bytes(4, "big")))
        writer.close()
        has_ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        connection = await Connection.open(f"127.0.0.1:{port}")
        num_sent = await connection.send_most("/x", 100_000)
        await connection.close()
        await has_ended.wait()
    assert received.startswith(PREFACE)
    assert num_sent == 99_999 > 65_535, "more than the first window"
    assert len(received) > num_sent


def test_probe_counts_a_callback_that_has_not_ended(probe: Probe) -> None:
    async def work() -> float:
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass
        return probe.take().longest_cpu_ms

    assert asyncio.run(work()) >= 100


def test_report_finds_each_goal_that_an_attack_misses() -> None:
    assert CALM.missed() == []
    assert replace(CALM, longest_cpu_ms=101.0).missed() == ["processor time"]
    assert replace(CALM, peak_bytes=700_000_001).missed() == ["memory"]
    assert replace(CALM, stop_s=None).missed() == ["stop"]
    assert replace(CALM, failures={"save": 1}).missed() == ["neighbour's calls"]
    assert replace(CALM, attacked={"step": (60.0, 2_201.0)}).missed() == ["p99 of a step"]
    assert replace(CALM, exit_code=-9, stop_s=None).missed() == ["coordinator ended", "stop"]


def test_tables_name_the_attack_and_mark_the_goals_that_it_missed() -> None:
    worse = replace(CALM, longest_cpu_ms=2_956.0)
    assert list(table([worse]))[-1].startswith("| `saves` | 50 / 100 -> 60 / 2,200 |")
    row = list(comparison({"saves": worse}, {}))[-1]
    assert "**callback 2,956 ms**" in row
    assert row.endswith("| not measured |")


def test_every_attack_has_a_name_for_the_command_line_and_a_text() -> None:
    assert all(name == attack.name and attack.text for name, attack in ATTACKS.items())
