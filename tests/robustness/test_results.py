"""A result can be fetched repeatedly, also after restarts, and always has the same bytes."""

import asyncio
import hashlib
import random
from pathlib import Path

import pytest

from tests.support.toy_engine import POISON_TOKEN
from tests.support.toy_pool import ToyPool, running_pool

NUM_RESTARTS = 5
NUM_FETCHES = 3


async def fetched(pool: ToyPool, names: list[str]) -> dict[str, bytes]:
    """Wait for operations; return the hash of each serialized result."""
    found: dict[str, bytes] = {}
    for start in range(0, len(names), 1000):
        for operation in await pool.wait(*names[start : start + 1000]):
            found[operation.name] = hashlib.sha256(operation.SerializeToString(deterministic=True)).digest()
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_operations", [600, pytest.param(10_000, marks=pytest.mark.long)])
async def test_results_are_the_same_bytes_three_times_across_five_restarts(tmp_path: Path, num_operations: int) -> None:
    """The operations are passes, steps and failures; the restarts follow clean stops and crashes."""
    chance = random.Random(11)
    names: list[str] = []
    first: dict[str, bytes] = {}
    num_fetched: dict[str, int] = {}
    async with running_pool(tmp_path) as pool:
        adapters = [await pool.adapter() for _ in range(4)]
    num_rounds = NUM_RESTARTS + 1
    seqs = dict.fromkeys(adapters, 1)
    for round_index in range(num_rounds):
        async with running_pool(tmp_path, is_crash=round_index % 2 == 1, replay_s_max=0.001) as pool:
            await pool.take_over()
            while len(names) < num_operations * (round_index + 1) / num_rounds:
                submitted = []
                for adapter in adapters:
                    new_seqs = range(seqs[adapter], seqs[adapter] + 20)
                    submitted += [submit(pool, adapter, seq, is_poisoned=chance.random() < 0.02) for seq in new_seqs]
                    seqs[adapter] += 20
                names += await asyncio.gather(*submitted)
            again = chance.sample(names, len(names) // 2) + [name for name in names if name not in first]
            for name, digest in (await fetched(pool, list(dict.fromkeys(again)))).items():
                assert first.setdefault(name, digest) == digest
                num_fetched[name] = num_fetched.get(name, 0) + 1
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        while missing := [name for name in names if num_fetched[name] < NUM_FETCHES]:
            for name, digest in (await fetched(pool, missing)).items():
                assert first[name] == digest
                num_fetched[name] += 1
    assert len(first) == len(names) >= num_operations


async def submit(pool: ToyPool, adapter: str, seq: int, *, is_poisoned: bool) -> str:
    """Submit a step after every third pass; poisoned passes fail."""
    if seq % 4 == 0:
        return await pool.optim_step(adapter, seq)
    return await pool.forward_backward(adapter, seq, 8, token=POISON_TOKEN if is_poisoned else None)
