"""The pool under load: a coordinator in a process of its own, with tenants that exist before its start.

Depends on the harness of the attacks for the process. A tenant's weight is set in the database, through the store.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.base.config import CoordinatorConfig
from coordinator.coordinator import Coordinator
from coordinator.storage.access.audit import Act
from scripts.attack.pool import AttackedPool
from tinkerpool.v1 import pool_pb2, pool_pb2_grpc
from workers.contract.settings import PoolConfig, PoolModel
from workers.pool.factory import make_pool

TIMED = "scripts.reliability.load.engine:timed_factory"
LOCAL = ("--pool", "local", "--new-key")
TRAINING, SAMPLING = "forward_backward", "sample"
CALL_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Committed tokens since the start of the pool, and its last cycle."""

    tokens: Mapping[str, Mapping[str, int]]
    """Kind of operation to tenant to tokens."""
    cycle_id: int
    cycle_s: float
    """Seconds of the last cycle."""

    def since(self, earlier: Usage, kind: str) -> dict[str, int]:
        """Return the tokens of each tenant since an earlier reading."""
        before = earlier.tokens.get(kind, {})
        return {tenant: tokens - before.get(tenant, 0) for tenant, tokens in self.tokens.get(kind, {}).items()}


async def _prepare(data_dir: Path, weights: Mapping[str, float]) -> dict[str, str]:
    """Make a data directory with these tenants and their weights; return a key of each."""
    config = PoolConfig(models=(PoolModel(name="toy", path="toy"),), kind="local", engine=TIMED)
    coordinator = Coordinator(CoordinatorConfig(data_dir=data_dir), make_pool(config))
    await coordinator.start()
    try:
        keys = {}
        for tenant, weight in weights.items():
            keys[tenant], row = await coordinator.authenticator.create_key(tenant)
            if weight != 1.0:
                act = Act(at=time.time(), act="tenant.limit", subject=tenant)
                await coordinator.core.quotas.change(row.tenant_id, {"weight": str(weight)}, act)
        return keys
    finally:
        await coordinator.stop()


class LoadedPool(AttackedPool):
    """A pool whose tenants have weights. `keys`: a key of each tenant."""

    def __init__(self, weights: Mapping[str, float], *, is_timed: bool, options: Sequence[str] = ()) -> None:
        """`is_timed`: the engine takes the time of the shipped model and computes nothing. Otherwise: that model.

        `options`: more options of `tinkerpool serve`.
        """
        engine = ("--engine", TIMED) if is_timed else ()
        super().__init__([*LOCAL, *engine, *options], None)
        self.keys = asyncio.run(_prepare(self.data_dir, weights))

    def usage(self) -> Usage:
        """Read the committed tokens of all tenants."""
        key = json.loads((self.data_dir.parent / "credentials.json").read_text(encoding="utf-8"))["api_key"]
        metadata = (("authorization", f"Bearer {key}"),)
        with self.channel() as channel:
            stub = pool_pb2_grpc.PoolServiceStub(channel)
            rows = stub.GetUsage(pool_pb2.GetUsageRequest(), metadata=metadata, timeout=CALL_S).rows
            status = stub.GetPoolStatus(pool_pb2.GetPoolStatusRequest(num_cycles=1), metadata=metadata, timeout=CALL_S)
        tokens: dict[str, dict[str, int]] = {TRAINING: {}, SAMPLING: {}}
        for row in rows:
            if row.kind in tokens:
                tokens[row.kind][row.tenant] = row.num_tokens
        last = status.cycles[-1] if status.cycles else pool_pb2.Cycle()
        seconds = last.pass_seconds + last.step_seconds + last.commit_seconds
        return Usage(tokens=tokens, cycle_id=last.cycle_id, cycle_s=seconds)
