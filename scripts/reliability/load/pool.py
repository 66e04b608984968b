"""The pool under load: a coordinator in a process of its own, with tenants of different weights.

Depends on the harness of the attacks for the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.attack.pool import AttackedPool
from tinkerpool.v1 import limits_pb2, limits_pb2_grpc, pool_pb2

TIMED = "scripts.reliability.load.engine:timed_factory"
TRAINING, SAMPLING, STEPS = "forward_backward", "sample", "optim_step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Committed tokens since the start of the pool, and its last cycle."""

    tokens: Mapping[str, Mapping[str, int]]
    """Kind of operation to tenant to tokens."""
    steps: Mapping[str, int]
    """Tenant to optimizer steps."""
    cycle_id: int
    cycle_s: float
    """Seconds of the last cycle."""

    def since(self, earlier: Usage, kind: str) -> dict[str, int]:
        """Return the tokens of each tenant since an earlier reading."""
        before = earlier.tokens.get(kind, {})
        return {tenant: tokens - before.get(tenant, 0) for tenant, tokens in self.tokens.get(kind, {}).items()}


class LoadedPool(AttackedPool):
    """A pool whose tenants have weights. `keys`: a key of each tenant."""

    def __init__(self, weights: Mapping[str, float], *, is_timed: bool, options: Sequence[str] = ()) -> None:
        """`is_timed`: the engine takes the time of the shipped model and computes nothing. Otherwise: that model.

        `options`: more options of `tinkerpool serve`.
        """
        engine = ("--engine", TIMED) if is_timed else ()
        super().__init__(["--pool", "local", *engine, *options], None, is_probed=False)
        self._weights = weights
        self.keys: dict[str, str] = {}

    def _start(self) -> None:
        super()._start()
        self.keys = {tenant: self.create_key(tenant) for tenant in self._weights}
        with self.new_channel() as channel:
            stub = limits_pb2_grpc.LimitServiceStub(channel)
            for tenant, weight in self._weights.items():
                request = limits_pb2.SetTenantLimitsRequest(tenant=tenant, limits={"weight": str(weight)})
                stub.SetTenantLimits(request, metadata=self.metadata(), timeout=self.call_timeout_s)

    def usage(self) -> Usage:
        """Read the committed tokens of all tenants."""
        rows, status = self.usage_rows(), self.status(num_cycles=1)
        tokens: dict[str, dict[str, int]] = {TRAINING: {}, SAMPLING: {}}
        for row in rows:
            if row.kind in tokens:
                tokens[row.kind][row.tenant] = row.num_tokens
        steps = {row.tenant: row.num_operations for row in rows if row.kind == STEPS}
        last = status.cycles[-1] if status.cycles else pool_pb2.Cycle()
        seconds = last.pass_seconds + last.step_seconds + last.commit_seconds
        return Usage(tokens=tokens, steps=steps, cycle_id=last.cycle_id, cycle_s=seconds)
