"""One warm base model and its adapters: runs a worker's batches and decode steps.

Does not depend on tenants, durability or the way that calls arrive. The parts: `model` (the forward), `bank` (the
adapters' rows), `training` (a batch's items), `sampling` (decode steps), `selftest` (trials when the model is loaded).

Main invariant: an item's result and its adapter's bits depend on that item and adapter alone, not on the other items of
the batch, on how passes are cut, or on which slots are free. A failing item changes only its own adapter.

A batch: compare epochs, remove, install, then run the items in order. Adapters that the next batch is expected to need
begin to load when the batch's own adapters are resident.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from workers.bank.arriving import with_read_states
from workers.bank.bank import Bank
from workers.contract.messages import (
    Batch,
    BatchResult,
    ErrorCode,
    ItemError,
    ItemResult,
    ModelInfo,
    PassItem,
    SampleEvent,
    SampleRequest,
    SampleResult,
    WorkerUse,
)
from workers.contract.protocols import Arriving, EngineFactory
from workers.contract.settings import EngineSettings, num_cores
from workers.host import process_use
from workers.host.allocator import keep_freed_memory, without_holes
from workers.host.free_memory import MemoryShare, free_bytes, free_host_bytes
from workers.host.threads import ThreadChoice
from workers.model.base_model import BaseModel
from workers.sampling.sampler import Sampler, SamplerLimits
from workers.selftest.adapter_costs import measured_costs
from workers.selftest.loading import fitting_tokens, load_base_model
from workers.selftest.page_attention import tried_page_kernel
from workers.selftest.step_costs import sequences_of_fixed_time
from workers.selftest.thread_invariance import is_thread_count_invariant
from workers.training.copies import AdapterCopies
from workers.training.items import ItemRunner
from workers.training.passes import PassRunner

BANK_PART = 0.5
"""The part of a GPU's memory that the bank may take of what the base model and the sampler have left; passes need the
rest."""
HOST_PART = 0.5
"""The part of the free memory that copies and sampler versions may take, unless the operator names a number."""


def host_bytes_max(settings: EngineSettings, free_bytes: int) -> int:
    """Return the most bytes of host memory for adapters and sampler versions, if so many bytes are free there."""
    return settings.host_bytes_max or int(HOST_PART * settings.host_share * free_bytes)


def bank_bytes_max(free_bytes: int) -> int:
    """Return the most bytes of a bank on a GPU that has so many free, behind the base model and the sampler."""
    return int(BANK_PART * free_bytes)


def sampler_limits(settings: EngineSettings) -> SamplerLimits:
    """Return the limits of the engine's sampler."""
    return SamplerLimits(cache_bytes_max=settings.cache_bytes_max, cache_share=settings.cache_share)


class TrainingEngine:
    """Implements `workers.contract.protocols.Engine`. One thread only, but for `read_ahead`."""

    @without_holes()  # trials allocate more memory than the model
    def __init__(
        self,
        settings: EngineSettings,
        incarnation: str = "",
        *,
        base_model: BaseModel | None = None,
        free_bytes: Callable[[torch.device], int] = free_bytes,
    ) -> None:
        """Load the base model and run its trials; `free_bytes` measures the free memory of a device.

        `base_model` has been loaded by these settings, and no other engine computes with it at the same time.
        Raises UnsupportedModelError (a ValueError), ValueError and OSError.
        """
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        self.settings = settings
        self.base_model = base_model = base_model or load_base_model(settings)
        self.bank = bank = Bank(
            base_model.group_shapes, settings.num_slots, base_model.device, compute_dtype=base_model.dtype
        )
        memory = MemoryShare(base_model.device, settings.memory_share, free_bytes)
        limits = sampler_limits(settings)
        self.sampler = Sampler(base_model, bank, limits, memory, page_kernel=tried_page_kernel(base_model))
        if base_model.device.type == "cuda":
            bank.limit(bank_bytes_max(memory.free_bytes()))
        self._passes = PassRunner(base_model, bank, memory, settings.recompute)
        fitting = fitting_tokens(self._passes)
        is_invariant = fitting is None and is_thread_count_invariant(base_model)
        self._threads = ThreadChoice(torch.get_num_threads(), num_cores()) if is_invariant else None
        info = base_model.info(
            is_thread_count_invariant=is_invariant, are_samples_batch_invariant=self.sampler.is_batch_invariant
        )
        self._info = replace(
            info,
            fitting_tokens=fitting,
            host_bytes_max=host_bytes_max(settings, free_host_bytes()),
            bank_bytes_max=bank.copy_bytes_max,
            num_cache_blocks=self.sampler.num_cache_blocks,
            num_sequence_slots=self.sampler.num_sequence_slots,
        )
        self._copies = AdapterCopies(bank, base_model.max_rank, self._info.fingerprint)
        self._items = ItemRunner(self._passes, self._copies, pass_tokens_max=settings.pass_tokens_max)
        self._incarnation = incarnation
        self._epoch = 0
        keep_freed_memory()
        self._info = replace(self._info, costs=measured_costs(base_model))
        if base_model.device.type == "cpu":  # on a GPU a step of all slots takes hardly longer than a step of one
            self.sampler.bound_scopes(sequences_of_fixed_time(self.sampler, self._running))

    @property
    def info(self) -> ModelInfo:
        """Facts of the base model."""
        return self._info

    # ------------------------------------------------------------------ batches

    def begin(self, epoch: int, incarnation: str) -> None:
        """Drop everything of the last coordinator: it may be ahead of the next one's log."""
        self._epoch, self._incarnation = epoch, incarnation
        self._copies.clear()
        self.sampler.reset()

    def read_ahead(self, message: Arriving) -> Arriving:
        """See `Engine`."""
        return with_read_states(self.bank, message)

    def run(self, batch: Batch) -> BatchResult:
        """Run one batch to its end. Every item of a batch of an older epoch fails with OUT_OF_ORDER."""
        begin_s = time.perf_counter()
        if batch.epoch < self._epoch:
            stale = ItemError(code=ErrorCode.OUT_OF_ORDER, message="the batch is of an older epoch")
            results = [ItemResult(op_id=item.op_id, error=stale) for item in batch.items]
        else:
            if batch.epoch > self._epoch:
                self._enter(batch.epoch)
            for key in batch.removals:
                self._copies.remove(key)
            for install in batch.installs:
                self._copies.install(install)
            self._passes.prefetch.expect(batch.expected, own=frozenset(item.adapter_id for item in batch.items))
            with self._running():
                if passes := [item for item in batch.items if isinstance(item, PassItem)]:
                    self._passes.measure_room(passes)
                results = self._items.run(batch.items)
            self._check_device(results)
            self._passes.prefetch.end_batch()
        return BatchResult(
            epoch=self._epoch,
            cycle_id=batch.cycle_id,
            incarnation=self._incarnation,
            results=tuple(results),
            wall_s=time.perf_counter() - begin_s,
            held_bytes=self.bank.host_bytes,
            phase_s=self._passes.times.take(),
            use=self._use(),
        )

    def _use(self) -> WorkerUse:
        stats = self.bank.stats
        return WorkerUse(
            resident_bytes=process_use.resident_bytes(),
            device_bytes=process_use.device_bytes(self._passes.base_model.device),
            cpu_s=process_use.cpu_s(),
            num_loads=stats.num_loads,
            num_prefetches=stats.num_prefetches,
            num_evictions=stats.num_evictions,
            num_cache_blocks_used=self.sampler.num_cache_blocks_used,
        )

    def _enter(self, epoch: int) -> None:
        """Enter a batch's epoch. Samples of the first one may have come before it."""
        if self._epoch:
            self.begin(epoch, self._incarnation)
        self._epoch = epoch

    def _running(self) -> AbstractContextManager[None]:
        """Compute with as many threads as there are free cores, if bits do not depend on the number."""
        return self._threads.running() if self._threads else nullcontext()

    def _check_device(self, results: Sequence[ItemResult | SampleResult]) -> None:
        """Raise the library's error, which ends this engine, if the device does not compute any more.

        A kernel that accesses memory out of bounds, or whose assertion fails, leaves a GPU that refuses all later work
        of the process: everything would fail from now on, whatever is asked for. Only a failure inside of the worker
        can be the sign of it.
        """
        failures = (result.error for result in results if result.error is not None)
        if self.base_model.device.type == "cuda" and any(each.code is ErrorCode.INTERNAL for each in failures):
            torch.cuda.synchronize(self.base_model.device)

    # ------------------------------------------------------------------ samples

    def start_sample(self, request: SampleRequest) -> None:
        """Remove the versions that the request names, and queue the request."""
        for key in request.removals:
            self._copies.remove(key)
        self.sampler.start_sample(request)

    def cancel_sample(self, op_id: str) -> None:
        """Stop a request; unknown ids are ignored."""
        self.sampler.cancel_sample(op_id)

    def decode_step(self) -> Sequence[SampleEvent]:
        """Advance running sequences by one token."""
        with self._running():
            events = self.sampler.decode_step()
        self._check_device([event for event in events if isinstance(event, SampleResult)])
        return events

    def can_decode(self) -> bool:
        """Return whether `decode_step` has anything to do."""
        return self.sampler.can_decode()


def engine_factory(settings: EngineSettings) -> EngineFactory:
    """Return a factory of engines with these settings; see `PoolConfig.engine`."""
    return lambda incarnation: TrainingEngine(settings, incarnation)
