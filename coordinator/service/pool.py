"""The state of the pool: workers, cycles, usage. Administrators see all tenants; others see them as counts.

Administrators drain workers.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from datetime import date
from itertools import islice
from weakref import WeakValueDictionary

from coordinator.base.config import VERSION
from coordinator.base.errors import invalid, not_found, unavailable, unmet
from coordinator.base.time import day_number
from coordinator.fleet.fleet import Incarnation
from coordinator.observe.throughput import by_worker
from coordinator.runtime.core import Core
from coordinator.service.access import streamed, uninterrupted
from coordinator.service.activity import ActivityUseCases
from coordinator.service.listings import PAGE_BYTES_MAX
from coordinator.service.problems import problems
from coordinator.storage.rows import DrainedWorkerRow, UsageRow
from coordinator.tenants.keys import Authenticator
from coordinator.tenants.principals import Principal
from tinkerpool.v1 import pool_pb2 as pb
from tinkerpool.v1.probation_pb2 import Probation

USAGE_ROWS_MAX = 10_000
"""Rows of one response about usage."""
USAGE_SLICE_ROWS = 200
"""Rows that are made at a time, in two milliseconds: other calls run between two slices."""
CYCLES_SLICE_ENTRIES = 512
"""Entries of cycles that are read at a time, in a millisecond, and those of the last cycle beyond."""
_FIELDS = {"tenant": "tenant", "kind": "kind", "model": "base_model", "adapter": "adapter_id", "day": "day"}
"""Group to the field of a row."""
_NUMBERS = ("num_operations", "num_tokens", "engine_seconds", "file_bytes", "file_seconds")


class _Sight:
    """What all watchers that see the same of each cycle see of the last one: it is made once for them."""

    def __init__(self, principal: Principal, name_of: Callable[[str], str]) -> None:
        self._principal = principal
        self._name_of = name_of
        self._cycle: pb.Cycle | None = None
        self._response = pb.WatchCyclesResponse()

    def of(self, cycle: pb.Cycle) -> pb.WatchCyclesResponse:
        """Return the response with this cycle."""
        if cycle is not self._cycle:
            shown = _shown(self._principal, cycle, functools.cache(self._name_of))
            self._cycle, self._response = cycle, pb.WatchCyclesResponse(cycle=shown)
        return self._response


class PoolUseCases(ActivityUseCases):
    """PoolService."""

    def __init__(self, core: Core, authenticator: Authenticator) -> None:
        super().__init__(core, authenticator)
        self._sights: WeakValueDictionary[str, _Sight] = WeakValueDictionary()
        """Of the watchers that there are: by tenant; administrators', who all see the same, under the empty name."""

    async def get_pool_status(self, principal: Principal, request: pb.GetPoolStatusRequest) -> pb.GetPoolStatusResponse:
        """Return the workers, the numbers of operations, what tenants do, and the last cycles.

        A member sees of a worker how many of its own adapters live there, and when it was lost; not where it runs, and
        not why it was lost.
        """
        core = self._core
        cycles = await self._last_cycles(principal, request.num_cycles or 20)
        queues = await self._current_queues()
        status = pb.GetPoolStatusResponse(
            workers=self._workers(principal),
            num_queued=sum(queue.num_queued for queue in queues.values()),
            num_running=sum(queue.num_running for queue in queues.values()),
            num_samples=core.samples.num_samples,
            cycles=cycles,
            version=VERSION,
            epoch=core.epoch,
            num_tenants=len(core.in_flight.tenants()),
            uptime_seconds=core.time.monotonic() - core.started_at,
            probations=self._probations(principal),
            problem=core.store.database.problem(),
            tenants=self._tenants(principal, queues),
            running_adapters=self._running_adapters(principal, queues),
        )
        status.problems.extend(problems(status, is_admin=principal.is_admin))
        return status

    @streamed
    async def watch_cycles(
        self, principal: Principal, request: pb.WatchCyclesRequest
    ) -> AsyncGenerator[pb.WatchCyclesResponse, None]:
        """Yield every cycle that commits from now on."""
        name = "" if principal.is_admin else principal.tenant_id
        sight = self._sights.setdefault(name, _Sight(principal, self._tenant_name))
        with self._core.journal.watchers.watch(principal.tenant_id) as queue:
            while (cycle := await queue.get()) is not None:
                yield sight.of(cycle)
            raise unavailable("SHUTTING_DOWN", "the pool is shutting down")

    async def get_usage(self, principal: Principal, request: pb.GetUsageRequest) -> pb.GetUsageResponse:
        """Return the metered usage: by tenant and kind of operation, or from a day on by other groups."""
        usage = self._core.store.usage
        if not request.since and not request.group_by:
            rows = usage.of(None if principal.is_admin else principal.tenant_id)
            return pb.GetUsageResponse(rows=map(_usage_row, rows))
        since = _day(request.since) if request.since else 0
        groups = list(dict.fromkeys(map(_group, request.group_by))) or ["tenant", "kind"]
        fields = [_FIELDS[group] for group in groups]
        found: dict[tuple[str, ...], pb.UsageRow] = {}
        async for row in self._usage_by(principal, groups, since):
            key = tuple(getattr(row, field) for field in fields)
            if key in found:
                _add(found[key], row)
            else:
                found[key] = row
            if len(found) > USAGE_ROWS_MAX:
                raise invalid(
                    f"this usage has more than {USAGE_ROWS_MAX:,} rows: name a later day as since, or fewer groups"
                )
        start = max(since, usage.first_day()) if since else 0
        return pb.GetUsageResponse(
            rows=(found[key] for key in sorted(found)), start_day=_day_text(start) if start else None
        )

    async def _usage_by(
        self, principal: Principal, groups: Sequence[str], since: int
    ) -> AsyncGenerator[pb.UsageRow, None]:
        """Yield the sums of each tenant that the caller may see, in slices by turns of the caller's tenant."""
        tenants, turns = self._core.store.tenants.all() if principal.is_admin else [], self._core.listing_turns
        for tenant_id in [row.tenant_id for row in tenants] or [principal.tenant_id]:
            async with turns.turn(principal.tenant_id):
                rows = self._core.store.usage.by(groups, tenant_id, since)
            while True:
                async with turns.turn(principal.tenant_id) as turn:
                    part = [_usage_row(row) for row in islice(rows, USAGE_SLICE_ROWS)]
                    turn.use(sum(row.ByteSize() for row in part))
                if not part:
                    break
                for row in part:
                    yield row
                await asyncio.sleep(0)

    @uninterrupted
    async def drain_worker(self, principal: Principal, request: pb.DrainWorkerRequest) -> pb.DrainWorkerResponse:
        """Take a worker out of work, for good."""
        worker_id, supervisor = request.worker_id, self._core.supervisor
        self._check_worker(worker_id)
        if not supervisor.is_drained(worker_id):
            row = DrainedWorkerRow(worker_id=worker_id, base_model=self._model_of(worker_id))
            try:
                supervisor.drain(worker_id)
            except ValueError as error:
                raise unmet("LAST_WORKER", str(error)) from None
            act = self._core.accounts.act("worker.drain", worker_id, principal)
            try:
                await self._core.store.drained_workers.add(row, act)
            except BaseException:
                supervisor.undrain(worker_id)
                raise
        return pb.DrainWorkerResponse(worker=self._worker(principal, worker_id))

    @uninterrupted
    async def undrain_worker(self, principal: Principal, request: pb.UndrainWorkerRequest) -> pb.UndrainWorkerResponse:
        """Let a worker take work again."""
        worker_id, supervisor = request.worker_id, self._core.supervisor
        self._check_worker(worker_id)
        if supervisor.is_drained(worker_id):
            act = self._core.accounts.act("worker.undrain", worker_id, principal)
            await self._core.store.drained_workers.remove(worker_id, act)
            supervisor.undrain(worker_id)
        return pb.UndrainWorkerResponse(worker=self._worker(principal, worker_id))

    async def _last_cycles(self, principal: Principal, num_cycles: int) -> list[pb.Cycle]:
        """Return the last cycles, oldest first, in slices by turns of the caller's tenant.

        They are fewer where they have more than `PAGE_BYTES_MAX`.
        """
        shown: list[pb.Cycle] = []
        num_bytes, name_of = 0, functools.cache(self._tenant_name)
        cycles = deque(islice(reversed(list(self._core.journal.recent)), max(num_cycles, 0)))
        while cycles and num_bytes < PAGE_BYTES_MAX:
            async with self._core.listing_turns.turn(principal.tenant_id) as turn:
                num_read = 0
                while cycles and num_read < CYCLES_SLICE_ENTRIES:
                    num_read += 1 + len(cycles[0].entries)
                    shown.append(_shown(principal, cycles.popleft(), name_of))
                    turn.use(shown[-1].ByteSize())
                num_bytes += turn.num_used
            await asyncio.sleep(0)
        return shown[::-1]

    def _workers(self, principal: Principal) -> list[pb.Worker]:
        """Return all workers, with the tokens a second that went through them."""
        tenant_id, throughput = None if principal.is_admin else principal.tenant_id, self._core.throughput
        trained, sampled = by_worker(throughput.trained(), tenant_id), by_worker(throughput.sampled(), tenant_id)
        workers = [self._worker(principal, worker_id) for worker_id in self._worker_ids()]
        for worker in workers:
            worker.trained_tokens_per_second = trained.get(worker.worker_id, 0.0)
            worker.sampled_tokens_per_second = sampled.get(worker.worker_id, 0.0)
        return workers

    def _worker_ids(self) -> list[str]:
        """Return all workers: those that have an incarnation, then those that were drained."""
        known = self._core.fleet.worker_ids()
        return known + [each for each in self._core.pool.base_models() if each not in known]

    def _check_worker(self, worker_id: str) -> None:
        if worker_id not in self._worker_ids():
            raise not_found("worker", worker_id)

    def _model_of(self, worker_id: str) -> str:
        if worker_id in self._core.fleet.worker_ids():
            return self._core.fleet.worker(worker_id).info.model.name
        return self._core.pool.base_models()[worker_id]

    def _worker(self, principal: Principal, worker_id: str) -> pb.Worker:
        core, is_admin = self._core, principal.is_admin
        shown = pb.Worker(worker_id=worker_id, base_model=self._model_of(worker_id))
        losses = core.fleet.losses(worker_id)
        if losses.num:
            shown.num_losses = losses.num
            shown.last_loss_time.FromNanoseconds(int(losses.last_at * 1e9))
        if is_admin:
            shown.last_loss_reason, shown.start_problem = losses.reason, losses.start_problem
        if worker_id not in core.fleet.worker_ids():
            has_ended = core.supervisor.is_drained(worker_id)
            shown.state = pb.WORKER_STATE_DRAINED if has_ended else pb.WORKER_STATE_LOST
            return shown
        worker = core.fleet.worker(worker_id)
        shown.incarnation, shown.device = worker.name, worker.info.device
        shown.num_slots, shown.is_live, shown.state = worker.info.num_slots, worker.is_live, _state(worker)
        shown.num_adapters = core.registry.num_on(worker_id, None if is_admin else principal.tenant_id)
        shown.num_samples = sum(is_admin or each.tenant_id == principal.tenant_id for each in worker.samples.values())
        if (seconds := core.supervisor.host_leaves_in_s(worker)) is not None:
            shown.host_leaves_in_seconds = seconds
        if is_admin:
            shown.pid, shown.node, shown.held_bytes = worker.info.pid, worker.info.node, worker.held_bytes
            shown.slow_because = worker.info.model.slow_because
            shown.resident_bytes, shown.device_bytes = worker.use.resident_bytes, worker.use.device_bytes
        return shown

    def _probations(self, principal: Principal) -> list[Probation]:
        """Return the probations that the caller may see, by the tenants' names."""
        found = {tenant_id: self._core.probation.standing(tenant_id) for tenant_id in self._core.probation.tenants()}
        shown = [
            Probation(
                tenant=self._tenant_name(tenant_id),
                num_kills=standing.num_kills,
                operation=standing.operation,
                remaining_seconds=standing.remaining_s,
                backoff_seconds=standing.backoff_s,
            )
            for tenant_id, standing in found.items()
            if standing is not None and (principal.is_admin or tenant_id == principal.tenant_id)
        ]
        return sorted(shown, key=lambda each: each.tenant)


def _shown(principal: Principal, cycle: pb.Cycle, name_of: Callable[[str], str]) -> pb.Cycle:
    """Return a cycle as the caller may see it. (In memory, an entry holds its tenant's id: `name_of` names it.)

    Of other tenants a member sees their number, by one empty entry each, and in the first of these their operations
    and tokens in all: not which adapters, workers and steps were theirs, nor what one of them did.
    """
    shown = pb.Cycle(
        cycle_id=cycle.cycle_id,
        base_model=cycle.base_model,
        start_time=cycle.start_time,
        pass_seconds=cycle.pass_seconds,
        step_seconds=cycle.step_seconds,
        commit_seconds=cycle.commit_seconds,
        workers=cycle.workers if principal.is_admin else (),
    )
    others, other_ids = pb.CycleEntry(), set()
    for entry in cycle.entries:
        if principal.is_admin or entry.tenant == principal.tenant_id:
            shown.entries.append(entry)
            shown.entries[-1].tenant = name_of(entry.tenant)
        else:
            other_ids.add(entry.tenant)
            others.num_operations += entry.num_operations
            others.num_tokens += entry.num_tokens
    if other_ids:
        shown.entries.append(others)
        shown.entries.extend(pb.CycleEntry() for _ in range(len(other_ids) - 1))
    return shown


def _group(group: pb.UsageGroup.ValueType) -> str:
    """Return a group as storage names it. Raises ServiceError INVALID_ARGUMENT."""
    if group not in pb.UsageGroup.values() or group == pb.USAGE_GROUP_UNSPECIFIED:
        raise invalid(f"group_by has no group {group}: tenant is 1, model 2, adapter 3, kind 4, day 5")
    return pb.UsageGroup.Name(group).removeprefix("USAGE_GROUP_").lower()


def _day(text: str) -> int:
    """Return a day as storage numbers it. Raises ServiceError INVALID_ARGUMENT."""
    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise invalid(f"since must be a day as 2026-11-26, not {text[:40]!r}") from None
    return day_number(day.year, day.month, day.day)


def _day_text(day: int) -> str:
    return f"{day // 10_000:04}-{day // 100 % 100:02}-{day % 100:02}"


def _usage_row(row: UsageRow) -> pb.UsageRow:
    shown = pb.UsageRow(
        tenant=row.tenant_name,
        kind=row.kind,
        num_operations=row.num_operations,
        num_tokens=row.num_tokens,
        engine_seconds=row.engine_s,
        file_bytes=row.file_bytes,
        file_seconds=row.file_s,
        base_model=row.base_model,
        adapter_id=row.adapter_id,
    )
    if row.day is not None:
        shown.day = _day_text(row.day) if row.day else ""
    return shown


def _add(row: pb.UsageRow, other: pb.UsageRow) -> None:
    for name in _NUMBERS:
        setattr(row, name, getattr(row, name) + getattr(other, name))


def _state(worker: Incarnation) -> pb.WorkerState.ValueType:
    if worker.is_draining:
        return pb.WORKER_STATE_DRAINING
    if not worker.is_live:
        return pb.WORKER_STATE_LOST
    return pb.WORKER_STATE_LATE if worker.is_away else pb.WORKER_STATE_READY
