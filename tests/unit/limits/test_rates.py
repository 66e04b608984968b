"""Token buckets: the average, the burst, exact delays, and requests for more than a bucket has."""

import contextlib
import random

import pytest

from coordinator.base.errors import Code, ServiceError
from coordinator.base.tenant_limits import BURST_S, TenantLimits
from coordinator.limits import rates as rates_module
from coordinator.limits.quotas import Quotas
from coordinator.limits.rates import Rates
from coordinator.storage.access.audit import Act
from coordinator.storage.store import Store
from tests.support.database import TENANT
from tests.support.toy_pool import FakeTime

ACT = Act(at=1.0, act="tenant.limit", subject="alice")


class Bench:
    """The rates of two operations and 100 tokens a second."""

    def __init__(self, store: Store) -> None:
        self.time = FakeTime()
        self.quotas = Quotas(store, TenantLimits(operations_per_s=2.0, tokens_per_s=100.0))
        self.rates = Rates(self.quotas, self.time.monotonic)

    def take(self, num_operations: int, num_tokens: int = 0, tenant_id: str = TENANT) -> None:
        """Take amounts. Raises ServiceError."""
        self.rates.check(tenant_id, num_operations, num_tokens)
        self.rates.draw(tenant_id, num_operations, num_tokens)

    def refusal(self, num_operations: int, num_tokens: int = 0) -> ServiceError:
        with pytest.raises(ServiceError) as refused:
            self.take(num_operations, num_tokens)
        return refused.value


@pytest.fixture
def bench(store: Store) -> Bench:
    return Bench(store)


async def test_a_burst_is_accepted_and_then_the_rate(bench: Bench) -> None:
    for _ in range(int(2 * BURST_S)):
        bench.take(1)
    error = bench.refusal(1)
    assert (error.code, error.reason, error.retry_delay_s) == (Code.RESOURCE_EXHAUSTED, "RATE_LIMITED", 0.5)
    assert error.quota is not None
    assert (error.quota.usage, error.quota.maximum) == (20, 20)
    assert "tinkerpool tenant limit alice operations_per_s=NUMBER" in error.message
    bench.take(1, tenant_id="another")
    bench.time.now += 100 * BURST_S
    for _ in range(int(2 * BURST_S)):
        bench.take(1)
    assert bench.refusal(1).reason == "RATE_LIMITED", "an idle tenant saves up no more than a burst"


async def test_a_creation_is_one_operation_and_is_counted_only_if_it_is_accepted(bench: Bench) -> None:
    for _ in range(int(2 * BURST_S)):
        bench.rates.take_creation(TENANT)
    for _ in range(3):
        with pytest.raises(ServiceError) as refused:
            bench.rates.take_creation(TENANT)
        assert (refused.value.reason, refused.value.retry_delay_s) == ("RATE_LIMITED", 0.5)
    bench.time.now += 0.5
    bench.rates.take_creation(TENANT)


@pytest.mark.parametrize("num_tokens", [1, 7, 333, 1000])
async def test_the_same_request_is_accepted_after_exactly_the_delay_and_not_before(
    bench: Bench, num_tokens: int
) -> None:
    bench.take(1, 1000)
    delay_s = bench.refusal(1, num_tokens).retry_delay_s
    assert delay_s is not None
    bench.time.now += delay_s - 0.002
    assert bench.refusal(1, num_tokens).retry_delay_s == pytest.approx(0.002, abs=0.0011)
    bench.time.now += 0.0021
    bench.take(1, num_tokens)


async def test_a_request_for_more_than_the_bucket_has_is_accepted_and_the_next_ones_pay_for_it(bench: Bench) -> None:
    bench.take(1, 1)
    bench.take(1, 5000)
    assert bench.refusal(1, 1).retry_delay_s == pytest.approx(40.02)
    assert bench.refusal(1, 5000).retry_delay_s == pytest.approx(40.02)
    bench.time.now += 40.03
    bench.take(1, 1)


async def test_a_request_of_two_operations_is_not_starved_by_requests_of_one(bench: Bench) -> None:
    bench.take(20)
    accepted = {1: 0, 2: 0}
    order = random.Random(1)
    for _ in range(80):
        bench.time.now += 0.5  # one operation more
        for amount in order.sample((1, 2), 2):
            with contextlib.suppress(ServiceError):
                bench.take(amount)
                accepted[amount] += 1
    assert accepted[2] >= 20
    assert accepted[1] >= 20
    assert 2 * accepted[2] + accepted[1] <= 81, "the rate holds, and at most one request is ahead of it"


async def test_a_request_that_is_never_refused_is_paid_for_by_the_next_ones(bench: Bench) -> None:
    bench.take(20)
    bench.rates.draw(TENANT, 4, 0)
    assert bench.refusal(1).retry_delay_s == 2.5


async def test_a_new_rate_holds_at_once_and_without_a_rate_nothing_is_refused(bench: Bench) -> None:
    bench.take(20)
    await bench.quotas.change(TENANT, {"operations_per_s": "4"}, ACT)
    assert bench.refusal(1).retry_delay_s == 0.25
    await bench.quotas.change(TENANT, {"operations_per_s": "unlimited"}, ACT)
    bench.take(1000)


async def test_buckets_that_are_full_again_take_no_memory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates_module, "TENANTS_KEPT", 10)
    for number in range(100):
        bench.take(1, tenant_id=f"t{number}")
        bench.time.now += 1.0
    assert len(bench.rates._operations._buckets) <= 10  # private: nothing shows how many there are
