"""The stored drains of workers."""

from pathlib import Path

from coordinator.base.errors import Failure
from coordinator.runtime.drains import keep_drained
from coordinator.storage.access.audit import Act
from coordinator.storage.rows import DrainedWorkerRow
from coordinator.storage.store import Store
from tests.support.toy_pool import FakeTime


def act(name: str) -> Act:
    return Act(at=0.0, act=name, subject="w0")


async def store_with(path: Path, *rows: tuple[str, str]) -> Store:
    """Return a store in which these workers, with their base models, are drained."""
    store = Store(path / "tinkerpool.db", FakeTime(), Failure())
    for worker_id, base_model in rows:
        row = DrainedWorkerRow(worker_id=worker_id, base_model=base_model)
        await store.drained_workers.add(row, act("worker.drain"))
    return store


async def test_a_drain_is_stored_with_its_act_until_it_is_taken_back(tmp_path: Path) -> None:
    store = await store_with(tmp_path, ("w1", "toy"), ("w0", "toy"), ("w0", "toy"))
    assert [row.worker_id for row in store.drained_workers.all()] == ["w0", "w1"]
    await store.drained_workers.remove("w0", act("worker.undrain"))
    assert [row.worker_id for row in store.drained_workers.all()] == ["w1"]
    assert [entry.act for entry in store.audit.newest(9)] == ["worker.undrain"] + 3 * ["worker.drain"]
    await store.close()


async def test_workers_stay_drained_as_far_as_each_base_model_keeps_one(tmp_path: Path) -> None:
    store = await store_with(tmp_path, ("w0", "a"), ("w1", "a"), ("w2", "b"), ("w3", "b"), ("w9", "a"))
    base_models = {"w0": "a", "w1": "a", "w2": "a", "w3": "b", "w4": "b"}
    assert await keep_drained(store.drained_workers, base_models) == ["w0", "w1", "w3"]
    assert [row.worker_id for row in store.drained_workers.all()] == ["w0", "w1", "w3"], "w2 has another base model"
    assert await keep_drained(store.drained_workers, {"w0": "a", "w1": "a"}) == ["w1"]
    assert [row.worker_id for row in store.drained_workers.all()] == ["w1"]
    await store.close()
