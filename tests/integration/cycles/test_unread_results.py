"""Waits for large results that their clients do not read, on a pool without doors."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.limits import results
from coordinator.limits.results import COPIES, Responses
from coordinator.operations import in_flight
from tests.support.toy_pool import ToyPool
from tinkerpool.v1 import operations_pb2 as ops_pb


@pytest.fixture(autouse=True)
def every_result_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (in_flight, results):
        monkeypatch.setattr(module, "UNCOUNTED_BYTES", 0)


async def finished_pass(pool: ToyPool, tenant: str) -> str:
    name = await pool.forward_backward(await pool.adapter(tenant), 1, 8, tenant=tenant)
    await pool.wait(name, tenant=tenant)
    return name


async def test_a_wait_holds_room_while_its_client_reads_and_others_wait_for_it(pool: ToyPool) -> None:
    names = {tenant: await finished_pass(pool, tenant) for tenant in ("alice", "eve")}
    eve = await pool.principal("eve")
    request = ops_pb.WaitOperationsRequest(names=[names["eve"]])
    num_bytes = pool.core.admission.result_bytes(eve.tenant_id, names["eve"].rpartition(":")[0], 1)
    assert num_bytes > 0
    pool.core.responses = Responses(bytes_max=3 * COPIES * num_bytes, of_tenant_max=COPIES * num_bytes)
    unread = pool.service.wait_operations(eve, request)
    shown = (await anext(unread)).operation
    again = asyncio.create_task(anext(pool.service.wait_operations(eve, request)))
    await pool.wait(names["alice"], tenant="alice")
    for _ in range(20):
        await asyncio.sleep(0)
    assert not again.done()
    await unread.aclose()
    assert (await asyncio.wait_for(again, 60)).operation == shown


async def test_results_of_one_call_are_returned_together_in_the_order_of_their_names(pool: ToyPool) -> None:
    alice, adapter = await pool.principal("alice"), await pool.adapter("alice")
    names = [await pool.forward_backward(adapter, seq, 8, tenant="alice") for seq in (1, 2)]
    with pool.core.responses.room(alice.tenant_id) as room:
        found = await pool.service.finished_operations(alice, [names[1], names[0]], room, is_poll=False)
    assert [each.name for each in found] == [names[1], names[0]]
