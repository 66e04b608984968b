"""Several clients of one sampler: numbers for their requests, and which of these have finished."""

from __future__ import annotations

from coordinator.operations.finished_samples import CLIENT_SEQS, Finished
from coordinator.service.auth import Principal
from coordinator.service.sampling import SamplingUseCases
from tinkerpool import names


class SamplingClientUseCases(SamplingUseCases):
    """For a door whose clients take turns at no sampler: each counts its requests in a block of its own."""

    async def join_sampler(self, principal: Principal, sampler_id: str) -> int:
        """A number for one more client of a sampler: its seqs are those after number x `CLIENT_SEQS`."""
        sampler = self._sampler(principal, sampler_id)
        self._live_session(principal, sampler.session_id)
        return self._core.followers.new_client()

    async def finished_samples(
        self, principal: Principal, sampler_id: str, client: int, cursor: int, timeout_s: float
    ) -> tuple[list[Finished], int]:
        """A client's samples that have finished since a cursor (0: any), and the next cursor; see `Followers.since`."""
        self._sampler(principal, sampler_id)
        return await self._core.followers.since(
            sampler_id, client, cursor, timeout_s, lambda: self._unfetched(sampler_id, client)
        )

    def _unfetched(self, sampler_id: str, client: int) -> list[Finished]:
        """What has finished and was not fetched, oldest first. What is about to be told is not among it."""
        rows = self._core.store.operations.unfetched(sampler_id, client * CLIENT_SEQS + 1, (client + 1) * CLIENT_SEQS)
        found = [(names.operation_name(sampler_id, row.seq), row) for row in rows]
        return [
            Finished(name, row.is_failed, row.num_bytes) for name, row in found if self._core.table.get(name) is None
        ]
