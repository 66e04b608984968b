"""One base model's adapters: who has something to do, whose turn it may be, and how many live where.

Knows queues, suspects, and that a copy may have to wait for a snapshot; neither time nor budgets nor what a cycle does.
Main invariant: an adapter that has nothing to do costs nothing. It is in no collection that a cycle walks through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from coordinator.operations.adapter_log import NOBODY, AdapterQueue, ReadyChunks
from coordinator.operations.operation import Kind
from coordinator.scheduling.planner import Candidate
from coordinator.scheduling.quarantine import Suspects


class Roster:
    """Who could be in the next cycle."""

    def __init__(
        self, suspects: Suspects, is_unsettled: Callable[[str], bool], is_unwritten: Callable[[str], bool]
    ) -> None:
        """`is_unsettled`: a snapshot of this adapter may be durable, and its queue does not know; `is_unwritten`:
        weights that it has published have no file, and need its log.
        """
        self.adapters: dict[str, AdapterQueue] = {}
        self.is_stopping = False
        """Nothing more is begun."""
        self._suspects = suspects
        self._is_unsettled = is_unsettled
        self._is_unwritten = is_unwritten
        self._touched: dict[str, AdapterQueue] = {}
        """Those of which something has changed since they were last found to have nothing to do."""
        self._ahead: dict[str, AdapterQueue] = {}
        """Those whose copies may be ahead of their snapshots."""
        self._last_cycle: dict[str, int] = {}
        self._residents: Counter[str] = Counter()

    def add(self, adapter: AdapterQueue) -> None:
        """A new adapter, which has no copy yet."""
        assert not adapter.worker_id
        adapter.residents = self._residents
        self.adapters[adapter.adapter_id] = adapter

    def remove(self, adapter: AdapterQueue) -> None:
        """The adapter is deleted."""
        for kept in (self.adapters, self._touched, self._ahead, self._last_cycle):
            kept.pop(adapter.adapter_id, None)
        if adapter.residents is self._residents:
            self._residents[adapter.worker_id] -= bool(adapter.worker_id)
            adapter.residents = Counter()

    def touch(self, adapter: AdapterQueue) -> None:
        """Something about the adapter has changed."""
        self._touched[adapter.adapter_id] = adapter

    def ran(self, adapter_ids: Iterable[str]) -> None:
        """A worker has answered for these."""
        self._ahead.update((name, self.adapters[name]) for name in adapter_ids if name in self.adapters)

    def planned(self, adapter_id: str, cycle_id: int) -> None:
        """The adapter is in the pass of this cycle."""
        self._last_cycle[adapter_id] = cycle_id

    def is_ready(self) -> bool:
        """Whether a cycle would do anything. Forgets who has nothing to do any more, and who is suspected no more."""
        for name in [name for name, adapter in self._touched.items() if not adapter.is_ready()]:
            del self._touched[name]
        self._clear_suspects()
        return any(True for _ in self.allowed())

    def touched(self) -> list[AdapterQueue]:
        """All of which something has changed, whether or not it is their turn."""
        return list(self._touched.values())

    def allowed(self) -> Iterator[AdapterQueue]:
        """The ready adapters whose turn it may be. Once we are stopping: those in the middle of an operation."""
        for adapter in self._touched.values():
            if not self._suspects.may_run(adapter.adapter_id) or (self.is_stopping and adapter.is_between_operations):
                continue
            if not self.waits_for_file(adapter):
                yield adapter

    def tenants(self) -> frozenset[str]:
        """Whose adapters these are."""
        return frozenset(adapter.tenant_id for adapter in self.allowed())

    def has_tokens(self, num_tokens: int) -> bool:
        """Whether what is ready fills so many tokens."""
        for adapter in self.allowed():
            for chunk_tokens in ReadyChunks(adapter):
                num_tokens -= chunk_tokens
                if num_tokens <= 0:
                    return True
        return False

    def candidates(self) -> list[Candidate]:
        """Those that may have something for a pass."""
        return [
            Candidate(
                adapter_id=adapter.adapter_id,
                tenant_id=adapter.tenant_id,
                worker_id=adapter.worker_id,
                chunk_tokens=ReadyChunks(adapter),
                last_cycle_id=self._last_cycle.get(adapter.adapter_id, 0),
            )
            for adapter in self.allowed()
        ]

    def due_steps(self) -> Iterator[AdapterQueue]:
        """Those with something for the step phase, each looked at when its turn comes."""
        for adapter in list(self.allowed()):
            adapter.settle()
            if next(adapter.ready_states(), None) is not None:
                yield adapter

    def residents(self, worker_ids: Iterable[str]) -> dict[str, int]:
        """How many adapters live on each of these workers."""
        return {worker_id: self._residents[worker_id] for worker_id in worker_ids}

    def ahead(self) -> list[AdapterQueue]:
        """Those on whose copies something ran that their snapshots do not have."""
        for name in [name for name, adapter in self._ahead.items() if not _is_ahead(adapter)]:
            del self._ahead[name]
        return list(self._ahead.values())

    def waits_for_file(self, adapter: AdapterQueue) -> bool:
        """Whether it can do nothing before a snapshot of it is settled, or what it has published is written: be
        installed from that snapshot, or load, which brings a snapshot of its own and so cuts the log."""
        is_unsettled = self._is_unsettled(adapter.adapter_id)
        if not is_unsettled and not self._is_unwritten(adapter.adapter_id):
            return False
        adapter.settle()
        states = list(adapter.ready_states())
        is_loading = bool(states) and states[-1].kind is Kind.LOAD_STATE
        return is_loading or (is_unsettled and not adapter.worker_id)

    def _clear_suspects(self) -> None:
        """Let go of suspects that have run what they are suspected for, or have nothing to run any more."""
        while cleared := [adapter for name in self._suspects.group if (adapter := self._cleared(name)) is not None]:
            for adapter in cleared:
                adapter.suspected = NOBODY
                self._suspects.clear(adapter.adapter_id)

    def _cleared(self, name: str) -> AdapterQueue | None:
        adapter = self.adapters.get(name)
        if adapter is None:
            return None  # a sample
        return adapter if adapter.cursor >= adapter.suspected[1] or name not in self._touched else None


def _is_ahead(adapter: AdapterQueue) -> bool:
    has_run = adapter.engine_s_since_snapshot > 0 or adapter.placed_seq > adapter.snapshot_seq
    return bool(adapter.worker_id) and has_run
