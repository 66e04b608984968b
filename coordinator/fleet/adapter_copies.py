"""Which adapters have a copy on which worker. In memory; does not depend on what an adapter is."""

from __future__ import annotations

from collections.abc import Iterable


class Residency:
    """Adapters by worker, in order of arrival."""

    def __init__(self) -> None:
        self._by_worker: dict[str, dict[str, None]] = {}

    def enter(self, worker_id: str, adapter_id: str) -> None:
        """Record that the adapter has a copy there."""
        self._by_worker.setdefault(worker_id, {})[adapter_id] = None

    def leave(self, worker_id: str, adapter_id: str) -> None:
        """Record that the adapter has no copy there any more."""
        self._by_worker.get(worker_id, {}).pop(adapter_id, None)

    def on(self, worker_id: str) -> list[str]:
        """Return the adapters with a copy on this worker."""
        return list(self._by_worker.get(worker_id, ()))

    def counts(self, worker_ids: Iterable[str]) -> dict[str, int]:
        """Return the number of adapters with a copy on each of these workers."""
        return {worker_id: len(self._by_worker.get(worker_id, ())) for worker_id in worker_ids}
