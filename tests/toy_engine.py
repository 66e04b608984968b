"""An engine without a model, for testing everything around one.

An adapter's state is a SHA-256 chain over what was applied to it, with the pending gradient as a second chain that an
optim_step folds in. So a lost, doubled or reordered operation, or a gradient that should have been dropped, shows in
the final hash. The fences (epoch, `prev_seq`, chunk order) are the real engine's. Knobs for failure are options of the
loss: any datum with token `POISON_TOKEN` fails its item, `KILL_TOKEN` raises out of the engine, as a crash would.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workers.messages import (
    AdapterInstall,
    AdapterSpec,
    AdapterState,
    Batch,
    BatchResult,
    ErrorCode,
    Item,
    ItemError,
    ItemResult,
    LoadItem,
    ModelInfo,
    OptimStepItem,
    PassItem,
    SampledSequence,
    SampleEvent,
    SampleRequest,
    SampleResult,
    SaveItem,
    StopReason,
    TokenEvent,
)

POISON_TOKEN = 66
KILL_TOKEN = 67
FINGERPRINT = "toy"


def toy_model_info(name: str = "toy") -> ModelInfo:
    """Facts about a model that is not there."""
    return ModelInfo(
        name=name,
        num_params=0,
        vocab_size=100,
        max_seq_len=64,
        max_rank=32,
        chunk_tokens=16,
        eos_token_ids=(0,),
        attn_modules=("q_proj",),
        mlp_modules=("up_proj",),
        unembed_modules=("lm_head",),
        tokenizer_files={"tokenizer.json": b"{}"},
        fingerprint=FINGERPRINT,
    )


def digest(*parts: bytes | str | int | float) -> bytes:
    """SHA-256 over parts, unambiguously."""
    sha = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        sha.update(len(data).to_bytes(8, "little") + data)
    return sha.digest()


def fresh_chain(spec: AdapterSpec) -> bytes:
    """The chain that an adapter begins with."""
    return digest("fresh", spec.adapter_id, spec.rank, spec.seed)


def item_digest(item: Item) -> bytes:
    """What an item adds to a chain: its place and its contents, but not how it was cut into cycles."""
    match item:
        case PassItem():
            parts: list[bytes | str | int | float] = ["pass", item.loss_fn, repr(sorted(item.loss_config.items()))]
            for datum in item.data:
                parts.append(datum.tokens.tobytes())
                parts += [name + repr(array.tolist()) for name, array in sorted(datum.loss_inputs.items())]
            return digest(item.seq, item.chunk_index, *parts)
        case OptimStepItem():
            return digest(item.seq, "step", repr(item.params))
        case LoadItem():
            return digest(item.seq, "load", item.state.weights)
    raise AssertionError(f"{type(item).__name__} changes no state")


@dataclass(slots=True)
class ToyAdapter:
    """One adapter's copy."""

    spec: AdapterSpec
    chain: bytes
    gradient: bytes = b""
    applied_seq: int = 0
    next_chunk: int = 0
    num_steps: int = 0


@dataclass(slots=True)
class _Sequence:
    request: SampleRequest
    chain: bytes
    index: int
    tokens: list[int]


class ToyEngine:
    """Implements `workers.pool.Engine`. `seconds_per_batch` makes it slow."""

    def __init__(
        self, incarnation: str, *, name: str = "toy", num_slots: int = 4, seconds_per_batch: float = 0.0
    ) -> None:
        self.incarnation = incarnation
        self.adapters: dict[str, ToyAdapter] = {}
        self.versions: dict[str, bytes] = {}
        self.batches: list[Batch] = []
        self._info = toy_model_info(name)
        self._epoch = 0
        self._seconds_per_batch = seconds_per_batch
        self._running: list[_Sequence] = []
        self._done: dict[str, list[SampledSequence | None]] = {}
        self._events: list[SampleEvent] = []
        self.num_slots = num_slots
        self.pid = os.getpid()
        self.node = socket.gethostname()
        self.device = "cpu"

    @property
    def info(self) -> ModelInfo:
        return self._info

    def run(self, batch: Batch) -> BatchResult:
        started = time.perf_counter()
        if self._seconds_per_batch:
            time.sleep(self._seconds_per_batch)
        if batch.epoch > self._epoch:
            self._epoch = batch.epoch
            self.adapters.clear()
        self.batches.append(batch)
        for install in batch.installs:
            self.adapters[install.spec.adapter_id] = self._installed(install)
        for key in batch.removals:
            self.adapters.pop(key, None)
            self.versions.pop(key, None)
        if batch.epoch < self._epoch:
            error = ItemError(code=ErrorCode.OUT_OF_ORDER, message=f"epoch {batch.epoch} is over")
            results = tuple(ItemResult(op_id=item.op_id, error=error) for item in batch.items)
        else:
            results = tuple(self._apply(item) for item in batch.items)
        return BatchResult(
            epoch=batch.epoch,
            cycle_id=batch.cycle_id,
            incarnation=self.incarnation,
            results=results,
            wall_s=time.perf_counter() - started,
        )

    def _installed(self, install: AdapterInstall) -> ToyAdapter:
        adapter = ToyAdapter(install.spec, fresh_chain(install.spec))
        if install.state is not None:
            self._load(adapter, install.state, with_optimizer=install.state.optimizer is not None)
            adapter.applied_seq = install.state.applied_seq
        return adapter

    def _load(self, adapter: ToyAdapter, state: AdapterState, *, with_optimizer: bool) -> None:
        adapter.chain = bytes.fromhex(json.loads(state.weights)["chain"])
        adapter.gradient = b""
        adapter.num_steps = state.num_steps if with_optimizer else 0

    def _apply(self, item: Item) -> ItemResult:
        adapter = self.adapters.get(item.adapter_id)
        chunk = item.chunk_index if isinstance(item, PassItem) else 0
        if adapter is None or adapter.applied_seq != item.prev_seq or adapter.next_chunk != chunk:
            at = "absent" if adapter is None else f"at {adapter.applied_seq}, chunk {adapter.next_chunk}"
            message = f"{item.op_id} chunk {chunk} follows {item.prev_seq}, but {item.adapter_id} is {at}"
            return ItemResult(op_id=item.op_id, error=ItemError(code=ErrorCode.OUT_OF_ORDER, message=message))
        if item.drop_gradient:
            adapter.gradient = b""
        match item:
            case PassItem():
                return self._pass(adapter, item)
            case OptimStepItem():
                adapter.chain = digest(adapter.chain, adapter.gradient, item_digest(item))
                adapter.gradient = b""
                adapter.num_steps += 1
                adapter.applied_seq = item.seq
                return ItemResult(op_id=item.op_id, metrics={"grad_norm:last": 1.0})
            case SaveItem():
                adapter.applied_seq = item.seq
                if item.publish_as:
                    self.versions[item.publish_as] = adapter.chain
                return ItemResult(op_id=item.op_id, state=toy_state(adapter))
            case LoadItem():
                self._load(adapter, item.state, with_optimizer=item.with_optimizer)
                adapter.applied_seq = item.seq
                return ItemResult(op_id=item.op_id)
        raise AssertionError(type(item))

    def _pass(self, adapter: ToyAdapter, item: PassItem) -> ItemResult:
        if any(KILL_TOKEN in datum.tokens for datum in item.data):
            raise RuntimeError("killed by a toy token")
        num_tokens = sum(len(datum.tokens) for datum in item.data)
        if any(POISON_TOKEN in datum.tokens for datum in item.data):
            adapter.gradient, adapter.next_chunk, adapter.applied_seq = b"", 0, item.seq
            error = ItemError(code=ErrorCode.NON_FINITE, message="the loss is not finite")
            return ItemResult(op_id=item.op_id, error=error, num_tokens=num_tokens)
        if item.backward:
            adapter.gradient = digest(adapter.gradient, item_digest(item))
        adapter.next_chunk = item.chunk_index + 1
        if adapter.next_chunk == item.num_chunks:
            adapter.next_chunk, adapter.applied_seq = 0, item.seq
        value = int.from_bytes(adapter.chain[:2], "little") / 65536
        return ItemResult(
            op_id=item.op_id,
            logprobs=tuple(np.full(d.loss_inputs["target_tokens"].shape, -value, np.float32) for d in item.data),
            metrics={"loss:sum": value * num_tokens},
            num_tokens=num_tokens,
            engine_s=1e-6 * num_tokens,
        )

    def start_sample(self, request: SampleRequest) -> None:
        key = request.version.key
        if request.version.state is not None:
            self.versions[key] = bytes.fromhex(json.loads(request.version.state.weights)["chain"])
        if key and key not in self.versions:
            error = ItemError(code=ErrorCode.INTERNAL, message=f"unknown version {key}")
            self._events.append(SampleResult(op_id=request.op_id, error=error))
            return
        chain = self.versions.get(key, b"base")
        self._done[request.op_id] = [None] * request.num_samples
        self._running += [_Sequence(request, chain, index, []) for index in range(request.num_samples)]

    def cancel_sample(self, op_id: str) -> None:
        if self._done.pop(op_id, None) is not None:
            self._running = [s for s in self._running if s.request.op_id != op_id]
            error = ItemError(code=ErrorCode.CANCELLED, message="cancelled")
            self._events.append(SampleResult(op_id=op_id, error=error))

    def can_decode(self) -> bool:
        return bool(self._running or self._events)

    def decode_step(self) -> Sequence[SampleEvent]:
        events, self._events = self._events, []
        for sequence in list(self._running):
            request, params = sequence.request, sequence.request.params
            token = toy_token(sequence.chain, request, sequence.index, len(sequence.tokens))
            sequence.tokens.append(token)
            if request.stream:
                events.append(TokenEvent(op_id=request.op_id, sequence_index=sequence.index, token=token, logprob=-1.0))
            is_stopped = token in params.stop_tokens
            if is_stopped or len(sequence.tokens) == params.max_tokens:
                self._running.remove(sequence)
                events += self._finish(sequence, is_stopped)
        return events

    def _finish(self, sequence: _Sequence, is_stopped: bool) -> list[SampleEvent]:
        request, done = sequence.request, self._done[sequence.request.op_id]
        done[sequence.index] = SampledSequence(
            tokens=np.array(sequence.tokens, np.int32),
            logprobs=np.full(len(sequence.tokens), -1.0, np.float32),
            stop_reason=StopReason.STOP if is_stopped else StopReason.LENGTH,
        )
        if any(finished is None for finished in done):
            return []
        del self._done[request.op_id]
        prompt_logprobs = np.full(len(request.prompt), -2.0, np.float32)
        prompt_logprobs[0] = np.nan
        return [
            SampleResult(
                op_id=request.op_id,
                sequences=tuple(s for s in done if s is not None),
                prompt_logprobs=prompt_logprobs if request.prompt_logprobs else None,
                num_prompt_tokens=len(request.prompt),
                num_sampled_tokens=sum(len(s.tokens) for s in done if s is not None),
            )
        ]


def toy_state(adapter: ToyAdapter) -> AdapterState:
    """An adapter's durable state."""
    return AdapterState(
        weights=json.dumps({"chain": adapter.chain.hex()}).encode(),
        optimizer=b"moments",
        num_steps=adapter.num_steps,
        applied_seq=adapter.applied_seq,
        fingerprint=FINGERPRINT,
    )


def toy_token(chain: bytes, request: SampleRequest, index: int, position: int) -> int:
    """A token as a function of weights, prompt, seed, sample and position, never 0."""
    value = digest(chain, request.prompt.tobytes(), request.params.seed, index, position)
    return 1 + int.from_bytes(value[:4], "little") % 60
