"""Who could be in a cycle, and that nobody else costs one anything."""

from pathlib import Path
from typing import Any

from coordinator.operations.adapter_log import AdapterQueue
from coordinator.scheduling.quarantine import Suspects
from coordinator.scheduling.ready_set import Roster
from tests.support.adapter_logs import FB, STEP, operation
from tests.support.toy_pool import running_pool
from workers.contract.messages import AdapterSpec

NUM_IDLE = 1000


class Watched(AdapterQueue):
    """An adapter that counts how often anything of any of them is looked at."""

    num_looks = 0

    def __getattribute__(self, name: str) -> Any:
        Watched.num_looks += 1
        return super().__getattribute__(name)


def spec(name: str) -> AdapterSpec:
    return AdapterSpec(adapter_id=name, rank=8, alpha=1.0, seed=0, train_attn=True, train_mlp=True, train_unembed=True)


def adapter_named(name: str, *kinds: Any, tenant: str = "t") -> AdapterQueue:
    adapter = AdapterQueue(tenant, "s", "toy", spec(name))
    for seq, kind in enumerate(kinds, 1):
        adapter.add(operation(seq, kind))
    return adapter


def roster_of(*adapters: AdapterQueue) -> Roster:
    roster = Roster(Suspects(), lambda _: False, lambda _: False)
    for adapter in adapters:
        roster.add(adapter)
        roster.touch(adapter)
    return roster


async def test_a_thousand_registered_adapters_with_nothing_to_do_are_not_looked_at_in_a_cycle(tmp_path: Path) -> None:
    """Half of them live on the worker. The sweep, every few seconds, may look at all."""
    async with running_pool(tmp_path, sweep_interval_s=1000.0, linger_s=0.0) as pool:
        core = pool.coordinator.core
        active, neighbour = await pool.adapter(), await pool.adapter("bob")
        for index in range(NUM_IDLE):
            idle = Watched("idle", "s", "toy", spec(f"idle-{index}"))
            core.add_adapter(idle)
            core.touch(idle)
            if index % 2:
                idle.placed("w0")
        await pool.wait(await pool.forward_backward(active, 1, 5))  # finds out that the others have nothing to do
        num_looks = Watched.num_looks
        for seq in range(2, 10, 2):
            await pool.wait(await pool.optim_step(active, seq), await pool.forward_backward(active, seq + 1, 5))
            await pool.wait(await pool.forward_backward(neighbour, seq // 2, 5, tenant="bob"), tenant="bob")
        assert len(core.cycles) >= 5
        assert Watched.num_looks == num_looks > NUM_IDLE


def test_an_adapter_with_nothing_to_do_is_forgotten_until_it_is_touched() -> None:
    busy, idle = adapter_named("busy", FB), adapter_named("idle")
    roster = roster_of(busy, idle)
    assert roster.is_ready()
    assert roster.touched() == [busy]
    idle.add(operation(1, STEP))
    roster.touch(idle)
    assert roster.is_ready()
    assert roster.touched() == [busy, idle]
    assert list(roster.due_steps()) == [idle]


def test_residents_are_those_with_a_copy_and_a_deleted_adapter_is_none() -> None:
    one, other, away = adapter_named("one"), adapter_named("other"), adapter_named("away")
    roster = roster_of(one, other, away)
    one.placed("w0")
    other.placed("w0")
    assert roster.residents(["w0", "w1"]) == {"w0": 2, "w1": 0}
    roster.remove(one)
    roster.remove(away)
    assert roster.residents(["w0"]) == {"w0": 1}
    one.placed("w0")  # a cycle that was under way had it
    assert roster.residents(["w0"]) == {"w0": 1}
    one.lose_copy()
    roster.add(one)  # its deletion has failed
    one.placed("w1")
    assert roster.residents(["w0", "w1"]) == {"w0": 1, "w1": 1}


def test_an_adapter_is_ahead_from_what_ran_until_its_snapshot_has_it() -> None:
    adapter = adapter_named("a", FB)
    roster = roster_of(adapter)
    adapter.placed("w0")
    roster.ran(["a", "deleted meanwhile"])
    assert roster.ahead() == [], "nothing was applied"
    adapter.placed_seq = 1
    roster.ran(["a"])
    assert roster.ahead() == [adapter]
    adapter.covered(1, b"", 0.0)
    assert roster.ahead() == []


def test_the_budget_is_full_once_the_ready_chunks_fill_it() -> None:
    roster = roster_of(adapter_named("a", FB, FB), adapter_named("b", FB))  # 4 tokens each
    assert roster.has_tokens(12)
    assert not roster.has_tokens(13)
