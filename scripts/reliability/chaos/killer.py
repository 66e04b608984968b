"""The kills: which process, when and how, and the time until work resumed.

Every kill is drawn from (seed, number of the kill). About half happen at a failpoint: in a state that lasts for
microseconds, which a random moment would rarely hit.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from scripts.reliability.chaos.pool import ProcessHandle, ServedPool, Violation, Worker, wait_until
from scripts.reliability.chaos.tenants import Progress
from workers.contract.failpoints import POINTS

ARMED_S = 8.0
"""How long a failpoint stays armed. If no process reaches it in time, the kill happens at that moment."""
MISSES_MAX = 3
"""A failpoint is no longer drawn if misses exceed hits by this number."""
POLL_WORKERS_S = 0.2
"""Polling interval for the pool's workers."""
REPLACED_TIMEOUT_S = 120.0
"""A killed or hanging worker must be replaced within this time."""
RESUMED_TIMEOUT_S = 240.0
"""An operation must finish within this time after a kill."""
DELAY_S_MAX = 3.0
"""Between two kills, after work has resumed."""
GONE_TIMEOUT_S = 30.0
"""A worker without a coordinator must end within this time."""


class Target(Enum):
    """The killed processes."""

    WORKER = "worker"
    COORDINATOR = "coordinator"
    BOTH = "both"


class WaitFor(Enum):
    """What must happen before the next kill."""

    NOTHING = 0
    """Nothing: the next kill may hit a recovering pool."""
    ANY = 1
    """An operation of some tenant has finished; other adapters may still be replayed."""
    ALL = 2
    """An operation of every tenant has finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A planned kill."""

    target: Target
    point: str
    """The failpoint; empty: a random moment."""
    is_hang: bool
    """Stop the worker, and continue it only after its replacement has started."""
    delay_s: float
    """After the previous kill."""
    wait_for: WaitFor


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A completed kill."""

    number: int
    """From 1."""
    target: str
    how: str
    """The failpoint, `hang`, or `moment`."""
    missed: str
    """The planned failpoint, if no process reached it; empty otherwise."""
    num_unexplained: int
    """Workers that were replaced without a kill: they returned no ping for seconds."""
    alive_s: float | None
    """From the kill until all processes were replaced; None: the next kill came first."""
    resumed_s: float | None
    """From the kill until an operation finished after `alive_s`."""
    all_resumed_s: float | None
    """From the kill until an operation of every tenant had finished; None if the next kill did not wait for it."""

    @property
    def kind(self) -> str:
        """`hang`, `moment` or `failpoint`."""
        return self.how if self.how in {"hang", "moment"} else "failpoint"


def draw(seed: int, number: int, points: frozenset[str]) -> Kill:
    """Draw kill `number`: 60 % workers, 30 % coordinators, 10 % both; a sixth of the workers hang."""
    rng = random.Random(f"{seed}/{number}")
    target = rng.choices((Target.WORKER, Target.COORDINATOR, Target.BOTH), (60, 30, 10))[0]
    is_hang = target is Target.WORKER and rng.random() < 1 / 6
    own = sorted(point for point in points if _is_in_worker(point) == (target is not Target.COORDINATOR))
    point = rng.choice(own) if own and not is_hang and rng.random() < 0.5 else ""
    delay_s, wait_for = rng.uniform(0.0, DELAY_S_MAX), rng.choices(tuple(WaitFor), (25, 45, 30))[0]
    return Kill(target=target, point=point, is_hang=is_hang, delay_s=delay_s, wait_for=wait_for)


class Killer:
    """Kills processes of one pool, one kill after another."""

    def __init__(self, pool: ServedPool, progress: Progress, seed: int, num_workers: int) -> None:
        self._hits: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._num_unexplained = 0
        self._pool = pool
        self._progress = progress
        self._seed = seed
        self._num_workers = num_workers
        self._known: frozenset[str] = frozenset()
        self._is_worker_lost = False
        """A worker was killed and no operation has finished since. Killing another worker now could make the pool
        fail the running operation as poison, rightly: it lost one worker after another."""

    def kill(self, number: int) -> Record:
        """Carry out kill `number`, and wait for recovery. Raises Violation if a process does not come back."""
        points = {point for point in POINTS if self._misses[point] - self._hits[point] < MISSES_MAX}
        if self._num_workers == 1:
            points.discard("dispatch.partial")
        kill = draw(self._seed, number, frozenset(points))
        if self._is_worker_lost and kill.target is not Target.COORDINATOR:
            self._resume(time.monotonic(), set(), WaitFor.ANY)
        time.sleep(kill.delay_s)
        handles = {worker.incarnation: ProcessHandle(worker.pid) for worker in self._workers(kill)}
        how, missed, moment = "moment", "", None
        victims = set(handles)
        if kill.target is Target.WORKER:
            victims = {random.Random(f"{self._seed}/{number}/victim").choice(sorted(handles))}
        if kill.is_hang:
            how, moment = "hang", self._hang(handles, victims)
        elif kill.point:
            moment = self._kill_at_failpoint(kill)
            how, missed = (kill.point, "") if moment else (how, kill.point)
            if moment and kill.target is Target.WORKER:
                victims = self._ended_of(handles)
        if moment is None:
            moment = self._kill_now(kill, [handles[victim] for victim in victims])
        if kill.target is not Target.WORKER:
            self._pool.start()
        self._check_ended([handles[victim] for victim in victims])
        for handle in handles.values():
            handle.close()
        self._known = frozenset()
        self._is_worker_lost |= kill.target is not Target.COORDINATOR
        waits = self._resume(moment, victims, kill.wait_for) if kill.wait_for is not WaitFor.NOTHING else [None] * 3
        num_unexplained, self._num_unexplained = self._num_unexplained, 0
        self._hits[how] += 1
        self._misses[missed] += 1
        return Record(
            number=number,
            target=kill.target.value,
            how=how,
            missed=missed,
            num_unexplained=num_unexplained,
            alive_s=waits[0],
            resumed_s=waits[1],
            all_resumed_s=waits[2],
        )

    def _workers(self, kill: Kill) -> list[Worker]:
        """Return the live workers. A coordinator may also be killed while it starts and has none."""
        if kill.target is not Target.WORKER and not kill.point:
            return self._pool.workers() if self._pool.is_ready() else []
        self._pool.wait_ready()
        workers: list[Worker] = []

        def are_complete() -> bool:
            nonlocal workers
            self._pool.check()
            workers = self._pool.workers()
            return len(workers) == self._num_workers

        if not wait_until(are_complete, REPLACED_TIMEOUT_S, POLL_WORKERS_S):
            raise Violation(f"a worker is missing after {REPLACED_TIMEOUT_S:g} s\n{self._pool.log_tail()}")
        self._count_unexplained(workers)
        return workers

    def _count_unexplained(self, workers: list[Worker]) -> None:
        """Count new incarnations that no kill explains."""
        incarnations = frozenset(worker.incarnation for worker in workers)
        if self._known:
            self._num_unexplained += len(incarnations - self._known)
        self._known = incarnations

    def _kill_now(self, kill: Kill, handles: Sequence[ProcessHandle]) -> float:
        """Kill the target now; return the moment."""
        moment = time.monotonic()
        if kill.target is not Target.COORDINATOR:
            for handle in handles:
                handle.send(signal.SIGKILL)
        if kill.target is not Target.WORKER:
            self._pool.kill()
        return moment

    def _kill_at_failpoint(self, kill: Kill) -> float | None:
        """Arm the failpoint; return the moment a process was killed at it, None if no process reached it."""
        pool, point = self._pool, kill.point
        pool.arm(point)
        if not wait_until(lambda: pool.was_hit(point), ARMED_S) and pool.disarm(point):
            return None
        moment = time.monotonic()
        if kill.target is Target.COORDINATOR:
            if not wait_until(pool.has_ended, GONE_TIMEOUT_S):
                raise Violation(f"a process other than the coordinator reached {point}")
            pool.reap()
        elif kill.target is Target.BOTH:
            pool.kill()
        return moment

    def _ended_of(self, handles: Mapping[str, ProcessHandle]) -> set[str]:
        """Return the incarnation whose process has just ended."""
        ended: set[str] = set()

        def has_one_ended() -> bool:
            ended.update(incarnation for incarnation, handle in handles.items() if handle.has_ended(0.0))
            return bool(ended)

        if not wait_until(has_one_ended, GONE_TIMEOUT_S):
            raise Violation("a process other than a worker reached a worker's failpoint")
        return ended

    def _hang(self, handles: Mapping[str, ProcessHandle], victims: set[str]) -> float:
        """Stop a worker's process until it is replaced, then continue it."""
        [victim] = victims
        moment = time.monotonic()
        handles[victim].send(signal.SIGSTOP)
        try:
            if not wait_until(lambda: self._are_back(victims), REPLACED_TIMEOUT_S, POLL_WORKERS_S):
                raise Violation(f"{victim} hangs and was not replaced\n{self._pool.log_tail()}")
        finally:
            handles[victim].send(signal.SIGCONT)
        return moment

    def _check_ended(self, handles: Iterable[ProcessHandle]) -> None:
        """Raise Violation if a worker that was killed, or whose coordinator was killed, does not end."""
        for handle in handles:
            if not handle.has_ended(GONE_TIMEOUT_S):
                raise Violation(f"a worker still runs {GONE_TIMEOUT_S:g} s after it or its coordinator was killed")

    def _are_back(self, victims: set[str]) -> bool:
        """Return whether all workers are alive and all killed ones were replaced."""
        self._pool.check()
        incarnations = frozenset(worker.incarnation for worker in self._pool.workers())
        return len(incarnations) == self._num_workers and victims.isdisjoint(incarnations)

    def _resume(self, moment: float, victims: set[str], wait_for: WaitFor) -> list[float | None]:
        """Wait for all processes, then for finished operations; return the three waits of `Record`."""
        self._pool.wait_ready()
        if not wait_until(lambda: self._are_back(victims), REPLACED_TIMEOUT_S, POLL_WORKERS_S):
            raise Violation(f"a killed worker was not replaced\n{self._pool.log_tail()}")
        self._count_unexplained(self._pool.workers())
        alive = time.monotonic()
        resumed = self._progress.wait_after(alive, RESUMED_TIMEOUT_S)
        resumed_by_all = resumed
        if wait_for is WaitFor.ALL:
            resumed_by_all = self._progress.wait_after(alive, RESUMED_TIMEOUT_S, of_all=True)
        if resumed is None or resumed_by_all is None:
            tenants = self._progress.tenants_without_progress(alive)
            raise Violation(
                f"{RESUMED_TIMEOUT_S:g} s after a kill no operation of {tenants} has finished\n{self._pool.log_tail()}"
            )
        self._is_worker_lost = False
        return [alive - moment, resumed - moment, resumed_by_all - moment if wait_for is WaitFor.ALL else None]


def _is_in_worker(point: str) -> bool:
    return point.startswith("worker.")
