"""Drives a training engine as the coordinator does: sequence numbers, installs, passes and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from tests.support.mini_model import Architecture
from tests.support.numerics.base_models import SHARED
from workers.bank.bank import Bank
from workers.contract.messages import (
    AdamParams,
    AdapterInstall,
    AdapterSpec,
    AdapterState,
    Batch,
    Datum,
    ErrorCode,
    Item,
    ItemResult,
    LoadItem,
    OptimStepItem,
    PassItem,
    SampleResult,
    SaveItem,
)
from workers.contract.settings import EngineSettings
from workers.engine import TrainingEngine
from workers.host.free_memory import MemoryShare, free_bytes
from workers.training.copies import AdapterCopies
from workers.training.items import ItemRunner
from workers.training.passes import PassRunner

ARCHITECTURES: tuple[Architecture, ...] = ("qwen3", "gemma3", "qwen3.5-moe", "gpt-oss")
"""Architectures of most tests: tied and untied, with and without a window, with and without norms of heads; a hybrid
whose experts have one in common; experts with biases behind attention with sinks."""
RARER_ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen3.5", "qwen3-moe")
"""Each has one of these traits alone: for long runs of the same tests."""
ALL_ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
"""Architectures of the comparison with PEFT."""
VOCAB_SIZE = 258


def make_spec(adapter_id: str, rank: int = 8, **changes: Any) -> AdapterSpec:
    fields: dict[str, Any] = {
        "alpha": 32.0,
        "seed": sum(adapter_id.encode()),
        "train_attn": True,
        "train_mlp": True,
        "train_unembed": True,
    }
    return AdapterSpec(adapter_id=adapter_id, rank=rank, **fields | changes)


def make_data(loss_fn: str, lengths: Sequence[int], seed: int = 0, num_targets: int | None = None) -> tuple[Datum, ...]:
    """Return random sequences with the inputs of a loss; log-probabilities among them are near the policy's."""
    rng = np.random.default_rng((seed, len(loss_fn), *lengths))

    def draw(shape: Any) -> NDArray[np.float32]:
        return np.asarray(rng.standard_normal(shape), dtype=np.float32)

    data = []
    for length in lengths:
        shape = length if num_targets is None else (length, num_targets)
        inputs: dict[str, Any] = {"target_tokens": rng.integers(0, VOCAB_SIZE, shape).astype(np.int32)}
        if loss_fn == "cross_entropy":
            inputs["weights"] = draw(shape)
        else:
            inputs["logprobs"] = draw(shape) * 0.3 - 6
            inputs["advantages"] = draw(shape)
        if loss_fn == "stable_reinforce":
            inputs["temperatures"] = rng.choice(np.array([0, 0.6, 1, 1.7], np.float32), shape)
            inputs["advantages"] *= inputs["temperatures"] > 0
            inputs["logprobs"] += np.float32(0.5)  # so that sums of p - q have both signs
        data.append(Datum(tokens=rng.integers(0, VOCAB_SIZE, length).astype(np.int32), loss_inputs=inputs))
    return tuple(data)


@dataclass(slots=True, kw_only=True)
class Tenant:
    """A tenant's training run."""

    spec: AdapterSpec
    passes: Sequence[Sequence[Datum]]
    """The requests of a step: one forward_backward per entry. Every step has the same."""
    loss_fn: str = "cross_entropy"
    loss_config: Mapping[str, float] = field(default_factory=dict)
    params: AdamParams = field(
        default_factory=lambda: AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=5.0)
    )
    num_chunks: int = 1

    @property
    def key(self) -> str:
        return self.spec.adapter_id


def make_engine(
    model: Path, *, free_bytes: Callable[[torch.device], int] = free_bytes, **settings: Any
) -> TrainingEngine:
    """Return an engine with the smallest memory for samples, unless `cache_bytes_max` is given.

    Its base model is shared where `SHARED` is on.
    """
    defaults: dict[str, Any] = {"cache_bytes_max": 0}
    made = EngineSettings(model_path=str(model), **defaults | settings)
    return TrainingEngine(made, base_model=SHARED.get(made), free_bytes=free_bytes)


def assemble_again(engine: TrainingEngine, bank: Bank | None = None, free_bytes: int = 1 << 40) -> None:
    """Give an engine other parts for training: around another, empty bank, and with this much free memory.

    Writes private fields: outside of tests an engine never changes its parts.
    """
    model, settings = engine.base_model, engine.settings
    if bank is not None:
        engine.bank = bank
        engine._copies = AdapterCopies(bank, model.max_rank, engine.info.fingerprint)
    memory = MemoryShare(model.device, measure=lambda _: free_bytes)
    engine._passes = PassRunner(model, engine.bank, memory, settings.recompute)
    engine._items = ItemRunner(engine._passes, engine._copies, pass_tokens_max=settings.pass_tokens_max)


class Driver:
    """Keeps every adapter's seq and runs batches on one engine."""

    def __init__(self, model: Path, num_slots: int = 16, **config: Any) -> None:
        self.engine = make_engine(model, num_slots=num_slots, **config)
        self.seqs: dict[str, int] = {}
        self.num_batches = 0

    def install(self, *specs: AdapterSpec, state: AdapterState | None = None) -> None:
        installs = tuple(AdapterInstall(spec=spec, state=state) for spec in specs)
        for spec in specs:
            self.seqs[spec.adapter_id] = 0 if state is None else state.applied_seq
        self.run(installs=installs)

    def run(self, *items: Item, installs: tuple[AdapterInstall, ...] = ()) -> list[ItemResult]:
        self.num_batches += 1
        batch = Batch(epoch=1, cycle_id=self.num_batches, installs=installs, items=items)
        results = self.engine.run(batch).results
        assert [result.op_id for result in results] == [item.op_id for item in items]
        return list(results)

    def train(self, *items: Item) -> list[ItemResult]:
        """Run items, none of which may fail; return their results."""
        results = self.run(*items)
        assert [result.error for result in results] == [None] * len(items)
        return results

    def num_base_matmuls(self, *items: Item) -> int:
        """Run items as `train`; return how many products with frozen weights that takes."""
        before = self.engine.base_model.num_base_matmuls
        self.train(*items)
        return self.engine.base_model.num_base_matmuls - before

    def _next(self, key: str) -> dict[str, Any]:
        seq = self.seqs[key]
        self.seqs[key] = seq + 1
        return {"op_id": f"{key}/{seq + 1}", "adapter_id": key, "prev_seq": seq, "seq": seq + 1}

    def backward(self, key: str, data: Sequence[Datum], loss_fn: str = "cross_entropy", **changes: Any) -> PassItem:
        return self.chunks(key, [data], loss_fn, **changes)[0]

    def forward(self, key: str, data: Sequence[Datum], loss_fn: str = "cross_entropy", **changes: Any) -> PassItem:
        return self.backward(key, data, loss_fn, backward=False, **changes)

    def chunks(
        self, key: str, chunks: Sequence[Sequence[Datum]], loss_fn: str = "cross_entropy", **changes: Any
    ) -> list[PassItem]:
        position = self._next(key)
        defaults: dict[str, Any] = {"loss_fn": loss_fn, "loss_config": {}, "backward": True}
        return [
            PassItem(**position, chunk_index=index, num_chunks=len(chunks), data=tuple(data), **defaults | changes)
            for index, data in enumerate(chunks)
        ]

    def step(self, key: str, params: AdamParams | None = None, **changes: Any) -> OptimStepItem:
        return OptimStepItem(**self._next(key), params=params or AdamParams(learning_rate=1e-2), **changes)

    def save(self, key: str, *, with_optimizer: bool = True, publish_as: str = "") -> SaveItem:
        return SaveItem(**self._next(key), with_optimizer=with_optimizer, publish_as=publish_as)

    def load(self, key: str, state: AdapterState, *, with_optimizer: bool = True) -> LoadItem:
        return LoadItem(**self._next(key), state=state, with_optimizer=with_optimizer)

    def state(self, key: str) -> AdapterState:
        """Return the adapter's state without the pending gradient, by a save."""
        state = self.train(self.save(key))[0].state
        assert state is not None
        return state

    def snapshot_item(self, key: str) -> SaveItem:
        """Return a save for recovery: at the adapter's present seq, with the pending gradient."""
        position: dict[str, Any] = {"op_id": "snapshot", "prev_seq": self.seqs[key], "seq": self.seqs[key]}
        return SaveItem(adapter_id=key, **position, with_optimizer=True, with_gradient=True)

    def snapshot(self, key: str) -> AdapterState:
        """Return the adapter's state with the pending gradient, by a save for recovery."""
        state = self.train(self.snapshot_item(key))[0].state
        assert state is not None
        return state

    def gradient(self, key: str) -> torch.Tensor:
        """Return a copy of the pending gradient (P,), zeros if there is none."""
        bank = self.engine.bank
        gradient = bank.entry(key).read().grad
        return torch.zeros(bank.entry(key).layout.num_values) if gradient is None else gradient.to("cpu", copy=True)

    def gradients(self, key: str) -> dict[str, torch.Tensor]:
        """Return the pending gradient by matrix, unpadded."""
        entry = self.engine.bank.entry(key)
        named = entry.layout.matrices(self.gradient(key).numpy(), entry.spec.rank)
        return {name: torch.from_numpy(matrix) for name, matrix in named}

    def weights(self, key: str) -> dict[str, torch.Tensor]:
        """Return the weights by matrix, unpadded."""
        entry = self.engine.bank.entry(key)
        host = self.engine.bank.entry(key).read()
        assert host.weights is not None
        named = entry.layout.matrices(host.weights.cpu().numpy(), entry.spec.rank)
        return {name: torch.from_numpy(matrix.copy()) for name, matrix in named}


def training_items(driver: Driver, tenant: Tenant) -> list[PassItem]:
    """Return a tenant's passes of one step, each request cut into `num_chunks`."""
    items: list[PassItem] = []
    for data in tenant.passes:
        cut = [data[i :: tenant.num_chunks] for i in range(tenant.num_chunks)]
        items += driver.chunks(tenant.key, cut, tenant.loss_fn, loss_config=tenant.loss_config)
    return items


@dataclass(slots=True)
class Trace:
    """All outputs of a tenant's training run, compared bit by bit."""

    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    gradients: list[bytes] = field(default_factory=list)
    states: list[AdapterState] = field(default_factory=list)

    def assert_equal(self, other: Trace) -> None:
        """Assert that all outputs are equal."""
        assert self.metrics == other.metrics
        assert len(self.logprobs) == len(other.logprobs)
        for mine, theirs in zip(self.logprobs, other.logprobs, strict=True):
            assert mine.tobytes() == theirs.tobytes()
        assert self.gradients == other.gradients
        assert self.states == other.states


def note(trace: Trace, result: ItemResult) -> None:
    """Add an item's result to a trace."""
    assert result.error is None, result.error
    trace.logprobs += result.logprobs
    trace.metrics.append(result.metrics)


DATA = make_data("cross_entropy", [20, 11])
"""The data of `trained`."""


def code(result: ItemResult | SampleResult) -> ErrorCode | None:
    """Return the code of the error, if the item or sample failed."""
    return None if result.error is None else result.error.code


def message_of(result: ItemResult | SampleResult) -> str:
    """Return the message of the error, empty if there is none."""
    return "" if result.error is None else result.error.message


def trained(driver: Driver, key: str, num_steps: int = 2) -> None:
    """Train an adapter for some steps on `DATA`."""
    for _ in range(num_steps):
        driver.train(driver.backward(key, DATA), driver.step(key))
