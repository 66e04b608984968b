"""SQLite over a file system that counts syncs and can make one fail."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.base.errors import Code, ServiceError
from coordinator.storage.sqlite import StoreBrokenError, set_pragmas
from tests.support.disk.apsw_connection import ApswConnection
from tests.support.disk.lossy_vfs import LossyVfs, sync_error
from tests.support.toy_pool import LENGTHS, expected_chain, running_pool
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.logs import JsonFormatter

SUCCEEDED = ops_pb.OPERATION_STATE_SUCCEEDED


@pytest.fixture
def vfs() -> Iterator[LossyVfs]:
    vfs = LossyVfs("watched", random.Random(0))
    yield vfs
    vfs.unregister()


def connect_over(vfs: LossyVfs) -> Callable[[Path], Any]:
    """Return a function that opens a database on this file system with the pragmas of the store."""

    def connect(path: Path) -> Any:
        connection: Any = ApswConnection(path, vfs=vfs.name)
        set_pragmas(connection)
        return connection

    return connect


async def test_a_forward_backward_with_its_step_costs_at_most_two_syncs_of_the_database(
    tmp_path: Path, vfs: LossyVfs
) -> None:
    async with running_pool(tmp_path, connect=connect_over(vfs)) as pool:
        adapter = await pool.adapter()
        for step in range(20):
            before = vfs.num_operations["sync"]
            names = await asyncio.gather(
                pool.forward_backward(adapter, 2 * step + 1, *LENGTHS), pool.optim_step(adapter, 2 * step + 2)
            )
            await pool.wait(*names)
            assert 1 <= vfs.num_operations["sync"] - before <= 2


async def test_a_failed_sync_stops_the_coordinator_and_the_next_one_has_every_acknowledged_operation(
    tmp_path: Path, vfs: LossyVfs
) -> None:
    """The sync is not repeated: a second one would succeed, although the first one may have lost writes.

    The stop does not wait for operations that ran in part, because no cycle commits any more.
    """
    failed_syncs: list[str] = []

    def fail(operation: str, file: str) -> None:
        if operation == "sync":
            failed_syncs.append(file)
            raise sync_error()

    async with running_pool(
        tmp_path, is_crash=True, stop_s_max=1e6, connect=lambda path: ApswConnection(path, vfs=vfs.name)
    ) as pool:
        adapter = await pool.adapter()
        spec = pool.spec_of(adapter)
        acknowledged = [await pool.forward_backward(adapter, 1, *LENGTHS), await pool.optim_step(adapter, 2)]
        before = await pool.wait(*acknowledged)
        vfs.on_operation = fail
        with pytest.raises(ServiceError) as refused:
            await pool.forward_backward(adapter, 3, *LENGTHS)
        with pytest.raises(StoreBrokenError, match=r"the disk of .* fails"):
            await asyncio.wait_for(pool.coordinator.failed(), 60)
        assert not pool.coordinator.health()
        with pytest.raises(ServiceError):
            await pool.forward_backward(adapter, 3, *LENGTHS)
        assert len(failed_syncs) == 1
        vfs.on_operation = lambda operation, file: None
    assert refused.value.code is Code.UNAVAILABLE
    assert "not known" in refused.value.message
    assert refused.value.retry_delay_s
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert await pool.wait(*acknowledged) == before
        passed, stepped = await pool.wait(
            await pool.forward_backward(adapter, 3, *LENGTHS), await pool.optim_step(adapter, 4)
        )
        assert (passed.state, stepped.state) == (SUCCEEDED, SUCCEEDED)
        assert pool.chain(adapter) == expected_chain(spec, [((1,), 2), ((3,), 4)])


async def test_a_cycle_that_cannot_be_committed_is_an_event_with_its_id(
    tmp_path: Path, vfs: LossyVfs, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(operation: str, file: str) -> None:
        if operation == "sync":
            raise sync_error()

    async with running_pool(tmp_path, stop_s_max=1e6, connect=lambda path: ApswConnection(path, vfs=vfs.name)) as pool:
        adapter = await pool.adapter()
        pool.hold()
        await pool.forward_backward(adapter, 1, *LENGTHS)
        vfs.on_operation = fail
        await pool.release()
        with pytest.raises(StoreBrokenError):
            await asyncio.wait_for(pool.coordinator.failed(), 60)
        vfs.on_operation = lambda operation, file: None
        next_id = pool.core.journal.new_id()
    [record] = [each for each in caplog.records if "is not committed" in each.getMessage()]
    event = json.loads(JsonFormatter().format(record))
    assert (event["logger"], event["level"]) == ("coordinator.cycle.commit", "error")
    assert event["message"].startswith(f"cycle {event['cycle']} is not committed: the disk of ")
    assert 0 < event["cycle"] < next_id
