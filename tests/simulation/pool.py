"""A pool of toy engines without threads or processes, whose workers die, hang, answer late and answer twice.

`SimPool` holds the workers of a history; they may outlive a coordinator. `SimPoolFront` is one coordinator's view and
implements the `Pool` protocol; it dies with its coordinator. Batches that a dead coordinator sent may still arrive at
a worker in the next coordinator's life.

A worker that outlives its coordinator is told the next one's epoch when that starts: `start_sample` carries no epoch,
so a sample that came before the first batch of a new epoch would be dropped by that batch.

Knows neither tenants nor the disk.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from coordinator.cycle.items import SNAPSHOT
from tests.simulation.world import World
from tests.support.toy_engine import ToyEngine
from workers.contract.messages import Batch, BatchResult, ErrorCode, SampleEvent, SampleRequest, WorkerInfo
from workers.contract.protocols import WorkerLost

TRAVEL_S = 0.0005
WORK_S = 0.004
DECODE_S = 0.001
"""Mean delays: a message's way, a batch's work, a decode step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFaults:
    """Probabilities, per batch unless said otherwise."""

    die_before: float = 0.0
    """The worker dies with a batch that it has not touched."""
    die_after: float = 0.0
    """It dies after it has applied the batch."""
    die_sampling: float = 0.0
    """Per decode step."""
    pause: float = 0.0
    """It stops before or after the batch, answers nothing, not even pings, and later goes on (SIGSTOP, SIGCONT)."""
    twice: float = 0.0
    """The batch is delivered twice; either answer may be the one that arrives."""
    slow_ping: float = 0.0
    """Per ping: the answer takes up to twice as long as is waited for."""
    no_replacement: float = 0.0
    """Per attempt: the next life of a worker does not start."""
    survive: float = 0.0
    """Per worker, when its coordinator dies: it goes on."""


@dataclass(slots=True, eq=False)
class _Life:
    """One incarnation of a worker."""

    incarnation: str
    engine: ToyEngine
    is_dead: bool = False
    is_replaced: bool = False
    is_paused: bool = False
    zombies: list[Batch] = field(default_factory=list)
    """What a dead coordinator sent to it, and what is still on its way."""
    events: asyncio.Queue[Sequence[SampleEvent] | None] = field(default_factory=asyncio.Queue)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and made anew, whenever the flags above change."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_decoding: bool = False
    last: Batch | None = None
    """What it has applied last; the network may deliver it again."""
    operations: frozenset[str] = frozenset()
    """What its batch runs."""
    num_seconds: int = 0
    """How often in a row a second answer hid the first."""

    def change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def running(self) -> frozenset[str]:
        """Operations that a death would make suspect."""
        return self.operations | self.engine._done.keys()

    def attach(self) -> None:
        """A new coordinator's loop begins."""
        self.events, self.changed, self.lock = asyncio.Queue(), asyncio.Event(), asyncio.Lock()
        self.is_decoding = self.is_paused = False


class SimPool:
    """The workers of a history."""

    def __init__(self, world: World, num_workers: int, faults: WorkerFaults) -> None:
        self.world = world
        self.faults = faults
        self.random: Random = world.random("pool")
        self.lives: dict[str, _Life] = {}
        self.deaths_alone: Counter[str] = Counter()
        """Operations that ran alone when their worker was lost. Once is chance; at the second the coordinator rightly
        believes that the operation did it, so nothing is done to a worker that runs such a one alone again."""
        self.num_workers = num_workers
        self._num_lives = 0

    def new_life(self, worker_id: str) -> _Life:
        """A worker's next life, empty."""
        self._num_lives += 1
        incarnation = f"{worker_id}-{self._num_lives}"
        self.lives[worker_id] = _Life(incarnation, ToyEngine(incarnation))
        return self.lives[worker_id]

    def note_death(self, life: _Life) -> None:
        """A worker is lost with what it runs."""
        if len(life.running()) == 1:
            self.deaths_alone.update(life.running())

    def coordinator_died(self, unanswered: Sequence[tuple[_Life, Batch]]) -> None:
        """The coordinator's process is gone, and with it most of the workers."""
        for worker_id, life in list(self.lives.items()):
            is_fresh = (
                not life.engine.batches
            )  # it would take the next epoch for its first, and keep samples of this one
            if life.is_dead or is_fresh or self.random.random() >= self.faults.survive:
                del self.lives[worker_id]
        for life, batch in unanswered:
            if life in self.lives.values():
                life.zombies.append(batch)
        for life in self.lives.values():
            if life.last is not None and self.random.random() < 0.3:
                life.zombies.append(life.last)


class SimPoolFront:
    """Implements `workers.contract.protocols.Pool` for one coordinator."""

    def __init__(self, pool: SimPool, epoch: Callable[[], int]) -> None:
        self._pool = pool
        self._epoch = epoch
        self._world = pool.world
        self._random = pool.random
        self._lives = pool.lives
        self._tasks: set[asyncio.Task[None]] = set()
        self.unanswered: list[tuple[_Life, Batch]] = []
        """Batches that were sent, or applied and not answered."""
        self.num_replayed = 0

    async def start(self) -> None:
        await asyncio.sleep(self._random.uniform(0, 0.01))
        for index in range(self._pool.num_workers):
            worker_id = f"w{index}"
            life = self._lives.get(worker_id)
            if life is None:
                self._pool.new_life(worker_id)
                continue
            self._world.fault("worker survives its coordinator", worker_id)
            life.attach()
            zombies, life.zombies = life.zombies, []
            for batch in zombies:
                delay = self._random.choice((0.0, 0.005, 0.05, 0.3))
                if delay == 0.0:
                    self._deliver_zombie(life, batch)
                else:
                    asyncio.get_running_loop().call_later(delay, self._deliver_zombie, life, batch)
            life.engine.run(Batch(epoch=self._epoch(), cycle_id=0))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._lives.clear()

    def workers(self) -> tuple[WorkerInfo, ...]:
        return tuple(
            WorkerInfo(
                worker_id=worker_id,
                incarnation=life.incarnation,
                model=life.engine.info,
                pid=1,
                node="sim",
                num_slots=16,
                device="none",
            )
            for worker_id, life in sorted(self._lives.items())
        )

    async def run(self, worker_id: str, batch: Batch) -> BatchResult:
        life = self._life(worker_id)
        sent = (life, batch)
        self.unanswered.append(sent)
        life.operations = frozenset(item.op_id for item in batch.items) - {SNAPSHOT}
        try:
            self._world.trace(f"batch {batch.cycle_id} to {life.incarnation}: {_describe(batch)}")
            await self._travel()
            async with life.lock:
                result = await self._run(life, batch)
            is_late = life.is_replaced
            await self._travel()
        except WorkerLost:
            self._pool.note_death(life)
            raise
        finally:
            life.operations = frozenset()
            self.unanswered.remove(sent)
        if life.is_dead and not is_late:
            raise WorkerLost(f"{life.incarnation} has died")
        errors = [r.error.code.name for r in result.results if r.error is not None]
        self._world.trace(f"batch {batch.cycle_id} from {life.incarnation}: {errors}")
        return result

    async def start_sample(self, worker_id: str, request: SampleRequest) -> None:
        life = self._life(worker_id)
        await self._travel()
        await self._until_running(life)
        life.engine.start_sample(request)
        self._decode(life)

    async def cancel_sample(self, worker_id: str, op_id: str) -> None:
        life = self._life(worker_id)
        await self._travel()
        await self._until_running(life)
        life.engine.cancel_sample(op_id)
        self._decode(life)

    async def sample_events(self, worker_id: str) -> AsyncIterator[SampleEvent]:
        life = self._life(worker_id)
        while (events := await life.events.get()) is not None:
            for event in events:
                yield event
        raise WorkerLost(f"{life.incarnation} has ended")

    async def ping(self, worker_id: str) -> None:
        life = self._life(worker_id)
        if self._random.random() < self._pool.faults.slow_ping and not self._is_spared(life):
            self._world.fault("slow ping", worker_id)
            await asyncio.sleep(self._random.uniform(0, 10))
        await self._until_running(life)
        await self._travel()

    async def replace(self, worker_id: str) -> WorkerInfo:
        await asyncio.sleep(self._random.uniform(0, 0.05))
        if (life := self._lives.get(worker_id)) is not None:
            self._pool.note_death(life)
            life.is_replaced = life.is_dead = True
            life.events.put_nowait(None)
            life.change()
        if self._random.random() < self._pool.faults.no_replacement:
            self._world.fault("no replacement", worker_id)
            raise WorkerLost("it does not start")
        self._pool.new_life(worker_id)
        return next(worker for worker in self.workers() if worker.worker_id == worker_id)

    async def _run(self, life: _Life, batch: Batch) -> BatchResult:
        kind = "" if self._is_spared(life) else self._draw()
        if kind == "pause before":
            await self._pause(life, batch, "a batch was not begun")
        await self._until_running(life)
        await asyncio.sleep(self._random.expovariate(1 / WORK_S))
        await self._until_running(life)
        if kind == "die before":
            self._die(life, f"before batch {batch.cycle_id}")
        result = life.engine.run(batch)
        life.last = batch
        self._world.work["batches"] += 1
        if kind == "twice":
            result = self._again(life, batch, result)
        elif kind == "die after":
            self._die(life, f"after batch {batch.cycle_id}")
        elif kind == "pause after":
            is_late = await self._pause(life, batch, "a batch was applied", may_be_late=True)
            if is_late:
                return result
        await self._until_running(life)
        self._decode(life)
        return result

    def _draw(self) -> str:
        faults, value = self._pool.faults, self._random.random()
        for kind, probability in (
            ("die before", faults.die_before),
            ("die after", faults.die_after),
            ("pause before", faults.pause / 4),
            ("pause after", faults.pause * 3 / 4),
            ("twice", faults.twice),
        ):
            if value < probability:
                return kind
            value -= probability
        return ""

    def _is_spared(self, life: _Life) -> bool:
        return any(self._pool.deaths_alone[operation] for operation in life.running())

    def _die(self, life: _Life, why: str) -> None:
        self._world.fault(f"worker dies {why.split(maxsplit=1)[0]}", f"{life.incarnation} {why}")
        life.is_dead = True
        if self._random.random() < 0.5:  # else only who asks the worker notices
            life.events.put_nowait(None)
        life.change()
        raise WorkerLost(f"{life.incarnation} has died")

    async def _pause(self, life: _Life, batch: Batch, what: str, *, may_be_late: bool = False) -> bool:
        """Stop the worker for a while. True if it was replaced meanwhile and its answer arrives nevertheless."""
        seconds = self._random.choice((0.1, 1.0, 10.0, 20.0)) * self._random.random()
        self._world.fault("worker paused", f"{life.incarnation} when {what}: {batch.cycle_id}")
        life.is_paused = True
        asyncio.get_running_loop().call_later(seconds, self._resume, life)
        while life.is_paused and not life.is_dead:
            await life.changed.wait()
        if life.is_replaced and may_be_late and self._random.random() < 0.9:
            self._world.fault("late answer", life.incarnation)
            await asyncio.sleep(self._random.uniform(0, 1))
            return True
        return False

    def _resume(self, life: _Life) -> None:
        life.is_paused = False
        life.change()

    def _again(self, life: _Life, batch: Batch, first: BatchResult) -> BatchResult:
        second = life.engine.run(batch)
        if self._random.random() < 0.5 and life.num_seconds < 2:
            life.num_seconds += 1
            self._world.fault("batch twice, second answer", f"{batch.cycle_id}")
            return second
        life.num_seconds = 0
        self._world.fault("batch twice, first answer", f"{batch.cycle_id}")
        return first

    def _deliver_zombie(self, life: _Life, batch: Batch) -> None:
        if life.is_dead:
            return
        self._world.fault("batch of a dead coordinator", f"{life.incarnation} epoch {batch.epoch}")
        result = life.engine.run(batch)
        codes = {each.error and each.error.code for each in result.results}
        assert result.epoch == batch.epoch or codes <= {ErrorCode.OUT_OF_ORDER}, "a worker obeys a dead coordinator"

    def _decode(self, life: _Life) -> None:
        if not life.is_decoding and not life.is_dead and life.engine.can_decode():
            life.is_decoding = True
            task = asyncio.get_running_loop().create_task(self._decode_on(life))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _decode_on(self, life: _Life) -> None:
        try:
            while life.engine.can_decode():
                await asyncio.sleep(self._random.expovariate(1 / DECODE_S))
                await self._until_running(life)
                if self._random.random() < self._pool.faults.die_sampling and not self._is_spared(life):
                    self._die(life, "sampling")
                life.events.put_nowait(life.engine.decode_step())
        except WorkerLost:
            return
        finally:
            life.is_decoding = False

    def _life(self, worker_id: str) -> _Life:
        life = self._lives.get(worker_id)
        if life is None:
            raise WorkerLost(f"{worker_id} is not running")
        return life

    async def _until_running(self, life: _Life) -> None:
        while life.is_paused and not life.is_dead:
            await life.changed.wait()
        if life.is_dead:
            await asyncio.sleep(self._random.uniform(0, 0.1))
            raise WorkerLost(f"{life.incarnation} has died")

    async def _travel(self) -> None:
        await asyncio.sleep(self._random.expovariate(1 / TRAVEL_S))


def _describe(batch: Batch) -> str:
    installs = ",".join(i.spec.adapter_id[-10:] for i in batch.installs)
    items = ",".join(f"{type(i).__name__[:4]}{i.seq}@{i.adapter_id[:3]}" for i in batch.items)
    return f"[{installs}] {items}"
