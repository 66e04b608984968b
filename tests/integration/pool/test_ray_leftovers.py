"""A start removes the Ray processes of a killed pool, and an interrupted `up` leaves none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.cli.options import RAY_FILE
from coordinator.cli.process import POLL_S
from scripts.pool_process import ROOT
from tests.support.serving import TOY_ON_RAY, Terminal
from tests.support.waiting import wait_until
from tinkerpool.serving import running_pid
from workers.pool.processes import find_marked
from workers.pool.ray_host import Belongings

LISTENS = "0A"
"""State of a listening socket in the kernel's table."""
LOOPBACKS = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1, the same as an address of IPv6, and ::1, as the kernel's table writes them on this byte order."""
JOIN = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("joined", ray.get(ray.remote(lambda: 1).remote()))
"""

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]


def belongings(terminal: Terminal) -> Belongings:
    found = Belongings.read(terminal.data_dir / RAY_FILE)
    assert found is not None
    return found


def processes(of: Belongings) -> dict[int, str]:
    """Return the names of its processes, by process id."""
    found = find_marked(of.mark)
    for process in found:
        process.close()
    return {process.pid: process.name for process in found}


def descendants(pid: int) -> set[int]:
    """Return all descendants of a process."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def check_it_listens_on_the_loopback_only(pids: set[int]) -> None:
    """Fail if one of the processes has a listening socket on another interface."""
    open_sockets: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                open_sockets[f"socket:[{fields[9]}]"] = fields[1].partition(":")[0]
    found = {(name, open_sockets[link]) for pid in pids for name, link in links(pid) if link in open_sockets}
    assert {"gcs_server", "raylet"} <= {name for name, _ in found}, "the test found no socket of Ray"
    assert {each for each in found if each[1] not in LOOPBACKS} == set()


def links(pid: int) -> list[tuple[str, str]]:
    """Return the process's name and the target of each of its open files."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        return [(name, str(path.readlink())) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:  # it, or the file, has just been closed
        return []


def check_only_its_own_token_opens_it(terminal: Terminal, of: Belongings) -> None:
    """Fail if a process with another token can join, or if Ray's token is in a command line or a file of its folder."""
    variables: dict[str, str] = {}
    lines = []
    for pid, name in processes(of).items():
        line = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        lines += line
        if name == "raylet":
            content = Path(f"/proc/{pid}/environ").read_text()
            variables = dict(each.split("=", 1) for each in content.split("\0") if "=" in each)
    token = variables["RAY_AUTH_TOKEN"]
    assert token != os.environ["RAY_AUTH_TOKEN"], "a private Ray has the token of a cluster"
    assert not any(token in each for each in lines)
    assert of.folder is not None
    logs = [path for path in (*Path(of.folder).rglob("*"), *terminal.home.rglob("*")) if path.is_file()]
    assert logs
    assert not any(token.encode() in path.read_bytes() for path in logs)
    address = next(each.partition("=")[2] for each in lines if each.startswith("--gcs-address="))
    joined = terminal.python(
        *("-c", JOIN, address),
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN="0" * 64,
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # or it would look for Ray at another address of this machine
        RAY_NUM_REDIS_GET_RETRIES="1",  # of the connection to the GCS: a refused one is tried for 20 s otherwise
    )
    assert joined.returncode != 0, joined.stdout
    assert "joined" not in joined.stdout
    assert "uthenticat" in joined.stderr + joined.stdout


def test_killed_pools_ray_is_removed_by_its_next_start_and_another_pools_ray_is_not(tmp_path: Path) -> None:
    first, other = Terminal(tmp_path / "first"), Terminal(tmp_path / "other")
    with first.serve(*TOY_ON_RAY) as (killed, _), other.serve(*TOY_ON_RAY) as _:
        old, bystander = belongings(first), belongings(other)
        unmarked = descendants(killed.pid) - processes(old).keys()
        assert not unmarked & descendants(killed.pid)
        assert {"gcs_server", "raylet", "ray::EngineActo", "ray::DashboardA"} <= set(processes(old).values())
        # Ray may end idle workers at any time.
        check_it_listens_on_the_loopback_only({killed.pid, *processes(old)})
        check_only_its_own_token_opens_it(first, old)
        needed = {pid for pid, name in processes(bystander).items() if name != "ray::IDLE"}
        killed.kill()
        killed.wait(20)
        (first.home / "ready.json").unlink()
        assert processes(old), "the killed pool left no process, so the test shows nothing"

        with first.serve(*TOY_ON_RAY):
            assert not processes(old)
            assert old.folder is not None
            assert not Path(old.folder).exists()
            assert belongings(first).mark != old.mark
            first.train()
        assert "removed the leftovers of a killed pool" in first.log.read_text()
        assert needed <= processes(bystander).keys()
        other.train()
    assert not (first.data_dir / RAY_FILE).exists()
    assert not processes(bystander)
    assert not Path(str(bystander.folder)).exists()


@pytest.mark.parametrize("stops", [pytest.param(True, marks=pytest.mark.long), False], ids=["once", "twice"])
def test_an_interrupted_up_leaves_no_process_of_its_ray(tmp_path: Path, stops: bool) -> None:
    terminal = Terminal(tmp_path / "home")
    up = subprocess.Popen(
        [sys.executable, "-m", "tinkerpool.cli", "up", *TOY_ON_RAY], env=terminal.environment, cwd=ROOT
    )
    wait_until(lambda: (terminal.data_dir / RAY_FILE).exists() and processes(belongings(terminal)))
    ray, pool = belongings(terminal), running_pid(terminal.data_dir)
    assert pool is not None
    if not stops:
        os.kill(pool, signal.SIGSTOP)
        up.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            up.wait(3 * POLL_S)
    up.send_signal(signal.SIGINT)
    assert up.wait(60) == 1
    assert not processes(ray)
    assert not (terminal.data_dir / RAY_FILE).exists()
    assert running_pid(terminal.data_dir) is None
