"""Gradient windows through a whole pool: discarded gradients, with lost workers and restarts around them."""

from __future__ import annotations

from pathlib import Path

from coordinator.base.errors import Code
from tests.support.toy_engine import POISON_TOKEN
from tests.support.toy_pool import LENGTHS, ToyPool, expected_chain, refusal, running_pool
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import training_pb2

SUCCEEDED = ops_pb.OPERATION_STATE_SUCCEEDED


async def discarded(pool: ToyPool, adapter: str) -> list[str]:
    """Submit passes, a discard, other passes and a step, twice; return the operations' names."""
    names = []
    for first in (1, 7):
        names += [await pool.forward_backward(adapter, first + i, *LENGTHS) for i in (0, 1)]
        names.append(await pool.discard_gradient(adapter, first + 2))
        names += [await pool.forward_backward(adapter, first + i, *LENGTHS) for i in (3, 4)]
        names.append(await pool.optim_step(adapter, first + 5))
    return names


async def test_discarded_passes_leave_no_trace_in_the_bits_whatever_is_lost(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        adapter = await pool.adapter()
        expected = expected_chain(pool.spec_of(adapter), [((4, 5), 6), ((10, 11), 12)])
        names = await discarded(pool, adapter)
        done = await pool.wait(*names)
        assert [each.state for each in done] == [SUCCEEDED] * 12
        assert done[2].HasField("discard_gradient")
        assert pool.chain(adapter) == expected
        pool.lose_worker()
        await pool.wait(await pool.forward_backward(adapter, 13, 3))
        assert pool.chain(adapter) == expected
        await pool.wait(await pool.discard_gradient(adapter, 14))
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert await pool.wait(*names) == done
        await pool.wait(await pool.forward_backward(adapter, 15, 3))
        assert pool.chain(adapter) == expected


async def test_a_discard_whose_outcome_was_lost_in_a_crash_is_decided_after_the_restart(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        adapter = await pool.adapter()
        spec = pool.spec_of(adapter)
        await pool.wait(await pool.forward_backward(adapter, 1, *LENGTHS))
        pool.hold()
        names = [await pool.forward_backward(adapter, 2, *LENGTHS), await pool.discard_gradient(adapter, 3)]
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        names += [await pool.forward_backward(adapter, 4, *LENGTHS), await pool.optim_step(adapter, 5)]
        assert [each.state for each in await pool.wait(*names)] == [SUCCEEDED] * 4
        assert pool.chain(adapter) == expected_chain(spec, [((4,), 5)])


async def test_a_snapshot_after_a_discard_holds_no_gradient(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        expected = expected_chain(pool.spec_of(adapter), [((3,), 4)])
        await pool.wait(await pool.forward_backward(adapter, 1, *LENGTHS), await pool.discard_gradient(adapter, 2))
    async with running_pool(tmp_path) as pool:  # the stop took a snapshot
        await pool.take_over()
        row = pool.store.snapshots.get(adapter)
        assert row is not None
        assert pool.folders.snapshots.read(row.folder, row.sha256).gradient is None
        await pool.wait(await pool.forward_backward(adapter, 3, *LENGTHS), await pool.optim_step(adapter, 4))
        assert pool.chain(adapter) == expected


async def test_a_discard_opens_a_closed_window_without_a_step(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        failed, closed = await pool.wait(
            await pool.forward_backward(adapter, 1, *LENGTHS, token=POISON_TOKEN),
            await pool.forward_backward(adapter, 2, *LENGTHS),
        )
        assert (failed.error.reason, closed.error.reason) == ("NON_FINITE", "GRADIENT_WINDOW_CLOSED")
        assert "discard_gradient" in closed.error.message
        done = await pool.wait(
            await pool.discard_gradient(adapter, 3),
            await pool.forward_backward(adapter, 4, *LENGTHS),
            await pool.optim_step(adapter, 5),
        )
        assert [each.state for each in done] == [SUCCEEDED] * 3
        assert pool.chain(adapter) == expected_chain(pool.spec_of(adapter), [((4,), 5)])


async def test_a_repeated_discard_is_the_same_operation_and_its_seq_stays_taken(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter, principal = await pool.adapter(), await pool.principal()
        by_id = training_pb2.DiscardGradientRequest(adapter_id=adapter, request_id="r")
        names = [(await pool.service.discard_gradient(principal, by_id)).operation.name for _ in range(2)]
        names.append(await pool.discard_gradient(adapter, 1))
        assert names == [f"{adapter}:1"] * 3
        assert (await refusal(pool.optim_step(adapter, 1))).code is Code.ALREADY_EXISTS
