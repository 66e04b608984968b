"""Samples of a data directory from before log-probabilities were scaled by temperature keep what they were promised."""

import asyncio
import json
import sqlite3
from pathlib import Path

import pytest

from coordinator.base.errors import Code
from tests.support.toy_pool import ToyPool, refusal, running_pool, sample_request, tokens_of
from tests.support.waiting import until
from tinkerpool.convert import from_tensor
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import sampling_pb2

OLD = Path(__file__).resolve().parents[2] / "support" / "samples_of_schema_7.sql"
SAMPLER = "ef2b0f52-8069-4a9e-b85f-df42ff1fbbf5:sample:0"
POOL_ID = 3091414601371329363


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """The data directory of the old version, killed while sample 2 was running."""
    directory = tmp_path / "data"
    directory.mkdir(mode=0o700)
    db = sqlite3.connect(directory / "tinkerpool.db")
    db.executescript(OLD.read_text())
    db.close()
    (directory / "pool.json").write_text(json.dumps({"pool_id": f"{POOL_ID:016x}", "epoch": 1, "service_ms": 0}))
    return directory


def the_request(seq: int, temperature: float = 0.5) -> sampling_pb2.SampleRequest:
    """Return the request of both samples, as their client sent it and sends it now."""
    return sample_request(SAMPLER, seq, seed=3, temperature=temperature, max_tokens=6)


def logprobs_of(operation: ops_pb.Operation) -> list[float]:
    [sequence] = operation.sample.sequences
    values: list[float] = from_tensor(sequence.logprobs).tolist()
    return values


async def sample(pool: ToyPool, request: sampling_pb2.SampleRequest) -> ops_pb.Operation:
    operation = (await pool.service.sample(await pool.principal(), request)).operation
    [finished] = await pool.wait(operation.name)
    return finished


async def test_an_unfinished_sample_of_the_old_version_gets_the_log_probabilities_that_it_was_promised(
    data_dir: Path,
) -> None:
    async with running_pool(data_dir) as pool:
        first, second = await pool.wait(f"{SAMPLER}:1", f"{SAMPLER}:2")
        new = await sample(pool, the_request(3))
    assert tokens_of(first) == tokens_of(second) == tokens_of(new)
    assert logprobs_of(first) == logprobs_of(second) == [-1.0] * 6
    assert logprobs_of(new) == [-2.0] * 6


async def test_repeats_of_samples_of_the_old_version_are_recognised_also_when_only_their_hashes_are_left(
    data_dir: Path,
) -> None:
    async with running_pool(data_dir) as pool:
        first = await sample(pool, the_request(1))
        second = await sample(pool, the_request(2))
        assert not pool.store.operations.since(SAMPLER, 0)[0][1], "the payload of a finished sample is gone"
        for seq in (1, 2):
            refused = await refusal(pool.service.sample(await pool.principal(), the_request(seq, temperature=0.25)))
            assert (refused.code, refused.reason) == (Code.ALREADY_EXISTS, "SEQ_TAKEN")
    assert logprobs_of(first) == logprobs_of(second) == [-1.0] * 6


async def test_a_stream_that_broke_at_the_upgrade_is_requested_again_and_ends_with_its_sample(data_dir: Path) -> None:
    async with running_pool(data_dir, engine_values=[{"may_decode": False}]) as pool:
        request = sampling_pb2.StreamSampleRequest(request=the_request(2))
        events = pool.service.stream_sample(await pool.principal(), request)
        first_event = asyncio.ensure_future(anext(events))
        await until(lambda: pool.core.samples.streams.has_listener(f"{SAMPLER}:2"))
        await pool.release()
        last = await first_event
        assert [event async for event in events] == []
    assert logprobs_of(last.operation) == [-1.0] * 6


async def test_a_client_cannot_choose_what_log_probabilities_mean(data_dir: Path) -> None:
    async with running_pool(data_dir) as pool:
        request = the_request(3)
        request.logprobs_version = sampling_pb2.LOGPROBS_VERSION_UNSPECIFIED
        plain = await sample(pool, request)
        request.logprobs_version = 7  # type: ignore[assignment]  # no value of this version of the contract
        again = await sample(pool, request)
    assert plain == again
    assert logprobs_of(plain) == [-2.0] * 6
