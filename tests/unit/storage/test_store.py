"""The store: which rows a write adds, which it refuses, and what a reopened store contains."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from coordinator.storage.cycles import CycleCommit, StagedStates
from coordinator.storage.rows import CheckpointRow, DecidedOperation, NewOperation, SamplerRow, SnapshotRow
from coordinator.storage.sqlite import ConflictError
from coordinator.storage.store import Store
from tests.support.database import adapter_row, checkpoint_row, open_store, query, sampler_row, session_row

ADAPTER = "s:train:0"


def operation(seq: int, append_id: int = 1, **values: Any) -> NewOperation:
    fields: dict[str, Any] = {
        "target_id": "a",
        "tenant_id": "t",
        "kind": "forward_backward",
        "request_id": None,
        "payload": b"payload",
        "payload_hash": b"hash",
        "chunk_tokens": 16,
    }
    return NewOperation(seq=seq, append_id=append_id, **fields | values)


def decided(seq: int, append_id: int = 1, *, outcome: bytes = b"ok", **values: Any) -> DecidedOperation:
    fields: dict[str, Any] = {"target_id": "a", "tenant_id": "t", "kind": "forward_backward", "day": 20261126}
    return DecidedOperation(seq=seq, append_id=append_id, outcome=outcome, **fields | values)


def pending_checkpoint(path: str, seq: int, adapter_id: str = ADAPTER) -> CheckpointRow:
    """Return the row that a save of weights for sampling commits before its file is written."""
    return checkpoint_row(path, adapter_id, kind="sampler_weights", size_bytes=7, seq=seq, fingerprint="toy")


def pending_sampler(sampler_id: str, seq: int, adapter_id: str = ADAPTER) -> SamplerRow:
    """Return the row that an unnamed save commits before its file is written."""
    return sampler_row(sampler_id, adapter_id=adapter_id, version=f"{adapter_id}:{seq}")


def snapshot(seq: int, adapter_id: str = ADAPTER) -> SnapshotRow:
    return SnapshotRow(adapter_id=adapter_id, seq=seq, folder=f"f{seq}", sha256="x")


async def add_adapter(store: Store) -> None:
    """Insert the adapter `ADAPTER`, with a snapshot at 0."""
    await store.sessions.insert(session_row("s"))
    await store.adapters.insert(adapter_row(ADAPTER, "s"), snapshot(0))


def outcomes(store: Store) -> list[bytes | None]:
    return [row.outcome for row, _ in store.operations.since("a", 0)]


async def test_nothing_is_lost_when_the_store_is_opened_again(store: Store, tmp_path: Path) -> None:
    pending = [store.operations.append([operation(seq)]) for seq in range(1, 51)]
    await store.close()
    await asyncio.gather(*pending)
    again = await open_store(tmp_path / "log.db")
    assert [row.seq for row, _ in again.operations.since("a", 0)] == list(range(1, 51))
    await again.close()


async def test_a_row_is_read_as_it_was_written(store: Store) -> None:
    row = pending_checkpoint("p", 5)
    sampler = pending_sampler("s:sample:0", 12)
    await add_adapter(store)
    await store.cycles.commit(CycleCommit(states=StagedStates(checkpoints=[row], samplers=[sampler])))
    assert store.checkpoints.by_path("p") == row
    assert store.samplers.get("s:sample:0") == sampler
    assert store.adapters.get(ADAPTER) == adapter_row(ADAPTER, "s")
    assert store.sessions.get_live("s") == session_row("s")
    assert store.snapshots.get(ADAPTER) == snapshot(0)


async def test_a_seq_and_a_request_id_exist_once(store: Store) -> None:
    append = store.operations.append
    await append([operation(1, request_id="r")])
    other_contents = operation(1, kind="optim_step", payload_hash=b"other")
    for other in (operation(1), operation(1, append_id=2), other_contents, operation(2, request_id="r")):
        with pytest.raises(ConflictError):
            await append([other])
    with pytest.raises(ConflictError):
        await append([operation(2), operation(1)])
    await append([operation(2), operation(3), operation(1, target_id="b", request_id="r")])
    with pytest.raises(ConflictError):
        await append([operation(0)])
    assert [row.seq for row, _ in store.operations.since("a", 0)] == [1, 2, 3]


async def test_cycle_ids_never_run_backwards_when_loops_commit_out_of_order(store: Store) -> None:
    await store.cycles.commit(CycleCommit(cycle_id=8))
    await store.cycles.commit(CycleCommit(cycle_id=7))
    assert store.cycles.last_id() == 8


async def test_each_incarnation_has_a_new_epoch_and_append_ids_of_its_own(store: Store, tmp_path: Path) -> None:
    first = [store.operations.new_append_id() for _ in range(3)]
    await store.close()
    again = await open_store(tmp_path / "log.db")
    second = [again.operations.new_append_id() for _ in range(3)]
    assert len({*first, *second}) == 6
    assert await again.raise_epoch() == 3
    await again.close()


async def test_an_operation_is_finished_once_and_metered_once(store: Store) -> None:
    await store.operations.append([operation(1)])
    done = decided(1, outcome=b"first", num_tokens=5, engine_s=0.5)
    await store.cycles.commit(CycleCommit(finished=[done]))
    with pytest.raises(AssertionError, match="finished before"):
        await store.cycles.commit(CycleCommit(finished=[decided(1, outcome=b"second", num_tokens=5)]))
    [usage] = store.usage.of("t")
    assert outcomes(store) == [b"first"]
    assert (usage.num_operations, usage.num_tokens, usage.engine_s) == (1, 5, 0.5)


async def test_an_outcome_of_a_withdrawn_append_does_not_finish_the_operation_that_has_its_seq(store: Store) -> None:
    """An append fails while the operation runs. Before its cycle commits, another operation takes the seq."""
    await store.operations.append([operation(1, append_id=7), operation(2, append_id=3)])
    await store.operations.append([operation(1, append_id=4, target_id="b")])
    commit = CycleCommit(
        finished=[
            decided(1, append_id=2, outcome=b"old"),
            decided(2, append_id=3),
            decided(1, append_id=4, target_id="b"),
        ]
    )
    assert await store.cycles.commit(commit) == {"a"}
    assert outcomes(store) == [None, None]
    assert [row.outcome for row, _ in store.operations.since("b", 0)] == [b"ok"], "outcomes of others are stored"


async def test_no_state_with_the_effect_of_an_unlogged_operation_is_stored(store: Store, tmp_path: Path) -> None:
    states = StagedStates(
        snapshots=[snapshot(1, "a")],
        checkpoints=[pending_checkpoint("p", 2, "a")],
        samplers=[pending_sampler("s:sample:0", 2, "a")],
    )
    assert await store.cycles.commit(CycleCommit(finished=[decided(1)], states=states)) == {"a"}
    await store.operations.append([operation(1, append_id=7), operation(2, append_id=3)])
    other_append = CycleCommit(finished=[decided(1, append_id=2), decided(2, append_id=3)], states=states)
    assert await store.cycles.commit(other_append) == {"a"}
    for table in ("snapshots", "checkpoints", "samplers", "usage"):
        assert query(tmp_path / "log.db", f"SELECT * FROM {table}") == []
    assert outcomes(store) == [None, None]


async def test_a_deletion_decides_logged_operations_only(store: Store) -> None:
    await add_adapter(store)
    await store.operations.append([operation(1, append_id=7), operation(2, append_id=3)])
    assert await store.adapters.delete(ADAPTER, [decided(1, append_id=2), decided(2, append_id=3)], 5.0) == "f0"
    row = store.adapters.get(ADAPTER)
    assert row is not None
    assert row.deleted_at == 5.0
    assert outcomes(store) == [None, b"ok"]


async def test_a_snapshot_drops_the_payloads_that_it_covers_and_no_others(store: Store) -> None:
    await store.operations.append([operation(seq) for seq in (1, 2, 3, 4)])
    finished = [decided(seq) for seq in (1, 2, 4)]
    await store.cycles.commit(CycleCommit(finished=finished, states=StagedStates(snapshots=[snapshot(3, "a")])))
    assert [payload for _, payload in store.operations.since("a", 0)] == [None, None, b"payload", b"payload"]


async def test_no_snapshot_cuts_the_log_at_weights_without_a_file_until_they_have_one_or_their_session_ends(
    store: Store,
) -> None:
    await add_adapter(store)
    await store.sessions.insert(session_row("t"))
    rows = [pending_sampler("s:sample:0", 12), pending_sampler("t:sample:1", 9)]
    await store.cycles.commit(CycleCommit(states=StagedStates(samplers=rows)))
    for seq in (9, 12, 100):
        with pytest.raises(ConflictError, match="no file"):
            await store.snapshots.commit(snapshot(seq))
    assert await store.snapshots.commit(snapshot(8)) == "f0"
    await store.sessions.end("t", 1.0)
    assert await store.snapshots.commit(snapshot(11)) == "f8"
    with pytest.raises(ConflictError, match="no file"):
        await store.cycles.commit(CycleCommit(states=StagedStates(snapshots=[snapshot(13)])))
    assert [row.sampler_id for row in store.samplers.unwritten()] == ["s:sample:0"]
    assert await store.samplers.commit_file("s:sample:0", "weights", "y") == 1
    assert await store.samplers.commit_file("s:sample:0", "others", "z") == 0
    assert await store.snapshots.commit(snapshot(13)) == "f11"


async def test_no_snapshot_cuts_the_log_at_a_checkpoint_without_a_file_until_it_has_one_or_is_deleted(
    store: Store,
) -> None:
    await add_adapter(store)
    await store.cycles.commit(
        CycleCommit(states=StagedStates(checkpoints=[pending_checkpoint("p", 5), pending_checkpoint("q", 9)]))
    )
    assert [row.path for row in store.checkpoints.unwritten()] == ["p", "q"]
    assert await store.snapshots.commit(snapshot(4)) == "f0"
    for seq in (5, 9, 100):
        with pytest.raises(ConflictError, match="no file"):
            await store.snapshots.commit(snapshot(seq))
    assert await store.checkpoints.commit_file("p", 4, "others", "z", 1, "toy") is None, (
        "the path belongs to another save"
    )
    before = store.checkpoints.by_path("p")
    assert await store.checkpoints.commit_file("p", 5, "weights", "y", 77, "another") == before
    assert await store.snapshots.commit(snapshot(8)) == "f4"
    assert await store.checkpoints.delete("q", 8) is None, "that save is not stored any more"
    with pytest.raises(ConflictError, match="no file"):
        await store.snapshots.commit(snapshot(9))
    assert await store.checkpoints.delete("q", 9) == pending_checkpoint("q", 9)
    assert await store.snapshots.commit(snapshot(9)) == "f8"
    row = store.checkpoints.by_path("p")
    assert row is not None
    assert (row.folder, row.sha256, row.size_bytes, row.fingerprint) == ("weights", "y", 77, "another")
    assert await store.checkpoints.delete("p", 5) == row
    assert store.checkpoints.totals() == {}


async def test_an_adapter_and_its_first_snapshot_are_created_together(store: Store) -> None:
    await add_adapter(store)
    with pytest.raises(ConflictError):
        await store.adapters.insert(adapter_row(ADAPTER, "s"), snapshot(1))
    assert store.snapshots.all() == [snapshot(0)]


async def test_another_tenants_rows_are_reported_as_absent(store: Store) -> None:
    await add_adapter(store)
    await store.cycles.commit(
        CycleCommit(
            states=StagedStates(checkpoints=[pending_checkpoint("p", 5)], samplers=[pending_sampler("s:sample:0", 12)])
        )
    )
    for tenant_id, is_there in (("t", True), ("u", False)):
        assert (store.sessions.of_tenant(tenant_id, "s") is not None) == is_there
        assert (store.adapters.of_tenant(tenant_id, ADAPTER) is not None) == is_there
        assert (store.samplers.of_tenant(tenant_id, "s:sample:0") is not None) == is_there
        found = store.checkpoints.readable(tenant_id, "p", is_public_enough=True)
        assert (found is not None) == is_there
    await store.checkpoints.set_public("p", is_public=True)
    assert store.checkpoints.readable("u", "p", is_public_enough=True) is not None
    assert store.checkpoints.readable("u", "p", is_public_enough=False) is None


async def test_a_plan_is_written_with_the_next_commit_and_removed_with_its_cycle(store: Store) -> None:
    store.cycles.note_plan(1, {"a": "w0"})
    await store.operations.append([operation(1)])
    assert store.cycles.plans() == {1: ["a"]}
    await store.cycles.commit(CycleCommit(cycle_id=1))
    assert store.cycles.plans() == {}


async def test_only_the_last_cycles_are_kept(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.storage.cycles.CYCLES_KEPT", 3)  # the real bound is 10,000
    for cycle_id in range(1, 8):
        await store.cycles.commit(CycleCommit(cycle_id=cycle_id))
    assert [row["cycle_id"] for row in query(tmp_path / "log.db", "SELECT cycle_id FROM cycles")] == [5, 6, 7]


async def test_old_results_are_dropped_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.storage.operations.DROPPED_MAX", 10)
    store = await open_store(tmp_path / "log.db")
    for seq in range(1, 36):
        request_id = f"r{seq}" if seq % 2 else None
        await store.operations.append([operation(seq, payload=b"x", outcome=b"ok", request_id=request_id)])
        store.operations.note_fetched("a", seq)
    await store.database.execute("DELETE FROM payloads")
    await store.database.execute("UPDATE operations SET fetched_service_s = 1")
    num_commits = store.database.num_commits
    await store.operations.drop_results(fetched_before=2.0, finished_before=-1.0)
    assert store.database.num_commits - num_commits == 4
    rows = store.database.read("SELECT seq, outcome_bytes FROM operations ORDER BY seq")
    assert [(row["seq"], row["outcome_bytes"]) for row in rows] == [(seq, 0) for seq in range(1, 36, 2)]
    assert store.database.read("SELECT * FROM outcomes") == []
    await store.close()
