"""Admission with a real store: which requests consume a sequence number, and that a repeat is always safe."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from coordinator.base.config import Limits
from coordinator.base.errors import Code, ServiceError, invalid
from coordinator.base.tenant_limits import TenantLimits
from coordinator.fleet.fleet import Fleet
from coordinator.limits.quotas import Quotas
from coordinator.limits.rates import Rates
from coordinator.operations import admission
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.admission import Admission, Request
from coordinator.operations.ceilings import Ceilings
from coordinator.operations.holdings import Holdings
from coordinator.operations.in_flight import FinishedSamples, InFlightTable
from coordinator.operations.operation import Kind, Operation, Usage
from coordinator.operations.registry import AdapterGroup, AdapterRegistry
from coordinator.operations.sessions import SessionTable
from coordinator.operations.spending import Spending
from coordinator.payloads.passes import Chunk, decoded_pass
from coordinator.storage.access.audit import Act
from coordinator.storage.store import Store
from tests.support.adapter_logs import adapter_with
from tests.support.toy_pool import FakeTime, fail_appends
from tinkerpool.v1 import training_pb2, types_pb2
from workers.contract.gradient_windows import EMPTY

LIMITS = Limits(pending_operations_max=8, window_bytes_max=500)
TENANT_LIMITS = TenantLimits(queued_operations_max=10, queued_bytes_max=2000)


@dataclass
class Bench:
    """An admission with one adapter."""

    store: Store
    in_flight: InFlightTable = field(default_factory=lambda: InFlightTable(FinishedSamples(epoch=1)))
    adapter: AdapterLog = field(default_factory=adapter_with)

    def __post_init__(self) -> None:
        self.time = FakeTime()
        self.holdings = Holdings(self.store, Fleet())
        registry = AdapterRegistry(self.time, self.store.adapters, self.holdings)
        self.quotas = Quotas(self.store, TENANT_LIMITS)
        self.rates = Rates(self.quotas, self.time.monotonic)
        registry.add(self.adapter)
        self.group: AdapterGroup = registry.group_of(self.adapter)
        sessions, spending = SessionTable(self.store, self.time), Spending(self.store, self.in_flight, self.time.wall)
        ceilings = Ceilings(self.quotas, self.in_flight, sessions, registry, self.holdings, spending)
        self.admission = Admission(
            self.store, self.in_flight, registry, LIMITS, ceilings, self.rates, clock=lambda: 0.0
        )

    async def submit(self, *requests: Request, seq: int = 0, request_id: str = "") -> list[Operation]:
        acceptance = self.admission.accept(self.adapter, seq, request_id, requests)
        return list(await acceptance.until_durable())

    async def refusal(self, *requests: Request, seq: int = 0, request_id: str = "") -> ServiceError:
        with pytest.raises(ServiceError) as raised:
            await self.submit(*requests, seq=seq, request_id=request_id)
        return raised.value

    async def sample(self, seq: int, sampler: str = "s") -> Operation:
        request = Request(kind=Kind.SAMPLE, raw=training_pb2.OptimStepRequest(), payload=b"sample")
        [operation] = await self.admission.accept_sample("t", sampler, seq, "", request).until_durable()
        return operation

    def logged(self) -> list[int]:
        return [row.seq for row, _ in self.store.operations.since("a", 0)]


@pytest.fixture
async def bench(store: Store) -> Bench:
    return Bench(store)


def step(payload: bytes = b"step") -> Request:
    return Request(kind=Kind.OPTIM_STEP, raw=training_pb2.OptimStepRequest(adapter_id="a"), payload=payload)


def forward_backward(payload: bytes = b"pass") -> Request:
    return Request(
        kind=Kind.FORWARD_BACKWARD,
        raw=training_pb2.ForwardBackwardRequest(adapter_id="a"),
        payload=payload,
        decoded=decoded_pass("cross_entropy", {}, []),
        chunks=(Chunk(0, 1, 4),),
    )


def bad(rate: float = -1.0) -> Request:
    raw = training_pb2.OptimStepRequest(adapter_id="a", adam=types_pb2.AdamParams(learning_rate=rate))
    return Request(kind=Kind.OPTIM_STEP, raw=raw, malformed=invalid("adam.learning_rate is wrong"))


def seqs(operations: Sequence[Operation]) -> list[int]:
    return [operation.seq for operation in operations]


async def test_an_operation_is_in_the_log_when_it_is_acknowledged(bench: Bench) -> None:
    [operation] = await bench.submit(step(), seq=1)
    assert operation.is_durable
    assert bench.logged() == [1]


async def test_an_operation_may_run_before_its_append_has_committed(bench: Bench) -> None:
    """Acceptance does not wait: nothing is awaited before the asserts."""
    acceptance = bench.admission.accept(bench.adapter, 1, "", [forward_backward()])
    [operation] = acceptance.operations
    assert not operation.is_durable
    assert list(bench.adapter.ahead().passes()) == [operation]
    assert (list(bench.group.dirty), list(bench.group.arrivals.drain())) == (["a"], ["t"])
    assert bench.in_flight.get("a:1") is operation
    assert operation.decoded is not None, "the request is decoded once"
    await acceptance.until_durable()
    assert operation.is_durable


async def test_requests_that_arrive_out_of_order_cost_no_read_of_operations(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    # Counted at the connection's only reader: no public counter of reads exists.
    monkeypatch.setattr(bench.store.database, "read_one", lambda sql, parameters=(): reads.append(sql))
    assert seqs(await bench.submit(step(), seq=2)) == [2]
    bench.admission.check_room(bench.adapter, 1, "", 0)
    assert seqs(await bench.submit(forward_backward(), seq=1)) == [1]
    assert [sql for sql in reads if "row_bytes" not in sql] == []


async def test_a_repeated_request_is_the_same_operation_and_another_request_at_its_seq_is_refused(bench: Bench) -> None:
    [first] = await bench.submit(step(), seq=1)
    [again] = await bench.submit(step(), seq=1)
    assert again is first
    for other in (step(b"other"), forward_backward(b"step"), bad()):
        error = await bench.refusal(other, seq=1)
        assert (error.code, error.metadata) == (Code.ALREADY_EXISTS, {"expected_seq": "2"})
    assert bench.logged() == [1]


async def test_a_repeat_is_acknowledged_only_when_the_first_is_durable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_appends(monkeypatch, bench.store, 1)
    errors = await asyncio.gather(*(bench.submit(step(), seq=1) for _ in range(3)), return_exceptions=True)
    assert [getattr(error, "reason", error) for error in errors] == ["STORAGE"] * 3
    assert all(error.retry_delay_s for error in errors if isinstance(error, ServiceError))


async def test_a_repeat_of_two_operations_is_acknowledged_only_when_both_are_durable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_appends(monkeypatch, bench.store, 2)
    first, second = (
        bench.admission.accept(bench.adapter, seq, "", [request])
        for seq, request in ((1, forward_backward()), (2, step()))
    )
    assert (await bench.refusal(forward_backward(), step(), seq=1)).reason == "STORAGE"
    assert seqs(await first.until_durable()) == [1]
    with pytest.raises(ServiceError):
        await second.until_durable()


async def test_a_storage_failure_consumes_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.submit(step(), seq=1)
    with monkeypatch.context() as patch:
        fail_appends(patch, bench.store, 2, 3)
        error = await bench.refusal(forward_backward(), step(), request_id="r")
        assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "STORAGE")
        bad_error = await bench.refusal(bad(), seq=2)
        assert bad_error.reason == "STORAGE"
    assert (bench.adapter.next_seq, list(bench.adapter.operations)) == (2, [1])
    assert (len(bench.in_flight), bench.adapter.window_bytes) == (1, 0)
    assert seqs(await bench.submit(forward_backward(), step(), request_id="r")) == [2, 3]
    assert bench.logged() == [1, 2, 3]


async def test_a_refused_seq_is_consumed_once_and_its_repeat_gets_the_same_refusal(bench: Bench) -> None:
    errors = await asyncio.gather(*(bench.refusal(bad(), seq=1) for _ in range(3)))
    errors.append(await bench.refusal(bad(), seq=1))
    assert {(error.code, error.message) for error in errors} == {(Code.INVALID_ARGUMENT, "adam.learning_rate is wrong")}
    assert bench.logged() == [1]
    assert bench.adapter.operations[1].is_failed
    assert (await bench.refusal(bad(-2.0), seq=1)).code is Code.ALREADY_EXISTS
    assert (len(bench.in_flight), bench.adapter.next_seq) == (0, 2)


async def test_a_refusal_without_a_seq_consumes_nothing(bench: Bench) -> None:
    for _ in range(2):
        assert (await bench.refusal(bad(), request_id="r")).code is Code.INVALID_ARGUMENT
    assert bench.logged() == []
    assert seqs(await bench.submit(step(), request_id="r")) == [1]


async def test_a_repeat_gets_the_first_outcome_although_the_checks_have_changed(bench: Bench) -> None:
    raw, gone = training_pb2.LoadStateRequest(adapter_id="a"), ServiceError(Code.NOT_FOUND, "NOT_FOUND", "no such one")
    checked = Request(kind=Kind.LOAD_STATE, raw=raw, payload=b"load")
    now_gone = Request(kind=Kind.LOAD_STATE, raw=raw, payload=b"load", refusal=gone)
    [first] = await bench.submit(checked, seq=1)
    assert await bench.submit(now_gone, seq=1) == [first]
    assert (await bench.refusal(now_gone, seq=2)).code is Code.NOT_FOUND
    [failed] = await bench.submit(checked, seq=2)  # the checks succeed now, but the seq is consumed
    assert failed.is_failed


async def test_a_request_id_takes_the_next_seq_once(bench: Bench) -> None:
    first, again, other = await asyncio.gather(
        *(bench.submit(step(name), request_id=name.decode()) for name in (b"r", b"r", b"q"))
    )
    assert (seqs(first), seqs(again), seqs(other)) == ([1], [1], [2])
    assert (await bench.refusal(step(b"changed"), request_id="r")).code is Code.ALREADY_EXISTS


async def test_a_request_id_of_another_seq_is_refused_and_that_seq_stays_free(bench: Bench) -> None:
    await bench.submit(step(), seq=1, request_id="r")
    assert (await bench.refusal(step(), seq=2, request_id="r")).reason == "REQUEST_ID_TAKEN"
    assert bench.adapter.next_seq == 2
    assert seqs(await bench.submit(step(), seq=2)) == [2]


async def test_a_call_that_cannot_be_repeated_safely_is_refused(bench: Bench) -> None:
    assert "set one of them" in (await bench.refusal(step())).message
    assert "seq" in (await bench.refusal(step(), seq=-1)).message


async def test_two_operations_are_accepted_together_or_not_at_all(bench: Bench) -> None:
    await bench.submit(step(b"taken"), seq=2)
    error = await bench.refusal(forward_backward(), step(), seq=1)
    assert (error.code, bench.logged()) == (Code.ALREADY_EXISTS, [2])
    assert list(bench.adapter.operations) == [2]
    await bench.submit(forward_backward(), seq=3)
    assert (await bench.refusal(forward_backward(), step(), seq=3)).code is Code.ALREADY_EXISTS


async def test_a_full_adapter_log_refuses_with_a_delay_and_consumes_nothing(bench: Bench) -> None:
    for seq in range(1, 9):
        await bench.submit(step(), seq=seq)
    error = await bench.refusal(step(), seq=9)
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert error.retry_delay_s
    assert error.quota is not None
    assert (error.quota.usage, error.quota.maximum) == (8, 8)
    assert bench.adapter.next_seq == 9
    assert seqs(await bench.submit(step(), seq=8)) == [8], "a repeat needs no free entry"
    one = bench.adapter.operations[1]
    one.succeed(1, Usage())
    bench.in_flight.finish(one)
    assert seqs(await bench.submit(step(), seq=9)) == [9]


async def test_a_tenants_bytes_in_flight_are_bounded(bench: Bench) -> None:
    await bench.submit(step(bytes(2000)), seq=1)
    raw = training_pb2.OptimStepRequest(adapter_id="a" * 50)
    large = Request(kind=Kind.OPTIM_STEP, raw=raw, payload=bytes(50))
    assert (await bench.refusal(large, seq=2)).reason == "QUEUE_FULL"
    with pytest.raises(ServiceError, match="bytes of your queued requests"):
        bench.admission.check_room(bench.adapter, 2, "", 0)  # before it is decoded
    bench.admission.check_room(bench.adapter, 1, "", 0)  # a repeat needs no free bytes


async def test_the_operation_that_others_wait_for_is_accepted_although_the_queue_is_full(bench: Bench) -> None:
    for seq in (2, 3, *range(5, 11)):
        await bench.submit(step(bytes(250)), seq=seq)
    assert (await bench.refusal(step(bytes(250)), seq=4)).reason == "QUEUE_FULL", "it waits for seq 1 itself"
    assert (await bench.refusal(step(bytes(250)), seq=11)).reason == "QUEUE_FULL"
    bench.admission.check_room(bench.adapter, 1, "", 0)
    assert seqs(await bench.submit(step(bytes(250)), seq=1)) == [1]
    assert seqs(await bench.submit(step(bytes(250)), seq=4)) == [4]


async def test_the_room_for_awaited_operations_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "AWAITED_BYTES_MAX", 60)  # the real one takes 128 MiB
    await bench.submit(step(bytes(1999)), seq=3)
    request = Request(kind=Kind.OPTIM_STEP, raw=training_pb2.OptimStepRequest(adapter_id="a" * 40), payload=bytes(40))
    await bench.submit(request, seq=1)
    assert (await bench.refusal(request, seq=2)).reason == "QUEUE_FULL"


async def test_a_tenants_queued_operations_are_bounded_over_all_targets_and_the_awaited_one_is_accepted(
    bench: Bench,
) -> None:
    """As the official SDK sends a batch: its first part last."""
    for seq in range(2, 10):
        await bench.submit(step(), seq=seq)
    for seq in (1, 2):
        await bench.sample(seq, sampler="s")
    with pytest.raises(ServiceError, match="queued operations of yours: 10 in use, at most 10") as raised:
        await bench.sample(1, sampler="s2")
    assert raised.value.retry_delay_s
    assert seqs(await bench.submit(step(), seq=1)) == [1]
    for seq in (1, 2):
        one = bench.adapter.operations[seq]
        one.succeed(1, Usage())
        bench.in_flight.finish(one)
    await bench.sample(1, sampler="s2")


async def test_a_rate_refuses_with_the_exact_delay_consumes_no_seq_and_never_refuses_the_awaited_one(
    bench: Bench,
) -> None:
    await bench.quotas.change("t", {"operations_per_s": "0.3"}, Act(at=1.0, act="tenant.limit", subject="alice"))
    for seq in (1, 3, 4):
        await bench.submit(step(), seq=seq)
    for refused in (await bench.refusal(step(), seq=5), await bench.refusal(bad(), seq=5)):
        assert (refused.code, refused.reason, refused.retry_delay_s) == (
            Code.RESOURCE_EXHAUSTED, "RATE_LIMITED", 3.334
        )  # fmt: skip
    with pytest.raises(ServiceError, match="operations and creations of yours within 10 s: 3 in use, at most 3"):
        await bench.sample(1)
    assert seqs(await bench.submit(step(), seq=4)) == [4], "a repeat is free"
    assert bench.logged() == [1, 3, 4]
    assert seqs(await bench.submit(step(), seq=2)) == [2]
    assert (await bench.refusal(step(), seq=5)).retry_delay_s == 6.667
    bench.time.now += 6.667
    assert seqs(await bench.submit(step(), seq=5)) == [5]
    assert (await bench.refusal(step(), seq=6)).reason == "RATE_LIMITED"


async def test_refused_requests_count_for_the_rate_too(bench: Bench) -> None:
    await bench.quotas.change("t", {"operations_per_s": "0.1"}, Act(at=1.0, act="tenant.limit", subject="alice"))
    assert (await bench.refusal(bad(), seq=1)).operation
    assert (await bench.refusal(bad(), seq=2)).reason == "RATE_LIMITED"


async def test_queued_samples_are_bounded_too(bench: Bench) -> None:
    for seq in range(1, 9):
        await bench.sample(seq)
    with pytest.raises(ServiceError, match="queued operations of s: 8 in use, at most 8"):
        await bench.sample(9)
    request = Request(kind=Kind.SAMPLE, raw=training_pb2.OptimStepRequest(), payload=b"sample")
    again = bench.admission.accept_sample("t", "s", 8, "", request)
    assert (seqs(again.operations), again.is_new) == ([8], False)


async def test_a_repeated_sample_is_acknowledged_only_when_the_first_is_durable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_appends(monkeypatch, bench.store, 1)
    found = await asyncio.gather(*(bench.sample(1) for _ in range(2)), return_exceptions=True)
    assert [getattr(each, "reason", each) for each in found] == ["STORAGE"] * 2
    assert len(bench.in_flight) == 0


async def test_samples_without_a_seq_are_numbered_behind_the_highest_one(bench: Bench) -> None:
    await bench.sample(7)
    request = Request(kind=Kind.SAMPLE, raw=training_pb2.OptimStepRequest(), payload=b"sample")
    accepted = [bench.admission.accept_sample("t", "s", 0, request_id, request) for request_id in ("r", "r", "q")]
    assert [seqs(each.operations) for each in accepted] == [[8], [8], [9]]
    for each in accepted:
        await each.until_durable()


async def test_a_seq_far_ahead_is_refused_with_the_one_expected(bench: Bench) -> None:
    for seq in (9, 10**12, 2**63 - 1):
        error = await bench.refusal(step(), seq=seq)
        assert (error.reason, error.metadata) == ("SEQ_TOO_FAR", {"expected_seq": "1"})
    assert seqs(await bench.submit(step(), seq=8)) == [8]
    with pytest.raises(ServiceError, match="at most"):
        await bench.sample(2**63 - 1)


async def test_a_client_cannot_leave_more_seqs_out_than_it_may_have_operations(bench: Bench) -> None:
    """Each of them is recorded once it is lost."""
    for seq in (5, 8):
        await bench.submit(step(), seq=seq)
    assert bench.adapter.num_missing == 6
    await bench.submit(step(), seq=10)
    assert (await bench.refusal(step(), seq=12)).reason == "SEQ_TOO_FAR"
    assert seqs(await bench.submit(step(), seq=11)) == [11]
    assert seqs(await bench.submit(step(), seq=3)) == [3]
    assert seqs(await bench.submit(step(), seq=13)) == [13]


async def test_a_window_that_grows_too_large_is_refused_with_what_to_do(bench: Bench) -> None:
    await bench.submit(forward_backward(bytes(400)), seq=1)
    error = await bench.refusal(forward_backward(bytes(200)), seq=2)
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "WINDOW_TOO_LARGE")
    await bench.submit(step(), seq=3)
    await bench.submit(forward_backward(bytes(200)), seq=4)


async def test_a_stopping_pool_refuses_new_operations_and_acknowledges_repeats(bench: Bench) -> None:
    [first] = await bench.submit(step(), seq=1)
    bench.admission.close()
    error = await bench.refusal(step(), seq=2)
    assert (error.code, bool(error.retry_delay_s)) == (Code.UNAVAILABLE, True)
    assert await bench.submit(step(), seq=1) == [first]


async def test_an_operation_that_a_snapshot_covers_is_not_accepted_again(bench: Bench) -> None:
    bench.adapter.cover(5, EMPTY, 0.0)
    bench.adapter.restore(6)
    assert (await bench.refusal(step(), seq=3)).reason == "RESULT_DROPPED"
    assert seqs(await bench.submit(step(), seq=6)) == [6]


async def test_an_adapter_that_is_being_deleted_accepts_no_operations(bench: Bench) -> None:
    bench.adapter.begin_deletion()
    assert (await bench.refusal(step(), seq=1)).code is Code.NOT_FOUND
    assert (await bench.refusal(bad(), seq=1)).code is Code.NOT_FOUND
    assert (len(bench.in_flight), bench.logged()) == (0, [])


async def test_a_refusal_that_is_not_recorded_closes_no_window(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.admission.accept(bench.adapter, 2, "", [step()])
    with monkeypatch.context() as patch:
        fail_appends(patch, bench.store, 1)
        wrong = Request(kind=Kind.FORWARD_BACKWARD, raw=forward_backward().raw, malformed=invalid("no data"))
        assert (await bench.refusal(wrong, seq=1)).reason == "STORAGE"
    assert not bench.adapter.is_ready()
    assert not bench.adapter.operations[2].is_final
    [again] = await bench.submit(forward_backward(), seq=1)
    assert list(bench.adapter.ahead().passes()) == [again]
