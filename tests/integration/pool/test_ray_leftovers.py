"""The next start on a data directory removes the Ray processes of a killed pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.cli.options import RAY_FILE
from tests.support.serving import TOY_ON_RAY, Terminal
from workers.pool.processes import find_marked
from workers.pool.ray_host import Belongings

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


def test_killed_pools_ray_is_removed_by_its_next_start_and_another_pools_ray_is_not(tmp_path: Path) -> None:
    first, other = Terminal(tmp_path / "first"), Terminal(tmp_path / "other")
    with first.serve(*TOY_ON_RAY) as (killed, _), other.serve(*TOY_ON_RAY) as _:
        old, bystander = belongings(first), belongings(other)
        unmarked = descendants(killed.pid) - processes(old).keys()
        assert not unmarked & descendants(killed.pid)
        assert {"gcs_server", "raylet", "ray::EngineActo", "ray::DashboardA"} <= set(processes(old).values())
        # Ray may end idle workers at any time.
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
        assert "removed the leftovers of a killed pool" in (first.home / "serve.out").read_text()
        assert needed <= processes(bystander).keys()
        other.train()
    assert not (first.data_dir / RAY_FILE).exists()
    assert not processes(bystander)
    assert not Path(str(bystander.folder)).exists()
