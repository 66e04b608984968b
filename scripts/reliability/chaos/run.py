"""Kill a working pool repeatedly, and show that nothing was lost and that no bit differs.

    make chaos                 # 200 kills, about an hour
    make chaos KILLS=20        # fewer

Starts `tinkerpool serve` (Ray, SQLite, gRPC, the shipped model) and lets four tenants train with ordinary clients.
Meanwhile workers and the coordinator are killed with `kill -9`, at random moments and at failpoints, and some workers
are stopped and left hanging. The clients reconnect by themselves and may see no error. After the kills every tenant
finishes its round of steps. Then

    every operation has succeeded, with the result that its client got, and returns the same bytes at each fetch, also
    after another restart;
    the same steps on a pool without kills have the same results, weights and moments, bit for bit, and are charged the
    same.

Exits with 1 and the reason otherwise. The run's folder has report.json and clients.log, and for each of the two pools,
`disturbed` and `undisturbed`, the data directory and serve.log.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from scripts.pool_process import PoolEnded
from scripts.reliability.chaos import checks, report
from scripts.reliability.chaos.killer import Killer, Record
from scripts.reliability.chaos.pool import ServedPool, Violation
from scripts.reliability.chaos.results import Results, check_equal
from scripts.reliability.chaos.steps import PROFILES
from scripts.reliability.chaos.tenants import Progress, Tenant
from scripts.terminal import interrupt_at_sigterm, shown_path, uninterrupted
from tinkerpool import ServiceClient
from tinkerpool.serving import running_pid

FOLDER = Path(__file__).resolve().parents[3] / "chaos-run"
POOLS = ("disturbed", "undisturbed")
"""Folders of the pool with kills and of the pool without."""
STUCK_S = 300.0
"""A tenant is stuck if no operation of it finishes for this long."""
POLL_S = 0.1
CYCLE_TOKENS = 256
"""Less than the largest batches, so that some requests take several cycles."""

Check = Callable[[], None]
"""Raises Violation if a tenant saw an error or is stuck."""


@contextlib.contextmanager
def training(
    pool: ServedPool,
    results: Mapping[str, Results],
    progress: Progress,
    is_over: Callable[[str, int], bool],
    pause_s: float = 0.0,
) -> Iterator[Check]:
    """Run all tenants until the block ends and `is_over(tenant, steps)`. Raises Violation for a tenant's error."""
    begin = time.monotonic()
    tenants = [
        Tenant(
            profile,
            ServiceClient(pool.url, results[profile.name].key),
            results[profile.name].journal,
            progress,
            partial(is_over, profile.name),
            pause_s,
        )
        for profile in PROFILES
    ]

    def check() -> None:
        pool.check()
        for tenant in tenants:
            if tenant.error:
                raise Violation(f"{tenant.name} saw an error:\n{tenant.error}")
            waited_s = time.monotonic() - max(progress.last(tenant.name), begin)
            if tenant.is_alive() and waited_s > STUCK_S:
                raise Violation(f"no operation of {tenant.name} finished for {waited_s:.0f} s\n{pool.log_tail()}")

    for tenant in tenants:
        tenant.start()
    try:
        yield check
    except Violation:
        check()  # prefer a tenant's error, which explains more
        raise
    while any(tenant.is_alive() for tenant in tenants):
        check()
        time.sleep(POLL_S)
    check()
    for tenant in tenants:
        tenant.close()


def kill_and_train(
    pool: ServedPool, results: Mapping[str, Results], progress: Progress, args: argparse.Namespace
) -> list[Record]:
    """Let the tenants train until all kills are done; return the kills."""
    killer = Killer(pool, progress, args.seed, args.workers)
    records: list[Record] = []
    with training(pool, results, progress, lambda _, __: len(records) >= args.kills, args.pause) as check:
        while len(records) < args.kills:
            record = killer.kill(len(records) + 1)
            records.append(record)
            num_steps = " ".join(f"{tenant} {len(own.journal.lines)}" for tenant, own in results.items())
            print_now(f"{_line(record, args.kills)} | steps: {num_steps}")
            check()
            if record.resumed_s is not None:
                for own in results.values():
                    own.fetch_new(pool)
    return records


def run(args: argparse.Namespace) -> None:
    """Run everything, and write the report. Raises Violation."""
    begin = time.monotonic()
    progress = Progress(profile.name for profile in PROFILES)
    arguments = ["--workers", str(args.workers), "--threads", "1", "--cycle-tokens", str(CYCLE_TOKENS)]
    disturbed = ServedPool(args.dir / POOLS[0], ["--pool", "ray", *arguments])
    print_now(f"{args.kills} kills; everything is in {shown_path(args.dir)}")
    with serving(disturbed):
        results = results_on(disturbed)
        records = kill_and_train(disturbed, results, progress, args)
        print_now("The kills are done. Fetching everything again ...")
        fetch_and_check(disturbed, results)
        num_dropped = sum(own.fetch_again(disturbed, is_streamed=True) for own in results.values())
        charged = checks.usage_of(disturbed)
        num_epochs = disturbed.epoch()
    # One more restart. No tenant trains, so a local pool suffices.
    with serving(ServedPool(disturbed.folder, ["--pool", "local", *arguments])) as reread:
        for own in results.values():
            own.fetch_again(reread, is_streamed=False)
    checks.check_store(disturbed.data_dir)

    num_steps = {tenant: len(own.journal.lines) for tenant, own in results.items()}
    print_now(f"The same steps without kills: {', '.join(f'{t} {n}' for t, n in num_steps.items())} ...")
    undisturbed = ServedPool(args.dir / POOLS[1], ["--pool", "ray", *arguments])
    with serving(undisturbed):
        others = results_on(undisturbed)
        with training(undisturbed, others, progress, lambda tenant, step: step >= num_steps[tenant]):
            pass
        fetch_and_check(undisturbed, others)
        checks.check_same_usage(charged, checks.usage_of(undisturbed))
    states = {tenant: checks.state_files(disturbed, own.journal) for tenant, own in results.items()}
    for tenant, other in others.items():
        check_equal(
            other.by_position(), results[tenant].by_position(), f"{tenant}: results differ from a run without kills"
        )
        checks.check_same_state(tenant, states[tenant], checks.state_files(undisturbed, other.journal))
    kills = report.figures_of_kills(records)
    figures = {
        "epochs": num_epochs,
        "tracebacks_in_log": disturbed.tracebacks(),
        "steps": num_steps,
        "operations": {tenant: len(own.digests) for tenant, own in results.items()},
        "dropped_before_the_end": num_dropped,
        "client_errors": 0,
        "final_state": states,
        "total_seconds": time.monotonic() - begin,
    }
    (args.dir / "report.json").write_text(json.dumps(kills | figures, indent=2) + "\n")
    print_now("")
    for line in report.lines(kills, figures):
        print_now(line)
    print_now(f"{figures['total_seconds']:.0f} s in total. Figures: {shown_path(args.dir / 'report.json')}")


def results_on(pool: ServedPool) -> dict[str, Results]:
    """Create every tenant's key on a pool; return the tenants' results, empty."""
    return {profile.name: Results(pool.create_key(profile.name)) for profile in PROFILES}


def fetch_and_check(pool: ServedPool, results: Mapping[str, Results]) -> None:
    """Fetch all results that are not fetched yet, and compare each adapter with its journal."""
    for own in results.values():
        own.fetch_new(pool)
        checks.check_adapter(pool, own.key, own.journal)


@contextlib.contextmanager
def serving(pool: ServedPool) -> Iterator[ServedPool]:
    """Start a pool, and stop it when the block ends."""
    pool.start()
    try:
        pool.wait_ready()
        yield pool
    finally:
        with uninterrupted():
            pool.end()


def print_now(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def _line(record: Record, num_kills: int) -> str:
    then = (
        "the next kill follows at once" if record.resumed_s is None else f"work resumed after {record.resumed_s:4.1f} s"
    )
    return f"kill {record.number:3}/{num_kills}  {record.target:11} {record.how:24} {then:28}"


def main() -> int:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="number of kills (default %(default)s)")
    parser.add_argument("--dir", type=Path, default=FOLDER, help="the run's folder; replaced")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kills")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--pause", type=float, default=0.15, metavar="SECONDS", help="a tenant's pause between two steps, on average"
    )
    args = parser.parse_args()
    for pool in POOLS:
        if (pid := running_pid(args.dir / pool / "pool")) is not None:
            print_now(f"Error: the pool of an earlier run still serves {args.dir / pool}; end it first: kill {pid}")
            return 1
    interrupt_at_sigterm()
    shutil.rmtree(args.dir, ignore_errors=True)
    args.dir.mkdir(parents=True)
    logging.basicConfig(filename=args.dir / "clients.log", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        run(args)
    except (Violation, PoolEnded) as violation:
        print_now(f"\nVIOLATION: {violation}\nEverything is in {shown_path(args.dir)}: serve.log and clients.log.")
        return 1
    except KeyboardInterrupt:
        print_now("Interrupted; the pool is stopped.")
        return 130
    return 0
