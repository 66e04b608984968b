"""One process per tenant: what a group without a shared engine does, each with plain PEFT on a share of the cores.

Knows processes and pipes; what a process does in a step is `bench_sides.SequentialPeft` with one adapter. The processes
are forked from one that has imported torch and loaded nothing, so that many of them start in seconds and share what the
libraries allocate: kinder to them, in time and memory, than processes that users start.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from scripts.bench.models import Model
from scripts.bench.sides.training import SequentialPeft
from workers.contract.messages import Datum

BYTES_PER_PROCESS = 400 << 20
"""What one takes beside its base model, roughly: for the decision how many fit."""
STOP_TIMEOUT_S = 10.0
PRELOADED = ["peft", "transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3"]
"""Imported once, before forking. Not our own modules: the process that forks may not know the folder of this script."""


def num_processes_that_fit(model: Model) -> int:
    """How many tenants' processes fit into half of the memory that is free now; 1 where that is not known."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return 1
    lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines())
    available_bytes = int(lines["MemAvailable"].split()[0]) << 10
    return max(1, available_bytes // 2 // (BYTES_PER_PROCESS + 8 * model.num_matmul_params))


class ProcessPerTenant:
    """Tenants' processes, ready to step on command. As a context manager it ends them."""

    def __init__(self, model: Model, rank: int, initial: Sequence[bytes]) -> None:
        """One process per adapter in `initial`. Returns when all have loaded the model."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._num_active = 0
        for file in initial:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, model, rank, file), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(STOP_TIMEOUT_S)
            if process.is_alive():
                process.kill()

    def give(self, data: Sequence[tuple[Datum, ...]], num_threads: int) -> None:
        """From now on process i trains on `data[i]` with so many threads, and the others wait."""
        self._num_active = len(data)
        for pipe, part in zip(self._pipes, data, strict=False):
            pipe.send((part, num_threads))

    def step(self) -> list[float]:
        """All of them at the same time; returns their summed losses."""
        active = self._pipes[: self._num_active]
        for pipe in active:
            pipe.send(None)
        return [pipe.recv() for pipe in active]

    def memory_bytes(self) -> int:
        """Proportional set size of the processes that train now; 0 where the system does not tell."""
        total = 0
        for process in self._processes[: self._num_active]:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup")
            if rollup.is_file():
                [line] = [line for line in rollup.read_text(encoding="ascii").splitlines() if line.startswith("Pss:")]
                total += int(line.split()[1]) << 10
        return total


def _serve(pipe: Connection, model: Model, rank: int, file: bytes) -> None:
    """A process's life: data and threads, or None for a step, until the pipe is closed."""
    side = SequentialPeft(model, [rank], [file])
    pipe.send(None)
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            return
        if command is None:
            pipe.send(side.step()[0])
        else:
            data, num_threads = command
            torch.set_num_threads(num_threads)
            side.give([data])
