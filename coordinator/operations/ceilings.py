"""The ceilings of a tenant: how much is in use of each limit that counts, and whether an operation has room.

What an operation or a sampler adds is checked when it is accepted: a check counts what is held and what unfinished
operations have claimed. Operations that were accepted are not checked again: not when they run, and not by recovery.

Depends on the counts of the other registers; not on the order of operations. Main invariant: as long as its limits
stay, a tenant never holds more than they say, whatever is deleted while its operations wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.base.errors import Quota, ServiceError
from coordinator.limits.quotas import QUEUE_FULL, Quotas
from coordinator.operations.holdings import Claim, Holdings
from coordinator.operations.in_flight import InFlightTable
from coordinator.operations.registry import AdapterRegistry
from coordinator.operations.sessions import SessionTable
from coordinator.operations.spending import Spending


class Ceilings:
    """The ceilings of all tenants, by what they count. Claims are those of unfinished operations."""

    def __init__(
        self,
        quotas: Quotas,
        in_flight: InFlightTable,
        sessions: SessionTable,
        registry: AdapterRegistry,
        holdings: Holdings,
        spending: Spending,
    ) -> None:
        self._sessions = sessions
        claimed = in_flight.claimed
        self.sessions = quotas.ceiling("sessions_max", sessions.num_of)
        self.adapters = quotas.ceiling("adapters_max", registry.num_of)
        self.queued_operations = quotas.ceiling("queued_operations_max", in_flight.num_of_tenant)
        self.queued_bytes = quotas.ceiling("queued_bytes_max", in_flight.bytes_of_tenant)
        self.streams = quotas.ceiling("streams_max")
        self.samples = quotas.ceiling("samples_max", lambda tenant: claimed(tenant).num_samples)
        self.samplers = quotas.ceiling(
            "samplers_max", lambda tenant: sessions.num_samplers(tenant) + claimed(tenant).num_samplers
        )
        self.checkpoints = quotas.ceiling(
            "checkpoints_max", lambda tenant: holdings.num_checkpoints(tenant) + claimed(tenant).num_checkpoints
        )
        self.stored_bytes = quotas.ceiling(
            "stored_bytes_max", lambda tenant: holdings.num_bytes(tenant) + claimed(tenant).num_bytes
        )
        self.tokens = quotas.ceiling(
            "tokens_per_month", lambda tenant: spending.tokens(tenant) + claimed(tenant).num_tokens
        )

    def refusal(self, tenant_id: str, claim: Claim) -> ServiceError | None:
        """Return why an operation with this claim is refused for good; None: it has room."""
        claimed = (
            (self.checkpoints, claim.num_checkpoints),
            (self.stored_bytes, claim.num_bytes),
            (self.tokens, claim.num_tokens),
            (self.samplers, claim.num_samplers),
        )
        refusals = (ceiling.refusal(tenant_id, added) for ceiling, added in claimed if added)
        return next((refusal for refusal in refusals if refusal is not None), None)

    def check_queue(self, tenant_id: str, of_target: Quota, num_bytes: int) -> None:
        """Raise ServiceError QUEUE_FULL if a request has to wait until others of its target or tenant are finished.

        `of_target`: the queue of its adapter or sampler. One of more bytes than the whole ceiling is accepted alone.
        """
        if of_target.usage >= of_target.maximum:
            raise QUEUE_FULL.of(of_target)
        self.queued_operations.check(tenant_id)
        if self.queued_bytes.used(tenant_id):
            self.queued_bytes.check(tenant_id, num_bytes)

    def check_samples(self, tenant_id: str, claim: Claim) -> None:
        """Raise ServiceError if a sample is above the budget, or has to wait until others of its tenant are finished.

        One that is larger than the whole ceiling is accepted alone.
        """
        if (refusal := self.refusal(tenant_id, claim)) is not None:
            raise refusal
        if self.samples.used(tenant_id) or not self.samples.maximum(tenant_id):
            self.samples.check(tenant_id, claim.num_samples)

    @contextmanager
    def adding_sampler(self, tenant_id: str, session_id: str, num_bytes: int) -> Iterator[None]:
        """Count a sampler of a live session; if the block, which writes its row, raises, count it no longer.

        `num_bytes`: of its row. Raises ServiceError SAMPLER_QUOTA or STORAGE_QUOTA if the tenant has no room for it.
        """
        with self.samplers.holding(tenant_id), self.stored_bytes.holding(tenant_id, num_bytes):
            yield
        self._sessions.count_samplers(session_id, 1)
