"""Client, gRPC, coordinator, engine and checkpoints together, with the shipped model and concurrent tenants."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinkerpool
from tests.support.served_pool import ServedPool, shipped_pool
from tests.support.serving import Terminal
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

TEXT = "In the beginning God created the heaven and the earth.\n"


def datum(tokenizer: Any, text: str = TEXT) -> tinkerpool.Datum:
    tokens = tokenizer.encode(text)
    return tinkerpool.Datum(
        tinkerpool.ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def logprobs(client: tinkerpool.TrainingClient, data: list[tinkerpool.Datum]) -> list[np.ndarray[Any, Any]]:
    output = client.forward(data, "cross_entropy").result(60)
    return [entry["logprobs"].to_numpy() for entry in output.loss_fn_outputs]


def train(client: tinkerpool.TrainingClient, text: str, num_steps: int, learning_rate: float = 5e-3) -> list[float]:
    data = [datum(client.get_tokenizer(), text)]
    losses = []
    for _ in range(num_steps):
        passed = client.forward_backward(data, "cross_entropy")
        step = client.optim_step(tinkerpool.AdamParams(learning_rate=learning_rate))
        losses.append(passed.result(60).metrics["loss:sum"])
        assert step.result(60).metrics is not None
    return losses


def test_a_co_batched_tenant_gets_the_same_bits_as_solo(pool: ServedPool) -> None:
    texts = [TEXT, "The LORD is my shepherd; I shall not want.\n", "Let there be light: and there was light.\n"]

    def run(index: int, results: dict[int, Any], steps: int = 5) -> None:
        with pool.client(f"tenant{index}") as service:
            client = service.create_lora_training_client(rank=[4, 8, 16][index], seed=index)
            losses = train(client, texts[index], steps)
            results[index] = (losses, logprobs(client, [datum(client.get_tokenizer(), texts[index])])[0])

    co_batched: dict[int, Any] = {}
    threads = [threading.Thread(target=run, args=(index, co_batched)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    solo: dict[int, Any] = {}
    run(1, solo)
    assert all(losses[-1] < losses[0] for losses, _ in co_batched.values())
    assert co_batched[1][0] == solo[1][0]
    assert co_batched[1][1].tobytes() == solo[1][1].tobytes()


def test_a_pair_takes_one_cycle_and_an_awaited_loop_two(pool: ServedPool) -> None:
    with pool.client("alice") as service:
        client = service.create_lora_training_client(rank=4)
        data = [datum(client.get_tokenizer())]
        steps = []
        for _ in range(5):  # a busy machine may take longer between two requests than a cycle waits for the second
            pair = client.forward_backward(data, "cross_entropy"), client.optim_step()
            steps.append({future.result(60).metrics["clock_cycle:unique"] for future in pair})
        first = client.forward_backward(data, "cross_entropy").result(60).metrics["clock_cycle:unique"]
        second = client.optim_step().result(60).metrics["clock_cycle:unique"]
    assert any(len(cycles) == 1 for cycles in steps)
    assert first < second


def test_a_saved_state_is_loaded_bit_for_bit(pool: ServedPool) -> None:
    with pool.client("alice") as service:
        client = service.create_lora_training_client(rank=8, seed=3)
        data = [datum(client.get_tokenizer())]
        train(client, TEXT, 3)
        saved = client.save_state("before").result(60)
        before = logprobs(client, data)[0]
        more = train(client, TEXT, 2)
        client.load_state_with_optimizer(saved.path).result(60)
        assert logprobs(client, data)[0].tobytes() == before.tobytes()
        assert train(client, TEXT, 2) == more
        resumed = service.create_training_client_from_state_with_optimizer(saved.path)
        assert logprobs(resumed, data)[0].tobytes() == before.tobytes()
        assert train(resumed, TEXT, 2) == more


def continued(
    pool: ServedPool, key: str, path: str, folder: Path
) -> tuple[dict[str, bytes], dict[str, bytes], list[float]]:
    """Train on from a checkpoint; return the files of that checkpoint and of the last one, and the losses."""
    with tinkerpool.ServiceClient(base_url=pool.url, api_key=key) as service:
        client = service.create_training_client_from_state_with_optimizer(path)
        losses = train(client, TEXT, 3)
        last = client.save_state("continued").result(60).path
        return exported(service, path, folder / "first"), exported(service, last, folder / "last"), losses


def exported(service: tinkerpool.ServiceClient, path: str, folder: Path) -> dict[str, bytes]:
    written = service.create_rest_client().export_checkpoint(path, folder).result(60)
    return {file.name: file.read_bytes() for file in written.glob("adapter_*")}


def test_a_backup_under_load_restores_the_same_bits_and_a_continued_run_has_the_same(
    pool: ServedPool, tmp_path: Path
) -> None:
    terminal = Terminal(tmp_path / "home")
    data_dir = pool.coordinator.core.config.data_dir
    num_done, is_over, alice, bob = [0], threading.Event(), pool.key("alice"), pool.key("bob")

    def load() -> None:
        with tinkerpool.ServiceClient(base_url=pool.url, api_key=bob) as service:
            client = service.create_lora_training_client(rank=4, seed=1)
            while not is_over.is_set():
                train(client, TEXT, 1)
                client.save_state(f"step{num_done[0]}").result(60)
                num_done[0] += 1

    with tinkerpool.ServiceClient(base_url=pool.url, api_key=alice) as service:
        client = service.create_lora_training_client(rank=8, seed=3)
        train(client, TEXT, 3)
        path = client.save_state("middle").result(60).path
    thread = threading.Thread(target=load)
    thread.start()
    try:
        wait_until(lambda: num_done[0] > 1)
        before = num_done[0]
        backup = terminal.run("backup", str(tmp_path / "backup"), "--data-dir", str(data_dir))
        assert num_done[0] > before, "the pool went on meanwhile"
    finally:
        is_over.set()
        thread.join(60)
    assert backup.returncode == 0, backup.stdout + backup.stderr
    expected = continued(pool, alice, path, tmp_path / "a")
    restored = terminal.run("restore", str(tmp_path / "backup"), str(tmp_path / "new"))
    assert restored.returncode == 0, restored.stdout + restored.stderr
    with shipped_pool(tmp_path / "new") as other:
        assert continued(other, alice, path, tmp_path / "b") == expected
    doctor = terminal.run("doctor", "--data-dir", str(tmp_path / "new"), "--verify")
    assert doctor.returncode == 0, doctor.stdout


def test_a_discarded_gradient_leaves_no_trace_in_the_bits(pool: ServedPool) -> None:
    step = tinkerpool.AdamParams(learning_rate=5e-3)
    states = []
    for discards in (True, False):
        with pool.client("alice") as service:
            client = service.create_lora_training_client(rank=8, seed=5)
            data = [datum(client.get_tokenizer())]
            train(client, TEXT, 1)
            if discards:
                client.forward_backward([datum(client.get_tokenizer(), "Let there be light.\n")], "cross_entropy")
                client.discard_gradient()
            client.forward_backward(data, "cross_entropy")
            norm = client.optim_step(step).result(60).metrics["grad_norm:last"]
            states.append((norm, logprobs(client, data)[0].tobytes()))
    assert states[0] == states[1]


@pytest.mark.parametrize("fault", ["refused", "overflows"])
def test_the_corrected_call_of_a_notebook_works_at_once_with_the_bits_of_a_run_without_the_bad_one(
    pool: ServedPool, fault: str
) -> None:
    step = tinkerpool.AdamParams(learning_rate=5e-3)
    runs = []
    for has_failed in (True, False):
        with pool.client("alice") as service:
            client = service.create_lora_training_client(rank=8, seed=6)
            good = [datum(client.get_tokenizer())]
            train(client, TEXT, 1)
            if has_failed:
                targets, weights = ([10**6] * 3, [1.0] * 3) if fault == "refused" else ([5] * 3, [3e38] * 3)
                inputs = {"target_tokens": targets, "weights": weights}
                bad = tinkerpool.Datum(tinkerpool.ModelInput.from_ints([1, 2, 3]), inputs)
                failed = client.forward_backward([*good, bad], "cross_entropy")
                with pytest.raises(tinkerpool.TinkerpoolError):
                    failed.result(60)
            corrected, stepped = client.forward_backward(good, "cross_entropy"), client.optim_step(step)
            loss = corrected.result(60).metrics["loss:sum"]
            norm = stepped.result(60).metrics["grad_norm:last"]
            runs.append((loss, norm, logprobs(client, good)[0].tobytes()))
    assert runs[0] == runs[1]
