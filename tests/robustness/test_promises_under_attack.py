"""Poison, a full disk and a stop while the pool is attacked: what is promised without attacks holds.

The pool is a process of its own with an engine without a model. Two attackers work all the time: one without a key, and
one tenant. What is checked does not depend on the machine's speed.
"""

from __future__ import annotations

import resource
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

import tinkerpool
from scripts.attack.attack import Target
from scripts.attack.attacker import Attacker
from scripts.attack.attacks import ATTACKS
from scripts.attack.neighbour import Neighbour, Phase
from scripts.attack.pool import STOP_LIMIT_S, AttackedPool
from tests.support.serving import TOY
from tests.support.toy_engine import KILL_TOKEN
from tinkerpool import AdamParams, Datum, OperationFailed

BESIDE = ("unknown-keys-grpc", "exports")
SCALE = 0.1
NUM_POISON = 1
NUM_FILLS = 1
FULL_S = 0.2
FINISH_S = 60.0
NUM_CALLS = 3
"""Calls of the neighbour that must have succeeded after the last fault."""

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("attacks")]


@pytest.fixture(scope="module")
def pool() -> Iterator[AttackedPool]:
    """Return a pool; the last test stops it."""
    with AttackedPool(TOY[:4], None) as pool:
        yield pool


@pytest.fixture
def neighbour(pool: AttackedPool) -> Iterator[Neighbour]:
    with Neighbour(pool, pool.create_key("neighbour")) as neighbour, attacked(pool):
        yield neighbour


@contextmanager
def attacked(pool: AttackedPool) -> Iterator[None]:
    """Attack the pool until the block ends."""
    attackers = []
    try:
        for name in BESIDE:
            facts: dict[str, Any] = {
                "grpc": pool.grpc,
                "http": pool.http,
                "model": pool.model,
                "key": pool.create_key(name),
            }
            attackers.append(Attacker(ATTACKS[name], Target(**facts, scale=SCALE, duration_s=600.0)))
            assert attackers[-1].wait_ready()
            attackers[-1].go()
        yield
        assert not any(attacker.has_finished() for attacker in attackers), "an attack has ended before its time"
    finally:
        for attacker in attackers:
            attacker.kill()


def finish(neighbour: Neighbour, phase: Phase) -> None:
    """End a phase after some more calls; check that no call of it failed."""
    num_before = {kind: len(times) for kind, times in phase.seconds.items()}
    deadline = time.monotonic() + FINISH_S
    while len(phase.seconds["step"]) < num_before.get("step", 0) + NUM_CALLS and time.monotonic() < deadline:
        time.sleep(0.02)
    neighbour.finish(phase, FINISH_S)
    assert not phase.reasons
    assert len(phase.seconds["step"]) >= NUM_CALLS


def test_poison_under_attack_fails_alone(pool: AttackedPool, neighbour: Neighbour) -> None:
    phase = neighbour.begin()
    poison = Datum([KILL_TOKEN], {"target_tokens": [1], "weights": [1.0]})
    with tinkerpool.ServiceClient(pool.url, pool.create_key("poisoner")) as service:
        client = service.create_lora_training_client(rank=8)
        for _ in range(NUM_POISON):
            step = client.train_step([poison], "cross_entropy", AdamParams())
            with pytest.raises(OperationFailed, match="ended its worker each time"):
                step.result(FINISH_S)
    finish(neighbour, phase)
    assert pool.exit_code is None


def test_a_full_disk_under_attack_corrupts_nothing_and_fails_no_call(pool: AttackedPool, neighbour: Neighbour) -> None:
    """The full disk is a limit on the size of files (RLIMIT_FSIZE): half of the log's, which begins anew when long."""
    unlimited = resource.RLIM_INFINITY
    phase = neighbour.begin()
    for fill in range(NUM_FILLS):
        size = max(path.stat().st_size for path in pool.data_dir.glob("tinkerpool.db*")) // 2
        num_refused = pool.log_text().count("the disk is full")
        resource.prlimit(pool.pid, resource.RLIMIT_FSIZE, (size + fill * 4096, unlimited))
        deadline = time.monotonic() + FINISH_S
        while pool.log_text().count("the disk is full") == num_refused and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(FULL_S)
        resource.prlimit(pool.pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))
        assert pool.log_text().count("the disk is full") > num_refused
        num_steps = len(phase.seconds["step"])
        while len(phase.seconds["step"]) < num_steps + 2 and time.monotonic() < deadline:  # one began before
            time.sleep(0.01)  # the pool says once that its disk is full, and again after a write that succeeded
    finish(neighbour, phase)
    assert pool.exit_code is None
    with closing(sqlite3.connect(pool.data_dir / "tinkerpool.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_stop_under_attack_is_in_time_and_leaves_nothing_to_replay(pool: AttackedPool) -> None:
    datum = Datum([1], {"target_tokens": [1], "weights": [1.0]})
    with tinkerpool.ServiceClient(pool.url, pool.create_key("stopped")) as service, attacked(pool):
        client = service.create_lora_training_client(rank=8)
        steps = [client.train_step([datum], "cross_entropy", AdamParams()) for _ in range(20)]
        steps[NUM_CALLS].result(FINISH_S)
        stop_s = pool.stop()
    assert stop_s is not None
    assert stop_s < STOP_LIMIT_S
    assert pool.exit_code == 0
    with closing(sqlite3.connect(pool.data_dir / "tinkerpool.db")) as database:
        applied = "SELECT MAX(seq) FROM operations WHERE target_id = ? AND outcome_bytes IS NOT NULL"
        covered = "SELECT seq FROM snapshots WHERE adapter_id = ?"
        adapter = (client.model_id,)
        assert database.execute(applied, adapter).fetchone() == database.execute(covered, adapter).fetchone()
