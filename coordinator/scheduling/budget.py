"""How much a cycle carries on one worker: its tokens, and the part of the worker's time that its samples get meanwhile.

The tokens are the operator's number, or the knee of the measured costs: a cycle costs a fixed time and a time per
token. Where the tokens take `KNEE` times as long as the fixed part, a larger cycle is hardly more efficient, and every
tenant waits longer for the next one. Depends on costs and on tenants' weights; not on counters or queued operations.
Main invariant: no result depends on the budget, because chunks are canonical.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from coordinator.scheduling.cost_model import CycleCosts
from coordinator.scheduling.virtual_counters import Share

logger = logging.getLogger(__name__)

KNEE = 20.0
"""Tokens at the knee take this many times the fixed cost: less than 5 % of such a cycle is fixed."""
START_TOKENS = 2048
"""The budget until the knee is known."""
TRUST = 2.0
"""A budget is at most this many times the largest measured pass (or the start): beyond it the line is unreliable."""
TOKENS_MAX = 65_536
"""The largest budget, for a machine on which the measured cost of a token is zero."""
NOTABLE = 0.1
"""Changes by a smaller fraction are not logged."""
DECODE_SHARE, DECODE_SHARE_MIN, DECODE_SHARE_MAX = 0.5, 0.1, 0.9
"""The share if there are no training tenants or no sampling tenants, the least and the most."""


class TokenBudget:
    """The budget of one base model's cycles."""

    def __init__(
        self, costs: CycleCosts, *, base_model: str, chunk_tokens: int, tokens: int | None, cycle_s_max: float
    ) -> None:
        """`tokens`: the operator's number; None: measured, from one chunk up to a pass of `cycle_s_max` seconds."""
        self._costs = costs
        self._base_model = base_model
        self._chunk_tokens = chunk_tokens
        self._cycle_s_max = cycle_s_max
        self._is_measured = tokens is None
        self._tokens = self._logged = tokens or max(START_TOKENS, chunk_tokens)

    @property
    def tokens(self) -> int:
        """Tokens of one cycle on one worker; whole chunks are counted, and a cycle takes at least one."""
        return self._tokens

    def update(self) -> None:
        """Update the budget from the measured costs. Call between cycles."""
        if not self._is_measured:
            return
        self._tokens = self._measured()
        if abs(self._tokens - self._logged) > NOTABLE * self._logged:
            line = self._costs.line
            shown = "costs unknown" if line is None else f"{line.fixed_s:.4f} s + {line.token_s:.3g} s per token"
            logger.debug("cycles of %s carry %d tokens (%s)", self._base_model, self._tokens, shown)
            self._logged = self._tokens

    def _measured(self) -> int:
        knee, line = float(START_TOKENS), self._costs.line
        if line is not None and line.is_wide:
            fixed_s = line.fixed_s + self._costs.commit_s
            knee = KNEE * fixed_s / line.token_s if line.token_s else float("inf")
        trusted = max(START_TOKENS, TRUST * self._costs.num_tokens_seen)
        most = min(trusted, TOKENS_MAX, self._costs.tokens_within(self._cycle_s_max))
        return max(self._chunk_tokens, int(min(knee, most)))


def decode_share(sampling: Collection[str], training: Collection[str], shares: Mapping[str, Share]) -> float:
    """Divide the weights of the tenants that sample there by those of all tenants; one that does both counts twice."""
    if not (sampling and training):
        return DECODE_SHARE
    sampled, trained = (
        sum(shares.get(tenant, Share()).weight for tenant in set(tenants)) for tenants in (sampling, training)
    )
    return min(max(sampled / (sampled + trained), DECODE_SHARE_MIN), DECODE_SHARE_MAX)
