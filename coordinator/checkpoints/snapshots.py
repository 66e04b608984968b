"""Which adapters are snapshotted when, and the writing of it beside the cycles.

Two bounds. What a worker's loss would cost: all that was run on it since its adapters' snapshots, run again, takes at
most `replay_s_max` engine seconds. And what writing costs: at most a tenth of the time. Where both cannot hold, the
first one wins. Between optimizer steps a snapshot is smaller, because there is no gradient to keep; that moment is
waited for until the first bound is reached.

Knows queues, and through the saver files and rows; not what a state holds. Main invariant: a queue learns that a
snapshot covers it only between cycles, so nothing changes under a cycle's feet.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from coordinator.base.time import Time
from coordinator.checkpoints.saver import Saver
from coordinator.operations.adapter_log import AdapterQueue
from coordinator.operations.canonical import serialize
from coordinator.storage.database import StorageError
from workers.contract.messages import AdapterState, ItemResult

logger = logging.getLogger(__name__)

LOGGED_OPERATIONS_MAX = 1000
"""Operations since its snapshot after which an adapter is snapshotted, however cheap they were: memory is bounded."""
WRITING_SHARE_MAX = 0.1
RETRY_S, RETRY_S_MAX = 5.0, 300.0
"""How long an adapter is left alone after a snapshot of it has failed; twice as long each time, and the most."""


@dataclass(frozen=True, slots=True)
class _Durable:
    adapter: AdapterQueue
    seq: int
    window_error: bytes
    replay_s: float
    replaced: str
    """The folder of the snapshot before it."""


class Snapshots:
    """The snapshots of one base model's adapters."""

    def __init__(self, saver: Saver, time: Time, replay_s_max: float, on_written: Callable[[], None]) -> None:
        """`on_written` is called when there is something to `settle`."""
        self._saver = saver
        self._time = time
        self._replay_s_max = replay_s_max
        self._on_written = on_written
        self._writing: dict[str, asyncio.Task[None]] = {}
        self._durable: list[_Durable] = []
        self._cost_s: dict[str, float] = {}
        """Adapter to seconds that its last snapshot took to write."""
        self._retry_at: dict[str, float] = {}
        self._num_failures: Counter[str] = Counter()
        self._asked: dict[str, tuple[AdapterQueue, bytes]] = {}
        """Adapters that are being asked for their states, and how their gradient windows stood."""

    def due(self, adapters: Iterable[AdapterQueue], lost: Collection[str]) -> list[AdapterQueue]:
        """Those to snapshot now; of `lost` ones something ran that was never logged. Call between operations."""
        by_worker: dict[str, list[AdapterQueue]] = {}
        for adapter in adapters:
            if adapter.worker_id and adapter.adapter_id not in lost:
                by_worker.setdefault(adapter.worker_id, []).append(adapter)
        return [adapter for resident in by_worker.values() for adapter in self._due_on_worker(resident)]

    def can_take(self, adapter: AdapterQueue) -> bool:
        """Whether the adapter's copy stands where a snapshot may be, ahead of its last one."""
        if adapter.adapter_id in self._writing:
            return False
        is_ahead = bool(adapter.worker_id) and adapter.placed_seq > adapter.snapshot_seq
        return is_ahead and adapter.is_between_operations and adapter.is_as_committed

    def begin(self, adapter: AdapterQueue) -> None:
        """Its copy is asked for its state as it is now."""
        window_error = serialize(adapter.window_error) if adapter.window_error is not None else b""
        self._asked[adapter.adapter_id] = adapter, window_error

    def end(self) -> None:
        """Whoever has not answered died over it."""
        for adapter, _ in list(self._asked.values()):
            self.failed(adapter, "its worker was lost")

    def take(self, adapter: AdapterQueue, result: ItemResult) -> None:
        """Write down what a worker has handed out, beside whatever else happens.

        Without a snapshot the log is longer, and nothing else: a failure is only reported.
        """
        if result.state is None:
            self.failed(adapter, str(result.error))
            return
        _, window_error = self._asked.pop(adapter.adapter_id)
        writing = self._write(adapter, result.state, window_error, adapter.engine_s_since_snapshot)
        self._writing[adapter.adapter_id] = asyncio.get_running_loop().create_task(writing)

    def failed(self, adapter: AdapterQueue, reason: str) -> None:
        """There is none this time."""
        logger.warning("no snapshot of %s: %s", adapter.adapter_id, reason)
        self._asked.pop(adapter.adapter_id, None)
        self._num_failures[adapter.adapter_id] += 1
        pause_s = min(RETRY_S_MAX, RETRY_S * 2 ** (self._num_failures[adapter.adapter_id] - 1))
        self._retry_at[adapter.adapter_id] = self._time.monotonic() + pause_s

    def is_unsettled(self, adapter_id: str) -> bool:
        """A snapshot of it may be durable, and the queue does not know: it must not be installed from the one before,
        for what is to be run again after that may have left the log."""
        return adapter_id in self._writing or any(each.adapter.adapter_id == adapter_id for each in self._durable)

    def settle(self, adapters: Mapping[str, AdapterQueue]) -> None:
        """Let queues know what has become durable. Call between cycles."""
        durable, self._durable = self._durable, []
        for each in durable:
            if adapters.get(each.adapter.adapter_id) is each.adapter:
                each.adapter.covered(each.seq, each.window_error, each.replay_s)
            if each.replaced:
                self._saver.snapshots.remove(each.replaced)

    async def finish(self) -> None:
        """Wait until everything that is being written is durable, or has failed."""
        while self._writing:
            await asyncio.gather(*self._writing.values())

    def forget(self, adapter_id: str) -> None:
        """The adapter was deleted."""
        self._cost_s.pop(adapter_id, None)
        self._retry_at.pop(adapter_id, None)
        self._num_failures.pop(adapter_id, None)

    def _due_on_worker(self, resident: list[AdapterQueue]) -> list[AdapterQueue]:
        due = []
        total_s = sum(a.engine_s_since_snapshot for a in resident if a.adapter_id not in self._writing)
        for adapter in sorted(resident, key=lambda a: a.engine_s_since_snapshot, reverse=True):
            is_long = adapter.placed_seq - adapter.snapshot_seq > LOGGED_OPERATIONS_MAX
            is_much = adapter.engine_s_since_snapshot * 2 * len(resident) >= self._replay_s_max  # the rest: half of it
            is_late = is_much and total_s > self._replay_s_max
            is_good_time = self._is_cheap(adapter) and not adapter.has_pending_gradient
            is_time = is_much and total_s > self._replay_s_max / 2 and is_good_time
            if not (is_long or is_late or is_time):
                continue
            if self.can_take(adapter) and self._time.monotonic() >= self._retry_at.get(adapter.adapter_id, 0.0):
                due.append(adapter)
                total_s -= adapter.engine_s_since_snapshot
        return due

    def _is_cheap(self, adapter: AdapterQueue) -> bool:
        cost_s = self._cost_s.get(adapter.adapter_id, 0.0)
        return cost_s <= WRITING_SHARE_MAX * (cost_s + adapter.engine_s_since_snapshot)

    async def _write(self, adapter: AdapterQueue, state: AdapterState, window_error: bytes, replay_s: float) -> None:
        began = self._time.monotonic()
        try:
            replaced = await self._saver.write_snapshot(adapter, state, window_error)
        except (OSError, StorageError) as error:
            self.failed(adapter, str(error))
        else:
            if replaced is not None:
                self._durable.append(_Durable(adapter, state.applied_seq, window_error, replay_s, replaced))
            self._cost_s[adapter.adapter_id] = self._time.monotonic() - began
            self._num_failures.pop(adapter.adapter_id, None)
        finally:
            del self._writing[adapter.adapter_id]
            self._on_written()
