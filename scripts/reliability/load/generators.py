"""Processes that run clients: each has an event loop of its own, and a pipe to the program that started it.

The protocol: the process opens its clients and sends "ready"; "go" starts them; "stop" lets them finish what they
began, and the process sends its record. Does not depend on the pool beyond its address.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from scripts.reliability.load.clients import Client, ClientPlan, Record

OPENING = 16
"""Clients that open at a time, in each process."""
OPEN_TIMEOUT_S, DRAIN_TIMEOUT_S = 180.0, 300.0


class GeneratorError(Exception):
    """A process of clients ended, or did not reply in time."""


class Generators:
    """Clients in processes. Use as a context: they are open inside it."""

    def __init__(self, target: str, model: str, plans: Sequence[ClientPlan], num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")  # grpc does not survive a fork
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(min(num_processes, len(plans))):
            ours, theirs = context.Pipe()
            arguments = (theirs, target, model, list(plans[number::num_processes]))
            self._pipes.append(ours)
            self._processes.append(context.Process(target=_main, args=arguments, daemon=True))

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        self._receive("ready", OPEN_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.join(0 if error is not None else 30.0)
            if process.is_alive():
                process.terminate()
                process.join()

    def go(self) -> None:
        """Start all clients."""
        for pipe in self._pipes:
            pipe.send("go")

    def stop(self) -> Record:
        """Let all clients finish what they began; return what they saw."""
        for pipe in self._pipes:
            pipe.send("stop")
        total = Record()
        for record in self._receive(Record, DRAIN_TIMEOUT_S):
            assert isinstance(record, Record)
            total.add(record)
        return total

    def _receive(self, expected: object, timeout_s: float) -> list[object]:
        received = []
        for pipe in self._pipes:
            try:
                message = pipe.recv() if pipe.poll(timeout_s) else "no reply"
            except EOFError:
                message = "it ended"
            if message != expected and type(message) is not expected:
                raise GeneratorError(f"a process of clients failed: {message}")
            received.append(message)
        return received


def _main(pipe: Connection, target: str, model: str, plans: Sequence[ClientPlan]) -> None:
    try:
        asyncio.run(_run(pipe, target, model, plans))
    except Exception as error:
        pipe.send(repr(error))
        raise


async def _run(pipe: Connection, target: str, model: str, plans: Sequence[ClientPlan]) -> None:
    record, stopping, opening = Record(), asyncio.Event(), asyncio.Semaphore(OPENING)
    clients = [Client(plan, target, model, record, stopping) for plan in plans]

    async def opened(client: Client) -> None:
        async with opening:
            await client.open()

    await asyncio.gather(*map(opened, clients))
    pipe.send("ready")
    await asyncio.to_thread(pipe.recv)
    running = asyncio.gather(*(client.run() for client in clients))
    await asyncio.to_thread(pipe.recv)
    stopping.set()
    await running
    pipe.send(record)
    await asyncio.gather(*(client.close() for client in clients))
