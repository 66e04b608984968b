"""Several clients of one sampler, as in the Tinker protocol: their numbers, and their finished samples.

Main invariant: the clients of a sampler never share a sequence number.
"""

from __future__ import annotations

from coordinator.operations.samples import CLIENT_SEQS, Finished
from coordinator.service.auth import Principal
from coordinator.service.sampling import SamplingUseCases
from tinkerpool import names


class SamplingClientUseCases(SamplingUseCases):
    """Use cases of clients that share a sampler. Each client numbers its samples in a range of its own."""

    async def join_sampler(self, principal: Principal, sampler_id: str) -> int:
        """Return the number of a new client. Its sequence numbers begin after number x `CLIENT_SEQS`."""
        sampler = self._sampler(principal, sampler_id)
        self._live_session(principal, sampler.session_id)
        return self._core.finished_samples.new_client()

    async def finished_samples(
        self, principal: Principal, sampler_id: str, client: int, cursor: int, timeout_s: float
    ) -> tuple[list[Finished], int]:
        """Return a client's samples that finished since a cursor (0: any), and the next cursor."""
        self._sampler(principal, sampler_id)
        return await self._core.finished_samples.since(
            sampler_id, client, cursor, timeout_s, lambda: self._unfetched(sampler_id, client)
        )

    def _unfetched(self, sampler_id: str, client: int) -> list[Finished]:
        """Return finished samples that were not fetched, oldest first, without those still in the in-flight table."""
        rows = self._core.store.operations.unfetched(sampler_id, client * CLIENT_SEQS + 1, (client + 1) * CLIENT_SEQS)
        found = [(names.operation_name(sampler_id, row.seq), row) for row in rows]
        return [
            Finished(name, row.is_failed, row.num_bytes)
            for name, row in found
            if self._core.in_flight.get(name) is None
        ]
