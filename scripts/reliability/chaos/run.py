"""Kill a working pool again and again, and show that nothing was lost and that no bit differs.

    make chaos                 # 200 kills, about an hour
    make chaos KILLS=20        # fewer
    make chaos                 # again, after Ctrl-C or worse: goes on where it was

Starts `tinkerpool serve` (Ray, SQLite, gRPC, the shipped model) and lets four tenants train with ordinary clients. All
the while workers and the coordinator are killed with `kill -9`, at random moments and at failpoints, and some workers
are stopped and left hanging. The clients reconnect by themselves and may see no error. When the kills are done,
every tenant ends its round of steps; then

    every operation has succeeded, with what its client saw, and has the same bytes each time that it is fetched, also
    after one more restart;
    the same steps on a pool where nothing is killed give the same results, the same weights and the same moments, bit
    for bit, and are charged the same.

Exits with 1 and the reason if anything is otherwise. The run's folder keeps everything: kills.jsonl, clients.log and
report.json; and for each pool, `disturbed` and `undisturbed`, its data, serve.log, the tenants' journals and results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from scripts.reliability.chaos import checks, report
from scripts.reliability.chaos.journal import Journal, JsonLines
from scripts.reliability.chaos.killer import Killer, Record
from scripts.reliability.chaos.pool import ServedPool, Violation
from scripts.reliability.chaos.results import Results, check_equal
from scripts.reliability.chaos.steps import PROFILES
from scripts.reliability.chaos.tenants import PlacedServiceClient, Progress, Tenant
from scripts.terminal import interrupt_at_sigterm, shown_path, uninterrupted

FOLDER = Path(__file__).resolve().parents[3] / "chaos-run"
STUCK_S = 300.0
"""A tenant whose last operation finished so long ago waits for something that never comes."""
POLL_S = 0.1
CYCLE_TOKENS = 256
"""Less than the largest batches have, so that some requests are spread over several cycles."""


@dataclass(slots=True)
class Notes:
    """What the run's folder knows of the run itself."""

    path: Path
    seed: int
    keys: dict[str, str]
    """Of each tenant, on the pool with kills and on the one without: `<pool>/<tenant>`."""
    num_lives: int = 0
    """Of this program, on this folder."""
    num_coordinators: int = 0
    """Lives of the coordinator of the pool with kills."""
    seconds: float = 0.0
    """That they took together."""

    @classmethod
    def open(cls, folder: Path, seed: int) -> Notes:
        """Those of the folder, or new ones. Raises ValueError if they are of another seed."""
        path = folder / "run.json"
        folder.mkdir(parents=True, exist_ok=True)
        notes = cls(path, seed, {})
        if path.exists():
            notes = cls(path, **json.loads(path.read_text()))
        if notes.seed != seed:
            raise ValueError(f"{folder} has a run with --seed {notes.seed}: go on with that, or choose another --dir")
        return notes

    def write(self) -> None:
        """Replace the file."""
        temporary = self.path.with_suffix(".new")
        fields = asdict(self)
        del fields["path"]
        temporary.write_text(json.dumps(fields, indent=2) + "\n")
        temporary.replace(self.path)


class Run:
    """One run: a folder, a pool with kills, and a pool without."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises ValueError if the folder belongs to another run."""
        self.args = args
        self.folder: Path = args.dir
        self.notes = Notes.open(self.folder, args.seed)
        self.notes.num_lives += 1
        self.notes.write()
        self._kills = JsonLines(self.folder / "kills.jsonl")
        self.records = [Record(**fields) for fields in self._kills.found]
        self.progress = Progress(profile.name for profile in PROFILES)
        self._saved = time.monotonic()

    def save(self) -> None:
        """Keep how long this has taken so far."""
        now = time.monotonic()
        self.notes.seconds += now - self._saved
        self._saved = now
        self.notes.write()

    def kill_and_train(self, pool: ServedPool, results: Mapping[str, Results]) -> None:
        """Let the tenants train until the kills are done."""
        killer = Killer(pool, self.progress, self.args.seed, self.args.workers, self.records)
        with self._tenants(pool, results, lambda _, __: self._is_done(), self.args.pause) as check:
            while not self._is_done():
                record = killer.kill(len(self.records) + 1)
                self._note(record)
                num_steps = " ".join(f"{tenant} {len(own.journal.lines)}" for tenant, own in results.items())
                say(f"{_line(record, self.args.kills)} | steps: {num_steps}")
                check()
                if record.resumed_s is not None:
                    for own in results.values():
                        own.fetch_new(pool)

    def train_alone(self, pool: ServedPool, results: Mapping[str, Results], num_steps: Mapping[str, int]) -> None:
        """Let the tenants take as many steps as with kills."""
        with self._tenants(pool, results, lambda tenant, step: step >= num_steps[tenant], 0.0):
            pass

    def results(self, pool: ServedPool) -> dict[str, Results]:
        """What the tenants did on a pool in earlier lives, and what it gave."""
        return {
            profile.name: Results(
                pool,
                self.key(pool, profile.name),
                profile.name,
                Journal(pool.folder / "journals" / f"{profile.name}.jsonl"),
            )
            for profile in PROFILES
        }

    def key(self, pool: ServedPool, tenant: str) -> str:
        """A tenant's key on a pool."""
        name = f"{pool.folder.name}/{tenant}"
        if name not in self.notes.keys:
            self.notes.keys[name] = pool.create_key(tenant)
            self.notes.write()
        return self.notes.keys[name]

    @contextlib.contextmanager
    def _tenants(
        self,
        pool: ServedPool,
        results: Mapping[str, Results],
        is_over: Callable[[str, int], bool],
        pause_s: float,
    ) -> Iterator[Callable[[], None]]:
        """All tenants at work until the block ends and `is_over(tenant, steps)`.

        Yields a check that, like the end of the block, raises Violation for an error that a tenant saw.
        """
        begin = time.monotonic()
        tenants = [
            Tenant(
                profile,
                PlacedServiceClient(pool.url, self.key(pool, profile.name)),
                results[profile.name].journal,
                self.progress,
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
                waited_s = time.monotonic() - max(self.progress.last(tenant.name), begin)
                if tenant.is_alive() and waited_s > STUCK_S:
                    raise Violation(f"nothing of {tenant.name}'s finished for {waited_s:.0f} s\n{pool.last_words()}")

        for tenant in tenants:
            tenant.start()
        try:
            yield check
        except Violation:
            check()  # what a tenant saw says more
            raise
        while any(tenant.is_alive() for tenant in tenants):
            check()
            time.sleep(POLL_S)
        check()
        for tenant in tenants:  # not after an error: what an ended session had queued would fail in the next run
            tenant.close()

    def _is_done(self) -> bool:
        num_kills: int = self.args.kills
        return len(self.records) >= num_kills

    def _note(self, record: Record) -> None:
        self.records.append(record)
        self._kills.add(asdict(record))
        self.save()


def run(args: argparse.Namespace) -> None:
    """Everything. Raises Violation, and ValueError if the folder belongs to another run."""
    this = Run(args)
    arguments = ["--workers", str(args.workers), "--threads", "1", "--cycle-tokens", str(CYCLE_TOKENS)]
    disturbed = ServedPool(this.folder / "disturbed", ["--pool", "ray", *arguments])
    say(f"{args.kills} kills, {len(this.records)} of them done before; everything is in {shown_path(this.folder)}")
    try:
        with serving(disturbed):
            results = this.results(disturbed)
            this.kill_and_train(disturbed, results)
            say("The kills are done. Fetching everything again ...")
            for tenant, own in results.items():
                own.fetch_new(disturbed)
                checks.check_adapter(disturbed, this.key(disturbed, tenant), own.journal)
            num_dropped = [own.fetch_again(disturbed, is_streamed=True) for own in results.values()]
            charged = checks.usage_of(disturbed)
            this.notes.num_coordinators = disturbed.epoch()
        # One more restart. Nobody trains any more, so that workers need no processes of their own.
        with serving(ServedPool(disturbed.folder, ["--pool", "local", *arguments])) as reread:
            for own in results.values():
                own.fetch_again(reread, is_streamed=False)
        checks.check_store(disturbed.data_dir)

        num_steps = {tenant: len(own.journal.lines) for tenant, own in results.items()}
        say(f"The same steps without kills: {', '.join(f'{t} {n}' for t, n in num_steps.items())} ...")
        undisturbed = ServedPool(this.folder / "undisturbed", ["--pool", "ray", *arguments])
        with serving(undisturbed):
            others = this.results(undisturbed)
            this.train_alone(undisturbed, others, num_steps)
            for tenant, other in others.items():
                other.fetch_new(undisturbed)
                checks.check_adapter(undisturbed, this.key(undisturbed, tenant), other.journal)
                check_equal(other.by_place(), results[tenant].by_place(), f"{tenant}: other results than without kills")
            if this.notes.num_lives == 1:  # else a sample may have been asked for again, of a new sampler
                checks.check_same_usage(charged, checks.usage_of(undisturbed))
        states = {tenant: checks.state_files(disturbed, own.journal) for tenant, own in results.items()}
        for tenant, other in others.items():
            checks.check_same_state(tenant, states[tenant], checks.state_files(undisturbed, other.journal))
    finally:
        this.save()
    kills = report.figures_of_kills(this.records)
    figures = {
        "coordinator_lives": this.notes.num_coordinators,
        "tracebacks_in_log": disturbed.tracebacks(),
        "steps": num_steps,
        "operations": {tenant: len(own.digests) for tenant, own in results.items()},
        "dropped_before_the_end": sum(num_dropped),
        "client_errors": 0,
        "final_state": states,
        "lives": this.notes.num_lives,
        "total_seconds": this.notes.seconds,
    }
    (this.folder / "report.json").write_text(json.dumps(kills | figures, indent=2) + "\n")
    say("")
    for line in report.lines(kills, figures):
        say(line)
    say(f"{this.notes.seconds:.0f} s in all. Figures: {shown_path(this.folder / 'report.json')}")


@contextlib.contextmanager
def serving(pool: ServedPool) -> Iterator[ServedPool]:
    """A pool that is ready, until the block ends, however it ends."""
    pool.begin()
    try:
        pool.wait_ready()
        yield pool
    finally:
        with uninterrupted():
            pool.stop()


def say(text: str) -> None:
    """A line for whoever watches."""
    print(text, flush=True)


def _line(record: Record, num_kills: int) -> str:
    then = "the next one comes at once" if record.resumed_s is None else f"on after {record.resumed_s:4.1f} s"
    return f"kill {record.number:3}/{num_kills}  {record.target:11} {record.how:24} {then:26}"


def main() -> int:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="how many in all, those of earlier lives included")
    parser.add_argument("--dir", type=Path, default=FOLDER, help="the run's folder; one that is there goes on")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--pause", type=float, default=0.15, metavar="SECONDS", help="a tenant's rest between two steps, on average"
    )
    args = parser.parse_args()
    interrupt_at_sigterm()
    args.dir.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=args.dir / "clients.log", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        run(args)
    except Violation as violation:
        say(f"\nVIOLATION: {violation}\nEverything is in {shown_path(args.dir)}: serve.log, clients.log, the journals.")
        return 1
    except ValueError as error:
        say(f"Error: {error}")
        return 1
    except KeyboardInterrupt:
        say("Interrupted; the pool is stopped. The same command goes on from here.")
        return 130
    return 0
