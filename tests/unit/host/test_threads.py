"""The number of threads of a pass, on a machine whose load the test sets."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch

from workers.host.threads import WINDOW_S, CoreTimes, ThreadChoice, read_core_times


@dataclass(slots=True)
class Machine:
    """A machine on which other processes use `foreign` cores during a pass."""

    foreign: float = 0.0
    wall_s: float = 0.0
    used_s: float = 0.0
    own_s: float = 0.0

    def read(self) -> CoreTimes:
        return CoreTimes(self.wall_s, self.used_s, self.own_s)

    def run(self, choice: ThreadChoice, seconds: float = WINDOW_S) -> int:
        """Run a pass; return its number of threads."""
        with choice.running():
            num_threads = torch.get_num_threads()
            self.wall_s += seconds
            self.own_s += seconds * num_threads
            self.used_s += seconds * (num_threads + self.foreign)
        return num_threads


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


def test_a_pass_leaves_a_busy_core_and_returns_once_it_is_free() -> None:
    machine = Machine()
    choice = ThreadChoice(2, 2, machine.read)
    assert [machine.run(choice) for _ in range(2)] == [2, 2]
    machine.foreign = 1.0
    assert [machine.run(choice) for _ in range(3)] == [2, 1, 1]
    machine.foreign = 0.0
    assert [machine.run(choice) for _ in range(2)] == [1, 2]
    assert torch.get_num_threads() == 2


def test_a_load_between_the_margins_changes_no_number_of_threads() -> None:
    machine = Machine(foreign=0.3)
    choice = ThreadChoice(2, 2, machine.read)
    assert [machine.run(choice) for _ in range(3)] == [2, 2, 2]
    machine.foreign = 0.5
    machine.run(choice)
    machine.foreign = 0.3
    assert [machine.run(choice) for _ in range(3)] == [1, 1, 1]


def test_short_passes_are_measured_together() -> None:
    machine = Machine(foreign=1.0)
    choice = ThreadChoice(2, 2, machine.read)
    assert [machine.run(choice, WINDOW_S / 4) for _ in range(5)] == [2, 2, 2, 2, 1]


def test_never_fewer_than_one_thread_nor_more_than_allowed() -> None:
    machine = Machine(foreign=20.0)
    choice = ThreadChoice(4, 16, machine.read)
    assert [machine.run(choice) for _ in range(2)] == [4, 1]
    machine.foreign = 0.0
    assert [machine.run(choice) for _ in range(2)] == [1, 4]
    machine.foreign = 14.0
    assert [machine.run(choice) for _ in range(2)] == [4, 2]


def test_without_figures_of_the_system_all_threads_are_used() -> None:
    choice = ThreadChoice(2, 2, lambda: None)
    for _ in range(3):
        with choice.running():
            assert torch.get_num_threads() == 2


def test_the_systems_own_figures_grow() -> None:
    before = read_core_times()
    begin_s = time.process_time()
    while time.process_time() < begin_s + 0.1:  # ten of the kernel's ticks
        pass
    after = read_core_times()
    assert before is not None
    assert after is not None
    assert before.used_s < after.used_s
    assert before.own_s + 0.1 <= after.own_s
