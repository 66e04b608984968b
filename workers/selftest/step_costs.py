"""Trial of decode steps: how many sequences take as long as the fixed time of a step.

The sampler bounds the sequences of a scope in a step by that number (`sampling.step_shares`). It is a ratio of the
fastest steps of two sizes, of sequences with few tokens and no adapter. Where many workers are loaded at once on few
cores it may be a few times as large or as small. No bit of a sample depends on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from workers.contract.messages import SampleRequest, SampleResult, SamplerVersion, SamplingParams
from workers.sampling.sampler import Sampler

NUM_SEQUENCES, NUM_TOKENS = 16, 2
"""Of the larger of two sizes, and of each sequence."""
ROUNDS, ROUNDS_S = 8, 1.0
"""Rounds of the trial, and the seconds after which no further one begins."""


def sequences_of_fixed_time(
    sampler: Sampler,
    running: Callable[[], AbstractContextManager[None]],
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the number for a sampler without requests; infinity if the trial fails, or sequences cost nothing.

    It fails where not all sequences run at once. Steps run in contexts of `running`; `clock` gives seconds.
    """
    if sampler.num_sequence_slots < NUM_SEQUENCES or sampler.blocks.num_blocks < 2 * NUM_SEQUENCES:
        return math.inf

    def fastest_s(num_sequences: int) -> float:
        """Run requests of a sequence each; return the seconds of the fastest step."""
        for number in range(num_sequences):
            sampler.start_sample(_request(f"trial-{number}"))
        fastest_s, num_running, has_failed = math.inf, 0, False
        while sampler.can_decode():
            with running():
                step_s = clock()
                events = sampler.decode_step()
                fastest_s = min(fastest_s, clock() - step_s)
            num_running = max(num_running, len(sampler.slots.running))
            has_failed |= any(isinstance(event, SampleResult) and event.error is not None for event in events)
        if has_failed or num_running < num_sequences:
            raise _TrialFailed
        return fastest_s

    begin_s = clock()
    solo_s = many_s = math.inf
    try:
        for _ in range(ROUNDS):
            solo_s, many_s = min(solo_s, fastest_s(1)), min(many_s, fastest_s(NUM_SEQUENCES))
            if clock() > begin_s + ROUNDS_S:
                break
    except _TrialFailed:
        return math.inf
    sequence_s = (many_s - solo_s) / (NUM_SEQUENCES - 1)
    return max(0.0, solo_s / sequence_s - 1) if sequence_s > 0 else math.inf


class _TrialFailed(Exception):
    """Steps were not of the sizes that were asked for."""


def _request(name: str) -> SampleRequest:
    """Return a request of a scope of its own, so that it has the memory of no other one."""
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=0)
    version, prompt = SamplerVersion(key=""), np.zeros(1, np.int32)
    return SampleRequest(op_id=name, scope=name, version=version, prompt=prompt, num_samples=1, params=params)
