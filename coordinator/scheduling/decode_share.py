"""The part of a worker's time that its samples get while it runs a batch of training operations. Pure.

Depends on tenants' weights only; not on counters or operations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from coordinator.scheduling.virtual_counters import Share

DECODE_SHARE, DECODE_SHARE_MIN, DECODE_SHARE_MAX = 0.5, 0.1, 0.9
"""The share if there are no training tenants or no sampling tenants, the least and the most."""


def decode_share(sampling: Collection[str], training: Collection[str], shares: Mapping[str, Share]) -> float:
    """Divide the weights of the tenants that sample there by those of all tenants; one that does both counts twice."""
    if not (sampling and training):
        return DECODE_SHARE
    sampled, trained = (
        sum(shares.get(tenant, Share()).weight for tenant in set(tenants)) for tenants in (sampling, training)
    )
    return min(max(sampled / (sampled + trained), DECODE_SHARE_MIN), DECODE_SHARE_MAX)
