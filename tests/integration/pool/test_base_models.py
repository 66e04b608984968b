"""A pool with several base models: each has workers, a clock and adapters of its own; cycle ids are one sequence."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from coordinator.base.config import CoordinatorConfig
from coordinator.coordinator import Coordinator
from tests.support.toy_engine import ToyEngine
from tests.support.toy_pool import ToyPool
from workers.pool.local import LocalPool


async def test_adapters_of_two_base_models_run_on_their_own_workers_side_by_side(tmp_path: Path) -> None:
    engines: dict[str, ToyEngine] = {}

    def factory(worker_id: str, name: str) -> Callable[[str], ToyEngine]:
        def make(incarnation: str) -> ToyEngine:
            engines[worker_id] = ToyEngine(incarnation, name=name)
            return engines[worker_id]

        return make

    pool = LocalPool({"w0": factory("w0", "toy"), "w1": factory("w1", "other")})
    coordinator = Coordinator(CoordinatorConfig(data_dir=tmp_path), pool)
    await coordinator.start()
    try:
        toys = ToyPool(coordinator, {})
        first, second = await toys.adapter("alice"), await toys.adapter("bob", base_model="other")
        names = await asyncio.gather(
            *(toys.forward_backward(first, seq, 5) for seq in (1, 2)),
            *(toys.forward_backward(second, seq, 5, tenant="bob") for seq in (1, 2)),
        )
        operations = await toys.wait(*names[:2]) + await toys.wait(*names[2:], tenant="bob")
        cycles = list(coordinator.core.journal.recent)
    finally:
        await coordinator.stop()
    assert {item.adapter_id for batch in engines["w0"].batches for item in batch.items} == {first}
    assert {item.adapter_id for batch in engines["w1"].batches for item in batch.items} == {second}
    assert {cycle.base_model for cycle in cycles} == {"toy", "other"}
    assert not {o.cycle_id for o in operations[:2]} & {o.cycle_id for o in operations[2:]}
