"""The coordinator is killed at each failpoint, under load; the next epoch finishes every acknowledged operation."""

import asyncio
import itertools
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.toy_pool import (
    LENGTHS,
    ToyPool,
    expected_chain,
    expected_tokens,
    running_pool,
    sample_request,
    tokens_of,
)
from tests.support.waiting import until
from tinkerpool.v1 import checkpoints_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract import failpoints
from workers.contract.messages import AdapterSpec

pytestmark = pytest.mark.slow

T = TypeVar("T")
SUCCEEDED = ops_pb.OPERATION_STATE_SUCCEEDED
NUM_ADAPTERS = 2
NUM_STEPS = 3
CONFIG: Mapping[str, Any] = {"num_workers": 2, "ended_retention_s": 0.0, "sweep_interval_s": 0.01}
"""Rows of ended sessions are deleted while the load runs."""


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.disarm()


class Load:
    """The operations of several adapters: passes, steps, checkpoints and samplers; records the acknowledged ones."""

    def __init__(self) -> None:
        self.adapters: list[str] = []
        self.specs: dict[str, AdapterSpec] = {}
        self.acknowledged: list[str] = []

    async def create(self, pool: ToyPool) -> None:
        """Create the adapters."""
        for _ in range(NUM_ADAPTERS):
            adapter = await pool.adapter()
            self.adapters.append(adapter)
            self.specs[adapter] = pool.spec_of(adapter)

    async def submit(self, pool: ToyPool, adapter: str, step: int) -> None:
        """Submit two passes and a pass or a discard between them, a step, a checkpoint and an unnamed sampler."""
        first = 6 * step + 1
        self.acknowledged.append(await pool.forward_backward(adapter, first, *LENGTHS))
        if step % 2:
            self.acknowledged.append(await pool.discard_gradient(adapter, first + 1))
        else:
            self.acknowledged.append(await pool.forward_backward(adapter, first + 1, *LENGTHS))
        self.acknowledged.append(await pool.forward_backward(adapter, first + 2, *LENGTHS))
        self.acknowledged.append(await pool.optim_step(adapter, first + 3))
        self.acknowledged.append(await pool.submit_save(adapter, first + 4, f"step{step}"))
        self.acknowledged.append(await pool.submit_publish(adapter, first + 5))

    async def run(self, pool: ToyPool) -> None:
        """Submit everything, each step for all adapters at once, and wait for it."""
        self.acknowledged = []
        for step in range(NUM_STEPS):
            for _ in range(2):
                session = await pool.session()
                await pool.finish_session(session)
                await until(lambda: not _has_row(pool, session))  # noqa: B023 (the lambda ends with the call)
            await asyncio.gather(*(self.submit(pool, adapter, step) for adapter in self.adapters))
            await pool.written()
        await pool.wait(*self.acknowledged)

    def chain(self, adapter: str, num_steps: int = NUM_STEPS) -> bytes:
        """Return the expected hash chain of the adapter after this number of steps."""
        firsts = [6 * step + 1 for step in range(num_steps)]
        passes = [(2,) if step % 2 else (0, 1, 2) for step in range(num_steps)]
        windows = [([first + i for i in each], first + 3) for first, each in zip(firsts, passes, strict=True)]
        return expected_chain(self.specs[adapter], windows)


def _has_row(pool: ToyPool, session_id: str) -> bool:
    return bool(pool.store.database.read("SELECT 1 FROM sessions WHERE session_id = ?", (session_id,)))


HITS = (1, 3)
"""The first time, and one with earlier cycles, snapshots and files."""


@pytest.mark.slow
@pytest.mark.parametrize("point", failpoints.POINTS)
async def test_a_crash_at_any_failpoint_loses_nothing_acknowledged_and_applies_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Each next epoch starts on a copy of the data directory made at the failpoint, as after `kill -9`."""
    data = tmp_path / "data"
    load = Load()
    acknowledged: dict[int, list[str]] = {}
    hits = itertools.count(1)  # of all worker threads

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "run_in_executor", _at_once)  # so that no thread writes during the copy

    def crash() -> None:
        if load.acknowledged and (hit := next(hits)) in HITS:
            _on(loop, partial(copy, hit))

    def copy(hit: int) -> None:
        acknowledged[hit] = list(load.acknowledged)
        shutil.copytree(data, tmp_path / f"killed-{hit}")

    async with running_pool(data, replay_s_max=1e-6, **CONFIG) as pool:
        await load.create(pool)
        failpoints.arm(point, crash)
        await load.run(pool)
        failpoints.disarm()
    assert tuple(acknowledged) == HITS, f"{point} was reached only {next(hits) - 1} times"
    for hit, names in acknowledged.items():
        await check_the_next_epoch(tmp_path / f"killed-{hit}", load, names)


async def check_the_next_epoch(killed: Path, load: Load, acknowledged: Sequence[str]) -> None:
    """Start on a killed pool's data directory, submit everything again, and compare."""
    for folder in ("checkpoints", "snapshots", "samplers"):
        for path in (killed / folder).iterdir():
            assert path.name.startswith(".writing-") or (path / "state.json").exists(), (
                "a folder with its final name is complete"
            )
    async with running_pool(killed, **CONFIG) as pool:
        await pool.take_over()
        before = await pool.wait(*acknowledged)
        assert [each for each in before if each.state != SUCCEEDED] == []
        await load.run(pool)
        after = {each.name: each for each in await pool.wait(*load.acknowledged)}
        assert all(after[each.name] == each for each in before), "results do not change"
        for adapter in load.adapters:
            assert pool.chain(adapter) == load.chain(adapter)
            await check_checkpoints(pool, adapter, load)
            await check_samplers(pool, adapter, load, after)


def _at_once(_executor: object, work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    try:
        future.set_result(work(*arguments))
    except Exception as error:  # noqa: BLE001 (raised by the future)
        future.set_exception(error)
    return future


def _on(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    """Call `work` on the event loop's thread and wait for it."""

    async def call() -> None:
        work()

    if threading.current_thread() is threading.main_thread():
        work()
    else:
        asyncio.run_coroutine_threadsafe(call(), loop).result(60)


async def check_samplers(pool: ToyPool, adapter: str, load: Load, done: Mapping[str, ops_pb.Operation]) -> None:
    """Check that every unnamed sampler has the weights of its step, even if the crash came before its file."""
    for step in range(NUM_STEPS):
        sampler = done[f"{adapter}:{6 * step + 6}"].save_weights_for_sampler.sampler_id
        [operation] = await pool.wait(await pool.sample(sampler, 1, seed=step))
        chain = load.chain(adapter, step + 1)
        assert tokens_of(operation) == expected_tokens(chain, sample_request(sampler, seed=step))


async def check_checkpoints(pool: ToyPool, adapter: str, load: Load) -> None:
    """Check that every listed checkpoint loads with the state that was saved."""
    request = checkpoints_pb2.ListCheckpointsRequest(adapter_id=adapter)
    listed = (await pool.service.list_checkpoints(await pool.principal(), request)).checkpoints
    assert len(listed) == NUM_STEPS
    seq = 6 * NUM_STEPS + 1
    for checkpoint in listed:
        num_steps = int(checkpoint.path.rpartition("step")[2]) + 1
        [loaded] = await pool.wait(await pool.load_state(adapter, seq, checkpoint.path))
        assert loaded.state == SUCCEEDED
        assert pool.chain(adapter) == load.chain(adapter, num_steps)
        seq += 1
