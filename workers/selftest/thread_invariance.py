"""Trial of threads: whether passes, steps and samples have the same bits on one thread and on several.

If they have, the number of threads may follow the load of the machine (`host.threads`). The trial runs a small pass of
several adapters, their steps and some samples, twice.

Main invariant: a base model that was not tried, or had no memory for the trial, counts as depending on the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.bank.bank import Bank
from workers.bank.entries import Row
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
from workers.host.free_memory import MemoryShare
from workers.model.base_model import BaseModel
from workers.sampling.sampler import Sampler, SamplerLimits
from workers.training.optim import Step, StepNorms, adamw_step, adamw_steps
from workers.training.passes import PassRunner, Request

TRIAL_LENGTHS = {
    "few": (5,),
    "odd": (11,),
    "mixed": (24, 24, 11),
    "equal": (24, 24, 11),
    "many": (256,),
    "long": (1024,),
}
"""Lengths of the sequences of each adapter: few rows, two adapters computed as one batch, many targets of a token, and
a whole chunk of the largest rank."""
TRIAL_TARGETS = {"many": 200}
"""Targets of each token, where it is not one."""
TRIAL_PROMPT_TOKENS, TRIAL_DRAWN_TOKENS, TRIAL_CACHE_BYTES = 70, 3, 64 << 20
"""Size of the samples: a prompt of a block of keys and a part of one."""
TRIAL_SHORT_PARAMS_MIN, TRIAL_SHORT_LENGTH = 50_000_000, 128
"""With at least this many parameters, sequences of the trial are no longer than this, to keep it short."""
TRIAL_PARAMS_MAX = 1_000_000_000
"""Larger base models are not tried: the trial would take minutes, and threads that wait cost their long operations
little."""
_TRIED: dict[object, bool] = {}
"""Results of trials in this process, by all that kernels are chosen by."""


def is_thread_count_invariant(base_model: BaseModel) -> bool:
    """Return whether passes, steps and samples have the same bits on one thread and on the number in use.

    False without a trial if that number is one, if the device is no CPU, or if the model is very large.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or base_model.device.type != "cpu" or base_model.num_params > TRIAL_PARAMS_MAX:
        return False
    sizes = (base_model.group_shapes, base_model.num_heads, base_model.head_dim, base_model.delta_shape)
    key = (sizes, num_threads, base_model.dtype, base_model.numerics)
    if key not in _TRIED:
        several = _trial(base_model)
        torch.set_num_threads(1)
        try:
            single = _trial(base_model)
        finally:
            torch.set_num_threads(num_threads)
            base_model.reset()
        is_equal = all(torch.equal(left, right) for left, right in zip(several, single, strict=True))
        _TRIED[key] = bool(several) and is_equal
    return _TRIED[key]


def _trial(base_model: BaseModel) -> list[Tensor]:
    """Return all numbers that a pass, a step and samples of some adapters compute; none if the memory was too small."""
    longest = base_model.max_seq_len
    if base_model.num_params >= TRIAL_SHORT_PARAMS_MIN:
        longest = min(longest, TRIAL_SHORT_LENGTH)
    num_slots = len(TRIAL_LENGTHS)
    bank = Bank(base_model.group_shapes, num_slots, base_model.device, compute_dtype=base_model.dtype)
    passes = PassRunner(base_model, bank, MemoryShare(base_model.device))
    results = []
    for outcome in passes.run(_requests(base_model, bank, passes, longest)):
        if outcome.part is None:
            return []
        results += [outcome.part.logprobs, torch.tensor(outcome.part.loss_sum)]
    for row in bank.acquire(list(TRIAL_LENGTHS)):
        assert row.grad is not None
        results.append(row.grad.clone())
        norms = _step(row, is_deferred=base_model.is_deferred)
        if norms is None:
            return []
        results += [row.weights, torch.tensor([norms.gradient, norms.update, norms.adapter], dtype=torch.float64)]
    sampled = _sampled(base_model, bank, min(TRIAL_PROMPT_TOKENS, longest - TRIAL_DRAWN_TOKENS))
    return results + sampled if sampled else []


def _requests(base_model: BaseModel, bank: Bank, passes: PassRunner, longest: int) -> list[Request]:
    """Add the adapters of a trial to the bank; return one request of each."""
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
        requests.append(passes.checked(trial_item(name, data)))
    return requests


def trial_item(name: str, data: Sequence[Datum]) -> PassItem:
    """Return a forward_backward of an adapter that is in a trial's bank."""
    return PassItem(
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


def _step(row: Row, *, is_deferred: bool) -> StepNorms | None:
    """Take a step; return its norms, None if it failed."""
    params = AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)
    if not is_deferred:
        return adamw_step(row, params, 1)
    [norms] = adamw_steps([Step(row=row, params=params, num_steps=1)])
    return norms if isinstance(norms, StepNorms) else None


def _sampled(base_model: BaseModel, bank: Bank, prompt_tokens: int) -> list[Tensor]:
    """Return log-probabilities of samples: several of one prompt, and of different adapters in one step.

    None if the memory was too small.
    """
    sampler = Sampler(base_model, bank, SamplerLimits(cache_bytes_max=TRIAL_CACHE_BYTES))
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
