"""How many threads the next pass or decode step runs with: as many as there are cores that nobody else uses.

Threads that meet after every operation go at the pace of the last of them. Where another process holds one of two
cores, a pass on two threads takes several times as long as on one. So passes give way, and take the cores back when
they are free. Only where bits do not depend on the number of threads: `are_threads_alike` tries that when a model is
loaded.

Knows cores, times and, for that trial, one small pass and some samples; not batches or order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.bank.bank import Bank
from workers.contract.messages import (
    AdamParams,
    AdapterSpec,
    Datum,
    PassItem,
    SampleRequest,
    SampleResult,
    SamplerVersion,
    SamplingParams,
)
from workers.host.host_memory import free_bytes
from workers.host.kernel_files import read_kernel_file
from workers.model.base_model import BaseModel
from workers.sampling.sampler import Sampler
from workers.training.optim import Step, StepNorms, adamw_step, adamw_steps
from workers.training.passes import PassRunner

PROC_STAT = Path("/proc/stat")
NUM_CORES, CORE_BYTES = os.cpu_count() or 1, 256
"""Of the machine, and how long a core's line in that file may be: ten numbers of 64 bits."""
WINDOW_S = 0.25
"""Length of passes over which the cores are watched before deciding. The kernel counts in hundredths of a second."""
MARGIN_DOWN, MARGIN_UP = 0.4, 0.2
"""In cores: others may use so much of a thread's core before the thread is given up, and only so much when it is taken
back. Two margins, so that a load between them does not make the number swing."""


TRIAL_LENGTHS = {
    "few": (5,),
    "odd": (11,),
    "mixed": (24, 24, 11),
    "beside": (24, 24, 11),
    "many": (256,),
    "long": (1024,),
}
"""Sequences of the adapters of a trial: few rows, two adapters computed as one batch, many targets of each token, and a
whole chunk of the largest rank."""
TRIAL_TARGETS = {"many": 200}
"""Of each token, where it is not one."""
TRIAL_PROMPT_TOKENS, TRIAL_DRAWN_TOKENS, TRIAL_CACHE_BYTES = 70, 3, 64 << 20
"""Of its samples: a prompt of a block of keys and a part of one."""
TRIAL_SHORT_PARAMS_MIN, TRIAL_SHORT_LENGTH = 50_000_000, 128
"""From so many parameters on no sequence of the trial is longer than this, or it would take many seconds."""
TRIAL_PARAMS_MAX = 1_000_000_000
"""A larger base model is not tried: it would take minutes, and its operations are so long that meeting costs little."""
_TRIED: dict[object, bool] = {}
"""What trials in this process have shown, by all that kernels are chosen by."""


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """Seconds so far."""

    wall_s: float
    used_s: float
    """By anybody, on the cores that this process may use, summed over them."""
    own_s: float
    """By this process, all threads."""


def read_core_times() -> CoreTimes | None:
    """The present state; None where the system does not tell."""
    try:
        lines = read_kernel_file(PROC_STAT, (NUM_CORES + 1) * CORE_BYTES).split("\n")
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return None
    ticks = 0
    for line in lines[1:]:  # the first is of all cores
        name, *fields = line.split(" ")
        if not name.startswith("cpu"):
            break
        if name in cores:
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return CoreTimes(time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


class ThreadChoice:
    """Chooses for one engine. One thread only."""

    def __init__(
        self, num_threads: int, num_cores: int, read: Callable[[], CoreTimes | None] = read_core_times
    ) -> None:
        """At most `num_threads`, on a machine that gives this process `num_cores`."""
        self.num_threads = num_threads
        self._num_threads_max = num_threads
        self._num_cores = num_cores
        self._read = read
        self._wall_s = self._foreign_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a pass: the chosen number of threads inside, the number there was before afterwards."""
        if self._num_threads_max == 1:
            yield
            return
        before, num_before = self._read(), torch.get_num_threads()
        torch.set_num_threads(self.num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(num_before)
            after = self._read()
            if before is not None and after is not None:
                self._observe(before, after)

    def _observe(self, before: CoreTimes, after: CoreTimes) -> None:
        """Add a pass to the window; decide at its end."""
        self._wall_s += after.wall_s - before.wall_s
        self._foreign_s += (after.used_s - before.used_s) - (after.own_s - before.own_s)
        if self._wall_s < WINDOW_S:
            return
        num_free = self._num_cores - self._foreign_s / self._wall_s
        num_kept, num_taken = int(num_free + MARGIN_DOWN), int(num_free + MARGIN_UP)
        chosen = max(num_taken, min(num_kept, self.num_threads))
        self.num_threads = max(1, min(chosen, self._num_threads_max))
        self._wall_s = self._foreign_s = 0.0


def are_threads_alike(base_model: BaseModel) -> bool:
    """Whether passes, steps and samples have the same bits on one thread and on the number of threads in use.

    False without trying if that is one thread, if the device is no CPU, or if the model is very large.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or base_model.device.type != "cpu" or base_model.num_params > TRIAL_PARAMS_MAX:
        return False
    current = base_model.current
    sizes = (base_model.group_shapes, base_model.num_heads, base_model.head_dim)
    ways = (
        num_threads,
        base_model.dtype,
        base_model.block_rows,
        base_model.is_packed,
        current.rows_min,
        current.can_batch,
    )
    if (sizes, ways) not in _TRIED:
        num_matmuls = base_model.num_base_matmuls
        several = _trial(base_model)
        torch.set_num_threads(1)
        try:
            single = _trial(base_model)
        finally:
            torch.set_num_threads(num_threads)
            current.routing, current.attend, current.num_base_matmuls = current.route(()), None, num_matmuls
        is_alike = all(torch.equal(left, right) for left, right in zip(several, single, strict=True))
        _TRIED[sizes, ways] = bool(several) and is_alike
    return _TRIED[sizes, ways]


def _trial(base_model: BaseModel) -> list[Tensor]:
    """Everything that a pass and a step of some adapters compute; nothing if there was no memory for it."""
    longest = base_model.max_seq_len
    if base_model.num_params >= TRIAL_SHORT_PARAMS_MIN:
        longest = min(longest, TRIAL_SHORT_LENGTH)
    num_slots = len(TRIAL_LENGTHS)
    bank = Bank(base_model.group_shapes, num_slots, base_model.device, compute_dtype=base_model.dtype)
    passes = PassRunner(base_model, bank, time.perf_counter, lambda: free_bytes(base_model.device))
    rng = np.random.default_rng(0)
    requests = []
    for name, lengths in TRIAL_LENGTHS.items():
        rank = base_model.max_rank if name == "long" else min(8, base_model.max_rank)
        flags = {"train_attn": True, "train_mlp": True, "train_unembed": True}
        bank.add(name, AdapterSpec(adapter_id=name, rank=rank, alpha=32.0, seed=1, **flags))
        data = []
        for length in (min(length, longest) for length in lengths):
            shape = (length, TRIAL_TARGETS[name]) if name in TRIAL_TARGETS else (length,)
            targets = rng.integers(0, base_model.vocab_size, shape).astype(np.int32)
            inputs: dict[str, Any] = {
                "target_tokens": targets,
                "weights": rng.standard_normal(shape).astype(np.float32),
            }
            data.append(
                Datum(tokens=rng.integers(0, base_model.vocab_size, length).astype(np.int32), loss_inputs=inputs)
            )
        item = PassItem(
            op_id=name,
            adapter_id=name,
            prev_seq=0,
            seq=1,
            chunk_index=0,
            num_chunks=1,
            data=tuple(data),
            loss_fn="cross_entropy",
            loss_config={},
            backward=True,
        )
        requests.append(passes.checked(item))
    results = []
    for outcome in passes.run(requests):
        if outcome.part is None:
            return []
        results += [outcome.part.logprobs, torch.tensor(outcome.part.loss_sum)]
    for row in bank.acquire(list(TRIAL_LENGTHS)):
        assert row.grad is not None
        results.append(row.grad.clone())
        params = AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)
        if base_model.is_deferred:
            [norms] = adamw_steps([Step(row=row, params=params, num_steps=1)])
        else:
            norms = adamw_step(row, params, 1)
        if not isinstance(norms, StepNorms):
            return []
        results += [row.weights, torch.tensor([norms.gradient, norms.update, norms.adapter], dtype=torch.float64)]
    sampled = _sampled(base_model, bank, min(TRIAL_PROMPT_TOKENS, longest - TRIAL_DRAWN_TOKENS))
    return results + sampled if sampled else []


def _sampled(base_model: BaseModel, bank: Bank, prompt_tokens: int) -> list[Tensor]:
    """Log-probabilities of samples of a trial's adapters: several of one prompt, and of different ones together.

    Nothing if there was no memory for them.
    """
    sampler = Sampler(base_model, bank, cache_bytes_max=TRIAL_CACHE_BYTES)
    rng = np.random.default_rng(1)
    for number, key in enumerate(("few", "few", "odd", "")):
        request = SampleRequest(
            op_id=str(number),
            version=SamplerVersion(key=key),
            prompt=rng.integers(0, base_model.vocab_size, prompt_tokens - number).astype(np.int32),
            num_samples=1 + 2 * number,
            params=SamplingParams(max_tokens=TRIAL_DRAWN_TOKENS, seed=number),
            prompt_logprobs=True,
        )
        sampler.start_sample(request)
    results: dict[str, SampleResult] = {}
    while sampler.can_decode():
        results |= {event.op_id: event for event in sampler.decode_step() if isinstance(event, SampleResult)}
    values = []
    for _, result in sorted(results.items()):
        if result.error is not None or result.prompt_logprobs is None:
            return []
        values += [result.prompt_logprobs[1:], *(sequence.logprobs for sequence in result.sequences)]
    return [torch.from_numpy(logprobs) for logprobs in values]
