"""One warm base model and everybody's adapters: runs one batch after another, in one packed pass each where it can.

Knows batches and items; not tenants, durability, or how it is reached. The parts: `base_model` (the forward), `bank`
(where adapters lie), `passes` (with `packing`, `logits`, `losses`), `optim`, `snapshot`, `progress` (order), `sampler`.

Main invariant: an item's result and its adapter's bits depend on that item and adapter alone, not on what else is in
the batch, how it is cut into passes, or which slots are free. A failing item changes nothing but its own adapter.

How a batch runs: fence, installs, removals, then the items in order. Consecutive passes are gathered into groups of at
most `num_slots` adapters and as many tokens as fit, `pass_tokens_max` at most; a group is one packed pass (forwards and
backwards apart). On a GPU consecutive steps are taken together. What is expected next begins to load once the batch's
own adapters are there, beside the backward of a pass, or else when the items are done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Protocol, get_args

import torch

from workers.bank.bank import Bank, HostRow
from workers.bank.snapshot import (
    DamagedStateError,
    NonFiniteGradientError,
    OtherAdapterError,
    gradient_file,
    optimizer_file,
    read_state,
    weights_file,
)
from workers.contract.messages import (
    AdapterInstall,
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
    SampleEvent,
    SampleRequest,
    SaveItem,
)
from workers.contract.settings import num_cores
from workers.host.allocator import keep_freed_memory, without_holes
from workers.host.host_memory import free_bytes
from workers.host.threads import ThreadChoice
from workers.model.base_model import BaseModel
from workers.selftest.loading import load_base_model
from workers.selftest.threads import is_thread_count_invariant
from workers.training.memory import Recompute
from workers.training.optim import NonFiniteStepError, Step, StepNorms, adamw_step, adamw_steps, check_params
from workers.training.packing import Request
from workers.training.passes import Outcome, PassRunner, failure_of
from workers.training.progress import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to make a `TrainingEngine`."""

    model: str
    """A Hugging Face directory of a causal language model, or a name in the local hub cache."""
    model_name: str = ""
    """The name that users ask for; empty: `model`."""
    num_slots: int = 16
    """Adapters and sampler versions in the bank at once; others wait in host memory."""
    num_threads: int | None = None
    """Most threads of the library's kernels; None leaves the process's setting. Part of the fingerprint. Passes and
    decode steps take fewer while others use the cores, if their bits do not depend on that. `OMP_NUM_THREADS` and what
    bounds their spinning (`GOMP_SPINCOUNT`) must be in the environment before torch is imported."""
    device: str = "cpu"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of the base model's weights and activations; adapters, moments and gradients are fp32. "auto": bfloat16 on cuda,
    float32 on a CPU. Part of the fingerprint."""
    exact: bool = False
    """An adapter's bits in training depend on no neighbour on any device, at a cost; on a CPU in float32 they never do.
    Part of the fingerprint."""
    pass_tokens_max: int = 8192
    """Rows of one packed pass, fewer where memory is short; a longer run of items is cut. Changes no bits."""
    recompute: Recompute = "auto"
    """Whether layers run again in the backward instead of keeping what they computed (gradient checkpointing): a third
    slower, and far longer sequences fit. "auto": passes that would not fit otherwise. Changes no bits."""
    memory_share: float = 1.0
    """The part of the memory that is free when a batch begins that is this engine's; above 0, at most 1."""

    def __post_init__(self) -> None:
        for name in ("num_slots", "pass_tokens_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_threads is not None and self.num_threads < 1:
            raise ValueError(f"num_threads is {self.num_threads}; it must be at least 1, or None")
        if self.recompute not in get_args(Recompute):
            raise ValueError(f"recompute is {self.recompute!r}; it must be one of {', '.join(get_args(Recompute))}")
        if not 0 < self.memory_share <= 1:
            raise ValueError(f"memory_share is {self.memory_share}; it must be above 0 and at most 1")
        if self.dtype not in {"auto", "bfloat16", "float32"}:
            raise ValueError(f"dtype is {self.dtype!r}; it must be 'auto', 'bfloat16' or 'float32'")

    @property
    def torch_dtype(self) -> torch.dtype:
        """What `dtype` means on `device`."""
        is_cuda = torch.device(self.device).type == "cuda"
        return torch.bfloat16 if self.dtype == "bfloat16" or (self.dtype == "auto" and is_cuda) else torch.float32


class SamplerProtocol(Protocol):
    """What the engine asks of its sampler; the first four methods are those of `Engine`."""

    def start_sample(self, request: SampleRequest) -> None:
        """See `Engine`."""

    def cancel_sample(self, op_id: str) -> None:
        """See `Engine`."""

    def decode_step(self) -> Sequence[SampleEvent]:
        """See `Engine`."""

    def can_decode(self) -> bool:
        """See `Engine`."""

    def reset(self) -> None:
        """Forget every request, without events: the coordinator that asked is gone, and the bank has been cleared."""

    @property
    def num_cache_blocks(self) -> int:
        """Blocks of its memory for keys and values."""

    @property
    def untaken_bytes(self) -> int:
        """Memory that is the sampler's and that it has not taken yet."""

    @property
    def are_samples_alike(self) -> bool:
        """Whether a sample's bits do not depend on its company, as far as attention goes."""


@dataclass(slots=True)
class _Group:
    """Pass items that run together. All were admitted."""

    requests: list[Request] = field(default_factory=list)
    adapters: set[str] = field(default_factory=set)
    num_tokens: int = 0


class TrainingEngine:
    """Implements `workers.contract.protocols.Engine`. One thread only."""

    @without_holes()  # what is tried while it loads takes more memory than the model
    def __init__(
        self,
        config: EngineConfig,
        incarnation: str = "",
        *,
        make_sampler: Callable[[BaseModel, Bank], SamplerProtocol] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        free_bytes: Callable[[torch.device], int] = free_bytes,
    ) -> None:
        """Load the base model. Raises UnsupportedModelError (a ValueError) and OSError with what is wrong.

        `free_bytes` tells what may still be allocated on a device.
        """
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.config = config
        self.base_model = load_base_model(
            config.model, name=config.model_name, device=config.device, dtype=config.torch_dtype, exact=config.exact
        )
        self.bank = Bank(
            self.base_model.group_shapes,
            config.num_slots,
            self.base_model.device,
            compute_dtype=self.base_model.dtype,
        )
        self.sampler = None if make_sampler is None else make_sampler(self.base_model, self.bank)
        device = self.base_model.device
        self._passes = PassRunner(
            self.base_model, self.bank, clock, lambda: self._room_bytes(free_bytes(device)), config.recompute
        )
        fitting_tokens, name = self._passes.fitting_tokens(), self.base_model.name
        if fitting_tokens == 0:
            raise ValueError(f"{name} is loaded, but there is no memory for a pass: give the worker more")
        if fitting_tokens is not None:
            logger.warning("%s: memory is short; longer sequences than %d tokens are refused", name, fitting_tokens)
        is_invariant = fitting_tokens is None and is_thread_count_invariant(self.base_model)
        self._threads = ThreadChoice(torch.get_num_threads(), num_cores()) if is_invariant else None
        info = self.base_model.info(
            is_thread_count_invariant=is_invariant,
            are_samples_batch_invariant=self.sampler is None or self.sampler.are_samples_alike,
        )
        num_cache_blocks = None if self.sampler is None else self.sampler.num_cache_blocks
        self._info = replace(info, fitting_tokens=fitting_tokens, num_cache_blocks=num_cache_blocks)
        self._incarnation = incarnation
        self._clock = clock
        self._epoch = 0
        self._progress: dict[str, Progress] = {}
        self._broken: dict[str, ItemError] = {}
        """Adapters whose install failed, and why; their items answer with it."""
        keep_freed_memory()

    # ------------------------------------------------------------------ Engine

    @property
    def info(self) -> ModelInfo:
        """Facts about the base model."""
        return self._info

    def run(self, batch: Batch) -> BatchResult:
        """Run one batch to its end. Items of an epoch older than the newest seen are all OUT_OF_ORDER."""
        begin_s = self._clock()
        if batch.epoch < self._epoch:
            stale = ItemError(code=ErrorCode.OUT_OF_ORDER, message="the batch is of an older epoch")
            results = [ItemResult(op_id=item.op_id, error=stale) for item in batch.items]
        else:
            if batch.epoch > self._epoch:
                self._begin_epoch(batch.epoch)
            for install in batch.installs:
                self._install(install)
            for key in batch.removals:
                self._remove(key)
            own = frozenset(item.adapter_id for item in batch.items)
            self._passes.beside = partial(self._prefetch, batch.expected, own)
            with self._running():
                results = self._run_items(batch.items)
            self._prefetch(batch.expected, own, is_over=True)
        return BatchResult(
            epoch=self._epoch,
            cycle_id=batch.cycle_id,
            incarnation=self._incarnation,
            results=tuple(results),
            wall_s=self._clock() - begin_s,
        )

    def _prefetch(self, expected: Sequence[str], own: Collection[str], *, is_over: bool = False) -> None:
        """Begin to load what is expected next, unless the batch may still need adapters of its own that are not here.

        Copies follow each other: its own would wait behind those.
        """
        if is_over or all(self.bank.entry(key).row is not None for key in own if key in self.bank):
            self.bank.prefetch(expected, keep=own)

    def start_sample(self, request: SampleRequest) -> None:
        """Forget what it says is to be forgotten, and queue it."""
        assert self.sampler is not None, "this engine was made without a sampler"
        for key in request.removals:
            self._remove(key)
        self.sampler.start_sample(request)

    def cancel_sample(self, op_id: str) -> None:
        """Stop a request; unknown ids are ignored."""
        if self.sampler is not None:
            self.sampler.cancel_sample(op_id)

    def decode_step(self) -> Sequence[SampleEvent]:
        """Advance every running sequence by one token."""
        if self.sampler is None:
            return ()
        with self._running():
            return self.sampler.decode_step()

    def can_decode(self) -> bool:
        """Whether `decode_step` has anything to do."""
        return self.sampler is not None and self.sampler.can_decode()

    def _running(self) -> AbstractContextManager[None]:
        """Around whatever computes: on as many threads as there are free cores, if bits do not depend on it."""
        return self._threads.running() if self._threads else nullcontext()

    def _room_bytes(self, free_bytes: int) -> int:
        """What a pass may take of the memory that is free: this engine's share, without what is the sampler's."""
        return int(self.config.memory_share * free_bytes) - (0 if self.sampler is None else self.sampler.untaken_bytes)

    # ------------------------------------------------------------------ adapters

    def _begin_epoch(self, epoch: int) -> None:
        """A new coordinator: what is here may be ahead of its log."""
        is_first, self._epoch = self._epoch == 0, epoch
        if is_first:
            return  # nothing is here but samples that came before the first batch
        self.bank.clear()
        self._progress.clear()
        self._broken.clear()
        if self.sampler is not None:
            self.sampler.reset()

    def _remove(self, key: str) -> None:
        self.bank.remove(key)
        self._progress.pop(key, None)
        self._broken.pop(key, None)

    def _install(self, install: AdapterInstall) -> None:
        spec, state = install.spec, install.state
        self._remove(spec.adapter_id)
        try:
            if spec.rank > self.base_model.max_rank:
                raise OtherAdapterError(f"rank is {spec.rank}; this model takes at most {self.base_model.max_rank}")
            layout = self.bank.layout(spec)
            host = None if state is None else read_state(layout, spec, state.weights, state.optimizer, state.gradient)
        except ValueError as error:
            is_damaged = isinstance(error, DamagedStateError | OtherAdapterError) and state is not None
            code = ErrorCode.DATA_LOSS if is_damaged else ErrorCode.INVALID_ARGUMENT
            self._broken[spec.adapter_id] = ItemError(code=code, message=str(error))
            return
        self.bank.add(spec.adapter_id, spec, host)
        self._progress[spec.adapter_id] = Progress.of(state)

    # ------------------------------------------------------------------ items

    def _run_items(self, items: Sequence[Item]) -> list[ItemResult]:
        results: list[ItemResult] = []
        index = 0
        while index < len(items):
            item = items[index]
            stop = index + 1
            if isinstance(item, PassItem):
                while stop < len(items) and isinstance(items[stop], PassItem):
                    stop += 1
                results += self._run_passes([it for it in items[index:stop] if isinstance(it, PassItem)])
            elif isinstance(item, OptimStepItem) and self.base_model.is_deferred:
                steps = self._steps_from(items, index)
                results += self._run_steps(steps)
                stop = index + len(steps)
            else:
                results.append(self._run_other(item))
            index = stop
        return results

    def _admit(self, item: Item) -> ItemError | None:
        """Check an item's place in its adapter's order and take it; see `Progress.admit`."""
        progress = self._progress.get(item.adapter_id)
        if progress is None:
            missing = ItemError(code=ErrorCode.OUT_OF_ORDER, message="this worker does not hold the adapter")
            return self._broken.get(item.adapter_id, missing)
        error = progress.admit(item)
        if error is None and (item.drop_gradient or isinstance(item, LoadItem)):
            self.bank.drop_grad(item.adapter_id)
        return error

    # ------------------------------------------------------------------ passes

    def _run_passes(self, items: Sequence[PassItem]) -> list[ItemResult]:
        """A run of passes, group by group. Results in the order of the items."""
        self._passes.measure()
        tokens_max = self._passes.pass_tokens(items, self.config.pass_tokens_max)
        results: dict[int, ItemResult] = {}
        group = _Group()
        members: list[tuple[int, PassItem, Request | None, ItemError | None]] = []

        def flush() -> None:
            nonlocal group
            outcomes = iter(self._passes.run(group.requests))
            for index, item, request, error in members:
                outcome = Outcome(error=error) if request is None else next(outcomes)
                results[index] = self._settled(item, request, outcome)
            group = _Group()
            members.clear()

        for index, item in enumerate(items):
            is_full = len(group.adapters) == self.config.num_slots and item.adapter_id not in group.adapters
            num_tokens = sum(len(datum.tokens) for datum in item.data)
            is_long = group.num_tokens and group.num_tokens + num_tokens > tokens_max
            if is_full or is_long or (item.drop_gradient and item.adapter_id in group.adapters):
                flush()
            error = self._admit(item)
            if error is not None:
                results[index] = ItemResult(op_id=item.op_id, error=error)
                continue
            try:
                request = self._passes.checked(item)
            except ValueError as invalid:
                error = ItemError(code=ErrorCode.INVALID_ARGUMENT, message=str(invalid))
                members.append((index, item, None, error))
            else:
                members.append((index, item, request, None))
                group.requests.append(request)
                group.num_tokens += num_tokens
            group.adapters.add(item.adapter_id)
        flush()
        return [results[index] for index in range(len(items))]

    def _settled(self, item: PassItem, request: Request | None, outcome: Outcome) -> ItemResult:
        """An admitted item's result. A failed backward takes its adapter's pending gradient with it."""
        error = self._progress[item.adapter_id].settle(item, outcome.error)
        if error is not None:
            if item.backward:
                self.bank.drop_grad(item.adapter_id)
            return ItemResult(op_id=item.op_id, error=error, engine_s=outcome.engine_s)
        part = outcome.part
        assert request is not None
        assert part is not None
        metrics = {"loss:sum": part.loss_sum}
        if part.num_clipped is not None:
            metrics["clipped_tokens:sum"] = float(part.num_clipped)
        return ItemResult(
            op_id=item.op_id,
            logprobs=request.loss.split_logprobs(part.logprobs),
            metrics=metrics,
            num_tokens=request.num_tokens,
            engine_s=outcome.engine_s,
        )

    # ------------------------------------------------------------------ steps, saves, loads

    def _run_other(self, item: Item) -> ItemResult:
        begin_s = self._clock()
        error = self._admit(item)
        metrics: dict[str, float] = {}
        state = None
        if error is None:
            try:
                match item:
                    case OptimStepItem():
                        metrics = self._step(item)
                    case SaveItem():
                        state = self._save(item)
                    case LoadItem():
                        self._load(item)
                    case _:
                        raise TypeError(f"an engine cannot run a {type(item).__name__}")
            except Exception as exception:
                error = _item_error(exception)
                if error.code == ErrorCode.INTERNAL:
                    logger.exception("an item failed")
                self._progress[item.adapter_id].fail(item, error)
        if isinstance(item, OptimStepItem):
            self._end_window(item, error)
        return ItemResult(op_id=item.op_id, error=error, metrics=metrics, state=state, engine_s=self._clock() - begin_s)

    def _end_window(self, item: OptimStepItem, error: ItemError | None) -> None:
        """A step ends its gradient window, however it went, if it consumed its seq."""
        if item.adapter_id in self._progress and _is_applied(error):
            self.bank.drop_grad(item.adapter_id)

    def _step(self, item: OptimStepItem) -> dict[str, float]:
        check_params(item.params)
        row = self.bank.acquire([item.adapter_id])[0]
        norms = adamw_step(row, item.params, self._progress[item.adapter_id].num_steps + 1)
        return self._stepped(item, norms)

    def _stepped(self, item: OptimStepItem, norms: StepNorms) -> dict[str, float]:
        """Note a step that was taken; its metrics."""
        progress = self._progress[item.adapter_id]
        entry = self.bank.entry(item.adapter_id)
        entry.has_grad = False
        entry.has_moments = True
        num_datums = progress.stepped()
        return {
            "grad_norm:last": norms.gradient,
            "update_norm:last": norms.update,
            "adapter_norm:last": norms.adapter,
            "num_datums:sum": float(num_datums),
        }

    def _steps_from(self, items: Sequence[Item], index: int) -> list[OptimStepItem]:
        """The steps from `index` on that can be taken together: of different adapters, as many as there are slots."""
        steps: list[OptimStepItem] = []
        adapters: set[str] = set()
        for item in items[index : index + self.config.num_slots]:
            if not isinstance(item, OptimStepItem) or item.adapter_id in adapters:
                break
            steps.append(item)
            adapters.add(item.adapter_id)
        return steps

    def _run_steps(self, items: Sequence[OptimStepItem]) -> list[ItemResult]:
        """Steps of different adapters, with one wait for the device. Engine time is shared equally."""
        begin_s = self._clock()
        outcomes: dict[str, StepNorms | ItemError] = {}
        admitted: list[OptimStepItem] = []
        for item in items:
            refusal = self._admit(item)
            if refusal is None:
                try:
                    check_params(item.params)
                    admitted.append(item)
                    continue
                except ValueError as invalid:
                    refusal = _item_error(invalid)
                    self._progress[item.adapter_id].fail(item, refusal)
            outcomes[item.adapter_id] = refusal
        for item, norms in zip(admitted, self._take(admitted), strict=True):
            if isinstance(norms, StepNorms):
                outcomes[item.adapter_id] = norms
            else:
                outcomes[item.adapter_id] = failure = _item_error(norms)
                self._progress[item.adapter_id].fail(item, failure)
        engine_s = (self._clock() - begin_s) / len(items)
        results = []
        for item in items:
            outcome = outcomes[item.adapter_id]
            error = None if isinstance(outcome, StepNorms) else outcome
            metrics = self._stepped(item, outcome) if isinstance(outcome, StepNorms) else {}
            self._end_window(item, error)
            results.append(ItemResult(op_id=item.op_id, error=error, metrics=metrics, engine_s=engine_s))
        return results

    def _take(self, items: Sequence[OptimStepItem]) -> list[StepNorms | Exception]:
        """Take steps that were admitted. Out of memory, none of them has been taken."""
        try:
            rows = self.bank.acquire([item.adapter_id for item in items])
        except Exception as error:
            logger.warning("the adapters of %d steps cannot be loaded", len(items), exc_info=error)
            return [error] * len(items)
        return adamw_steps(
            [
                Step(row=row, params=item.params, num_steps=self._progress[item.adapter_id].num_steps + 1)
                for row, item in zip(rows, items, strict=True)
            ]
        )

    def _save(self, item: SaveItem) -> AdapterState:
        entry = self.bank.entry(item.adapter_id)
        progress = self._progress[item.adapter_id]
        if item.publish_as:
            self.bank.publish(item.adapter_id, item.publish_as)
        host = self.bank.read(item.adapter_id)
        assert host.weights is not None
        gradient = None
        if item.with_gradient and host.grad is not None:
            assert progress.window is None, "whatever closes a window drops its gradient"
            gradient = gradient_file(entry.layout, entry.spec, host.grad)
        return AdapterState(
            weights=weights_file(entry.layout, entry.spec, host.weights),
            optimizer=optimizer_file(entry.layout, entry.spec, host) if item.with_optimizer else None,
            num_steps=progress.num_steps,
            applied_seq=progress.applied_seq,
            fingerprint=self._info.fingerprint,
            gradient=gradient,
            num_datums=0 if gradient is None else progress.num_datums,
        )

    def _load(self, item: LoadItem) -> None:
        entry = self.bank.entry(item.adapter_id)
        optimizer = item.state.optimizer if item.with_optimizer else None
        host: HostRow = read_state(entry.layout, entry.spec, item.state.weights, optimizer)
        self.bank.replace(item.adapter_id, host)
        self._progress[item.adapter_id].loaded(0 if optimizer is None else item.state.num_steps)


def engine_factory(
    config: EngineConfig, make_sampler: Callable[[BaseModel, Bank], SamplerProtocol] | None = None
) -> Callable[[str], TrainingEngine]:
    """An `EngineFactory`: takes the incarnation, to be called on the thread that will own the engine."""
    return lambda incarnation: TrainingEngine(config, incarnation, make_sampler=make_sampler)


def _is_applied(error: ItemError | None) -> bool:
    """Whether the item consumed its seq."""
    return error is None or error.code != ErrorCode.OUT_OF_ORDER


def _item_error(error: Exception) -> ItemError:
    """What an item that is no pass answers when `error` ended it."""
    match error:
        case NonFiniteStepError():
            message = f"{error}; the step was not taken and the gradient was dropped. Lower the learning rate or clip."
            return ItemError(code=ErrorCode.NON_FINITE, message=message)
        case NonFiniteGradientError():
            return ItemError(code=ErrorCode.NON_FINITE, message=str(error))
        case DamagedStateError():
            return ItemError(code=ErrorCode.DATA_LOSS, message=str(error))
        case ValueError() if type(error) in {ValueError, OtherAdapterError}:
            return ItemError(code=ErrorCode.INVALID_ARGUMENT, message=str(error))
    return failure_of(error)
