"""When adapters are snapshotted, and the writing of snapshots while later cycles run.

Two bounds decide. The loss of a worker: replaying everything that ran on it since its adapters' snapshots takes at most
`replay_s_max` engine seconds. The cost of writing: at most a tenth of the time. While that holds, the replay is kept to
a part of its bound; where both cannot hold, the first one wins. Between optimizer steps a snapshot is smaller, because
there is no gradient in it; that moment is preferred until the first bound is reached.

Depends on adapter logs and, through `states`, on files and rows; not on what a state holds. Main invariant: a snapshot
covers its adapter log only between cycles, so that a log is not cut during a cycle.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.base.time import Alarms, Signal, Time, backoff_s
from coordinator.checkpoints.states import States
from coordinator.observe.metrics import SNAPSHOTS
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.windows import Window
from coordinator.storage.sqlite import StorageError
from workers.contract.logs import about
from workers.contract.messages import AdapterState, ItemResult

logger = logging.getLogger(__name__)

LOGGED_OPERATIONS_MAX = 1000
"""Operations since its snapshot after which an adapter is snapshotted, however cheap they were: this bounds memory."""
AT_ONCE, AT_ONCE_BYTES = 64, 32 << 20
"""States in memory at a time, and their bytes, unless a single one is larger. If more adapters are due, cycles wait for
the writing: later, the replay of a lost worker could exceed its bound."""
EARLY_PART = 0.25
"""Part of `replay_s_max` from which on adapters are snapshotted whose snapshots are cheap and small."""
WRITING_SHARE_MAX = 0.1
RETRY_S, RETRY_S_MAX = 5.0, 300.0
"""Pause after a snapshot of an adapter has failed; twice as long each time, and the most."""


@dataclass(frozen=True, slots=True)
class _Durable:
    adapter: AdapterLog
    seq: int
    window: Window
    replay_s: float
    replaced: str
    """The folder of the snapshot that it replaces."""


class Snapshots:
    """The snapshots of one base model's adapters."""

    def __init__(self, states: States, time: Time, replay_s_max: float) -> None:
        self.changed = Signal()
        """A snapshot was written or failed, or it or a read may be retried: call `settle`."""
        self._states = states
        self._time = time
        self._replay_s_max = replay_s_max
        self._writing: dict[str, asyncio.Task[None]] = {}
        self._bytes: dict[str, int] = {}
        """Adapter to the bytes of its state that is being written."""
        self._durable: list[_Durable] = []
        self._cost_s: dict[str, float] = {}
        """Adapter to seconds that its last snapshot took to write."""
        self._last_cost_s = 0.0
        """Of any adapter: of one without a snapshot nothing better is known."""
        self._failed_at: dict[str, float] = {}
        """Adapter to its last failure, if no snapshot has succeeded since."""
        self._num_failures: Counter[str] = Counter()
        self._readable_at: dict[str, float] = {}
        """Adapter to the service time before which no copy of it is read: the last read failed."""
        self._retries = Alarms(self.changed, time.monotonic)
        self._asked: dict[str, tuple[int, Window]] = {}
        """Adapters whose states were requested, with the generations of their copies and their gradient windows."""

    def due(self, adapters: Iterable[AdapterLog], lost: Collection[str]) -> list[AdapterLog]:
        """Return the adapters to snapshot now, without the `lost` ones: they ran an operation that was never logged.

        Call between cycles.
        """
        by_worker: dict[str, list[AdapterLog]] = {}
        for adapter in adapters:
            if adapter.home and adapter.adapter_id not in lost:
                by_worker.setdefault(adapter.home, []).append(adapter)
        return [adapter for resident in by_worker.values() for adapter in self._due_on_worker(resident)]

    def num_readable(self, adapters: Sequence[AdapterLog], size_of: Callable[[AdapterLog], int]) -> int:
        """Return how many of these adapters' states may be read now, besides those that are being written.

        `size_of` returns the bytes of one. 0: none, until some are written.
        """
        num_bytes = itertools.accumulate((size_of(each) for each in adapters), initial=sum(self._bytes.values()))
        next(num_bytes)
        number = sum(total <= AT_ONCE_BYTES for total in itertools.islice(num_bytes, AT_ONCE - len(self._writing)))
        return number or int(bool(adapters) and not self._writing)

    def can_take(self, adapter: AdapterLog) -> bool:
        """Return whether the adapter's copy is ahead of its last snapshot and at a point where one may be taken."""
        if adapter.adapter_id in self._writing:
            return False
        has_run = bool(adapter.home) and adapter.copy.applied_seq > adapter.snapshot_seq
        return has_run and adapter.is_between_operations and adapter.is_as_committed

    def may_take(self, adapter: AdapterLog, *, is_awaited: bool = False) -> bool:
        """Return whether `can_take` is true and no earlier attempt has failed just now.

        `is_awaited`: others wait until the copy can leave its worker, so the pause does not grow with each failure.
        """
        if (failed_at := self._failed_at.get(adapter.adapter_id)) is not None:
            num_failures = 1 if is_awaited else self._num_failures[adapter.adapter_id]
            if self._time.monotonic() < failed_at + backoff_s(RETRY_S, RETRY_S_MAX, num_failures - 1):
                return False
        return self.can_take(adapter)

    def has_failed(self, adapter_id: str) -> bool:
        """Return whether the last attempt at a snapshot of the adapter has failed."""
        return adapter_id in self._failed_at

    def begin(self, adapter: AdapterLog) -> None:
        """Record that a worker is about to be asked for the copy's state."""
        self._asked[adapter.adapter_id] = adapter.copy.generation, adapter.copy.applied_window

    def end(self, asked: Iterable[tuple[AdapterLog, int]]) -> None:
        """Record a failure for those of these generations whose worker did not reply: it is lost."""
        for adapter, generation in asked:
            if self._asked.get(adapter.adapter_id, (None,))[0] == generation:
                self.failed(adapter, "its worker was lost")

    def take(self, adapter: AdapterLog, result: ItemResult) -> None:
        """Begin to write the state that a worker returned.

        A failure is only logged: without this snapshot a replay takes longer, and no state is lost.
        """
        if result.state is None:
            self.failed(adapter, str(result.error))
            return
        _, window = self._asked.pop(adapter.adapter_id)
        self._bytes[adapter.adapter_id] = result.state.num_bytes
        writing = self._write(adapter, result.state, window, adapter.engine_s_since_snapshot)
        self._writing[adapter.adapter_id] = asyncio.get_running_loop().create_task(writing)

    def failed(self, adapter: AdapterLog, reason: str) -> None:
        """Schedule a retry of a snapshot that failed."""
        logger.warning("no snapshot of %s: %s", adapter.adapter_id, reason, extra=about(adapter=adapter.adapter_id))
        SNAPSHOTS.labels("failed").inc()
        self._asked.pop(adapter.adapter_id, None)
        self._num_failures[adapter.adapter_id] += 1
        self._failed_at[adapter.adapter_id] = now = self._time.monotonic()
        self._retries.set(now + RETRY_S)

    def postpone_read(self, adapter_id: str, seconds: float) -> None:
        """Let no copy of the adapter be read for so long: its files could not be read, and a retry may succeed."""
        self._readable_at[adapter_id] = at = self._time.monotonic() + seconds
        self._retries.set(at)

    def may_read(self, adapter_id: str) -> bool:
        """Return whether a copy of the adapter may be read: no earlier attempt has failed just now."""
        return self._time.monotonic() >= self._readable_at.get(adapter_id, 0.0)

    async def wake_to_retry(self) -> None:
        """Notify `changed` when a failed snapshot or read may be retried; run until cancelled."""
        await self._retries.run(self._time)

    def is_unsettled(self, adapter_id: str) -> bool:
        """Return whether a snapshot may be durable that the adapter log has not covered yet.

        Then no copy may be installed from the snapshot before: the operations to replay after it may have left the log.
        """
        return adapter_id in self._writing or any(each.adapter.adapter_id == adapter_id for each in self._durable)

    def settle(self, adapters: Mapping[str, AdapterLog]) -> None:
        """Cover the adapter logs by the snapshots that became durable. Call between cycles."""
        durable, self._durable = self._durable, []
        for each in durable:
            if adapters.get(each.adapter.adapter_id) is each.adapter:
                each.adapter.cover(each.seq, each.window, each.replay_s)
            if each.replaced:
                self._states.remove_soon(self._states.folders.snapshots, each.replaced)

    async def finish(self) -> None:
        """Wait until every snapshot that is being written is durable or has failed."""
        while self._writing:
            await asyncio.gather(*self._writing.values())

    def forget(self, adapter_id: str) -> None:
        """Drop the measurements of a deleted adapter."""
        self._cost_s.pop(adapter_id, None)
        self._failed_at.pop(adapter_id, None)
        self._num_failures.pop(adapter_id, None)
        self._readable_at.pop(adapter_id, None)

    def _due_on_worker(self, resident: list[AdapterLog]) -> list[AdapterLog]:
        due = []
        total_s = sum(a.engine_s_since_snapshot for a in resident if a.adapter_id not in self._writing)
        for adapter in sorted(resident, key=lambda a: a.engine_s_since_snapshot, reverse=True):
            is_long = adapter.copy.applied_seq - adapter.snapshot_seq > LOGGED_OPERATIONS_MAX
            is_good_time = self._is_cheap(adapter) and not adapter.copy.window.has_gradient
            bound_s = EARLY_PART * self._replay_s_max if is_good_time else self._replay_s_max
            is_much = adapter.engine_s_since_snapshot * 2 * len(resident) >= bound_s  # the others cost half of it
            if not (is_long or (is_much and total_s > bound_s)):
                continue
            if self.may_take(adapter):
                due.append(adapter)
                total_s -= adapter.engine_s_since_snapshot
        return due

    def _is_cheap(self, adapter: AdapterLog) -> bool:
        cost_s = self._cost_s.get(adapter.adapter_id, self._last_cost_s)
        return cost_s <= WRITING_SHARE_MAX * (cost_s + adapter.engine_s_since_snapshot)

    async def _write(self, adapter: AdapterLog, state: AdapterState, window: Window, replay_s: float) -> None:
        began = self._time.monotonic()
        try:
            replaced = await self._states.write_snapshot(adapter, state, window)
        except (OSError, StorageError) as error:
            self.failed(adapter, str(error))
        else:
            SNAPSHOTS.labels("written").inc()
            if replaced is not None:
                self._durable.append(_Durable(adapter, state.applied_seq, window, replay_s, replaced))
            self._cost_s[adapter.adapter_id] = self._last_cost_s = self._time.monotonic() - began
            self._num_failures.pop(adapter.adapter_id, None)
            self._failed_at.pop(adapter.adapter_id, None)
        finally:
            del self._writing[adapter.adapter_id], self._bytes[adapter.adapter_id]
            self.changed.notify()
