"""Distances between two runs of the same tenants, for paths that agree to rounding and not bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tests.support.numerics.harness import Driver, Tenant, Trace
from tests.support.numerics.tenants import TENANTS, train

SMOOTH = [tenant for tenant in TENANTS if tenant.loss_fn not in {"ppo", "cispo", "gspo", "stable_reinforce"}]
"""Tenants whose loss does not clip or taper: that turns a small difference into a jump."""

LOGPROBS, GRADIENTS = 0.1, 0.05
"""Largest distances from fp32 with a bf16 model of two layers: log-probabilities near -6, gradients relative."""
HYBRID_FACTOR = 4
"""How many times farther from fp32 a hybrid may be. transformers' own forwards of miniatures are 0.15 to 0.17 apart in
the two dtypes if one of two layers has linear attention, and 0.03 to 0.05 without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """The largest distances between two runs, over all tenants."""

    logprobs: float
    """Largest difference of a log-probability."""
    gradients: float
    """Euclidean norm of the difference of the gradients, as a fraction of the gradient's."""


def observe(driver: Driver, tenants: Sequence[Tenant]) -> dict[str, Trace]:
    """Train all tenants for one step; return their traces."""
    return train(driver, tenants, num_steps=1)


def distance(actual: Mapping[str, Trace], expected: Mapping[str, Trace]) -> Distance:
    """Return the distance between the traces of the same tenants."""
    logprobs = gradients = 0.0
    for key, trace in expected.items():
        for mine, theirs in zip(actual[key].logprobs, trace.logprobs, strict=True):
            logprobs = max(logprobs, float(abs(mine - theirs).max()))
        for mine_bytes, their_bytes in zip(actual[key].gradients, trace.gradients, strict=True):
            own, other = (torch.frombuffer(bytearray(data), dtype=torch.float32) for data in (mine_bytes, their_bytes))
            gradients = max(gradients, float((own - other).norm() / other.norm()))
    return Distance(logprobs=logprobs, gradients=gradients)
