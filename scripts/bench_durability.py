"""Measure what durability adds to a step: the same service with its log and snapshots synced to disk, and without.

    python scripts/bench_durability.py                      # the shipped model, 200 steps of each side
    python scripts/bench_durability.py --dir /mnt/data      # on the disk that matters

Two pools in this process, alike but for one thing: one keeps its data on a disk and syncs it, the other in memory and
syncs nothing. One tenant steps turn about on both: a forward_backward and an optim_step submitted together. Prints the
medians, their difference, and how many transactions a step took: each is one fsync, and there should be two.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from coordinator.config import CoordinatorConfig
from coordinator.coordinator import Coordinator
from coordinator.database import Connection, open_connection
from coordinator.disk import RealDisk
from coordinator.grpc_server import GrpcConfig, GrpcDoor
from coordinator.models import DEFAULT_MODEL, resolve_model
from tinkerpool import ServiceClient, types
from workers.pool import PoolConfig, make_pool

T = TypeVar("T")
NUM_WARM_UP = 10
ADAM = types.AdamParams(learning_rate=1e-4)


class Forgetful(RealDisk):
    """A disk that syncs nothing."""

    def sync(self, path: Path) -> None:
        """Not here."""


def unsynced(path: Path) -> Connection:
    """A database that leaves syncing to nobody."""
    db = open_connection(path)
    db.execute("PRAGMA synchronous = OFF")
    return db


class Side:
    """A pool with its door, on a thread of its own."""

    def __init__(self, data_dir: Path, model: str, **seams: Any) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        config = PoolConfig(models=(resolve_model(model, 1),), kind="local")
        self.coordinator = Coordinator(CoordinatorConfig(data_dir=data_dir), make_pool(config), **seams)
        self._door = GrpcDoor(GrpcConfig(port=0))
        key = self._call(self._start())
        self._service = ServiceClient(f"http://127.0.0.1:{self._door.port}", key)
        served = self._service.get_server_capabilities().supported_models[0]
        self.vocab_size = served.vocab_size
        self._training = self._service.create_lora_training_client(served.model_name, rank=8).result()

    @property
    def num_commits(self) -> int:
        """Transactions so far."""
        return self.coordinator.core.store.num_commits

    def step(self, batch: list[types.Datum]) -> float:
        """One step; returns its seconds."""
        began = time.perf_counter()
        passed = self._training.forward_backward(batch, "cross_entropy")
        stepped = self._training.optim_step(ADAM)
        passed.result()
        stepped.result()
        return time.perf_counter() - began

    def close(self) -> None:
        """End it."""
        self._service.close()
        self._call(self._stop())

    async def _start(self) -> str:
        self._door.bind()
        await self.coordinator.start()
        coordinator = self.coordinator
        await self._door.start(coordinator.service, coordinator.authenticator.authenticate, coordinator.health)
        return await coordinator.first_admin_key() or ""

    async def _stop(self) -> None:
        await self._door.refuse()
        await self.coordinator.stop()
        await self._door.stop(1.0)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)


@contextlib.contextmanager
def side(make: Callable[[], Side]) -> Iterator[Side]:
    """A side, closed at the end."""
    made = make()
    try:
        yield made
    finally:
        made.close()


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--seqs", type=int, default=8, help="sequences per step")
    parser.add_argument("--tokens", type=int, default=32, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dir", type=Path, default=None, help="where the durable side keeps its data")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    with (
        tempfile.TemporaryDirectory(dir=args.dir) as durable_dir,
        tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as memory_dir,
        side(lambda: Side(Path(durable_dir), args.model)) as durable,
        side(lambda: Side(Path(memory_dir), args.model, connect=unsynced, disk=Forgetful())) as forgetful,
    ):
        batch = []
        for _ in range(args.seqs):
            tokens = rng.integers(0, durable.vocab_size, args.tokens + 1)
            inputs = {"target_tokens": tokens[1:], "weights": np.ones(args.tokens, np.float32)}
            batch.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs))
        for _ in range(NUM_WARM_UP):
            durable.step(batch)
            forgetful.step(batch)
        commits, on, off = durable.num_commits, [], []
        for _ in range(args.steps):
            on.append(1e3 * durable.step(batch))
            off.append(1e3 * forgetful.step(batch))
        commits = durable.num_commits - commits
    added = statistics.median(on) - statistics.median(off)
    print("| a step of", f"{args.seqs} x {args.tokens} tokens | durable | in memory | added | transactions |")
    print("|---|---|---|---|---|")
    print(
        f"| median of {args.steps}, turn about | {statistics.median(on):.1f} ms | {statistics.median(off):.1f} ms "
        f"| {added:.1f} ms | {commits / args.steps:.2f} |"
    )


if __name__ == "__main__":
    main()
