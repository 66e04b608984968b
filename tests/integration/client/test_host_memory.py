"""More adapters than a worker has memory for take turns on it, and get the bits that they get without a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

import tinkerpool
from tests.support.served_pool import ServedPool, shipped_pool
from workers.contract.messages import Batch, BatchResult

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HOST_BYTES_MAX = 50_000_000
NUM_ADAPTERS, NUM_ROUNDS = 10, 2
ADAM = tinkerpool.AdamParams(learning_rate=1e-3)


def recorded(pool: ServedPool) -> list[int]:
    """Return a list to which every batch adds the bytes that its worker holds."""
    held, run = list[int](), pool.coordinator.core.pool.run

    async def run_and_record(worker_id: str, batch: Batch) -> BatchResult:
        result = await run(worker_id, batch)
        held.append(result.held_bytes)
        return result

    pool.coordinator.core.pool.run = run_and_record  # type: ignore[method-assign]
    return held


def train(pool: ServedPool) -> dict[str, list[float]]:
    """Train adapters of rank 128 in rounds, half of them at a time; return metrics and samples of each."""
    found: dict[str, list[float]] = {}
    with pool.client("alice") as service:
        clients = [service.create_lora_training_client("kjv-2m", rank=128, seed=n) for n in range(NUM_ADAPTERS)]
        for round_index in range(NUM_ROUNDS):
            for half in (clients[::2], clients[1::2]):
                futures = []
                for client in half:
                    number = clients.index(client)
                    tokens = [(7 * number + 3 * each + round_index) % 900 + 1 for each in range(17)]
                    datum = tinkerpool.Datum(tokens[:-1], {"target_tokens": tokens[1:]})
                    futures.append((number, client.forward_backward([datum], "cross_entropy"), client.optim_step(ADAM)))
                for number, forward, step in futures:
                    metrics = (forward.result(120).metrics["loss:sum"], step.result(120).metrics["grad_norm:last"])
                    found.setdefault(str(number), []).extend(metrics)
    return found


def test_adapters_beyond_a_workers_memory_are_kept_on_disk_and_their_bits_are_those_without_a_limit(
    tmp_path: Path,
) -> None:
    with shipped_pool(tmp_path / "bounded", num_slots=64, host_bytes_max=HOST_BYTES_MAX) as pool:
        held = recorded(pool)
        bounded = train(pool)
        assert len(pool.coordinator.core.registry.logs) == NUM_ADAPTERS
    with shipped_pool(tmp_path / "free", num_slots=64) as pool:
        unbounded = recorded(pool)
        assert train(pool) == bounded
    assert max(held) <= HOST_BYTES_MAX < max(unbounded)
