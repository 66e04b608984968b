"""What tests run in the process with the fake device; they call these functions by their names."""

from __future__ import annotations

from typing import Any

import numpy as np

from scripts.bench.gpu.cases import Case
from scripts.bench.gpu_count.cases import ALL_KINDS, RANK, engine_of, training
from tests.support.fake_cuda.counting import Counts
from workers.contract.messages import AdapterSpec, SampleRequest, SampleResult, SamplerVersion, SamplingParams
from workers.training.memory import Load, PassMemory


def steps_in_which_samples_join(**settings: Any) -> list[Counts]:
    """Return the counts of steps with prompts, and sequences of several versions that join and end at any row."""
    with engine_of("tiny", cache_bytes_max=1 << 30, **settings) as (engine, counting):
        for number in range(3):
            spec = AdapterSpec(adapter_id=f"v{number}", rank=8 << number, alpha=32.0, seed=number, **ALL_KINDS)
            engine.bank.add(spec.adapter_id, spec, is_trained=False)
        steps: list[Counts] = []
        for number in range(16):
            if number < 6:
                name = f"s{number}"
                engine.start_sample(
                    SampleRequest(
                        op_id=name,
                        scope=name,
                        version=SamplerVersion(key=f"v{number % 4}" if number % 4 < 3 else ""),
                        prompt=np.arange(40 + 30 * number, dtype=np.int32),
                        num_samples=1 + number % 3,
                        params=SamplingParams(max_tokens=4 + number, seed=number, temperature=0.5 + number % 2),
                    )
                )
            with counting.stretch() as counts:
                events = engine.decode_step()
            steps.append(counts)
            assert not [event for event in events if isinstance(event, SampleResult) and event.error]
        assert not engine.can_decode()
        return steps


def memory_of_a_pass(name: str, load: Case, **settings: Any) -> tuple[int, int, int]:
    """Return the peak of a step's passes, the estimate of it, and the buffers of attention in the estimate.

    The peak is without the buffers: they are inside of a kernel.
    """
    counts, _ = training(name, load, **settings)
    with engine_of(name, **settings) as (engine, _):
        base_model = engine.base_model
        num_sequences = load.num_tenants * load.num_seqs
        num_tokens = num_sequences * load.num_tokens
        estimate = PassMemory(base_model).peak_bytes(
            Load(
                num_tokens=num_tokens,
                lengths=[load.num_tokens],
                num_sequences=num_sequences,
                rank=RANK,
                num_adapters=load.num_tenants,
            ),
            backward=True,
            recompute=settings.get("recompute") == "on",
        )
        shape = num_tokens, num_sequences, base_model.num_heads, base_model.head_dim
        return counts.peak_bytes, estimate, base_model.attend_packed([1], [1]).buffer_bytes(*shape)
