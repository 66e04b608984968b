"""The demo's clock demonstration: the cost of a step in cycles and seconds, by the way a loop submits it.

naive      await the forward_backward, then submit the optim_step and await that
paired     submit both, then await both: they share a cycle
pipelined  submit the next step before awaiting this one: the next cycle always has work

Each loop runs without other tenants, then with two that train continuously. An engine in this process runs the same
step without the service: the difference is the latency that the service adds.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkerpool import ServiceClient, TrainingClient, types
from workers.contract import messages
from workers.contract.settings import ENGINE, EngineSettings, PoolModel
from workers.pool.loop import engine_factory

ADAM = types.AdamParams(learning_rate=1e-4)
PIPELINE_DEPTH = 2
"""Steps in flight in the pipelined loop."""
NUM_OTHERS = 2
NUM_ROUNDS = 3
"""The loops alternate, so that a busy moment of the machine affects all of them. With others few steps take fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCost:
    """The cost of a step."""

    loop: str
    num_others: int
    """Other tenants that trained at the same time."""
    cycles_per_step: float
    seconds_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedLatency:
    """Medians over steps of one batch, without other tenants; service and engine alternate."""

    service_s: float
    """forward_backward and optim_step over gRPC, submitted together, with their results durable."""
    engine_s: float
    """The same on an engine in this process."""


Cycles = list[float]


def naive(training: TrainingClient, batch: Sequence[types.Datum], num_steps: int) -> Cycles:
    """Await each operation before submitting the next."""
    cycles = []
    for _ in range(num_steps):
        cycles.append(_cycle(training.forward_backward(batch, "cross_entropy").result()))
        cycles.append(_cycle(training.optim_step(ADAM).result()))
    return cycles


def paired(training: TrainingClient, batch: Sequence[types.Datum], num_steps: int) -> Cycles:
    """Submit both operations of a step, then await them."""
    cycles = []
    for _ in range(num_steps):
        halves = training.forward_backward(batch, "cross_entropy"), training.optim_step(ADAM)
        cycles += [_cycle(half.result()) for half in halves]
    return cycles


def pipelined(training: TrainingClient, batch: Sequence[types.Datum], num_steps: int) -> Cycles:
    """Submit the next step before awaiting this one."""
    cycles: Cycles = []
    in_flight: deque[Any] = deque()
    for _ in range(num_steps):
        in_flight += (training.forward_backward(batch, "cross_entropy"), training.optim_step(ADAM))
        while len(in_flight) > 2 * (PIPELINE_DEPTH - 1):
            cycles.append(_cycle(in_flight.popleft().result()))
    return cycles + [_cycle(half.result()) for half in in_flight]


LOOPS: tuple[Callable[[TrainingClient, Sequence[types.Datum], int], Cycles], ...] = (naive, paired, pipelined)


def measure_loops(
    service: ServiceClient,
    others: Sequence[ServiceClient],
    base_model: str,
    rank: int,
    batch: Sequence[types.Datum],
    steps: int,
) -> list[LoopCost]:
    """Measure each loop without other tenants, then each with them."""
    training = service.create_lora_training_client(base_model, rank=rank).result()
    paired(training, batch, 2)
    costs = _measure_all(training, batch, steps, num_others=0)
    with _co_batched([c.create_lora_training_client(base_model, rank=rank).result() for c in others], batch):
        costs += _measure_all(training, batch, steps, num_others=len(others))
    return costs


def measure_latency(
    service: ServiceClient, model: PoolModel, num_threads: int, rank: int, batch: Sequence[types.Datum], steps: int
) -> AddedLatency:
    """Measure single steps of the paired loop and of an engine, alternating."""
    training = service.create_lora_training_client(model.name, rank=rank).result()
    step = _engine_step(model, num_threads, rank, batch)
    service_s, engine_s = [], []
    for _ in range(steps + 2):
        service_s.append(_seconds(lambda: paired(training, batch, 1)))
        engine_s.append(_seconds(step))
    # The first two are warm-up.
    return AddedLatency(service_s=statistics.median(service_s[2:]), engine_s=statistics.median(engine_s[2:]))


def _measure_all(
    training: TrainingClient, batch: Sequence[types.Datum], steps: int, *, num_others: int
) -> list[LoopCost]:
    num_steps = max(2, steps // NUM_ROUNDS)
    seconds: dict[str, list[float]] = {loop.__name__: [] for loop in LOOPS}
    cycles: dict[str, list[float]] = {loop.__name__: [] for loop in LOOPS}
    for _ in range(min(NUM_ROUNDS, steps - 1) if num_others else NUM_ROUNDS):
        for loop in LOOPS:
            started = time.perf_counter()
            ran_in = loop(training, batch, num_steps)
            seconds[loop.__name__].append((time.perf_counter() - started) / num_steps)
            cycles[loop.__name__].append((ran_in[-1] - ran_in[0] + 1) / num_steps)
    return [
        LoopCost(
            loop=name,
            num_others=num_others,
            cycles_per_step=statistics.mean(cycles[name]),
            seconds_per_step=statistics.median(seconds[name]),
        )
        for name in seconds
    ]


@contextmanager
def _co_batched(trainings: Sequence[TrainingClient], batch: Sequence[types.Datum]) -> Iterator[None]:
    """Train other tenants until the block ends."""
    done = threading.Event()

    def keep_training(training: TrainingClient) -> None:
        while not done.is_set():
            pipelined(training, batch, 5)

    threads = [threading.Thread(target=keep_training, args=(training,)) for training in trainings]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def _seconds(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _engine_step(model: PoolModel, num_threads: int, rank: int, batch: Sequence[types.Datum]) -> Callable[[], object]:
    """Return a step on an engine in this process: the two phases of a cycle, as a worker runs them."""
    settings = EngineSettings(
        model_name=model.name, model_path=model.path, num_slots=4, num_threads=num_threads, device="cpu"
    )
    engine = engine_factory(ENGINE, settings)("demo")
    spec = messages.AdapterSpec(
        adapter_id="demo", rank=rank, alpha=32.0, seed=0, train_attn=True, train_mlp=True, train_unembed=True
    )
    data = tuple(
        messages.Datum(
            tokens=datum.model_input.to_numpy(),
            loss_inputs={name: _engine_array(tensor) for name, tensor in datum.loss_fn_inputs.items()},
        )
        for datum in batch
    )
    install = messages.AdapterInstall(spec=spec, state=None)
    engine.run(messages.Batch(epoch=1, cycle_id=1, installs=(install,)))
    seq = 0

    def run(item: messages.Item) -> None:
        [result] = engine.run(messages.Batch(epoch=1, cycle_id=1 + seq, items=(item,))).results
        assert result.error is None, result.error

    def step() -> None:
        nonlocal seq
        run(
            messages.PassItem(
                op_id="pass", adapter_id="demo", prev_seq=seq, seq=seq + 1, chunk_index=0, num_chunks=1, data=data,
                loss_fn="cross_entropy", loss_config={}, backward=True,
            )
        )  # fmt: skip
        params = messages.AdamParams(learning_rate=1e-4)
        run(messages.OptimStepItem(op_id="step", adapter_id="demo", prev_seq=seq + 1, seq=seq + 2, params=params))
        seq += 2

    return step


def _engine_array(tensor: types.TensorData) -> NDArray[np.float32] | NDArray[np.int32]:
    array = tensor.to_numpy()
    return array.astype(np.int32) if tensor.dtype == "int64" else array.astype(np.float32)


def _cycle(output: types.ForwardBackwardOutput | types.OptimStepResponse) -> float:
    return output.metrics["clock_cycle:unique"]
