"""However large an adapter is, the coordinator has a piece of it in memory, and the adapter keeps its bits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

import tinkerpool
from scripts.embedded_pool import EmbeddedPool
from scripts.pool_process import free_port
from tests.support.mini_model import PAD_ID, VOCAB_SIZE_MIN, write_random_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.xdist_group("large rows")]
MIB = 1 << 20
RANK, HIDDEN, NUM_EXPERTS = 64, 64, 8
WAIT_S = 300.0
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
DATUM = tinkerpool.Datum(TOKENS[:-1], {"target_tokens": TOKENS[1:]})
ADAM = tinkerpool.AdamParams(learning_rate=1e-3)


def write_mixture(directory: Path, row_mib: int, num_layers: int) -> Path:
    """Write a mixture with a tiny vocabulary; weights and moments of an adapter on it take so many MiB."""
    num_values = row_mib * MIB // (3 * 4)
    intermediate = num_values // (RANK * 3 * NUM_EXPERTS * num_layers) // 32 * 32
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE_MIN,
        hidden_size=HIDDEN,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=intermediate,
        norm_topk_prob=True,
        bos_token_id=None,
        pad_token_id=PAD_ID,
    )
    return write_random_model(directory, config)


class Coordinator:
    """A pool's coordinator, with the peaks of its memory."""

    def __init__(self, pool: EmbeddedPool) -> None:
        self.grown_mib: dict[str, int] = {}
        """What it did to by how much larger than an idle one it was at most."""
        self._pool = pool
        self._idle = 0

    def note_idle(self) -> None:
        """Take its present size for that of an idle one, and begin to measure."""
        self._idle = self._bytes("VmRSS")
        self._reset()

    def did(self, what: str) -> None:
        """Note by how much larger than an idle one it was at most since the last call."""
        self.grown_mib[what] = (self._bytes("VmHWM") - self._idle) // MIB
        self._reset()

    def _bytes(self, name: str) -> int:
        lines = Path(f"/proc/{self._pool.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

    def _reset(self) -> None:
        Path(f"/proc/{self._pool.pid}/clear_refs").write_text("5")  # VmHWM begins again


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder on a disk: `tmp_path` may be in memory."""
    with tempfile.TemporaryDirectory(prefix="tinkerpool-rows-") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("row_mib", "num_layers", "most_mib"),
    [
        pytest.param(48, 1, 90, marks=pytest.mark.timeout(300)),
        pytest.param(1024, 8, 120, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
)
def test_a_row_passes_through_the_coordinator_in_pieces_and_keeps_its_bits(
    folder: Path, row_mib: int, num_layers: int, most_mib: int
) -> None:
    model = write_mixture(folder / "model", row_mib, num_layers)
    copy_bytes = row_mib * MIB * 4 // 3
    arguments = ["--model", f"mixture={model}", "--threads", "1", "--host-memory", str(copy_bytes * 3 // 2)]
    arguments += ["--no-http", "--port", str(free_port()), "--data-dir", str(folder / "pool")]
    pool = EmbeddedPool(folder)
    pool.begin(*arguments)
    coordinator = Coordinator(pool)
    try:
        pool.wait_ready()
        coordinator.note_idle()
        with tinkerpool.ServiceClient(pool.url, pool.admin_key) as service:
            train_through_all_ways(service, coordinator, folder)
            if row_mib >= 1024:
                client = service.create_lora_training_client("mixture", rank=RANK, seed=3, train_unembed=False)
                step(client)
                client.save_state("before").result(WAIT_S)
                step(client)
                expected = loss(client)
                pool.kill()
                pool.begin(*arguments)
                pool.wait_ready()
                coordinator.note_idle()
                assert loss(client) == expected
                coordinator.did("recovery")
    finally:
        if pool.exit_code is None:
            pool.stop(60.0)
    assert max(coordinator.grown_mib.values()) <= most_mib, coordinator.grown_mib


def step(client: tinkerpool.TrainingClient) -> float:
    """Take a step; return its loss."""
    result = client.train_step([DATUM], "cross_entropy", ADAM).result(WAIT_S)
    return result.forward_backward.metrics["loss:sum"]


def loss(client: tinkerpool.TrainingClient) -> float:
    return client.forward([DATUM], "cross_entropy").result(WAIT_S).metrics["loss:sum"]


def train_through_all_ways(service: tinkerpool.ServiceClient, coordinator: Coordinator, folder: Path) -> None:
    """Move an adapter in every way, where one has room on the worker; note what each took."""
    first, second = (
        service.create_lora_training_client("mixture", rank=RANK, seed=seed, train_unembed=False) for seed in (1, 2)
    )
    step(first)
    saved = first.save_state("saved").result(WAIT_S).path
    coordinator.did("save")
    losses = step(first), loss(first)
    step(second)
    coordinator.did("snapshot, to make room")
    assert loss(first) == losses[1]
    coordinator.did("install")
    first.load_state_with_optimizer(saved).result(WAIT_S)
    coordinator.did("load")
    assert (step(first), loss(first)) == losses
    sampler = first.save_weights_and_get_sampling_client("published")
    prompt, greedy = tinkerpool.ModelInput.from_ints(TOKENS), tinkerpool.SamplingParams(max_tokens=4, temperature=0.0)
    tokens = sampler.sample(prompt, 1, greedy).result(WAIT_S).sequences[0].tokens
    coordinator.did("publish")
    step(second)
    assert sampler.sample(prompt, 1, greedy).result(WAIT_S).sequences[0].tokens == tokens
    coordinator.did("sample from a file")
    rest = service.create_rest_client()
    out = rest.export_checkpoint(saved, folder / "out").result(WAIT_S)
    coordinator.did("download")
    rest.import_checkpoint(out).result(WAIT_S)
    coordinator.did("import")
    copy = service.create_training_client_from_state_with_optimizer(saved)
    assert (step(copy), loss(copy)) == losses
    coordinator.did("start from a checkpoint")
