"""A pool of toy engines without threads or processes, whose workers crash, hang, reply late and reply twice.

`SimPool` holds the workers of a history; they may outlive a coordinator. `SimPoolFront` is one coordinator's view and
implements the `Pool` protocol; it ends with its coordinator. Batches of an earlier epoch may still arrive at a worker
in the next epoch.

A worker that outlives its coordinator is adopted by the next one, as a new incarnation, or is refused and ended.

Does not depend on tenants or on the disk.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import NoReturn

from coordinator.cycle.items import SNAPSHOT
from coordinator.cycle.results import REINSTALLS_MAX
from tests.simulation.poisoner import Kills
from tests.simulation.standing import Standings
from tests.simulation.world import World
from tests.support.batches import Reference
from tests.support.toy_engine import ToyEngine
from workers.contract.messages import (
    AdapterCosts,
    AdapterInstall,
    AdapterState,
    Batch,
    BatchResult,
    ErrorCode,
    Item,
    PassItem,
    SampleEvent,
    SampleRequest,
    WorkerInfo,
)
from workers.contract.protocols import Owner, WorkerLost

NETWORK_S = 0.0005
WORK_S = 0.004
DECODE_S = 0.001
"""Mean delays: of a message on the network, of a batch, of a decode step."""
BASE_MODEL = "toy"
SPARED_POLL_S = 0.1
"""How often a worker whose reply to a ping is slow looks whether it must not be lost any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFaults:
    """Probabilities, per batch unless said otherwise."""

    crash_before: float = 0.0
    """The worker crashes with a batch that it has not begun."""
    crash_after: float = 0.0
    """It crashes after it has applied the batch."""
    crash_sampling: float = 0.0
    """Per decode step."""
    pause: float = 0.0
    """It stops before or after the batch, does not reply, not even to pings, and later continues (SIGSTOP, SIGCONT)."""
    twice: float = 0.0
    """The batch is delivered twice; either reply may be the one that arrives."""
    slow_ping: float = 0.0
    """Per ping: the reply takes up to twice the timeout of a ping."""
    no_replacement: float = 0.0
    """Per attempt: the next incarnation of a worker does not start."""
    reference_gone: float = 0.0
    """Per copy that is installed: its state is sent by a reference that leads nowhere any more."""
    survive: float = 0.0
    """Per worker, when its coordinator is killed: the worker keeps running."""
    late_join: float = 0.0
    """Per worker that is to start with its coordinator, while there is another one: it joins when the pool serves."""
    refused: float = 0.0
    """Per worker that has outlived its coordinator: the next one does not adopt it, as it runs other code."""


@dataclass(slots=True, eq=False)
class _Incarnation:
    """One incarnation of a worker."""

    incarnation: str
    engine: ToyEngine
    is_lost: bool = False
    is_replaced: bool = False
    is_paused: bool = False
    stale_batches: list[Batch] = field(default_factory=list)
    """Batches of earlier epochs that are still on the network."""
    events: asyncio.Queue[Sequence[SampleEvent] | None] = field(default_factory=asyncio.Queue)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced by a new event, whenever the flags above change."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_decoding: bool = False
    last: Batch | None = None
    """The last batch applied; the network may deliver it again."""
    operations: frozenset[str] = frozenset()
    """The operations of its batch."""
    arriving: set[str] = field(default_factory=set)
    """Samples that were sent to it and are on the network."""
    num_second_replies: int = 0
    """How often in a row the second reply arrived instead of the first."""

    def change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def running(self) -> frozenset[str]:
        """Return the operations that are quarantined if this incarnation is lost."""
        return self.operations | self.arriving | self.engine._done.keys()

    def adopt(self, epoch: int, incarnation: str) -> None:
        """Serve a new coordinator, on its event loop, as a new incarnation."""
        self.events, self.changed, self.lock = asyncio.Queue(), asyncio.Event(), asyncio.Lock()
        self.is_decoding = self.is_paused = False
        self.incarnation = incarnation
        self.engine.begin(epoch, incarnation)


class SimPool:
    """The workers of a history."""

    def __init__(
        self, world: World, num_workers: int, faults: WorkerFaults, kills: Kills, standings: Standings
    ) -> None:
        self.world = world
        self.kills = kills
        self.standings = standings
        self.faults = faults
        self.random: Random = world.random("pool")
        self.workers: dict[str, _Incarnation] = {}
        self.prepared: dict[str, _Incarnation] = {}
        """The next incarnations of workers whose hosts leave."""
        self.notices: dict[str, float] = {}
        """Incarnation to the virtual time at which its host leaves."""
        kills.watch(self.notices)
        self.solo_losses: Counter[str] = Counter()
        """Operations that ran solo when their worker was lost. A second loss would convince the coordinator that the
        operation is poison, so no fault is injected into a worker that runs such an operation."""
        self._host_bytes_max = self.random.choice((None, None, 1000, 2000))
        """Of copies and versions, which workers hold: any number, one, or a few."""
        self._costs = AdapterCosts()
        if self.random.random() < 0.5:  # passes of few adapters, that move in and out of slots
            self._costs = AdapterCosts(item_tokens=5.0, byte_tokens=0.01, move_byte_tokens=0.02)
        self.poison = world.random("poison").choice(("crash", "crash", "silence", "host"))
        """What a poison does: it ends its worker, silences it, or takes the host too, so that no replacement starts."""
        self.down: Counter[str] = Counter()
        """How many more attempts to replace these workers fail, because their hosts are down."""
        self.num_workers = num_workers
        """Of each coordinator's start. Workers that join later end with their coordinator."""
        self._num_joined = 0
        self._num_incarnations = 0
        self._class_random = world.random("classes")
        self._fingerprints = self._class_random.choice((("toy",), ("toy",), ("toy", "other")))
        """Of the hosts of this history."""
        self._classes: dict[str, str] = {}
        """Worker to the class of its present host."""

    def start_incarnation(self, worker_id: str) -> _Incarnation:
        """Start a worker's next incarnation, without adapters, or take the prepared one."""
        if worker_id not in self.prepared:
            self.prepared[worker_id] = self.new_incarnation(worker_id)
        self.workers[worker_id] = self.prepared.pop(worker_id)
        return self.workers[worker_id]

    def new_incarnation(self, worker_id: str) -> _Incarnation:
        """Return a process that no call reaches yet."""
        name = self.new_name(worker_id)
        fingerprint = self._classes.get(worker_id)
        if fingerprint is None or self._class_random.random() < 0.1:  # another host
            fingerprint = self._classes[worker_id] = self._class_random.choice(self._fingerprints)
        engine = ToyEngine(name, host_bytes_max=self._host_bytes_max, costs=self._costs, fingerprint=fingerprint)
        return _Incarnation(name, engine)

    def new_name(self, worker_id: str) -> str:
        """Return a name for a worker's next incarnation."""
        self._num_incarnations += 1
        return f"{worker_id}-{self._num_incarnations}"

    def next_worker(self) -> int:
        """Return the number of a worker that joins."""
        self._num_joined += 1
        return self.num_workers + self._num_joined - 1

    def note_loss(self, worker: _Incarnation) -> None:
        """Record the operation of a lost worker if it ran solo."""
        if len(worker.running()) == 1:
            self.solo_losses.update(worker.running())

    def is_spared(self, worker: _Incarnation) -> bool:
        """Return whether the loss of a worker might convict its operation."""
        return any(self.solo_losses[operation] for operation in worker.running())

    def crash(self, worker_id: str) -> None:
        """Lose a worker now, whatever it does, unless it is spared."""
        worker = self.workers[worker_id]
        if not self.is_spared(worker):
            self.note_loss(worker)
            worker.is_lost = True
            worker.events.put_nowait(None)
            worker.change()

    def end_epoch(self, outstanding: Sequence[tuple[_Incarnation, Batch]]) -> None:
        """Lose the workers that do not outlive their coordinator; keep batches on the network for the others."""
        self.prepared.clear()
        for worker_id, worker in list(self.workers.items()):
            has_joined = int(worker_id[1:]) >= self.num_workers
            if worker.is_lost or has_joined or self.random.random() >= self.faults.survive:
                del self.workers[worker_id]
        for worker, batch in outstanding:
            if worker in self.workers.values():
                worker.stale_batches.append(batch)
        for worker in self.workers.values():
            if worker.last is not None and self.random.random() < 0.3:
                worker.stale_batches.append(worker.last)


class SimPoolFront:
    """Implements `workers.contract.protocols.Pool` for one coordinator."""

    def __init__(self, pool: SimPool) -> None:
        self._pool = pool
        self._world = pool.world
        self._random = pool.random
        self._workers = pool.workers
        self._worker_ids = [f"w{index}" for index in range(pool.num_workers)]
        """Of all workers that were configured or joined."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.outstanding: list[tuple[_Incarnation, Batch]] = []
        """Batches that were sent and have no reply yet."""
        self._missing: list[str] = []
        self._num_gone = 0
        """References in a row that led nowhere."""
        self._strays: defaultdict[tuple[str, str, int], list[float]] = defaultdict(list)
        """Adapter, operation and chunk to the times at which the item found its copy out of order, since it was sent to
        a worker that was lost with it. More than `REINSTALLS_MAX` would convince the coordinator that the adapter
        cannot be rebuilt, so no fault is injected then that adds one."""

    def base_models(self) -> Mapping[str, str]:
        return dict.fromkeys(self._worker_ids, BASE_MODEL)

    async def start(self, owner: Owner, drained: Collection[str] = ()) -> None:
        await asyncio.sleep(self._random.uniform(0, 0.01))
        has_worker = False
        for worker_id in self._worker_ids:
            if worker_id in drained:
                self._workers.pop(worker_id, None)
                continue
            worker = self._workers.get(worker_id)
            if worker is not None and self._random.random() < self._pool.faults.refused:
                self._world.fault("worker refused", worker_id)
                worker.is_lost = True
                worker = None
                del self._workers[worker_id]
            if worker is None:
                if has_worker and self._random.random() < self._pool.faults.late_join:
                    self._missing.append(worker_id)
                else:
                    self._pool.start_incarnation(worker_id)
                    has_worker = True
                continue
            has_worker = True
            self._world.fault("worker adopted", worker_id)
            worker.adopt(owner.epoch, self._pool.new_name(worker_id))
            stale_batches, worker.stale_batches = worker.stale_batches, []
            for batch in stale_batches:
                delay = self._random.choice((0.0, 0.005, 0.05, 0.3))
                if delay == 0.0:
                    self._deliver_stale(worker, batch)
                else:
                    asyncio.get_running_loop().call_later(delay, self._deliver_stale, worker, batch)

    async def stop(self, *, is_final: bool = False) -> None:
        for task in self._tasks:
            task.cancel()
        self._workers.clear()

    def workers(self) -> tuple[WorkerInfo, ...]:
        return tuple(self._info(worker_id) for worker_id in sorted(self._workers))

    async def run(self, worker_id: str, batch: Batch) -> BatchResult:
        worker, sent_s = self._worker(worker_id), self._world.time()
        sent = (worker, batch)
        self.outstanding.append(sent)
        worker.operations = frozenset(item.op_id for item in batch.items) - {SNAPSHOT}
        self._world.work["copies and versions dropped"] += len(batch.removals)
        self._pool.standings.check_batch(batch.cycle_id, worker.operations)
        self._pool.standings.check_classes((each.adapter_id for each in batch.items), worker.engine.info.fingerprint)
        try:
            self._world.trace(f"batch {batch.cycle_id} to {worker.incarnation}: {_describe(batch)}")
            await self._delay()
            async with worker.lock:
                result = await self._run(worker_id, worker, batch)
            is_late = worker.is_replaced
            await self._delay()
        except (WorkerLost, asyncio.CancelledError):
            self._pool.note_loss(worker)
            self._forget_strays(batch, sent_s)
            raise
        finally:
            worker.operations = frozenset()
            self.outstanding.remove(sent)
        if worker.is_lost:
            self._forget_strays(batch, sent_s)
        if worker.is_lost and not is_late:
            raise WorkerLost(f"{worker.incarnation} is lost")
        self._note_strays(batch, result)
        errors = [r.error.code.name for r in result.results if r.error is not None]
        self._world.trace(f"batch {batch.cycle_id} from {worker.incarnation}: {errors}")
        return result

    async def start_sample(self, worker_id: str, request: SampleRequest) -> None:
        worker = self._worker(worker_id)
        self._pool.standings.check_sample(request.op_id)
        worker.arriving.add(request.op_id)
        try:
            await self._delay()
            await self._until_running(worker)
        finally:
            worker.arriving.discard(request.op_id)
        worker.engine.start_sample(request)
        self._decode(worker)

    async def cancel_sample(self, worker_id: str, op_id: str) -> None:
        worker = self._worker(worker_id)
        await self._delay()
        await self._until_running(worker)
        worker.engine.cancel_sample(op_id)
        self._decode(worker)

    async def sample_events(self, worker_id: str) -> AsyncIterator[SampleEvent]:
        worker = self._worker(worker_id)
        while (events := await worker.events.get()) is not None:
            for event in events:
                yield event
        raise WorkerLost(f"{worker.incarnation} is lost")

    async def ping(self, worker_id: str) -> None:
        worker = self._worker(worker_id)
        if self._random.random() < self._pool.faults.slow_ping and not self._pool.is_spared(worker):
            self._world.fault("slow ping", worker_id)
            until_s = self._world.time() + self._random.uniform(0, 10)
            while self._world.time() < until_s and not self._pool.is_spared(worker):  # noqa: ASYNC110 (no event for it)
                await asyncio.sleep(min(SPARED_POLL_S, until_s - self._world.time()))
        await self._until_running(worker)
        await self._delay()

    async def add(self, base_model: str) -> WorkerInfo:
        await asyncio.sleep(self._random.uniform(0, 0.05))
        worker_id = f"w{self._pool.next_worker()}"
        if self._random.random() < self._pool.faults.no_replacement:
            self._world.fault("no new worker", worker_id)
            raise WorkerLost(f"{worker_id} does not start")
        self._worker_ids.append(worker_id)
        self._pool.start_incarnation(worker_id)
        return self._info(worker_id)

    async def remove(self, worker_id: str) -> None:
        self._pool.kills.replaced(worker_id)
        self._pool.prepared.pop(worker_id, None)
        if (worker := self._workers.pop(worker_id, None)) is None:
            return
        if worker.is_lost:
            self._world.fault("drained worker lost", worker.incarnation)
        worker.is_replaced = worker.is_lost = True
        worker.events.put_nowait(None)
        worker.change()

    async def prepare(self, worker_id: str) -> None:
        await asyncio.sleep(self._random.choice((0.05, 2.0, 10.0)) * self._random.random())
        if self._random.random() < self._pool.faults.no_replacement:
            self._world.fault("no successor", worker_id)
            raise WorkerLost(f"{worker_id} does not start")
        self._pool.prepared[worker_id] = self._pool.new_incarnation(worker_id)

    async def leaving(self) -> Mapping[str, float]:
        notices, now = self._pool.notices, self._world.time()
        found = [(worker_id, notices.get(worker.incarnation)) for worker_id, worker in self._workers.items()]
        return {worker_id: at - now for worker_id, at in found if at is not None}

    async def replace(self, worker_id: str) -> WorkerInfo:
        await asyncio.sleep(self._random.uniform(0, 0.05))
        if worker_id in self._missing:
            self._world.fault("worker joins late", worker_id)
            self._missing.remove(worker_id)
        elif (worker := self._workers.get(worker_id)) is not None:
            self._pool.note_loss(worker)
            worker.is_replaced = worker.is_lost = True
            worker.events.put_nowait(None)
            worker.change()
        is_down = self._pool.down[worker_id] > 0
        self._pool.down[worker_id] -= is_down
        if is_down or self._random.random() < self._pool.faults.no_replacement:
            self._world.fault("no replacement", worker_id)
            self._pool.kills.replaced(worker_id)
            raise WorkerLost(f"{worker_id} does not start")
        self._pool.start_incarnation(worker_id)
        self._pool.kills.replaced(worker_id)
        return self._info(worker_id)

    def _info(self, worker_id: str) -> WorkerInfo:
        worker = self._workers[worker_id]
        return WorkerInfo(
            worker_id=worker_id,
            incarnation=worker.incarnation,
            model=worker.engine.info,
            pid=1,
            node="sim",
            num_slots=16,
            device="none",
        )

    async def _run(self, worker_id: str, worker: _Incarnation, batch: Batch) -> BatchResult:
        sent_s = self._world.time()
        kind = "" if self._pool.is_spared(worker) else self._draw()
        if kind == "pause before":
            await self._pause(worker, batch, "a batch was not begun")
        await self._until_running(worker)
        work_s = self._random.expovariate(1 / WORK_S)
        await asyncio.sleep(work_s)
        await self._until_running(worker)
        if kind == "crash before":
            self._crash(worker, f"before batch {batch.cycle_id}")
        sent = self._by_reference(batch)
        try:
            result = worker.engine.run(sent)
        except RuntimeError:  # it has a token that ends its engine
            samples = frozenset(worker.engine._done)
            self._pool.kills.killed(worker_id, worker.incarnation, sent_s, batch, samples)
            await self._poison(worker_id, worker, batch)
        worker.last = batch
        self._world.work["batches"] += 1
        if kind == "twice":
            result = self._again(worker, sent, result)
        elif kind == "crash after":
            self._crash(worker, f"after batch {batch.cycle_id}")
        elif kind == "pause after":
            is_late = await self._pause(worker, batch, "a batch was applied", may_be_late=True)
            if is_late:
                return result  # the coordinator drops it
        await self._until_running(worker)
        self._decode(worker)
        return replace(result, wall_s=work_s, phase_s={"forward": work_s})  # not the seconds that this machine took

    async def _poison(self, worker_id: str, worker: _Incarnation, batch: Batch) -> NoReturn:
        """Do what a poison does to its worker."""
        if self._pool.poison == "silence":
            self._world.fault("worker silenced by a poison", worker.incarnation)
            worker.is_paused = True
            await self._until_running(worker)
        if self._pool.poison == "host":
            self._world.fault("host taken by a poison", worker.incarnation)
            self._pool.down[worker_id] = 1  # attempt: after each loss its tenant waits nine times as long as it took
        self._crash(worker, f"poisoned by batch {batch.cycle_id}")

    def _by_reference(self, batch: Batch) -> Batch:
        """Send the states of copies by reference, some of which lead nowhere any more."""
        if not any(install.state for install in batch.installs):
            return batch
        return replace(batch, installs=tuple(self._install_by_reference(each, batch) for each in batch.installs))

    def _install_by_reference(self, install: AdapterInstall, batch: Batch) -> AdapterInstall:
        if install.state is None:
            return install
        items = [item for item in batch.items if item.adapter_id == install.spec.adapter_id]
        is_gone = self._random.random() < self._pool.faults.reference_gone and self._num_gone < 2
        is_gone = is_gone and self._may_stray(items)
        self._num_gone = self._num_gone + 1 if is_gone else 0
        if is_gone:
            self._world.fault("reference gone")
        assert isinstance(install.state, AdapterState)
        return replace(install, state=Reference(None if is_gone else install.state))

    def _may_stray(self, items: Iterable[Item]) -> bool:
        """Return whether each of these items may find its copy out of order once more."""
        return all(len(self._strays[_key(item)]) < REINSTALLS_MAX for item in items)

    def _note_strays(self, batch: Batch, result: BatchResult) -> None:
        for item, each in zip(batch.items, result.results, strict=True):
            if each.error is not None and each.error.code is ErrorCode.OUT_OF_ORDER:
                self._strays[_key(item)].append(self._world.time())

    def _forget_strays(self, batch: Batch, sent_s: float) -> None:
        """Count anew, from when the batch was sent to a worker that was lost; the loss is noticed later."""
        for key in map(_key, batch.items):
            self._strays[key] = [at for at in self._strays[key] if at > sent_s]

    def _draw(self) -> str:
        faults, value = self._pool.faults, self._random.random()
        for kind, probability in (
            ("crash before", faults.crash_before),
            ("crash after", faults.crash_after),
            ("pause before", faults.pause / 4),
            ("pause after", faults.pause * 3 / 4),
            ("twice", faults.twice),
        ):
            if value < probability:
                return kind
            value -= probability
        return ""

    def _crash(self, worker: _Incarnation, why: str) -> NoReturn:
        self._world.fault(f"worker crashes {why.split(maxsplit=1)[0]}", f"{worker.incarnation} {why}")
        self._pool.note_loss(worker)  # now: what ran solo goes on at once on another worker, before a replacement
        worker.is_lost = True
        if self._random.random() < 0.5:  # otherwise only a call to the worker detects the crash
            worker.events.put_nowait(None)
        worker.change()
        raise WorkerLost(f"{worker.incarnation} is lost")

    async def _pause(self, worker: _Incarnation, batch: Batch, what: str, *, may_be_late: bool = False) -> bool:
        """Stop the worker for a while. Return True if it was replaced meanwhile and its reply arrives nevertheless."""
        seconds = self._random.choice((0.1, 1.0, 20.0)) * self._random.random()
        self._world.fault("worker paused", f"{worker.incarnation} when {what}: {batch.cycle_id}")
        worker.is_paused = True
        asyncio.get_running_loop().call_later(seconds, self._resume, worker)
        while worker.is_paused and not worker.is_lost:
            await worker.changed.wait()
        if worker.is_replaced and may_be_late and self._random.random() < 0.9:
            self._world.fault("late reply", worker.incarnation)
            await asyncio.sleep(self._random.uniform(0, 1))
            return True
        return False

    def _resume(self, worker: _Incarnation) -> None:
        worker.is_paused = False
        worker.change()

    def _again(self, worker: _Incarnation, batch: Batch, first: BatchResult) -> BatchResult:
        """Deliver the same message once more; return one of the two replies."""
        second = worker.engine.run(batch)
        if self._random.random() < 0.5 and worker.num_second_replies < 2 and self._may_stray(batch.items):
            worker.num_second_replies += 1
            self._world.fault("batch twice, second reply", f"{batch.cycle_id}")
            return second
        worker.num_second_replies = 0
        self._world.fault("batch twice, first reply", f"{batch.cycle_id}")
        return first

    def _deliver_stale(self, worker: _Incarnation, batch: Batch) -> None:
        if worker.is_lost:
            return
        self._world.fault("batch of an earlier epoch", f"{worker.incarnation} epoch {batch.epoch}")
        result = worker.engine.run(batch)
        codes = {each.error and each.error.code for each in result.results}
        assert result.epoch == batch.epoch or codes <= {ErrorCode.OUT_OF_ORDER}, (
            "a worker applied a batch of an earlier epoch"
        )

    def _decode(self, worker: _Incarnation) -> None:
        if not worker.is_decoding and not worker.is_lost and worker.engine.can_decode():
            worker.is_decoding = True
            task = asyncio.get_running_loop().create_task(self._decode_on(worker))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _decode_on(self, worker: _Incarnation) -> None:
        try:
            while worker.engine.can_decode():
                await asyncio.sleep(self._random.expovariate(1 / DECODE_S))
                await self._until_running(worker)
                if self._random.random() < self._pool.faults.crash_sampling and not self._pool.is_spared(worker):
                    self._crash(worker, "sampling")
                worker.events.put_nowait(worker.engine.decode_step())
        except WorkerLost:
            return
        finally:
            worker.is_decoding = False

    def _worker(self, worker_id: str) -> _Incarnation:
        worker = self._workers.get(worker_id)
        if worker is None:
            raise WorkerLost(f"{worker_id} is not running")
        return worker

    async def _until_running(self, worker: _Incarnation) -> None:
        while worker.is_paused and not worker.is_lost:
            await worker.changed.wait()
        if worker.is_lost:
            await asyncio.sleep(self._random.uniform(0, 0.1))
            raise WorkerLost(f"{worker.incarnation} is lost")

    async def _delay(self) -> None:
        await asyncio.sleep(self._random.expovariate(1 / NETWORK_S))


def _key(item: Item) -> tuple[str, str, int]:
    return item.adapter_id, item.op_id, item.chunk_index if isinstance(item, PassItem) else 0


def _describe(batch: Batch) -> str:
    installs = ",".join(i.spec.adapter_id[-10:] for i in batch.installs)
    items = ",".join(f"{type(i).__name__[:4]}{i.seq}@{i.adapter_id[:3]}" for i in batch.items)
    return f"[{installs}] {items}"
