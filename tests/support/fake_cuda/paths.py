"""Every way through the engine on the fake device, counted; tests call these functions by their names.

An operation on tensors of two devices, of wrong dtypes or shapes fails here as it would on a GPU, and so does one
without a rule in `costs`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np

from scripts.bench.gpu_count.cases import no_layers, shape_of
from tests.support.fake_cuda.counting import Counts
from tests.support.fake_cuda.device import fake_cuda
from tests.support.fake_cuda.engines import make_engine, no_files
from tests.support.numerics import harness
from tests.support.numerics.harness import Driver, make_data, make_spec, training_items
from tests.support.numerics.tenants import TENANTS
from workers.contract.capacity import BLOCK_TOKENS
from workers.contract.messages import SampleRequest, SampleResult, SamplerVersion, SamplingParams
from workers.model import base_model
from workers.model.gpu_operations import has_kernels

WINDOW = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_window_layers": 0,
}


def train(
    *, model: str = "tiny", has_gaps: bool = False, window: bool = False, has_triton: bool = True, **settings: Any
) -> Counts | None:
    """Train a step of tenants of every kind on a miniature; return its counts. Raises AssertionError if an item fails.

    `has_gaps`: with adapters whose slots are not consecutive. Without `has_triton` torch computes losses. In fp32 it is
    not counted and None: fake tensors always take torch's plain attention, a GPU only where query heads share keys.
    """
    made: dict[str, Any] = {"cache_bytes_max": 0} | settings
    with (
        fake_cuda() as counting,
        no_files(shape_of(model) | (WINDOW if window else {})),
        patch.object(base_model, "has_kernels", lambda device: has_triton and has_kernels(device)),
    ):
        with patch.object(harness, "make_engine", lambda _, **options: make_engine(**made | options)):
            driver = Driver(None)  # type: ignore[arg-type]
        driver.install(*(tenant.spec for tenant in TENANTS))
        items = [item for tenant in TENANTS for item in training_items(driver, tenant)]
        if has_gaps:
            keys = [f"extra{number}" for number in range(4)]
            driver.install(*(make_spec(key) for key in keys))
            driver.engine.bank.acquire(keys)
            driver.engine.bank.evict(keys[1])
            items += [driver.backward(keys[index], make_data("cross_entropy", [20])) for index in (0, 2, 3)]
        is_counted = settings.get("dtype") != "float32"
        with counting.stretch() if is_counted else nullcontext() as counts:
            driver.train(*items)
            driver.train(*(driver.step(tenant.key, tenant.params) for tenant in TENANTS))
    return counts


def sample(*, model: str = "tiny", window: bool = False, **settings: Any) -> int:
    """Sample with every kind of request until all have ended; return how many decode steps that takes."""
    with fake_cuda() as counting, no_files(shape_of(model) | (WINDOW if window else {})):
        engine = make_engine(**settings)
        for number in range(6):
            key = f"v{number % 3}" if number % 4 else ""
            if key and key not in engine.bank:
                engine.bank.add(key, make_spec(key, 16 if key == "v2" else 8), is_trained=False)
            is_noted = bool(number % 2)
            engine.start_sample(
                SampleRequest(
                    op_id=f"s{number}",
                    scope=f"s{number % 2}",
                    version=SamplerVersion(key=key),
                    prompt=(np.arange(20 + 50 * number) % 200).astype(np.int32),
                    num_samples=1 + 3 * is_noted,
                    params=SamplingParams(
                        max_tokens=6 if number else BLOCK_TOKENS + 6,
                        seed=number,
                        temperature=number % 3,
                        top_p=1 - 0.1 * is_noted,
                    ),
                    prompt_logprobs=is_noted,
                    topk_prompt_logprobs=2 * is_noted,
                )
            )
        num_steps, results = 0, list[SampleResult]()
        with counting.stretch():
            while engine.can_decode():
                # Steps in the middle are alike. The last ones have a second block of drawn tokens.
                with no_layers() if 12 <= num_steps < BLOCK_TOKENS - 2 else nullcontext():
                    results += [event for event in engine.decode_step() if isinstance(event, SampleResult)]
                num_steps += 1
    assert [result.error for result in results] == [None] * 6
    return num_steps
