"""One process per tenant, without a shared engine: plain PEFT on a share of the cores.

A process steps with `SequentialPeft` on one adapter. The processes are forked from one that has imported torch and
loaded no model, so they start in seconds and share the libraries' memory. Processes that users start take more time
and memory.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch

from scripts.bench.models import Model
from scripts.bench.sides.training import SequentialPeft
from workers.contract.messages import Datum

BYTES_PER_PROCESS = 400 << 20
"""Rough memory of a process without its base model, to decide how many fit."""
STOP_TIMEOUT_S = 10.0
PRELOADED = ["peft", "transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3"]
"""Imported once, before forking."""


def num_processes_that_fit(model: Model) -> int:
    """Return how many tenants' processes fit into half of the free memory; 1 where that is unknown."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return 1
    lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines())
    available_bytes = int(lines["MemAvailable"].split()[0]) << 10
    return max(1, available_bytes // 2 // (BYTES_PER_PROCESS + 8 * model.num_matmul_params))


class ProcessPerTenant:
    """Tenants' processes that step on command. Leaving the context ends them."""

    def __init__(self, model: Model, rank: int, initial: Sequence[bytes]) -> None:
        """Start one process per adapter in `initial`, and wait until all have loaded the model."""
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

    def __exit__(self, *exception: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(STOP_TIMEOUT_S)
            if process.is_alive():
                process.kill()

    def give(self, data: Sequence[tuple[Datum, ...]], num_threads: int) -> None:
        """Train process i on `data[i]` with this many threads; processes without data do nothing."""
        self._num_active = len(data)
        for pipe, part in zip(self._pipes, data, strict=False):
            pipe.send((part, num_threads))

    def step(self) -> list[float]:
        """Step all processes at the same time; return their summed losses."""
        active = self._pipes[: self._num_active]
        for pipe in active:
            pipe.send(None)
        return [pipe.recv() for pipe in active]

    def memory_bytes(self) -> int:
        """Return the proportional set size of the training processes; 0 where it is unknown."""
        total = 0
        for process in self._processes[: self._num_active]:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup")
            if rollup.is_file():
                [line] = [line for line in rollup.read_text(encoding="ascii").splitlines() if line.startswith("Pss:")]
                total += int(line.split()[1]) << 10
        return total


def _serve(pipe: Connection, model: Model, rank: int, file: bytes) -> None:
    """Run in a process: receive data and threads, or None for a step, until the pipe is closed."""
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
