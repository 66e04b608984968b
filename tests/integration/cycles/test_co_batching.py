"""How long a tenant waits for co-batched tenants: a real coordinator in virtual time, with passes of known duration."""

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
"""An upper bound of nearly every commit in virtual time."""


async def paired_loop(
    toys: ToyPool, tenant: str, num_steps: int, lengths: tuple[int, ...], away_s: tuple[float, float]
) -> list[int]:
    """Run steps with a pause between a result and the next request; return the cycle of each step."""
    random, adapter, cycles = Random(tenant), await toys.adapter(tenant), []
    for step in range(num_steps):
        cycles.append((await paired_step(toys, adapter, 1 + 2 * step, lengths, tenant)).cycle_id)
        await asyncio.sleep(random.uniform(*away_s))
    return cycles


def test_the_only_active_tenant_is_dispatched_at_once(tmp_path: Path) -> None:
    """Also after two other tenants have stopped: the coordinator does not wait for them."""
    pool, num_solo = TimedPool(FIXED_S, TOKEN_S), 10

    async def scenario(toys: ToyPool) -> list[float]:
        await asyncio.gather(*(paired_loop(toys, tenant, 8, (16,), (0.001, 0.01)) for tenant in ("bob", "carol")))
        await asyncio.sleep(60.0)
        adapter, submitted = await toys.adapter(), []
        await paired_step(toys, adapter, 1, (16,), "alice")  # the first one also installs
        for step in range(1, 1 + num_solo):
            submitted.append(asyncio.get_running_loop().time())
            await paired_step(toys, adapter, 1 + 2 * step, (16,), "alice")
        return submitted

    submitted = in_virtual_time(tmp_path, pool, scenario)
    assert [began for began, _ in pool.passes[-num_solo:]] == submitted


@pytest.mark.parametrize("tokens", [256, None])
def test_the_token_budget_bounds_a_small_tenants_latency_beside_one_with_a_hundred_times_its_tokens(
    tmp_path: Path, tokens: int | None
) -> None:
    pool, num_steps = TimedPool(FIXED_S, TOKEN_S), 60

    async def scenario(toys: ToyPool) -> tuple[list[float], int]:
        loop = asyncio.get_running_loop()
        busy, small, latencies = await toys.adapter("busy"), await toys.adapter("small"), []

        async def overload() -> None:
            sent: deque[str] = deque()
            for seq in itertools.count(1):
                sent.append(await toys.forward_backward(busy, seq, *[16] * 100, tenant="busy"))
                if len(sent) == 4:
                    await toys.wait(sent.popleft(), tenant="busy")

        overloading = loop.create_task(overload())
        for step in range(num_steps):
            await asyncio.sleep(0.05)
            began = loop.time()
            await paired_step(toys, small, 1 + 2 * step, (16,), "small")
            latencies.append(loop.time() - began)
        overloading.cancel()
        return latencies, toys.core.loops["toy"].planning.budget.tokens

    latencies, budget = in_virtual_time(tmp_path, pool, scenario, cycle_tokens_max=tokens)
    most = max(num_tokens for _, num_tokens in pool.passes)
    assert most <= (tokens or 2048), "passes are within the budget; a measured budget starts above the knee and falls"
    later = sorted(latencies[num_steps // 2 :])  # after a measured budget has settled
    cycle_s = FIXED_S + TOKEN_S * budget + COMMIT_S
    assert later[-1] < 2 * cycle_s, "the rest of the running cycle, and its own cycle"
    assert sum(num_tokens for _, num_tokens in pool.passes) > 30 * 16 * num_steps, "the large tenant makes progress"


def test_a_measured_budget_reaches_the_knee_from_the_cycles_of_ordinary_load(tmp_path: Path) -> None:
    pool = TimedPool(FIXED_S, TOKEN_S)

    async def scenario(toys: ToyPool) -> int:
        sizes = (1, 4, 16, 40)
        loops = [paired_loop(toys, f"t{n}", 25, (16,) * n, (0.0, 0.05)) for n in sizes]
        await asyncio.gather(*loops)
        return toys.core.loops["toy"].planning.budget.tokens

    knee = 20 * FIXED_S / TOKEN_S
    budget = in_virtual_time(tmp_path, pool, scenario)
    assert knee < budget < 20 * (FIXED_S + COMMIT_S) / TOKEN_S


def paced(tmp_path: Path, *, fixed_s: float, away_s: tuple[float, float], linger_s: float) -> tuple[float, float]:
    """Run eight paired loops; return cycles per step and seconds per step."""
    pool, num_steps = TimedPool(fixed_s, TOKEN_S), 40

    async def scenario(toys: ToyPool) -> None:
        loops = [paired_loop(toys, f"tenant-{index}", num_steps, (16,) * 4, away_s) for index in range(8)]
        await asyncio.gather(*loops)

    in_virtual_time(tmp_path / str(linger_s), pool, scenario, linger_s=linger_s)
    return len(pool.passes) / num_steps, (pool.passes[-1][0] - pool.passes[0][0]) / num_steps


def test_paired_loops_share_cycles_if_the_fixed_cost_of_a_cycle_exceeds_their_pauses(tmp_path: Path) -> None:
    apart_cycles, apart_s = paced(tmp_path, fixed_s=0.05, away_s=(0.004, 0.014), linger_s=0.0)
    cycles, seconds = paced(tmp_path, fixed_s=0.05, away_s=(0.004, 0.014), linger_s=0.03)
    assert cycles < 1.2 < 1.9 < apart_cycles
    assert seconds < 0.85 * apart_s


def test_paired_loops_alternate_if_their_pauses_exceed_the_fixed_cost_of_a_cycle(tmp_path: Path) -> None:
    """Half of them pause while the cycle of the others runs: the worker is never idle, and waiting would idle it."""
    apart_cycles, apart_s = paced(tmp_path, fixed_s=0.003, away_s=(0.01, 0.04), linger_s=0.0)
    cycles, seconds = paced(tmp_path, fixed_s=0.003, away_s=(0.01, 0.04), linger_s=0.03)
    assert cycles > 1.7, apart_cycles
    assert seconds < 1.1 * apart_s, "1.04 to 1.07 with six other draws of the pauses"
