"""An engine without a model, for tests of all other parts.

An adapter's state is a SHA-256 chain over what was applied to it, with the pending gradient as a second chain that an
optim_step folds in, and a third one for the moments. So a lost, doubled or reordered operation, or a gradient that
should have been dropped, shows in the final hash. Order, chunks and gradient windows are kept by the real engine's
`workers.training.progress`; epochs, installs and removals follow the same rules.

Failure on demand: a datum with `POISON_TOKEN`, or the loss option `toy_fail`, fails its item; `KILL_TOKEN` raises out
of the engine, as a bug of the engine would; `EXIT_TOKEN` ends the process, as a crash in native code would.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.contract.adapted_modules import AdaptedModule, adapter_params, rank_class
from workers.contract.contents import whole
from workers.contract.messages import (
    AdapterCosts,
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
    TokenLogprobs,
    WorkerInfo,
)
from workers.contract.protocols import Arriving, EngineFactory
from workers.contract.settings import EngineSettings
from workers.training.progress import Progress

Array = NDArray[np.int32]

POISON_TOKEN = 66
KILL_TOKEN = 67
EXIT_TOKEN = 68
FAIL_OPTION = "toy_fail"
FINGERPRINT = "toy"


def toy_model_info(name: str = "toy") -> ModelInfo:
    """Return the facts of the toy's model."""
    return ModelInfo(
        name=name,
        num_params=0,
        vocab_size=100,
        max_seq_len=64,
        max_rank=32,
        chunk_tokens=16,
        eos_token_ids=(0,),
        modules=(
            AdaptedModule(name="model.layers.0.self_attn.q_proj", kind="attn", d_in=1, d_out=2),
            AdaptedModule(name="model.layers.0.mlp.up_proj", kind="mlp", d_in=1, d_out=1),
            AdaptedModule(name="lm_head", kind="unembed", d_in=1, d_out=0),
        ),
        tokenizer_files={"tokenizer.json": b"{}"},
        fingerprint=FINGERPRINT,
    )


def toy_worker_info(worker_id: str = "w0", incarnation: int = 1, model: str = "toy", **facts: Any) -> WorkerInfo:
    """Return an incarnation of a worker as a pool reports it; `facts` are those of its base model."""
    return WorkerInfo(
        worker_id=worker_id,
        incarnation=f"{worker_id}.{incarnation}",
        model=replace(toy_model_info(model), **facts),
        pid=0,
        node="here",
        num_slots=8,
        device="cpu",
    )


def digest(*parts: bytes | str | int | float) -> bytes:
    """Return the SHA-256 over parts; other parts give another one."""
    sha = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        sha.update(len(data).to_bytes(8, "little") + data)
    return sha.digest()


def toy_bytes(spec: AdapterSpec) -> int:
    """Return the bytes that a copy would have with weights, moments and gradient."""
    return 16 * rank_class(spec.rank) * adapter_params(toy_model_info("toy").modules, *spec.kinds)


TOY_BYTES = 192
"""Of a sampler version."""


def fresh_chain(spec: AdapterSpec) -> bytes:
    """Return the chain of a fresh adapter."""
    return digest("fresh", spec.adapter_id, spec.rank, spec.seed)


def item_digest(item: Item) -> bytes:
    """Return the digest of an item's seq, chunk and contents; it does not depend on the cycle that the item ran in."""
    match item:
        case PassItem():
            parts: list[bytes | str | int | float] = ["pass", item.loss_fn, repr(sorted(item.loss_config.items()))]
            for datum in item.data:
                parts.append(datum.tokens.tobytes())
                parts += [name + repr(array.tolist()) for name, array in sorted(datum.loss_inputs.items())]
            return digest(item.seq, item.chunk_index, *parts)
        case OptimStepItem():
            return digest(item.seq, "step", repr(item.params))
    raise AssertionError(f"{type(item).__name__} changes no state")


@dataclass(slots=True)
class ToyAdapter:
    """One adapter's copy."""

    spec: AdapterSpec
    chain: bytes
    """Stands for the weights."""
    gradient: bytes = b""
    moments: bytes = b""
    progress: Progress = field(default_factory=Progress)


@dataclass(slots=True)
class _Sequence:
    request: SampleRequest
    chain: bytes
    index: int
    tokens: list[int]


class ToyEngine:
    """Implements `workers.contract.protocols.Engine`.

    `seconds_per_batch` makes it slow. `fitting_tokens`, `num_cache_blocks`, `host_bytes_max`, `bank_bytes_max`,
    `costs`, `weights_id` and `modules` are only reported: no request is refused.
    """

    def __init__(
        self,
        incarnation: str,
        *,
        name: str = "toy",
        seconds_per_batch: float = 0.0,
        fitting_tokens: int | None = None,
        num_cache_blocks: int | None = None,
        host_bytes_max: int | None = None,
        bank_bytes_max: int | None = None,
        costs: AdapterCosts = AdapterCosts(),  # noqa: B008 (frozen)
        tokenizer_files: Mapping[str, bytes] | None = None,
        may_decode: bool = True,
        fingerprint: str = FINGERPRINT,
        weights_id: str = "",
        modules: Sequence[AdaptedModule] | None = None,
    ) -> None:
        self.incarnation = incarnation
        self.adapters: dict[str, ToyAdapter] = {}
        self.versions: dict[str, bytes] = {}
        self.batches: list[Batch] = []
        self._info = replace(
            toy_model_info(name),
            fitting_tokens=fitting_tokens,
            num_cache_blocks=num_cache_blocks,
            host_bytes_max=host_bytes_max,
            bank_bytes_max=bank_bytes_max,
            costs=costs,
            fingerprint=fingerprint,
            weights_id=weights_id,
        )
        if tokenizer_files is not None:
            self._info = replace(self._info, tokenizer_files=tokenizer_files)
        if modules is not None:
            self._info = replace(self._info, modules=tuple(modules))
        self._epoch = 0
        self._broken: dict[str, ItemError] = {}
        self._seconds_per_batch = seconds_per_batch
        self._running: list[_Sequence] = []
        self._done: dict[str, list[SampledSequence | None]] = {}
        self._events: list[SampleEvent] = []
        self.may_run = threading.Event()
        """While it is cleared, batches wait."""
        self.may_run.set()
        self._prompts: set[tuple[bytes, bytes]] = set()
        """Chain and prompt of finished samples: all tokens of these prompts but the last are cached."""
        self.may_decode = may_decode
        """While it is False, samples make no progress. Wake the loop, by any control, after setting it again."""

    @property
    def info(self) -> ModelInfo:
        return self._info

    def read_ahead(self, message: Arriving) -> Arriving:
        return message

    def run(self, batch: Batch) -> BatchResult:
        started = time.perf_counter()
        self.may_run.wait(30)
        if self._seconds_per_batch:
            time.sleep(self._seconds_per_batch)
        self.batches.append(batch)
        if batch.epoch < self._epoch:
            error = ItemError(code=ErrorCode.OUT_OF_ORDER, message=f"epoch {batch.epoch} is over")
            results = tuple(ItemResult(op_id=item.op_id, error=error) for item in batch.items)
        else:
            if batch.epoch > self._epoch:
                self._enter(batch.epoch)
            for key in batch.removals:
                self._remove(key)
            for install in batch.installs:
                self._install(install)
            results = tuple(self._run_items(batch.items))
        return BatchResult(
            epoch=self._epoch,
            cycle_id=batch.cycle_id,
            incarnation=self.incarnation,
            results=results,
            wall_s=time.perf_counter() - started,
            phase_s={"forward": time.perf_counter() - started},
            held_bytes=sum(toy_bytes(each.spec) for each in self.adapters.values()) + TOY_BYTES * len(self.versions),
        )

    def begin(self, epoch: int, incarnation: str) -> None:
        self._epoch, self.incarnation = epoch, incarnation
        for held in (self.adapters, self.versions, self._broken, self._running, self._done, self._events):
            held.clear()

    def _enter(self, epoch: int) -> None:
        if self._epoch:
            self.begin(epoch, self.incarnation)
        self._epoch = epoch  # samples that arrived before the first batch are kept

    def _remove(self, key: str) -> None:
        for held in (self.adapters, self.versions, self._broken):
            held.pop(key, None)

    def _install(self, install: AdapterInstall) -> None:
        adapter_id = install.spec.adapter_id
        self._remove(adapter_id)
        try:
            state = install.fetch()
        except LookupError:
            return
        adapter = ToyAdapter(install.spec, fresh_chain(install.spec), progress=Progress.of(state, install.batch))
        if state is not None:
            try:
                _load(adapter, state, with_optimizer=True)
                if state.gradient is not None:
                    adapter.gradient = read_chain(whole(state.gradient))
            except ValueError as error:
                self._broken[adapter_id] = ItemError(code=ErrorCode.DATA_LOSS, message=str(error))
                return
        self.adapters[adapter_id] = adapter

    def _run_items(self, items: Sequence[Item]) -> list[ItemResult]:
        """Run consecutive passes together, as the real engine does: all are admitted before the first is settled."""
        results: list[ItemResult] = []
        group: list[PassItem] = []
        for item in items:
            is_pass = isinstance(item, PassItem)
            if not is_pass or (item.drop_gradient and any(each.adapter_id == item.adapter_id for each in group)):
                results += self._passes(group)
                group = []
            if isinstance(item, PassItem):
                group.append(item)
            else:
                results.append(self._apply(item))
        return results + self._passes(group)

    def _admit(self, item: Item) -> ItemError | None:
        """Admit an item, and drop the gradient if that begins with it; return why it must not run."""
        adapter = self.adapters.get(item.adapter_id)
        if adapter is None:
            absent = ItemError(code=ErrorCode.OUT_OF_ORDER, message="this worker does not hold the adapter")
            return self._broken.get(item.adapter_id, absent)
        error = adapter.progress.admit(item)
        if error is None and (item.drop_gradient or isinstance(item, LoadItem)):
            adapter.gradient = b""
        return error

    def _apply(self, item: Item) -> ItemResult:
        error = self._admit(item)
        adapter = self.adapters.get(item.adapter_id)
        if adapter is None:
            return ItemResult(op_id=item.op_id, error=error)
        is_admitted = error is None or error.code is not ErrorCode.OUT_OF_ORDER
        match item:
            case OptimStepItem():
                metrics = {} if error else _step(adapter, item)
                if is_admitted:
                    adapter.gradient = b""
                return ItemResult(op_id=item.op_id, error=error, metrics=metrics, engine_s=1e-6)
            case SaveItem():
                if error is None and item.publish_as:
                    self.versions[item.publish_as] = adapter.chain
                state = None
                if error is None:
                    state = toy_state(adapter, with_optimizer=item.with_optimizer, with_gradient=item.with_gradient)
                return ItemResult(op_id=item.op_id, error=error, state=state)
            case LoadItem():
                if error is None:
                    try:
                        _load(adapter, item.state, with_optimizer=item.with_optimizer)
                    except ValueError as damage:
                        error = ItemError(code=ErrorCode.DATA_LOSS, message=str(damage))
                        adapter.progress.fail(item, error)
                return ItemResult(op_id=item.op_id, error=error)
        raise AssertionError(type(item))

    def _passes(self, group: Sequence[PassItem]) -> list[ItemResult]:
        results: dict[int, ItemResult] = {}
        running: list[tuple[int, PassItem]] = []
        for index, item in enumerate(group):
            if (error := self._admit(item)) is not None:
                results[index] = ItemResult(op_id=item.op_id, error=error)
            else:
                running.append((index, item))
        while running:
            failures = [self._run_pass(self.adapters[item.adapter_id], item) for _, item in running]
            again: list[tuple[int, PassItem]] = []
            waiting: set[str] = set()
            for (index, item), failure in zip(running, failures, strict=True):
                adapter = self.adapters[item.adapter_id]
                if item.adapter_id in waiting or adapter.progress.must_run_again(item):
                    waiting.add(item.adapter_id)
                    again.append((index, item))
                else:
                    results[index] = self._settle(adapter, item, failure)
            running = again
        return [results[index] for index in range(len(group))]

    def _run_pass(self, adapter: ToyAdapter, item: PassItem) -> ItemError | None:
        """Add a pass to the gradient, also one that fails; return its failure."""
        tokens = np.concatenate([datum.tokens for datum in item.data])
        if KILL_TOKEN in tokens:
            raise RuntimeError("killed by a toy token")
        if EXIT_TOKEN in tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        if item.backward:
            adapter.gradient = digest(adapter.gradient, item_digest(item))
        if POISON_TOKEN in tokens or item.loss_config.get(FAIL_OPTION):
            return ItemError(code=ErrorCode.NON_FINITE, message="the loss is not finite")
        return None

    def _settle(self, adapter: ToyAdapter, item: PassItem, failure: ItemError | None) -> ItemResult:
        error = adapter.progress.settle(item, failure)
        if error is not None:
            if item.backward:
                adapter.gradient = b""
            return ItemResult(op_id=item.op_id, error=error)
        num_tokens = sum(len(datum.tokens) for datum in item.data)
        value = int.from_bytes(adapter.chain[:2], "little") / 65536
        return ItemResult(
            op_id=item.op_id,
            logprobs=tuple(np.full(d.loss_inputs["target_tokens"].shape, -value, np.float32) for d in item.data),
            metrics={"loss:sum": value * num_tokens},
            num_tokens=num_tokens,
            engine_s=1e-6 * num_tokens,
        )

    def start_sample(self, request: SampleRequest) -> None:
        for removed in request.removals:
            self._remove(removed)
        key = request.version.key
        if request.version.state is not None:
            self.versions[key] = read_chain(whole(request.version.state.weights))
        if key and key not in self.versions:
            error = ItemError(code=ErrorCode.OUT_OF_ORDER, message=f"unknown version {key}")
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
        return bool((self._running and self.may_decode) or self._events)

    def decode_step(self) -> Sequence[SampleEvent]:
        events, self._events = self._events, []
        for sequence in list(self._running) if self.may_decode else ():
            request, params = sequence.request, sequence.request.params
            token = toy_token(sequence.chain, request, sequence.index, len(sequence.tokens))
            sequence.tokens.append(token)
            if request.stream:
                logprob = toy_logprob(request)
                events.append(
                    TokenEvent(op_id=request.op_id, sequence_index=sequence.index, token=token, logprob=logprob)
                )
            is_stopped = token in params.stop_tokens
            if is_stopped or len(sequence.tokens) == params.max_tokens:
                self._running.remove(sequence)
                events += self._finish(sequence, is_stopped)
        return events

    def _finish(self, sequence: _Sequence, is_stopped: bool) -> list[SampleEvent]:
        request, done = sequence.request, self._done[sequence.request.op_id]
        tokens = np.array(sequence.tokens, np.int32)
        done[sequence.index] = SampledSequence(
            tokens=tokens,
            logprobs=np.full(len(tokens), toy_logprob(request), np.float32),
            stop_reason=StopReason.STOP if is_stopped else StopReason.LENGTH,
            topk=toy_tokens(tokens, request.topk_sample_logprobs, -1.0),
        )
        if any(finished is None for finished in done):
            return []
        del self._done[request.op_id]
        prompt = request.prompt
        num_skipped = max(1, len(prompt) - (request.prompt_logprobs_last_n or len(prompt)))
        prompt_logprobs = np.full(len(prompt), -2.0, np.float32)
        prompt_logprobs[:num_skipped] = np.nan
        key = (sequence.chain, prompt.tobytes())
        num_cached = len(prompt) - 1 if key in self._prompts else 0
        self._prompts.add(key)
        return [
            SampleResult(
                op_id=request.op_id,
                sequences=tuple(s for s in done if s is not None),
                prompt_logprobs=prompt_logprobs if request.prompt_logprobs else None,
                topk_prompt=toy_tokens(prompt, request.topk_prompt_logprobs, -2.0, num_skipped),
                prompt_target_logprobs=toy_target_logprobs(request.prompt_targets),
                prompt_alt_tokens=toy_tokens(prompt[1:], request.prompt_alt_tokens_k, -3.0),
                num_prompt_tokens=len(prompt),
                num_cached_tokens=num_cached,
                num_sampled_tokens=sum(len(s.tokens) for s in done if s is not None),
                phase_s={"prefill": 1e-6 * len(prompt), "decode": 1e-6 * len(tokens)},
            )
        ]


def _step(adapter: ToyAdapter, item: OptimStepItem) -> dict[str, float]:
    adapter.chain = digest(adapter.chain, adapter.gradient, item_digest(item))
    adapter.moments = digest(adapter.moments, adapter.gradient, item_digest(item))
    norm = 1.0 if adapter.gradient else 0.0
    num_datums = float(adapter.progress.stepped())
    return {
        "grad_norm:last": norm,
        "update_norm:last": norm,
        "adapter_norm:last": 1.0,
        "num_datums:sum": num_datums,
    }


def _load(adapter: ToyAdapter, state: AdapterState, *, with_optimizer: bool) -> None:
    """Load a state without its gradient; drop the pending one. Raises ValueError if the state is damaged."""
    optimizer = state.optimizer if with_optimizer else None
    adapter.chain = read_chain(whole(state.weights))
    adapter.moments = b"" if optimizer is None else read_chain(whole(optimizer))
    adapter.gradient = b""
    adapter.progress.num_steps = 0 if optimizer is None else state.num_steps


def toy_state(adapter: ToyAdapter, *, with_optimizer: bool = True, with_gradient: bool = False) -> AdapterState:
    """Return an adapter's durable state."""
    has_gradient = with_gradient and bool(adapter.gradient)
    assert not (has_gradient and adapter.progress.window.closed_by), "a closed window has no gradient"
    return AdapterState(
        weights=_written(adapter.chain),
        optimizer=_written(adapter.moments) if with_optimizer else None,
        num_steps=adapter.progress.num_steps,
        applied_seq=adapter.progress.applied_seq,
        fingerprint=FINGERPRINT,
        gradient=_written(adapter.gradient) if has_gradient else None,
        num_datums=adapter.progress.num_datums if has_gradient else 0,
    )


def _written(chain: bytes) -> bytes:
    """Return a safetensors file without tensors, whose metadata has the chain."""
    metadata = {"chain": chain.hex(), "sha256": digest(chain).hex()}
    header = json.dumps({"__metadata__": metadata}).encode()
    return len(header).to_bytes(8, "little") + header


def read_chain(data: bytes) -> bytes:
    """Return the chain in a file; of an imported adapter a digest. Raises ValueError if the file is damaged."""
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        if any("data_offsets" in each for each in header.values()):  # an imported adapter has tensors
            return digest(data)
        fields = header["__metadata__"]
        chain = bytes.fromhex(fields["chain"])
        is_sound = fields["sha256"] == digest(chain).hex()
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise ValueError("the state cannot be read") from error
    if not is_sound:
        raise ValueError("the state does not match its own checksum")
    return chain


def toy_token(chain: bytes, request: SampleRequest, index: int, position: int) -> int:
    """Return a token that is a function of weights, prompt, seed, sample and position, never 0."""
    value = digest(chain, request.prompt.tobytes(), request.params.seed, index, position)
    return 1 + int.from_bytes(value[:4], "little") % 60


def toy_logprob(request: SampleRequest) -> float:
    """Return the log-probability of every sampled token: -1 at temperature 1."""
    return -1.0 / (request.params.temperature or 1.0) if request.scales_logprobs else -1.0


def toy_tokens(tokens: Array, k: int, logprob: float, num_skipped: int = 0) -> TokenLogprobs | None:
    """Return k tokens at each position: the token itself and the next ones in the vocabulary, each less likely by 1."""
    if not k:
        return None
    offsets = np.arange(k, dtype=np.int32)
    token_ids = (tokens[:, None] + offsets) % 100  # (n, k)
    logprobs = np.full(token_ids.shape, logprob, np.float32) - offsets.astype(np.float32)
    token_ids[:num_skipped], logprobs[:num_skipped] = 0, np.nan
    return TokenLogprobs(token_ids=token_ids.astype(np.int32), logprobs=logprobs.astype(np.float32))


def toy_target_logprobs(targets: Array | None) -> NDArray[np.float32] | None:
    """Return -t / 10 for token t, so that token 0 is certain."""
    return None if targets is None else np.where(targets < 0, 0.0, -targets / 10).astype(np.float32)


def toy_factory(settings: EngineSettings) -> EngineFactory:
    """Return the factory that `PoolConfig.engine` names. A model path has the options of ToyEngine as JSON.

    Raises OSError for the path "missing", as for a model that cannot be found.
    """
    if settings.model_path == "missing":
        raise OSError("there is no model in missing")
    options = json.loads(settings.model_path) if settings.model_path.startswith("{") else {}
    return lambda incarnation: ToyEngine(incarnation, name=settings.model_name, **options)
