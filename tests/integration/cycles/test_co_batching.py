"""Who waits how long for whom: a real coordinator in virtual time, and a worker whose passes take what a line says."""

import asyncio
import itertools
from collections import deque
from pathlib import Path
from random import Random

import pytest

from tests.support.timed_pool import TimedPool, in_virtual_time, paired_step
from tests.support.toy_pool import ToyPool

pytestmark = pytest.mark.slow

FIXED_S, TOKEN_S = 0.012, 0.0002
COMMIT_S = 0.02
"""More than a commit takes in virtual time, nearly always."""


async def paired_loop(
    toys: ToyPool, tenant: str, num_steps: int, lengths: tuple[int, ...], away_s: tuple[float, float]
) -> list[int]:
    """Step after step, with a pause between one's result and the next one's request. Returns the steps' cycles."""
    random, adapter, cycles = Random(tenant), await toys.adapter(tenant), []
    for step in range(num_steps):
        cycles.append((await paired_step(toys, adapter, 1 + 2 * step, lengths, tenant)).cycle_id)
        await asyncio.sleep(random.uniform(*away_s))
    return cycles


def test_the_only_active_tenant_is_dispatched_at_once(tmp_path: Path) -> None:
    """Also after company: a tenant that has gone is not waited for."""
    pool, num_alone = TimedPool(FIXED_S, TOKEN_S), 10

    async def body(toys: ToyPool) -> list[float]:
        await asyncio.gather(*(paired_loop(toys, tenant, 8, (16,), (0.001, 0.01)) for tenant in ("bob", "carol")))
        await asyncio.sleep(60.0)
        adapter, submitted = await toys.adapter(), []
        await paired_step(toys, adapter, 1, (16,), "alice")  # the first one also installs
        for step in range(1, 1 + num_alone):
            submitted.append(asyncio.get_running_loop().time())
            await paired_step(toys, adapter, 1 + 2 * step, (16,), "alice")
        return submitted

    submitted = in_virtual_time(tmp_path, pool, body)
    assert [began for began, _ in pool.passes[-num_alone:]] == submitted


@pytest.mark.parametrize("tokens", [256, None])
def test_a_hog_with_a_hundred_times_the_tokens_leaves_a_small_tenant_a_latency_bounded_by_the_budget(
    tmp_path: Path, tokens: int | None
) -> None:
    pool, num_steps = TimedPool(FIXED_S, TOKEN_S), 60

    async def body(toys: ToyPool) -> tuple[list[float], int]:
        loop = asyncio.get_running_loop()
        hog, small, latencies = await toys.adapter("hog"), await toys.adapter("small"), []

        async def be_a_hog() -> None:
            sent: deque[str] = deque()
            for seq in itertools.count(1):
                sent.append(await toys.forward_backward(hog, seq, *[16] * 100, tenant="hog"))
                if len(sent) == 4:
                    await toys.wait(sent.popleft(), tenant="hog")

        hogging = loop.create_task(be_a_hog())
        for step in range(num_steps):
            await asyncio.sleep(0.05)
            began = loop.time()
            await paired_step(toys, small, 1 + 2 * step, (16,), "small")
            latencies.append(loop.time() - began)
        hogging.cancel()
        return latencies, toys.core.loops["toy"].planning.budget.tokens

    latencies, budget = in_virtual_time(tmp_path, pool, body, cycle_tokens_max=tokens)
    most = max(num_tokens for _, num_tokens in pool.passes)
    assert most <= (tokens or 2048), "the budget holds, and the knee is below where it begins"
    later = sorted(latencies[num_steps // 2 :])  # a measured budget has been found by then
    cycle_s = FIXED_S + TOKEN_S * budget + COMMIT_S
    assert later[-1] < 2 * cycle_s, "the rest of the cycle that it just missed, and its own"
    assert sum(num_tokens for _, num_tokens in pool.passes) > 30 * 16 * num_steps, "the hog is served"


def test_a_measured_budget_finds_the_knee_from_cycles_as_they_come(tmp_path: Path) -> None:
    pool = TimedPool(FIXED_S, TOKEN_S)

    async def body(toys: ToyPool) -> int:
        sizes = (1, 4, 16, 40)
        loops = [paired_loop(toys, f"t{n}", 25, (16,) * n, (0.0, 0.05)) for n in sizes]
        await asyncio.gather(*loops)
        return toys.core.loops["toy"].planning.budget.tokens

    knee = 20 * FIXED_S / TOKEN_S
    budget = in_virtual_time(tmp_path, pool, body)
    assert knee < budget < 20 * (FIXED_S + COMMIT_S) / TOKEN_S


def paced(tmp_path: Path, *, fixed_s: float, away_s: tuple[float, float], linger_s: float) -> tuple[float, float]:
    """Eight paired loops: cycles per step, and seconds per step."""
    pool, num_steps = TimedPool(fixed_s, TOKEN_S), 40

    async def body(toys: ToyPool) -> None:
        loops = [paired_loop(toys, f"tenant-{index}", num_steps, (16,) * 4, away_s) for index in range(8)]
        await asyncio.gather(*loops)

    in_virtual_time(tmp_path / str(linger_s), pool, body, linger_s=linger_s)
    return len(pool.passes) / num_steps, (pool.passes[-1][0] - pool.passes[0][0]) / num_steps


def test_paired_loops_share_cycles_where_what_is_fixed_costs_more_than_their_absence(tmp_path: Path) -> None:
    apart_cycles, apart_s = paced(tmp_path, fixed_s=0.05, away_s=(0.004, 0.014), linger_s=0.0)
    cycles, seconds = paced(tmp_path, fixed_s=0.05, away_s=(0.004, 0.014), linger_s=0.03)
    assert cycles < 1.2 < 1.9 < apart_cycles
    assert seconds < 0.85 * apart_s


def test_paired_loops_alternate_where_their_absence_costs_more_than_what_is_fixed(tmp_path: Path) -> None:
    """Half of them are away while the others' cycle runs: nothing is idle, and waiting would only make it so."""
    apart_cycles, apart_s = paced(tmp_path, fixed_s=0.003, away_s=(0.01, 0.04), linger_s=0.0)
    cycles, seconds = paced(tmp_path, fixed_s=0.003, away_s=(0.01, 0.04), linger_s=0.03)
    assert cycles > 1.7, apart_cycles
    assert seconds < 1.05 * apart_s
