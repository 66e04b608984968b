"""Virtual counters: weighted fair scheduling by cost, for training and for sampling, which keep separate counters.

As in VTC (Sheng et al., OSDI 2024): what a tenant's work costs, over its weight, adds to its counter, and the tenant
with the lowest counter is next. Costs are in tokens: what else takes time counts as the tokens of as many seconds. A
tenant that was inactive is lifted to the lowest counter of the active ones, so that an idle tenant saves up no share.
`decode_share` divides the time of a worker that trains and samples, by the same weights.

A tenant whose weight changes is charged by the new weight from then on. What it has had in advance of the other active
tenants is never counted at more tokens than it was: a higher weight shortens its wait, in proportion, and a lower one
does not lengthen it. So no change lets a tenant wait for what it used at another weight, or puts it before others.

Pure; does not depend on operations. Main invariant: a counter never decreases, but at a higher weight towards the
lowest counter of the active tenants, and, before a plan's charge is durable, by what of that plan did not run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

DECODE_SHARE, DECODE_SHARE_MIN, DECODE_SHARE_MAX = 0.5, 0.1, 0.9
"""The share if there are no training tenants or no sampling tenants, the least and the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A tenant's weight and counter."""

    weight: float = 1.0
    virtual_tokens: float = 0.0
    """Cost in tokens, over the weight."""

    def charged(self, num_tokens: float) -> Share:
        """Return the share after this many more tokens."""
        return Share(weight=self.weight, virtual_tokens=self.virtual_tokens + num_tokens / self.weight)

    def lifted(self, floor: float) -> Share:
        """Return the share with a counter of at least `floor`."""
        return self if self.virtual_tokens >= floor else Share(weight=self.weight, virtual_tokens=floor)


@dataclass(frozen=True, slots=True, kw_only=True)
class FairState:
    """The counters that planning carries from cycle to cycle."""

    shares: Mapping[str, Share] = field(default_factory=dict)
    active: frozenset[str] = frozenset()
    """Tenants of the last plan."""


def lowest_counter(shares: Mapping[str, Share], active: Iterable[str]) -> float:
    """Return the counter that a returning tenant is lifted to: the lowest active one, or without any the highest."""
    counters = [shares[tenant].virtual_tokens for tenant in active if tenant in shares]
    return min(counters) if counters else max((share.virtual_tokens for share in shares.values()), default=0.0)


def lifted(shares: Mapping[str, Share], returning: Collection[str], active: Iterable[str]) -> dict[str, Share]:
    """Return the shares with every returning tenant at least at the lowest counter of the active ones."""
    raised = dict(shares)
    floor = lowest_counter(shares, active)
    for tenant in returning:
        raised[tenant] = raised.get(tenant, Share()).lifted(floor)
    return raised


def charged(state: FairState, num_tokens: Mapping[str, float]) -> FairState:
    """Return the counters after work outside a plan, by tenant in tokens.

    A tenant that is not active is lifted first, or its lift when it returns would take the charge back.
    """
    shares = dict(state.shares)
    for tenant_id in num_tokens.keys() & state.active:
        shares[tenant_id] = shares[tenant_id].charged(num_tokens[tenant_id])
    if others := num_tokens.keys() - state.active:
        shares = lifted(shares, others, state.active)
        for tenant_id in others:
            shares[tenant_id] = shares[tenant_id].charged(num_tokens[tenant_id])
    return FairState(shares=shares, active=state.active)


def taken_back(state: FairState, num_tokens: Mapping[str, float], floors: Mapping[str, float]) -> FairState:
    """Return the counters without what a plan charged for work that did not run, by tenant in tokens.

    `floors`: the counters before that plan. None goes below its floor, whatever weights have changed since.
    """
    shares = dict(state.shares)
    for tenant_id, number in num_tokens.items():
        share = shares[tenant_id]
        least = min(floors[tenant_id], share.virtual_tokens)
        shares[tenant_id] = share.charged(-number).lifted(least)
    return FairState(shares=shares, active=state.active)


def reweighed(shares: Mapping[str, Share], tenant_id: str, weight: float, active: Iterable[str]) -> dict[str, Share]:
    """Return the shares with another weight for a tenant."""
    old = shares.get(tenant_id, Share())
    ahead = max(0.0, old.virtual_tokens - lowest_counter(shares, active))
    spared = ahead * (1.0 - min(1.0, old.weight / weight))
    return {**shares, tenant_id: Share(weight=weight, virtual_tokens=old.virtual_tokens - spared)}


def decode_share(sampling: Collection[str], training: Collection[str], shares: Mapping[str, Share]) -> float:
    """Divide the weights of the tenants that sample there by those of all tenants; one that does both counts twice."""
    if not (sampling and training):
        return DECODE_SHARE
    sampled, trained = (
        sum(shares.get(tenant, Share()).weight for tenant in set(tenants)) for tenants in (sampling, training)
    )
    return min(max(sampled / (sampled + trained), DECODE_SHARE_MIN), DECODE_SHARE_MAX)
