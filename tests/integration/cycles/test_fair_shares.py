"""What tenants get of a pool that all of them fill: a real coordinator in virtual time; `make load` in real time."""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from coordinator.base.config import CoordinatorConfig
from coordinator.tenants.principals import Role
from tests.support.timed_pool import TimedPool, in_virtual_time, paired_step
from tests.support.toy_pool import ToyPool
from tinkerpool.v1 import limits_pb2

HEAVY, WEIGHT = "heavy", 2.0
SIZES = (16, 8, 4)
"""Tokens of a request, different among tenants: equal shares are of tokens, not of requests."""
TENANTS = {"a": 16, "b": 8, "c": 4, "d": 16, "e": 8, HEAVY: 16}
IN_FLIGHT = 5
CYCLES_MIN = 100
Work = Callable[[ToyPool, str, int], Coroutine[Any, Any, None]]


async def train(toys: ToyPool, tenant: str, num_tokens: int) -> None:
    """Keep two steps in flight, without end."""
    adapter, sent = await toys.adapter(tenant), deque[tuple[str, str]]()
    for seq in itertools.count(1, 2):
        first = await toys.forward_backward(adapter, seq, num_tokens, tenant=tenant)
        sent.append((first, await toys.optim_step(adapter, seq + 1, tenant=tenant)))
        if len(sent) == 2:
            await toys.wait(*sent.popleft(), tenant=tenant)


async def sample(toys: ToyPool, tenant: str, num_tokens: int) -> None:
    """Keep samples in flight, without end: always more than run."""
    sampler, seqs = await toys.sampler(await toys.session(tenant), tenant=tenant), itertools.count(1)

    async def one_after_another() -> None:
        for seq in seqs:
            prompt = (ord(tenant[0]) - 60, 1 + seq % 50, 1 + seq // 50)  # a new one: cached tokens are not charged
            name = await toys.sample(sampler, seq, tenant=tenant, prompt=prompt, max_tokens=num_tokens)
            await toys.wait(name, tenant=tenant)

    await asyncio.gather(*(one_after_another() for _ in range(IN_FLIGHT)))


def committed(toys: ToyPool) -> Counter[str]:
    """Return the committed tokens of each tenant."""
    tokens: Counter[str] = Counter()
    for row in toys.store.usage.of(None):
        tokens[row.tenant_name] += row.num_tokens
    return tokens


def shares(
    data_dir: Path,
    pool: TimedPool,
    work: Work,
    num_clients: int,
    first_s: float,
    counted_s: float,
    *,
    is_weight_new: bool = False,
    **config: Any,
) -> tuple[dict[str, float], int]:
    """Let all tenants work, and count after `first_s` seconds, for `counted_s`.

    `is_weight_new`: the heavy tenant gets its weight when counting begins; otherwise it has it from the start.

    Return each tenant's tokens over the mean of those with weight 1, and the number of passes.
    """

    async def give_weight(toys: ToyPool) -> None:
        await toys.principal(HEAVY)
        key, _ = await toys.coordinator.authenticator.create_key("root", role=Role.ADMIN)
        request = limits_pb2.SetTenantLimitsRequest(tenant=HEAVY, limits={"weight": str(WEIGHT)})
        await toys.service.set_tenant_limits(toys.coordinator.authenticator.authenticate(key), request)

    async def scenario(toys: ToyPool) -> tuple[Counter[str], int]:
        for tenant in TENANTS:
            await toys.principal(tenant)
        loop = asyncio.get_running_loop()
        clients = [loop.create_task(work(toys, *each)) for each in TENANTS.items() for _ in range(num_clients)]
        await asyncio.sleep(first_s)
        if is_weight_new:
            await give_weight(toys)
        first, num_first = committed(toys), len(pool.passes)
        await asyncio.sleep(counted_s)
        tokens, num_passes = committed(toys) - first, len(pool.passes) - num_first
        for client in clients:
            client.cancel()
            with suppress(asyncio.CancelledError):
                await client
        return tokens, num_passes

    if not is_weight_new:
        in_virtual_time(data_dir, TimedPool(0.01, 0.0001), give_weight)
    tokens, num_passes = in_virtual_time(data_dir, pool, scenario, **config)
    mean = sum(tokens[tenant] for tenant in TENANTS if tenant != HEAVY) / (len(TENANTS) - 1)
    return {tenant: tokens[tenant] / mean for tenant in TENANTS}, num_passes


@pytest.mark.slow
def test_over_a_hundred_cycles_tenants_train_by_their_weights_whatever_the_size_of_their_requests(
    tmp_path: Path,
) -> None:
    found, num_cycles = shares(tmp_path, TimedPool(0.01, 0.0001), train, 3, 0.3, 2.2, cycle_tokens_max=48)
    assert num_cycles >= CYCLES_MIN
    assert found.pop(HEAVY) == pytest.approx(WEIGHT, rel=0.1)
    assert found == pytest.approx(dict.fromkeys(found, 1.0), rel=0.1)


@pytest.mark.slow
def test_tenants_sample_by_their_weights_whatever_the_size_of_their_requests(tmp_path: Path) -> None:
    found, _ = shares(tmp_path, TimedPool(0.01, 0.0001), sample, 1, 2.0, 5.0, samples_per_worker_max=8)
    assert found.pop(HEAVY) == pytest.approx(WEIGHT, rel=0.1)
    assert found == pytest.approx(dict.fromkeys(found, 1.0), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "num_clients", "counted_s", "config"),
    [(train, 3, 2.2, {"cycle_tokens_max": 48}), (sample, 1, 5.0, {"samples_per_worker_max": 8})],
    ids=["train", "sample"],
)
def test_a_new_weight_holds_at_once(
    tmp_path: Path, work: Work, num_clients: int, counted_s: float, config: dict[str, int]
) -> None:
    pool = TimedPool(0.01, 0.0001)
    found, _ = shares(tmp_path, pool, work, num_clients, 1.0, counted_s, is_weight_new=True, **config)
    assert found.pop(HEAVY) == pytest.approx(WEIGHT, rel=0.1)
    assert found == pytest.approx(dict.fromkeys(found, 1.0), rel=0.1)


@pytest.mark.slow
def test_a_small_tenants_step_beside_one_that_fills_every_cycle_takes_twice_that_alone_and_the_budget_of_a_cycle(
    tmp_path: Path,
) -> None:
    """On slow hardware, where a budget at the knee would take two seconds, and as long again for samples."""
    pool, num_steps = TimedPool(0.1, 0.002), 5

    async def scenario(toys: ToyPool) -> tuple[list[float], list[float]]:
        loop = asyncio.get_running_loop()
        small, seqs = await toys.adapter("small"), itertools.count(1, 2)

        async def measure(num_missed: int) -> list[float]:
            """Return the seconds of steps that are submitted when `num_missed` passes without them have begun."""
            latencies = []
            for seq in itertools.islice(seqs, num_steps):
                num_passes = len(pool.passes) + num_missed
                while len(pool.passes) < num_passes:  # noqa: ASYNC110  # in virtual time
                    await asyncio.sleep(0.01)
                began = loop.time()
                await paired_step(toys, small, seq, (16,), "small")
                latencies.append(loop.time() - began)
            return latencies

        alone = await measure(0)
        clients = [loop.create_task(train(toys, "busy", 64)) for _ in range(16)]
        clients.append(loop.create_task(sample(toys, "busy", 50)))
        await asyncio.sleep(20.0)  # until the budget has settled
        beside = await measure(1) + await measure(3)
        for client in clients:
            client.cancel()
        return alone, beside

    alone, beside = in_virtual_time(tmp_path, pool, scenario)
    assert max(beside) <= 2 * max(alone) + CoordinatorConfig(data_dir=tmp_path).cycle_s_max
    most = max(num_tokens for began, num_tokens in pool.passes[-num_steps:])
    assert most > 10 * 16, "the large tenant makes progress"


@pytest.mark.slow
def test_a_small_tenants_sample_beside_one_that_fills_the_slots_with_equal_ones_takes_no_longer_than_alone(
    tmp_path: Path,
) -> None:
    """Equal samples that began together also end together, and the next ones begin: no slot is free in between."""
    pool, length, num_samples = TimedPool(0.01, 0.0001), 4, 12

    async def scenario(toys: ToyPool) -> tuple[list[float], list[float]]:
        loop = asyncio.get_running_loop()
        sampler = await toys.sampler(await toys.session("small"), tenant="small")
        busy, seqs = await toys.sampler(await toys.session("busy"), tenant="busy"), itertools.count(1)

        async def measure(first: int) -> list[float]:
            latencies = []
            for seq in range(first, first + num_samples):
                began = loop.time()
                name = await toys.sample(sampler, seq, tenant="small", max_tokens=length)
                await toys.wait(name, tenant="small")
                latencies.append(loop.time() - began)
                await asyncio.sleep(0.07)
            return latencies

        async def overload() -> None:
            for seq in seqs:
                await toys.wait(await toys.sample(busy, seq, tenant="busy", max_tokens=50), tenant="busy")

        alone = await measure(1)
        clients = [loop.create_task(overload()) for _ in range(24)]
        await asyncio.sleep(0.2)
        beside = await measure(1 + num_samples)
        for client in clients:
            client.cancel()
        return alone, beside

    alone, beside = in_virtual_time(tmp_path, pool, scenario, samples_per_worker_max=16)
    assert max(beside) < 2 * max(alone)
