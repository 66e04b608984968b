"""The phases of a run: one small tenant alone, beside a hog, and all tenants at once for minutes.

Main invariant: shares are counted between two readings of the committed usage, while every client has requests queued.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.base.config import CoordinatorConfig
from scripts.reliability.load.clients import ClientPlan, Record
from scripts.reliability.load.figures import Memory
from scripts.reliability.load.generators import Generators
from scripts.reliability.load.pool import LoadedPool, Usage

HEAVY, SMALL, HOG = "heavy", "small", "hog"
HEAVY_WEIGHT = 2.0
TRAINERS, SAMPLERS = 3, 2
"""Clients of a tenant that train, and that sample."""
PASS_TOKENS = (64, 32, 128)
"""Tokens of a step: tenants differ, so that equal shares are of tokens and not of requests."""
PROMPT_TOKENS, DRAWN_TOKENS = 16, 24
STEPS_AHEAD, SAMPLES_AHEAD = 2, 4
"""Requests in flight of one client: with these every tenant always has a step and a sample queued."""
HOG_TRAINERS, HOG_STEPS, HOG_TOKENS = 60, 4, 256
HOG_SAMPLERS, HOG_SAMPLES, HOG_DRAWN = 5, 64, 128
"""The hog's clients, their requests in flight and their tokens: more than the pool can do in minutes."""
WARM_UP = 0.05
"""Part of the time of a phase before shares are counted: until all queues are full."""
PROCESSES = 2
SHOWN_S = 30.0
CYCLE_S_MAX = CoordinatorConfig(data_dir=Path()).cycle_s_max


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What was measured while some clients ran."""

    record: Record
    memory: Memory
    first: Usage
    last: Usage
    seconds: float
    """Between the two readings of the usage."""
    cycles_s: list[float]
    """Of cycles that ran meanwhile, some seconds apart."""

    @property
    def num_cycles(self) -> int:
        """Cycles between the two readings."""
        return self.last.cycle_id - self.first.cycle_id


def tenants(num_tenants: int) -> dict[str, float]:
    """Return the tenants of a run and their weights."""
    names = [HEAVY, *(f"tenant-{number}" for number in range(1, num_tenants))]
    return {name: HEAVY_WEIGHT if name == HEAVY else 1.0 for name in [*names, SMALL, HOG]}


def small_plans(pool: LoadedPool) -> Iterator[ClientPlan]:
    """Yield the clients of a small tenant: one step, and one sample, after another."""
    key = pool.keys[SMALL]
    yield ClientPlan(name="small trains", key=key, trains=True, num_tokens=PASS_TOKENS[0])
    yield ClientPlan(name="small samples", key=key, trains=False, num_tokens=PROMPT_TOKENS, num_drawn=DRAWN_TOKENS)


def hog_plans(pool: LoadedPool) -> Iterator[ClientPlan]:
    """Yield the clients of a tenant that queues as much as it can."""
    key = pool.keys[HOG]
    for _ in range(HOG_TRAINERS):
        yield ClientPlan(name="hog trains", key=key, trains=True, num_tokens=HOG_TOKENS, in_flight=HOG_STEPS)
    for _ in range(HOG_SAMPLERS):
        yield ClientPlan(
            name="hog samples",
            key=key,
            trains=False,
            num_tokens=PROMPT_TOKENS,
            num_drawn=HOG_DRAWN,
            in_flight=HOG_SAMPLES,
        )


def all_plans(pool: LoadedPool) -> Iterator[ClientPlan]:
    """Yield the clients of all tenants but the small one and the hog."""
    names = [name for name in pool.keys if name not in {SMALL, HOG}]
    for number, name in enumerate(names):
        tokens = PASS_TOKENS[number % len(PASS_TOKENS)]
        for _ in range(TRAINERS):
            yield ClientPlan(name="trains", key=pool.keys[name], trains=True, num_tokens=tokens, in_flight=STEPS_AHEAD)
        for _ in range(SAMPLERS):
            yield ClientPlan(
                name="samples",
                key=pool.keys[name],
                trains=False,
                num_tokens=PROMPT_TOKENS,
                num_drawn=DRAWN_TOKENS,
                in_flight=SAMPLES_AHEAD,
            )


def run_phase(
    pool: LoadedPool,
    plans: Sequence[ClientPlan],
    seconds: float,
    show: Callable[[str], None],
    warm_up: float = WARM_UP,
) -> Phase:
    """Run clients for some seconds, then let them finish what they began."""
    memory, cycles_s, first = Memory(idle_bytes=pool.memory_bytes()), [], None
    with Generators(pool.grpc, pool.model, plans, PROCESSES) as generators:
        began = shown = time.monotonic()
        generators.go()
        first_at = began
        while (now := time.monotonic()) < began + seconds:
            time.sleep(min(1.0, seconds / 50, began + seconds - now))
            memory.readings.append(pool.memory_bytes())
            if first is None and time.monotonic() >= began + warm_up * seconds:
                first, first_at = pool.usage(), time.monotonic()
            if time.monotonic() >= shown + SHOWN_S:
                shown, usage = time.monotonic(), pool.usage()
                cycles_s.append(usage.cycle_s)
                show(_progress(usage, shown - began, memory.readings[-1]))
        assert first is not None
        last, last_at = pool.usage(), time.monotonic()
        cycles_s.append(last.cycle_s)
        record = generators.stop()
    return Phase(record=record, memory=memory, first=first, last=last, seconds=last_at - first_at, cycles_s=cycles_s)


def _progress(usage: Usage, seconds: float, num_bytes: int) -> str:
    tokens = ", ".join(f"{kind} {sum(each.values()):,} tokens" for kind, each in usage.tokens.items())
    return f"  {seconds:.0f} s: cycle {usage.cycle_id}, {tokens}, {num_bytes >> 20} MiB"
