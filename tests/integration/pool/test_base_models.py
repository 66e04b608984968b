"""A pool with several base models: each has workers, a clock and adapters of its own; cycle ids are one sequence."""

import asyncio
from pathlib import Path

from tests.support.toy_pool import running_pool


async def test_adapters_of_two_base_models_run_on_separate_workers_in_separate_cycles(tmp_path: Path) -> None:
    async with running_pool(tmp_path, engine_values=[{"name": "toy"}, {"name": "other"}]) as pool:
        first, second = await pool.adapter("alice"), await pool.adapter("bob", base_model="other")
        names = await asyncio.gather(
            *(pool.forward_backward(first, seq, 5) for seq in (1, 2)),
            *(pool.forward_backward(second, seq, 5, tenant="bob") for seq in (1, 2)),
        )
        operations = await pool.wait(*names[:2]) + await pool.wait(*names[2:], tenant="bob")
        cycles = list(pool.core.journal.recent)
        adapters = [
            {item.adapter_id for batch in engines[-1].batches for item in batch.items}
            for engines in pool.engines.values()
        ]
    assert adapters == [{first}, {second}]
    assert {cycle.base_model for cycle in cycles} == {"toy", "other"}
    assert not {o.cycle_id for o in operations[:2]} & {o.cycle_id for o in operations[2:]}
