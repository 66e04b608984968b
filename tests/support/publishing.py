"""Training rounds whose weights are published, on a toy pool whose files can be held up or refused."""

import asyncio
import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from coordinator.checkpoints.published_weights import Publishing
from tests.support.faults import held
from tests.support.toy_engine import ToyEngine
from tests.support.toy_pool import LENGTHS, ToyPool, expected_chain, expected_tokens, sample_request, tokens_of
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import AdapterSpec, Batch, BatchResult

ROUND = 4
"""Operations of a round: two passes, a step, a save."""


def publishing_of(pool: ToyPool) -> Publishing:
    return pool.core.states.publishing


@contextmanager
def held_files(pool: ToyPool) -> Iterator[threading.Event]:
    """Hold the files of published weights until the event is set, or the block ends."""
    with held(pool.folders.samplers, "write") as files, held(pool.folders.checkpoints, "write", files):
        yield files.may_go


def refuse_files(pool: ToyPool) -> Callable[[], None]:
    """Let every write of saved weights fail as on a full disk; return a function that ends this."""
    states = pool.core.states
    writes = {files: files.write for files in (states.folders.samplers, states.folders.checkpoints)}

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def make_room() -> None:
        for files, write in writes.items():
            files.write = write  # type: ignore[method-assign]

    for files in writes:
        files.write = full  # type: ignore[method-assign,assignment]
    return make_room


async def begin_to_publish(pool: ToyPool, adapter: str, seq: int, *, is_named: bool = False, **values: Any) -> str:
    """Submit a save of the adapter's weights; return the operation's name."""
    return await pool.submit_publish(adapter, seq, f"w{seq}" if is_named else "", **values)


async def sampler_of(pool: ToyPool, saved: ops_pb.Operation) -> str:
    """Return the unnamed sampler that a save created, or create one of the saved path."""
    assert saved.state == ops_pb.OPERATION_STATE_SUCCEEDED, saved
    outcome = saved.save_weights_for_sampler
    session_id = saved.name.partition(":")[0]
    return outcome.sampler_id or await pool.sampler(session_id, model_path=outcome.path)


async def publish(pool: ToyPool, adapter: str, seq: int, **values: Any) -> str:
    """Save the adapter's weights; return a sampler of them."""
    [saved] = await asyncio.wait_for(pool.wait(await begin_to_publish(pool, adapter, seq, **values)), 60)
    return await sampler_of(pool, saved)


async def train(pool: ToyPool, adapter: str, index: int, **values: Any) -> str:
    """Run one round; return the sampler that it published."""
    first = ROUND * index + 1
    for seq in (first, first + 1):
        await pool.forward_backward(adapter, seq, *LENGTHS)
    await pool.optim_step(adapter, first + 2)
    return await publish(pool, adapter, first + 3, **values)


def chain_after(spec: AdapterSpec, num_rounds: int) -> bytes:
    windows = [((ROUND * r + 1, ROUND * r + 2), ROUND * r + 3) for r in range(num_rounds)]
    return expected_chain(spec, windows)


def expected(chain: bytes, sampler: str) -> list[list[int]]:
    """Return the tokens that `sampled` must return for weights with this chain."""
    return expected_tokens(chain, sample_request(sampler, seed=7))


async def sampled(pool: ToyPool, sampler: str, seq: int) -> list[list[int]]:
    [operation] = await asyncio.wait_for(pool.wait(await pool.sample(sampler, seq, seed=7)), 60)
    return tokens_of(operation)


def folder_of(pool: ToyPool, sampler: str) -> str:
    """Return the folder of a sampler's weights, empty if there is none."""
    store = pool.store
    row = store.samplers.get(sampler)
    assert row is not None
    checkpoint = store.checkpoints.by_path(row.model_path)
    return checkpoint.folder if checkpoint is not None else row.folder


def snapshot_seq(pool: ToyPool, adapter: str) -> int:
    row = pool.store.snapshots.get(adapter)
    return 0 if row is None else row.seq


@contextmanager
def held_batches() -> Iterator[threading.Event]:
    """Block the batches of every engine until the event is set. Patched: the class, so that new engines block too."""
    may_run, run = threading.Event(), ToyEngine.run

    def held(engine: ToyEngine, batch: Batch) -> BatchResult:
        may_run.wait(60)
        return run(engine, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ToyEngine, "run", held)
        try:
            yield may_run
        finally:
            may_run.set()
