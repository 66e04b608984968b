"""Rows of ended sessions and deleted adapters: each thing that needs one keeps it, and nothing else does."""

import asyncio

from coordinator.storage.cycles import CycleCommit, StagedStates
from coordinator.storage.rows import (
    EXAMINED_MAX,
    DecidedOperation,
    Leftovers,
    NewOperation,
)
from coordinator.storage.store import Store
from tests.support.database import TENANT, adapter_row, checkpoint_row, sampler_row, session_row

ADAPTER, SAMPLER = "s:train:0", "s:sample:0"
NOW, LATER = 0.0, 1.0
"""Moments of service time: that of all writes here, and one behind it."""


async def log_operation(store: Store, target_id: str, kind: str) -> None:
    row = NewOperation(
        target_id=target_id,
        seq=1,
        append_id=1,
        tenant_id=TENANT,
        kind=kind,
        request_id=None,
        payload=b"p",
        payload_hash=b"h",
        chunk_tokens=16,
    )
    await store.operations.append([row])


async def all_deleted(leftovers: Leftovers, before: float = LATER) -> list[str]:
    """Walk over the whole table once."""
    deleted: list[str] = []
    while True:
        found = await leftovers.delete_some(before)
        deleted += found.deleted
        if found.is_last:
            return deleted


async def test_an_ended_session_stays_until_its_time_is_over_and_its_adapters_and_samplers_are_gone(
    store: Store,
) -> None:
    await store.sessions.insert(session_row("s"))
    await store.adapters.insert(adapter_row(ADAPTER, "s"), None)
    await store.samplers.insert(sampler_row(SAMPLER))
    walk = store.sessions.leftovers
    assert await all_deleted(walk) == []
    await store.sessions.end("s", 5.0)
    assert await all_deleted(walk) == []
    await store.adapters.delete(ADAPTER, [], 5.0)
    assert await all_deleted(store.adapters.leftovers) == [ADAPTER]
    assert await all_deleted(walk) == []
    assert await all_deleted(store.samplers.leftovers) == [SAMPLER]
    assert await all_deleted(walk, before=NOW) == []
    assert await all_deleted(walk) == ["s"]
    assert store.sessions.of_tenant(TENANT, "s") is None


async def test_a_sampler_stays_until_its_session_has_ended_and_its_results_are_dropped(store: Store) -> None:
    await store.sessions.insert(session_row("s"))
    await store.samplers.insert(sampler_row(SAMPLER))
    walk = store.samplers.leftovers
    assert await all_deleted(walk) == []
    await log_operation(store, SAMPLER, "sample")
    await store.sessions.end("s", 5.0)
    assert await all_deleted(walk) == []
    decided = DecidedOperation(
        target_id=SAMPLER, seq=1, append_id=1, tenant_id=TENANT, kind="sample", outcome=b"o", day=20261126
    )
    await store.cycles.commit(CycleCommit(finished=[decided]))
    assert await all_deleted(walk) == []
    await store.operations.drop_results(fetched_before=NOW, finished_before=LATER)
    assert await all_deleted(walk, before=NOW) == []
    assert await all_deleted(walk) == [SAMPLER]


async def test_a_deleted_adapter_stays_for_its_checkpoints_samplers_and_results(store: Store) -> None:
    """Each of three adapters has one of these."""
    for session in ("s", "t"):
        await store.sessions.insert(session_row(session))
    with_checkpoint, with_sampler, with_result = (f"s:train:{number}" for number in range(3))
    for adapter_id in (with_checkpoint, with_sampler, with_result):
        await store.adapters.insert(adapter_row(adapter_id, "s"), None)
    await store.cycles.commit(
        CycleCommit(states=StagedStates(checkpoints=[checkpoint_row("p", with_checkpoint, folder="c")]))
    )
    await store.samplers.insert(sampler_row("t:sample:0", adapter_id=with_sampler))
    await log_operation(store, with_result, "optim_step")
    walk = store.adapters.leftovers
    assert await all_deleted(walk) == []
    failed = DecidedOperation(
        target_id=with_result, seq=1, append_id=1, tenant_id=TENANT, kind="optim_step", outcome=b"o", day=20261126
    )
    for adapter_id in (with_checkpoint, with_sampler, with_result):
        await store.adapters.delete(adapter_id, [failed] if adapter_id == with_result else [], 5.0)
    assert await all_deleted(walk) == []
    await store.checkpoints.delete("p", 1)
    assert await all_deleted(walk, before=NOW) == []
    assert await all_deleted(walk) == [with_checkpoint]
    await store.sessions.end("t", 5.0)
    assert await all_deleted(store.samplers.leftovers) == ["t:sample:0"]
    assert await all_deleted(walk) == [with_sampler]
    await store.operations.drop_results(fetched_before=NOW, finished_before=LATER)
    assert await all_deleted(walk) == [with_result]
    assert store.sessions.adapters_gone("s") == 3
    assert store.sessions.adapters_gone("t") == 0


async def test_a_slice_examines_a_bounded_number_of_rows(store: Store) -> None:
    num_slices = 3
    ids = [f"s{number:05}" for number in range(num_slices * EXAMINED_MAX)]
    await asyncio.gather(*(store.sessions.insert(session_row(each)) for each in ids))
    await asyncio.gather(*(store.sessions.end(each, 5.0) for each in ids))
    walk = store.sessions.leftovers
    slices = [await walk.delete_some(LATER) for _ in range(num_slices + 1)]
    assert [len(each.deleted) for each in slices] == [EXAMINED_MAX] * num_slices + [0]
    assert [each.is_last for each in slices] == [False] * num_slices + [True]


async def test_a_row_that_is_needed_again_before_it_is_deleted_stays(store: Store) -> None:
    await store.sessions.insert(session_row("s"))
    await store.adapters.insert(adapter_row(ADAPTER, "s"), None)
    await store.adapters.delete(ADAPTER, [], 5.0)
    inserting = store.samplers.insert(
        sampler_row(SAMPLER, adapter_id=ADAPTER)
    )  # committed only after the walk has read
    assert (await store.adapters.leftovers.delete_some(LATER)).deleted == []
    await inserting
    assert store.adapters.get(ADAPTER) is not None
