"""Gradient windows through a whole pool: discards and failed batches, with lost workers and restarts around them."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.base.errors import Code
from tests.support.toy_engine import POISON_TOKEN
from tests.support.toy_pool import LENGTHS, ToyPool, expected_chain, refusal, running_pool
from tests.support.waiting import until
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


async def test_a_discard_opens_a_closed_window_without_a_step(pool: ToyPool) -> None:
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


async def test_a_repeated_discard_is_the_same_operation_and_its_seq_stays_taken(pool: ToyPool) -> None:
    adapter, principal = await pool.adapter(), await pool.principal()
    by_id = training_pb2.DiscardGradientRequest(adapter_id=adapter, request_id="r")
    names = [(await pool.service.discard_gradient(principal, by_id)).operation.name for _ in range(2)]
    names.append(await pool.discard_gradient(adapter, 1))
    assert names == [f"{adapter}:1"] * 3
    assert (await refusal(pool.optim_step(adapter, 1))).code is Code.ALREADY_EXISTS


BAD = 2**20
"""A token outside the vocabulary: the request is refused."""


async def failed_batch(pool: ToyPool, adapter: str, token: int) -> list[str]:
    """Submit a batch of three requests whose second one is refused, or fails on the worker; return their names."""
    names = [await pool.forward_backward(adapter, 1, *LENGTHS, batch=(1, 3))]
    if token == BAD:
        error = await refusal(pool.forward_backward(adapter, 2, *LENGTHS, token=token, batch=(1, 3)))
        assert error.code is Code.INVALID_ARGUMENT
        names.append(f"{adapter}:2")
    else:
        names.append(await pool.forward_backward(adapter, 2, *LENGTHS, token=token, batch=(1, 3)))
    return [*names, await pool.forward_backward(adapter, 3, *LENGTHS, batch=(1, 3))]


@pytest.mark.parametrize("token", [BAD, POISON_TOKEN])
async def test_the_batch_behind_a_failed_one_runs_at_once_with_the_bits_of_a_run_without_it(
    tmp_path: Path, token: int
) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        adapter = await pool.adapter()
        expected = expected_chain(pool.spec_of(adapter), [((4, 5), 6)])
        names = await failed_batch(pool, adapter, token)
        names += [await pool.forward_backward(adapter, seq, *LENGTHS, batch=(4, 5)) for seq in (4, 5)]
        done = await pool.wait(*names, await pool.optim_step(adapter, 6))
        reasons = [each.error.reason for each in done]
        assert reasons[:1] + reasons[2:] == ["", "GRADIENT_WINDOW_CLOSED", "", "", ""]
        assert "discard_gradient" not in done[2].error.message, "the batch may be submitted again at once"
        assert pool.chain(adapter) == expected
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        await pool.wait(await pool.forward_backward(adapter, 7, 3))
        assert pool.chain(adapter) == expected


@pytest.mark.parametrize("token", [BAD, POISON_TOKEN])
@pytest.mark.parametrize("ends", ["stop", "crash", "worker"])
async def test_a_failed_batch_is_known_after_a_restart_and_its_step_fails(
    tmp_path: Path, token: int, ends: str
) -> None:
    async with running_pool(tmp_path, is_crash=ends == "crash") as pool:
        adapter = await pool.adapter()
        spec = pool.spec_of(adapter)
        [first, *_] = await pool.wait(*await failed_batch(pool, adapter, token))
        assert first.state == SUCCEEDED
        if ends == "worker":
            pool.lose_worker()
            await closed_and_corrected(pool, adapter)
            return
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        await closed_and_corrected(pool, adapter)
        assert pool.chain(adapter) == expected_chain(spec, [((5,), 6)])


async def closed_and_corrected(pool: ToyPool, adapter: str) -> None:
    """Submit a step, which fails, and a batch with a step, which succeed."""
    step, *others = await pool.wait(
        await pool.optim_step(adapter, 4),
        await pool.forward_backward(adapter, 5, *LENGTHS, batch=(5, 5)),
        await pool.optim_step(adapter, 6),
    )
    assert step.error.reason == "GRADIENT_WINDOW_CLOSED"
    assert [each.state for each in others] == [SUCCEEDED] * 2


async def test_a_batch_that_a_restart_cuts_in_two_is_still_one_batch(tmp_path: Path) -> None:
    """Its first part is in the snapshot's gradient when its second part fails on another copy."""
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        spec = pool.spec_of(adapter)
        await pool.wait(await pool.forward_backward(adapter, 1, *LENGTHS, batch=(1, 2)))
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        other = await pool.adapter()
        pool.hold()
        await pool.forward_backward(other, 1, *LENGTHS)
        await until(lambda: pool.log_of(other).copy.is_running(pool.log_of(other).operations[1]))
        names = [
            await pool.forward_backward(adapter, 2, *LENGTHS, token=POISON_TOKEN, batch=(1, 2)),
            await pool.forward_backward(adapter, 3, *LENGTHS, batch=(3, 3)),
        ]
        await pool.release()
        failed, fine, step = await pool.wait(*names, await pool.optim_step(adapter, 4))
        together = [{item.op_id for item in batch.items} for batch in pool.engines["w0"][-1].batches]
        assert set(names) in together, "both batches ran in one phase"
        assert (failed.error.reason, fine.state, step.state) == ("NON_FINITE", SUCCEEDED, SUCCEEDED)
        assert pool.chain(adapter) == expected_chain(spec, [((3,), 4)])


async def test_unmarked_passes_close_the_window_up_to_the_step(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    done = await pool.wait(
        await pool.forward_backward(adapter, 1, *LENGTHS, token=POISON_TOKEN),
        await pool.forward_backward(adapter, 2, *LENGTHS, batch=(2, 2)),
        await pool.optim_step(adapter, 3),
        await pool.optim_step(adapter, 4),
    )
    assert [each.error.reason for each in done] == ["NON_FINITE", *["GRADIENT_WINDOW_CLOSED"] * 2, ""]


async def test_a_wrong_mark_is_refused_and_closes_the_window_like_a_request_without_one(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    error = await refusal(pool.forward_backward(adapter, 1, *LENGTHS, batch=(2, 3)))
    assert (error.code, "this request has seq 1" in error.message) == (Code.INVALID_ARGUMENT, True)
    [closed] = await pool.wait(await pool.forward_backward(adapter, 2, *LENGTHS, batch=(2, 2)))
    assert closed.error.reason == "GRADIENT_WINDOW_CLOSED"


@pytest.mark.parametrize(("batch", "is_open"), [((1, 1), True), (None, False)])
async def test_a_snapshot_keeps_how_long_its_window_is_closed(
    tmp_path: Path, batch: tuple[int, int] | None, is_open: bool
) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        await pool.wait(await pool.forward_backward(adapter, 1, *LENGTHS, token=POISON_TOKEN, batch=batch))
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert pool.log_of(adapter).snapshot_seq == 1
        names = [await pool.forward_backward(adapter, 2, *LENGTHS, batch=(2, 2)), await pool.optim_step(adapter, 3)]
        reasons = [each.error.reason for each in await pool.wait(*names)]
        assert reasons == ["" if is_open else "GRADIENT_WINDOW_CLOSED"] * 2
