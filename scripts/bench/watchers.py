"""Measure what browsers cost that watch the clock: a step with 20 readers of the stream of cycles, and without.

    python -m scripts.bench.watchers --quick
    python -m scripts.bench.watchers --num-watchers 100

Four tenants step together through gRPC on a pool with the shipped model. In each round they step ten times alone, and
ten times while plain clients, in a process of their own, read the events that the page reads. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import multiprocessing
import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from urllib.parse import urlsplit

from coordinator.base_models import DEFAULT_MODEL
from coordinator.doors.web.cycles import PATH as CYCLES
from scripts.bench.common import Column, Effort, Results, Row, measure_alternating, parser, shown_ratio, shown_time
from scripts.bench.models import Case, Model, add_model_options, chosen_models, open_models
from scripts.bench.sides.pools import Tenants, serve_arguments
from scripts.embedded_pool import embedded_pool
from tinkerpool import ServiceClient

RANK = 8
CASE = Case(num_tenants=4, num_seqs=1, num_tokens=64)
NUM_STEPS = 10
"""Steps of every tenant on each side of a round."""


def read_streams(address: tuple[str, int], key: str, number: int, told: Connection) -> None:
    """Open as many streams, tell when all have begun, read until told to end, then tell the bytes that came."""
    request = f"GET {CYCLES} HTTP/1.1\r\nHost: pool\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
    num_bytes = 0
    with selectors.DefaultSelector() as selector, ExitStack() as streams:
        for _ in range(number):
            stream = streams.enter_context(socket.create_connection(address))
            stream.sendall(request)
            assert b" 200 " in stream.recv(4096)
            selector.register(stream, selectors.EVENT_READ)
        told.send("open")
        selector.register(told, selectors.EVENT_READ)
        while True:
            for ready, _ in selector.select():
                if ready.fileobj is told:
                    told.send(num_bytes)
                    return
                assert isinstance(ready.fileobj, socket.socket)
                num_bytes += len(ready.fileobj.recv(1 << 16))


class Watchers:
    """Readers of the stream of cycles, in a process of their own."""

    def __init__(self, url: str, key: str, number: int) -> None:
        parts = urlsplit(url)
        self._arguments = ((parts.hostname, parts.port), key, number)
        self._told: Connection | None = None
        self._process: BaseProcess
        self.num_bytes = 0
        """What they have read."""

    def begin(self) -> None:
        """Open the streams; return once each has begun."""
        processes = multiprocessing.get_context("spawn")  # a fork would copy locks of gRPC's threads
        self._told, other = processes.Pipe()
        self._process = processes.Process(target=read_streams, args=(*self._arguments, other), daemon=True)
        self._process.start()
        other.close()
        assert self._told.recv() == "open"

    def end(self) -> None:
        """Close the streams."""
        if self._told is not None:
            self._told.send("end")
            self.num_bytes += self._told.recv()
            self._process.join()
            self._told = None


@contextmanager
def watching(watchers: Watchers) -> Iterator[Watchers]:
    """End the streams with the block."""
    try:
        yield watchers
    finally:
        watchers.end()


def measure(model: Model, args: argparse.Namespace) -> Row:
    """Measure one model's row."""
    with (
        embedded_pool(serve_arguments(model, args)) as pool,
        ExitStack() as clients,
        watching(Watchers(pool.http_url, pool.admin_key, args.num_watchers)) as watchers,
    ):
        keys = [pool.create_key(f"tenant{index}") for index in range(CASE.num_tenants)]
        services = [clients.enter_context(ServiceClient(pool.url, key)) for key in keys]
        tenants = Tenants(services, model.name, RANK, CASE.data(model.vocab_size))

        def steps() -> None:
            for _ in range(NUM_STEPS):
                tenants.step()

        sides: dict[str, Callable[[], object]] = {
            "alone": steps,
            "begin": watchers.begin,
            "watched": steps,
            "end": watchers.end,
        }
        timings = measure_alternating(sides, args.effort, in_order=True)
    return {
        "model": model.name,
        "num_watchers": args.num_watchers,
        "bytes": watchers.num_bytes,
        "watched_over_alone": timings["watched"].ratio_to(timings["alone"]),
        "alone": timings["alone"].summary(),
        "watched": timings["watched"].summary(),
    }


def main() -> None:
    """Read the command line, measure, print."""
    command = parser(__doc__)
    add_model_options(command)
    command.add_argument("--pool", choices=("ray", "local"), default="ray", help="local: threads stand in for Ray")
    command.add_argument("--seconds", type=float, default=30.0, help="for each row (at least 5 rounds)")
    command.add_argument("--num-watchers", type=int, default=20)
    args = command.parse_args()
    args.effort = Effort(seconds=0, rounds_min=2, rounds_max=2) if args.quick else Effort(seconds=args.seconds)
    models = [model for model in chosen_models(args) if model == DEFAULT_MODEL] or chosen_models(args)
    with open_models(models) as opened, Results("watchers", args) as results:
        table = results.table(
            "watchers",
            (
                Column("model", lambda r: r["model"]),
                Column("readers", lambda r: str(r["num_watchers"])),
                Column("ten steps of four tenants alone", lambda r: shown_time(r["alone"])),
                Column("while they read", lambda r: shown_time(r["watched"])),
                Column("ratio", lambda r: shown_ratio(r["watched_over_alone"])),
                Column("kB read", lambda r: f"{r['bytes'] / 1e3:,.0f}"),
                Column("rounds", lambda r: str(r["alone"]["rounds"])),
            ),
        )
        for model in opened:
            table.add(measure(model, args))


if __name__ == "__main__":
    main()
