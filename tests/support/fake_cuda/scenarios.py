"""What tests run in the process with the fake device; they call these functions by their names."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import torch

import workers.engine
from scripts.bench.gpu import sides
from scripts.bench.gpu.cases import Case, random_data
from scripts.bench.gpu_count.cases import (
    ALL_KINDS,
    RANK,
    REDUCED_SHAPES,
    decoding,
    engine_of,
    passes,
    training,
)
from tests.support.fake_cuda.counting import Counts
from workers.contract.messages import (
    AdapterInstall,
    AdapterSpec,
    Batch,
    Datum,
    PassItem,
    SampleEvent,
    SampleRequest,
    SampleResult,
    SamplerVersion,
    SamplingParams,
    TokenEvent,
)
from workers.engine import TrainingEngine
from workers.model import base_model
from workers.rows import RowLayout
from workers.sampling import sample_pass
from workers.sampling.sampler import SamplerLimits
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


def step_with_prompt_logprobs(num_requests: int) -> Counts:
    """Return the counts of a step with the prompts of so many requests, which want log-probabilities of their tokens.

    They fit into one call of `PromptOutputs.note` each.
    """
    with engine_of("tiny", cache_bytes_max=1 << 30) as (engine, counting):
        for number in range(num_requests):
            _start(engine, f"s{number}", 40, prompt_logprobs=True, prompt_targets=np.ones((39, 2), np.int32))
        with counting.stretch() as counts:
            names = {event.op_id for event in engine.decode_step() if isinstance(event, TokenEvent)}
        assert len(names) == num_requests
        return counts


def steps_with_lists() -> list[Counts]:
    """Return the counts of a step with a prompt and of the next one, of a request that wants every list of tokens."""
    with engine_of("tiny") as (engine, counting):
        params = SamplingParams(max_tokens=4, seed=1)
        wanted = {"topk_sample_logprobs": 5, "topk_prompt_logprobs": 3, "prompt_alt_tokens_k": 2}
        _start(engine, "lists", 40, params=params, num_samples=3, **wanted)
        steps: list[Counts] = []
        for _ in range(2):
            with counting.stretch() as counts:
                assert len(engine.decode_step()) == 3
            steps.append(counts)
        return steps


def step_of_adapters(*, is_reversed: bool) -> Counts:
    """Return the counts of a step of requests with adapters; `is_reversed`: the pass has them in the other order."""
    bank_order = sample_pass._bank_order
    with ExitStack() as stack:
        if is_reversed:  # patched: it depends on where the slabs are in memory
            other = lambda row: tuple(-number for number in bank_order(row))  # noqa: E731
            stack.enter_context(patch.object(sample_pass, "_bank_order", other))
        engine, counting = stack.enter_context(engine_of("tiny", cache_bytes_max=1 << 30))
        keys = ["v0", "v1", "v2"]
        for number, key in enumerate(keys):
            spec = AdapterSpec(adapter_id=key, rank=8, alpha=32.0, seed=number, **ALL_KINDS)
            engine.bank.add(key, spec, is_trained=False)
            _start(engine, key, 40, version=SamplerVersion(key=key), num_samples=2)
        for _ in range(3):
            engine.decode_step()
        with counting.stretch() as counts:
            events = engine.decode_step()
        assert {event.op_id for event in events} == set(keys)
        return counts


def step_with_late_slots() -> Counts:
    """Return the counts of the step in which a running request's last sample gets the slot of another request."""
    limits = partial(SamplerLimits, num_sequences_max=4)
    with patch.object(workers.engine, "SamplerLimits", limits), engine_of("tiny") as (engine, counting):
        _start(engine, "a", 40, num_samples=2, params=SamplingParams(max_tokens=3, seed=1))
        _start(engine, "b", 40, num_samples=3)
        for _ in range(3):
            assert _drawing(engine.decode_step(), "b") == {0, 1}
        with counting.stretch() as counts:
            assert _drawing(engine.decode_step(), "b") == {0, 1, 2}
        return counts


def _drawing(events: Sequence[SampleEvent], name: str) -> set[int]:
    """Return the sequences of a request that drew a token."""
    return {event.sequence_index for event in events if isinstance(event, TokenEvent) and event.op_id == name}


def _start(engine: TrainingEngine, name: str, num_tokens: int, **changes: Any) -> None:
    """Begin a request, of the base model unless `changes` name a version; it streams its tokens."""
    numbers: dict[str, Any] = {"num_samples": 1, "params": SamplingParams(max_tokens=8, seed=1), "stream": True}
    numbers["version"] = SamplerVersion(key="")
    prompt = np.arange(num_tokens, dtype=np.int32)
    engine.start_sample(SampleRequest(op_id=name, scope=name, prompt=prompt, **numbers | changes))


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


def failing_kernel(error: Exception, *, spoils_device: bool, what: str) -> str:
    """Return the outcome of a batch, or of a sample, if its forward raises: the code of its error, or what is raised.

    If the device is spoiled, all later calls raise too.
    """
    with engine_of("tiny", cache_bytes_max=1 << 20) as (engine, _), ExitStack() as stack:
        spec = AdapterSpec(adapter_id="a", rank=8, alpha=32.0, seed=1, **ALL_KINDS)
        installs = (AdapterInstall(spec=spec, state=None),)
        assert not engine.run(Batch(epoch=1, cycle_id=0, installs=installs, items=())).results
        stack.enter_context(patch.object(engine.base_model, "forward", Mock(side_effect=error)))
        if spoils_device:
            stack.enter_context(patch.object(torch.cuda, "synchronize", Mock(side_effect=error)))
        try:
            if what == "batch":
                item = _pass_of(*random_data(0, [9, 9], 384))
                (result,) = engine.run(Batch(epoch=1, cycle_id=1, items=(item,))).results
                failure = result.error
            else:
                prompt, params = np.arange(9, dtype=np.int32), SamplingParams(max_tokens=1, seed=1)
                version = SamplerVersion(key="")
                engine.start_sample(
                    SampleRequest(op_id="", scope="", version=version, prompt=prompt, num_samples=1, params=params)
                )
                (event,) = engine.decode_step()
                assert isinstance(event, SampleResult)
                failure = event.error
        except RuntimeError as raised:
            return f"raised {raised}"
        assert failure is not None
        return failure.code.name


def orders_of_a_backward(**settings: Any) -> list[bool]:
    """Return, for each backward of two batches, whether the library adds in a fixed order."""
    orders: list[bool] = []
    backward = torch.autograd.backward

    def recording(*args: Any) -> None:
        orders.append(torch.are_deterministic_algorithms_enabled())
        backward(*args)

    with engine_of("tiny", cache_bytes_max=0, **settings) as (engine, _):
        with patch.object(sides, "TrainingEngine", lambda _: engine):
            side = sides.Fused(engine.settings, Case(2, 1, 16), RANK)
        with patch.object(torch.autograd, "backward", recording):
            side.run_passes()
            side.run_passes()
    return orders


def kernels_of_targets(num_targets: int, *, has_kernels: bool) -> int:
    """Return the kernels of a pass with so many targets of each token; its loss is by our kernels or by torch."""
    with (
        patch.object(base_model, "has_kernels", lambda _: has_kernels),
        engine_of("tiny", cache_bytes_max=0) as (engine, counting),
    ):
        spec = AdapterSpec(adapter_id="a", rank=8, alpha=32.0, seed=1, **ALL_KINDS)
        engine.run(Batch(epoch=1, cycle_id=0, installs=(AdapterInstall(spec=spec, state=None),), items=()))
        shape = 40, num_targets
        inputs: Any = {"target_tokens": np.ones(shape, np.int32), "weights": np.ones(shape, np.float32)}
        item = _pass_of(Datum(tokens=np.arange(40, dtype=np.int32), loss_inputs=inputs))
        with counting.stretch() as counts:
            (result,) = engine.run(Batch(epoch=1, cycle_id=1, items=(item,))).results
        assert result.error is None
    return counts.num_kernels


def kernels_of_experts(num_experts: int) -> tuple[int, int]:
    """Return the kernels of a pass and of a decode step, with two adapters, of a mixture with so many experts."""
    shape = REDUCED_SHAPES["tiny-mixture"] | {"num_experts": num_experts}
    with patch.dict(REDUCED_SHAPES, {"tiny-mixture": shape}):
        (trained,), (sampled,) = passes("tiny-mixture", Case(2, 1, 16)), decoding("tiny-mixture", 4, 2)
    return trained["kernels"], sampled["kernels"]


def _pass_of(*data: Datum) -> PassItem:
    return PassItem(
        op_id="",
        adapter_id="a",
        prev_seq=0,
        seq=1,
        chunk_index=0,
        num_chunks=1,
        data=data,
        loss_fn="cross_entropy",
        loss_config={},
        backward=True,
    )


def bank_of(name: str, ranks: Sequence[int]) -> tuple[int, int, int]:
    """Add adapters of these ranks to the bank of an engine with a model of a named shape, and acquire one by one.

    Returns the bytes that were free before, those that the bank takes, and the adapters that are resident.
    """

    def nothing(layout: RowLayout, _: AdapterSpec) -> torch.Tensor:
        return torch.from_numpy(np.zeros(layout.num_values, np.float32))  # drawing them would take a minute

    with patch.object(RowLayout, "initial_weights", nothing), engine_of(name, cache_bytes_max=0) as (engine, _):
        free_bytes, _ = torch.cuda.mem_get_info()
        for number, rank in enumerate(ranks):
            key = f"adapter-{number}"
            engine.bank.add(key, AdapterSpec(adapter_id=key, rank=rank, alpha=32.0, seed=number, **ALL_KINDS))
            engine.bank.acquire([key])
        assert torch.cuda.mem_get_info()[0] == free_bytes - engine.bank.device_bytes
        return free_bytes, engine.bank.device_bytes, engine.bank.num_resident


def operations_of_a_pass(name: str, **settings: Any) -> dict[str, int]:
    """Return the kernels of a pass by the operation that launched them; those of our own have a namespace."""
    counts, _ = training(name, Case(3, 2, 16), **settings)
    return {operation: group.num_kernels for operation, group in counts.by_operation.items()}
