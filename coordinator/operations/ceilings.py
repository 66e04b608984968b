"""The ceilings of a tenant on what it stores and samples: checked when an operation is accepted, or a sampler made.

A check counts what is held and what unfinished operations have claimed, without an await between the check and the
claim. Operations that were accepted are not checked again: not when they run, and not by recovery.

Depends on the counts of the other registers; not on the order of operations. Main invariant: as long as its limits
stay, a tenant never holds and claims more than they say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.base.errors import Quota, ServiceError, busy, over_ceiling
from coordinator.limits.quotas import Quotas
from coordinator.operations.holdings import Claim, Holdings
from coordinator.operations.in_flight import InFlightTable
from coordinator.operations.sessions import SessionTable
from coordinator.operations.spending import Spending


class Ceilings:
    """The checks of ceilings that operations claim a part of."""

    def __init__(
        self,
        quotas: Quotas,
        in_flight: InFlightTable,
        sessions: SessionTable,
        holdings: Holdings,
        spending: Spending,
    ) -> None:
        self.quotas = quotas
        self._in_flight = in_flight
        self._sessions = sessions
        self._holdings = holdings
        self._spending = spending

    def num_checkpoints(self, tenant_id: str) -> int:
        """Return the checkpoints that a tenant has or is saving."""
        return self._holdings.num_checkpoints(tenant_id) + self._in_flight.claimed(tenant_id).num_checkpoints

    def stored_bytes(self, tenant_id: str) -> int:
        """Return the bytes that a tenant stores, with those that its unfinished operations may add."""
        return self._holdings.num_bytes(tenant_id) + self._in_flight.claimed(tenant_id).num_bytes

    def num_samplers(self, tenant_id: str) -> int:
        """Return the samplers of live sessions that a tenant has or is saving weights for."""
        return self._sessions.num_samplers(tenant_id) + self._in_flight.claimed(tenant_id).num_samplers

    def num_samples(self, tenant_id: str) -> int:
        """Return the continuations of a tenant that are not finished."""
        return self._in_flight.claimed(tenant_id).num_samples

    def num_tokens(self, tenant_id: str) -> int:
        """Return the tokens of a tenant in this month, with the most that its unfinished operations may take."""
        return self._spending.tokens(tenant_id) + self._in_flight.claimed(tenant_id).num_tokens

    def refusal(self, tenant_id: str, claim: Claim) -> ServiceError | None:
        """Return why an operation with this claim is refused for good; None: it has room."""
        limits, quota = self.quotas.of(tenant_id), self.quotas.quota
        num_checkpoints = self.num_checkpoints(tenant_id)
        if claim.num_checkpoints and num_checkpoints + claim.num_checkpoints > limits.checkpoints_max:
            used = quota(tenant_id, "checkpoints_max", num_checkpoints)
            return over_ceiling("CHECKPOINT_QUOTA", used, "delete some, or save with a time to live")
        if claim.num_bytes and (error := self._storage_refusal(tenant_id, claim.num_bytes)) is not None:
            return error
        if claim.num_tokens and limits.tokens_per_month is not None:
            num_tokens = self.num_tokens(tenant_id)
            if num_tokens + claim.num_tokens > limits.tokens_per_month:
                used = quota(tenant_id, "tokens_per_month", num_tokens)
                return over_ceiling("TOKEN_BUDGET", used, f"this may take {claim.num_tokens}: wait for the next month")
        return self._sampler_refusal(tenant_id) if claim.num_samplers else None

    def check_samples(self, tenant_id: str, claim: Claim) -> None:
        """Raise ServiceError if a sample is above the budget, or has to wait until others of its tenant are finished.

        One that is larger than the whole ceiling is accepted alone.
        """
        if (refusal := self.refusal(tenant_id, claim)) is not None:
            raise refusal
        num_samples, maximum = self.num_samples(tenant_id), self.quotas.of(tenant_id).samples_max
        if num_samples + claim.num_samples > maximum and (num_samples or not maximum):
            quota = self.quotas.quota(tenant_id, "samples_max", num_samples)
            raise full("SAMPLES_FULL", quota, "wait for some samples to finish")

    @contextmanager
    def storing(self, tenant_id: str, num_bytes: int) -> Iterator[None]:
        """Reserve bytes while the block stores something that is no operation. Raises ServiceError STORAGE_QUOTA."""
        if (refusal := self._storage_refusal(tenant_id, num_bytes)) is not None:
            raise refusal
        claim = Claim(num_bytes=num_bytes)
        self._holdings.claim(tenant_id, claim)
        try:
            yield
        finally:
            self._holdings.claim(tenant_id, claim, -1)

    @contextmanager
    def adding_sampler(self, tenant_id: str, session_id: str, num_bytes: int) -> Iterator[None]:
        """Count a sampler of a live session; if the block, which writes its row, raises, count it no longer.

        `num_bytes`: of its row. Raises ServiceError SAMPLER_QUOTA or STORAGE_QUOTA if the tenant has no room for it.
        """
        if (refusal := self._sampler_refusal(tenant_id)) is not None:
            raise refusal
        self._sessions.count_samplers(session_id, 1)
        try:
            with self.storing(tenant_id, num_bytes):
                yield
        except BaseException:
            self._sessions.count_samplers(session_id, -1)
            raise

    def _storage_refusal(self, tenant_id: str, added: int) -> ServiceError | None:
        if (stored := self.stored_bytes(tenant_id)) + added <= self.quotas.of(tenant_id).stored_bytes_max:
            return None
        used = self.quotas.quota(tenant_id, "stored_bytes_max", stored)
        mend = f"this may add {added}: delete checkpoints or adapters, or finish sessions"
        return over_ceiling("STORAGE_QUOTA", used, mend)

    def _sampler_refusal(self, tenant_id: str) -> ServiceError | None:
        if (num_samplers := self.num_samplers(tenant_id)) < self.quotas.of(tenant_id).samplers_max:
            return None
        quota = self.quotas.quota(tenant_id, "samplers_max", num_samplers)
        return over_ceiling("SAMPLER_QUOTA", quota, "finish sessions that have some")


def full(reason: str, quota: Quota, mend: str) -> ServiceError:
    """Return the refusal of what waiting makes room for; for good if the limit is 0."""
    return busy(reason, quota, mend) if quota.maximum else over_ceiling(reason, quota, mend)
