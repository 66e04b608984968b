"""Measure the cost of durability: a step of the same service with and without syncs to disk.

    python -m scripts.bench.durability --quick
    python -m scripts.bench.durability                      # the shipped model, 200 steps of each side
    python -m scripts.bench.durability --dir /mnt/data      # on another disk

Two pools in this process differ in one thing: one keeps its data on a disk and syncs it, the other keeps it in memory
without syncs. One tenant steps on both, alternating: a forward_backward and an optim_step submitted together. Prints
the medians, their difference, and the transactions per step: each is one fsync, and there should be two.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from coordinator.base_models import DEFAULT_MODEL, resolve_model
from coordinator.runtime.data_dir import Seams
from coordinator.storage.disk import RealDisk
from coordinator.storage.sqlite import Connection, open_connection
from scripts.bench.common import Column, Effort, Results, Timing, measure_alternating, parser, shown_ms, shown_time
from scripts.bench.models import Case
from scripts.bench.sides.pools import LocalService, Tenants

RANK = 8
WARM_UP = 10


class UnsyncedDisk(RealDisk):
    """A disk without syncs."""

    def sync(self, path: Path) -> None:
        """Do nothing."""


def unsynced(path: Path) -> Connection:
    """Open a database that never syncs."""
    db = open_connection(path)
    db.execute("PRAGMA synchronous = OFF")
    return db


def main() -> None:
    """Read the command line, measure, print."""
    command = parser(__doc__)
    command.add_argument("--model", default=DEFAULT_MODEL)
    command.add_argument("--seqs", type=int, default=8, help="sequences per step")
    command.add_argument("--tokens", type=int, default=32, help="tokens per sequence")
    command.add_argument("--steps", type=int, help="of each side; default: 200")
    command.add_argument("--dir", type=Path, help="folder of the durable side's data")
    args = command.parse_args()
    args.steps = args.steps or (3 if args.quick else 200)
    case = Case(num_tenants=1, num_seqs=args.seqs, num_tokens=args.tokens)
    with contextlib.ExitStack() as stack, Results("durability", args) as results:

        def side(parent: Path | None, seams: Seams | None = None) -> tuple[LocalService, Tenants]:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent)))
            model = resolve_model(args.model, 1)
            service = stack.enter_context(LocalService(folder, model, num_threads=args.threads, seams=seams))
            client = stack.enter_context(service.over_grpc("bench"))
            served = client.get_server_capabilities().supported_models[0]
            return service, Tenants([client], served.model_name, RANK, case.data(served.vocab_size))

        memory = Path("/dev/shm")
        service, durable = side(args.dir)
        _, in_memory = side(memory if memory.is_dir() else None, Seams(connect=unsynced, disk=UnsyncedDisk()))
        for _ in range(WARM_UP):
            durable.step()
            in_memory.step()
        num_commits = service.coordinator.core.store.database.num_commits
        effort = Effort(seconds=0, rounds_min=args.steps, rounds_max=args.steps, warm_up=0)
        timings = measure_alternating({"durable": durable.step, "in_memory": in_memory.step}, effort)
        num_commits = service.coordinator.core.store.database.num_commits - num_commits
        pairs = zip(timings["durable"].seconds, timings["in_memory"].seconds, strict=True)
        table = results.table(
            "durability",
            (
                Column("a step of", lambda r: r["case"]),
                Column("durable", lambda r: shown_time(r["durable"])),
                Column("in memory", lambda r: shown_time(r["in_memory"])),
                Column("added", lambda r: shown_ms(r["added_s"])),
                Column("transactions", lambda r: f"{r['commits_per_step']:.2f}"),
            ),
        )
        table.add(
            {
                "case": f"{args.seqs} x {args.tokens} tokens",
                "added_s": Timing(tuple(on - off for on, off in pairs)).median_s,
                "commits_per_step": num_commits / args.steps,
                **{name: timing.summary() for name, timing in timings.items()},
            }
        )


if __name__ == "__main__":
    main()
