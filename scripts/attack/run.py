"""One attack from start to end: a pool, its neighbour alone, the attack, and a stop while the attack goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from scripts.attack.attack import Attack, Target
from scripts.attack.attacker import Attacker
from scripts.attack.neighbour import Neighbour, Phase
from scripts.attack.pool import AttackedPool
from scripts.attack.probe import LoopFigures
from scripts.attack.report import Figures, figures_of

POLL_S = 0.02
FINISH_TIMEOUT_S = 60.0
"""For calls of the neighbour that began under the attack."""
HOLD_S = 1.0
"""Pause between a repeated attack and SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How attacks are run."""

    serve_arguments: tuple[str, ...] = ()
    scale: float = 1.0
    warm_up_s: float = 3.0
    solo_s: float = 12.0
    attack_s: float = 12.0
    """Shortest time under attack, and the length of attacks without a number of their own."""
    attack_s_max: float = 60.0
    after_s: float = 3.0
    """Pause between the end of an attack and the last measurement of memory."""
    memory_bytes_max: int = 4 << 30
    """The attack is stopped when the coordinator has more."""


class MemoryWatch:
    """Samples the coordinator's memory on a thread. Above the limit it stops the attack, far above it the pool."""

    def __init__(self, pool: AttackedPool, bytes_max: int) -> None:
        self.peak_bytes = 0
        self.stopped_at_bytes = 0
        self._pool, self._bytes_max = pool, bytes_max
        self._stop_attack: Callable[[], None] = lambda: None
        self._ending = threading.Event()

    def begin(self, stop_attack: Callable[[], None]) -> None:
        """Measure a new peak; call this above the limit."""
        self.peak_bytes, self._stop_attack = 0, stop_attack

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Sample until the block ends."""
        thread = threading.Thread(target=self._sample, name="memory", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ending.set()
            thread.join()

    def _sample(self) -> None:
        while not self._ending.wait(POLL_S):
            num_bytes = self._pool.memory_bytes()
            self.peak_bytes = max(self.peak_bytes, num_bytes)
            if num_bytes > self._bytes_max and not self.stopped_at_bytes:
                self.stopped_at_bytes = num_bytes
                self._stop_attack()
            if num_bytes > 2 * self._bytes_max:
                self._pool.kill()


def run_attacks(attacks: Sequence[Attack], plan: Plan) -> list[Figures]:
    """Run attacks one after the other on one pool. The last one goes on while the pool is stopped, if it is held.

    Raises PoolEnded if the pool does not start.
    """
    files_max = min((each.files_max for each in attacks if each.files_max is not None), default=None)
    is_tls = any(each.is_tls for each in attacks)
    arguments = plan.serve_arguments + tuple(each for attack in attacks for each in attack.serve_arguments)
    disk_bytes = next((each.disk_bytes for each in attacks if each.disk_bytes is not None), None)
    with AttackedPool(arguments, files_max, is_tls=is_tls, disk_bytes=disk_bytes) as pool:
        watch = MemoryWatch(pool, plan.memory_bytes_max)
        target = Target(
            grpc=pool.grpc,
            http=pool.http,
            key="",
            model=pool.model,
            scale=plan.scale,
            duration_s=plan.attack_s,
        )
        with watch.watching(), Neighbour(pool, pool.create_key("neighbour")) as neighbour:
            time.sleep(plan.warm_up_s)
            idle_bytes = pool.memory_bytes()
            pool.probe.reset()
            solo = neighbour.begin()
            time.sleep(plan.solo_s)
            neighbour.finish(solo, FINISH_TIMEOUT_S)
            solo_loop = pool.probe.read()
            done = []
            for attack in attacks:
                if pool.exit_code is None:
                    # A tenant of its own, so that an attack does not meet what the one before left.
                    target.key = pool.create_key(f"attacker-{attack.name}")
                    done.append(_attacked(attack, plan, pool, target, neighbour, watch))
        exit_code = pool.exit_code
        stop_s = _stopped_under_attack(attacks[-1], pool, target) if exit_code is None else None
        return [
            figures_of(
                each.attack,
                plan.scale,
                phases=(solo, each.phase),
                loops=(solo_loop, each.loop),
                memory_bytes=(idle_bytes, each.peak_bytes, each.after_bytes),
                more={
                    "stopped_at_bytes": watch.stopped_at_bytes,
                    "stop_s": stop_s,
                    "exit_code": exit_code,
                    "log_bytes": each.log_bytes,
                    "attack_s": each.attack_s,
                    "tally": each.tally,
                    "note": each.note,
                },
            )
            for each in done
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attacked:
    attack: Attack
    phase: Phase
    loop: LoopFigures
    peak_bytes: int
    after_bytes: int
    log_bytes: int
    attack_s: float
    tally: dict[str, int]
    note: str


def _attacked(
    attack: Attack, plan: Plan, pool: AttackedPool, target: Target, neighbour: Neighbour, watch: MemoryWatch
) -> _Attacked:
    """Attack, wait for the neighbour's calls, and return the measurements."""
    attacker = Attacker(attack, target)
    watch.begin(attacker.kill)
    is_prepared = attacker.wait_ready()
    with contextlib.suppress(EOFError, OSError):
        pool.probe.reset()
    watch.begin(attacker.kill)
    log_bytes = pool.log_bytes
    phase, begin = neighbour.begin(), time.monotonic()
    attacker.go()
    while time.monotonic() < begin + plan.attack_s or not attacker.has_finished():
        if pool.exit_code is not None or time.monotonic() > begin + plan.attack_s_max:
            break
        time.sleep(POLL_S)
    attack_s = time.monotonic() - begin
    note = "" if is_prepared else "the preparation did not end"
    neighbour.finish(phase, FINISH_TIMEOUT_S if pool.exit_code is None else 0.0)
    loop = LoopFigures()
    with contextlib.suppress(EOFError, OSError):
        loop = pool.probe.read()
    if attack.observe is not None:
        note = attack.observe(pool)
    peak_bytes, log_bytes = watch.peak_bytes, pool.log_bytes - log_bytes
    tally = attacker.stop()
    time.sleep(plan.after_s)
    return _Attacked(
        attack=attack,
        phase=phase,
        loop=loop,
        peak_bytes=peak_bytes,
        after_bytes=pool.memory_bytes(),
        log_bytes=log_bytes,
        attack_s=attack_s,
        tally=dict(tally),
        note=note,
    )


def _stopped_under_attack(attack: Attack, pool: AttackedPool, target: Target) -> float | None:
    """Stop the pool, while a repetition of the attack goes on if it is held. See `AttackedPool.stop`."""
    if not attack.is_held:
        return pool.stop()
    attacker = Attacker(attack, target)
    attacker.wait_ready()
    attacker.go()
    attacker.wait_finished(target.duration_s + FINISH_TIMEOUT_S)
    time.sleep(HOLD_S)
    try:
        return pool.stop()
    finally:
        attacker.kill()
