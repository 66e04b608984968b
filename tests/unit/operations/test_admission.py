"""Admission against a real store: what consumes a place and what does not, and that a retry is always safe."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coordinator.base.config import Limits
from coordinator.base.errors import Code, ServiceError, invalid
from coordinator.operations.adapter_log import AdapterQueue
from coordinator.operations.admission import Admission, Draft
from coordinator.operations.chunks import Chunk
from coordinator.operations.in_flight import OperationTable
from coordinator.operations.operation import Kind, Operation
from coordinator.storage.store import Store
from tests.support.database import open_store
from tests.support.toy_pool import fail_appends
from tinkerpool.v1 import training_pb2, types_pb2
from workers.contract.messages import AdapterSpec

LIMITS = Limits(pending_operations_max=8, pending_bytes_max=2000, window_bytes_max=500)
SPEC = AdapterSpec(adapter_id="a", rank=8, alpha=1.0, seed=0, train_attn=True, train_mlp=True, train_unembed=True)


@dataclass
class Desk:
    """An admission and one adapter."""

    store: Store
    table: OperationTable = field(default_factory=OperationTable)
    adapter: AdapterQueue = field(default_factory=lambda: AdapterQueue("t", "s", "toy", SPEC))
    touched: int = 0

    def __post_init__(self) -> None:
        self.admission = Admission(self.store, self.table, LIMITS)

    async def submit(self, *drafts: Draft, seq: int = 0, request_id: str = "") -> list[Operation]:
        def touch() -> None:
            self.touched += 1

        return await self.admission.to_adapter(self.adapter, seq, request_id, drafts, touch)

    async def refusal(self, *drafts: Draft, seq: int = 0, request_id: str = "") -> ServiceError:
        with pytest.raises(ServiceError) as raised:
            await self.submit(*drafts, seq=seq, request_id=request_id)
        return raised.value

    def logged(self) -> list[int]:
        return [row.seq for row, _ in self.store.operations.since("a", 0)]


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    store = await open_store(tmp_path / "log.db")
    yield Desk(store)
    await store.close()


def step(body: bytes = b"step") -> Draft:
    return Draft(Kind.OPTIM_STEP, training_pb2.OptimStepRequest(adapter_id="a"), lambda: (body, ()))


def forward_backward(body: bytes = b"pass") -> Draft:
    request = training_pb2.ForwardBackwardRequest(adapter_id="a")
    return Draft(Kind.FORWARD_BACKWARD, request, lambda: (body, (Chunk(0, 1, 4),)))


def bad(rate: float = -1.0) -> Draft:
    def build() -> tuple[bytes, tuple[Chunk, ...]]:
        raise invalid("adam.learning_rate is wrong")

    adam = types_pb2.AdamParams(learning_rate=rate)
    return Draft(Kind.OPTIM_STEP, training_pb2.OptimStepRequest(adapter_id="a", adam=adam), build)


def seqs(operations: Sequence[Operation]) -> list[int]:
    return [operation.seq for operation in operations]


async def test_an_operation_is_in_the_log_when_it_is_acknowledged(desk: Desk) -> None:
    [operation] = await desk.submit(step(), seq=1)
    assert operation.is_durable
    assert desk.logged() == [1]
    assert desk.touched == 1


async def test_the_same_again_is_the_same_operation_and_something_else_is_refused(desk: Desk) -> None:
    [first] = await desk.submit(step(), seq=1)
    [again] = await desk.submit(step(), seq=1)
    assert again is first
    for other in (step(b"other"), forward_backward(b"step"), bad()):
        error = await desk.refusal(other, seq=1)
        assert (error.code, error.metadata) == (Code.ALREADY_EXISTS, {"expected_seq": "2"})
    assert desk.logged() == [1]


async def test_a_repetition_is_acknowledged_only_when_the_first_is_durable(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_appends(monkeypatch, desk.store, 1)
    answers = await asyncio.gather(*(desk.submit(step(), seq=1) for _ in range(3)), return_exceptions=True)
    assert [getattr(answer, "reason", answer) for answer in answers] == ["STORAGE"] * 3
    assert all(answer.retry_delay_s for answer in answers if isinstance(answer, ServiceError))


async def test_a_storage_failure_consumes_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    await desk.submit(step(), seq=1)
    with monkeypatch.context() as patch:
        fail_appends(patch, desk.store, 2, 3)
        error = await desk.refusal(forward_backward(), step(), request_id="r")
        assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "STORAGE")
        bad_error = await desk.refusal(bad(), seq=2)
        assert bad_error.reason == "STORAGE"
    assert (desk.adapter.next_seq, list(desk.adapter.operations)) == (2, [1])
    assert (len(desk.table), desk.adapter.window_bytes) == (1, 0)
    assert seqs(await desk.submit(forward_backward(), step(), request_id="r")) == [2, 3]
    assert desk.logged() == [1, 2, 3]


async def test_a_refused_seq_is_consumed_once_and_its_repetition_gets_the_same_answer(desk: Desk) -> None:
    errors = await asyncio.gather(*(desk.refusal(bad(), seq=1) for _ in range(3)))
    errors.append(await desk.refusal(bad(), seq=1))
    assert {(error.code, error.message) for error in errors} == {(Code.INVALID_ARGUMENT, "adam.learning_rate is wrong")}
    assert desk.logged() == [1]
    assert desk.adapter.operations[1].is_failed
    assert (await desk.refusal(bad(-2.0), seq=1)).code is Code.ALREADY_EXISTS
    assert (len(desk.table), desk.adapter.next_seq) == (0, 2)


async def test_a_refusal_without_a_seq_consumes_nothing(desk: Desk) -> None:
    for _ in range(2):
        assert (await desk.refusal(bad(), request_id="r")).code is Code.INVALID_ARGUMENT
    assert desk.logged() == []
    assert seqs(await desk.submit(step(), request_id="r")) == [1]


async def test_a_check_that_no_longer_holds_does_not_matter_to_a_repetition(desk: Desk) -> None:
    def gone() -> None:
        raise ServiceError(Code.NOT_FOUND, "NOT_FOUND", "no such checkpoint")

    checked = Draft(Kind.LOAD_STATE, training_pb2.LoadStateRequest(adapter_id="a"), lambda: (b"load", ()))
    now_gone = Draft(checked.kind, checked.request, checked.build, check=gone)
    [first] = await desk.submit(checked, seq=1)
    assert await desk.submit(now_gone, seq=1) == [first]
    assert (await desk.refusal(now_gone, seq=2)).code is Code.NOT_FOUND
    [failed] = await desk.submit(checked, seq=2)  # it exists by now, but its seq is consumed
    assert failed.is_failed


async def test_a_request_id_takes_the_next_place_once(desk: Desk) -> None:
    first, again, other = await asyncio.gather(
        *(desk.submit(step(name), request_id=name.decode()) for name in (b"r", b"r", b"q"))
    )
    assert (seqs(first), seqs(again), seqs(other)) == ([1], [1], [2])
    assert (await desk.refusal(step(b"changed"), request_id="r")).code is Code.ALREADY_EXISTS


async def test_a_request_id_of_another_seq_is_refused_and_its_place_stays_free(desk: Desk) -> None:
    await desk.submit(step(), seq=1, request_id="r")
    assert (await desk.refusal(step(), seq=2, request_id="r")).reason == "REQUEST_ID_TAKEN"
    assert desk.adapter.next_seq == 2
    assert seqs(await desk.submit(step(), seq=2)) == [2]


async def test_a_call_that_cannot_be_repeated_safely_is_refused(desk: Desk) -> None:
    assert "set one of them" in (await desk.refusal(step())).message
    assert "seq" in (await desk.refusal(step(), seq=-1)).message


async def test_two_operations_are_taken_together_or_not_at_all(desk: Desk) -> None:
    await desk.submit(step(b"taken"), seq=2)
    error = await desk.refusal(forward_backward(), step(), seq=1)
    assert (error.code, desk.logged()) == (Code.ALREADY_EXISTS, [2])
    assert list(desk.adapter.operations) == [2]
    await desk.submit(forward_backward(), seq=3)
    assert (await desk.refusal(forward_backward(), step(), seq=3)).code is Code.ALREADY_EXISTS


async def test_a_full_queue_refuses_with_a_delay_and_consumes_nothing(desk: Desk) -> None:
    for seq in range(1, 9):
        await desk.submit(step(), seq=seq)
    error = await desk.refusal(step(), seq=9)
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert error.retry_delay_s
    assert desk.adapter.next_seq == 9
    assert seqs(await desk.submit(step(), seq=8)) == [8], "a repetition needs no room"
    one = desk.adapter.operations[1]
    one.succeed(1)
    desk.table.finished(one)
    assert seqs(await desk.submit(step(), seq=9)) == [9]


async def test_a_tenants_waiting_bytes_are_bounded(desk: Desk) -> None:
    await desk.submit(step(bytes(1999)), seq=1)
    large = Draft(Kind.OPTIM_STEP, training_pb2.OptimStepRequest(adapter_id="a" * 50), lambda: (bytes(50), ()))
    assert (await desk.refusal(large, seq=2)).reason == "QUEUE_FULL"


async def test_samples_that_wait_are_bounded_too(desk: Desk) -> None:
    sample = Draft(Kind.SAMPLE, training_pb2.OptimStepRequest(), lambda: (b"sample", ()))
    for seq in range(1, 9):
        await desk.admission.to_sampler("t", "s", seq, "", 1, sample)
    with pytest.raises(ServiceError, match="8 operations are waiting"):
        await desk.admission.to_sampler("t", "s", 9, "", 1, sample)
    again, is_new = await desk.admission.to_sampler("t", "s", 8, "", 1, sample)
    assert (again.seq, is_new) == (8, False)


async def test_a_repeated_sample_is_acknowledged_only_when_the_first_is_durable(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_appends(monkeypatch, desk.store, 1)
    sample = Draft(Kind.SAMPLE, training_pb2.OptimStepRequest(), lambda: (b"sample", ()))
    answers = await asyncio.gather(
        *(desk.admission.to_sampler("t", "s", 1, "", 1, sample) for _ in range(2)), return_exceptions=True
    )
    assert [getattr(answer, "reason", answer) for answer in answers] == ["STORAGE"] * 2
    assert len(desk.table) == 0


async def test_a_seq_far_ahead_is_refused_with_the_one_expected(desk: Desk) -> None:
    for seq in (9, 10**12, 2**63 - 1):
        error = await desk.refusal(step(), seq=seq)
        assert (error.reason, error.metadata) == ("SEQ_TOO_FAR", {"expected_seq": "1"})
    assert seqs(await desk.submit(step(), seq=8)) == [8]
    sample = Draft(Kind.SAMPLE, training_pb2.OptimStepRequest(), lambda: (b"sample", ()))
    with pytest.raises(ServiceError, match="at most"):
        await desk.admission.to_sampler("t", "s", 2**63 - 1, "", 1, sample)


async def test_a_window_that_grows_too_large_is_refused_with_what_to_do(desk: Desk) -> None:
    await desk.submit(forward_backward(bytes(400)), seq=1)
    error = await desk.refusal(forward_backward(bytes(200)), seq=2)
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "WINDOW_TOO_LARGE")
    await desk.submit(step(), seq=3)
    await desk.submit(forward_backward(bytes(200)), seq=4)


async def test_nothing_new_is_taken_while_stopping_but_what_was_taken_is_known(desk: Desk) -> None:
    [first] = await desk.submit(step(), seq=1)
    desk.admission.is_stopping = True
    error = await desk.refusal(step(), seq=2)
    assert (error.code, bool(error.retry_delay_s)) == (Code.UNAVAILABLE, True)
    assert await desk.submit(step(), seq=1) == [first]


async def test_what_left_with_a_snapshot_is_not_taken_again(desk: Desk) -> None:
    desk.adapter.snapshot_seq = desk.adapter.cursor = 5
    desk.adapter.next_seq = 6
    assert (await desk.refusal(step(), seq=3)).reason == "RESULT_DROPPED"
    assert seqs(await desk.submit(step(), seq=6)) == [6]
