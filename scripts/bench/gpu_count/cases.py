"""Cases: what the engine does on a GPU with models of real shapes, and the counts of each.

Imports torch: the guard of `tests.support.fake_cuda` must be loaded before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from scripts.bench.gpu import sides
from scripts.bench.gpu.cases import SHAPES, Case
from tests.support.fake_cuda.counting import Counting, Counts
from tests.support.fake_cuda.device import fake_cuda
from tests.support.fake_cuda.engines import make_engine, no_files
from workers.contract.messages import (
    AdapterSpec,
    SampleEvent,
    SampleRequest,
    SampleResult,
    SamplerVersion,
    SamplingParams,
    TokenEvent,
)
from workers.engine import TrainingEngine

RANK = 32
PROMPT_TOKENS = 128
ALL_KINDS = {"train_attn": True, "train_mlp": True, "train_unembed": True}


def shape_of(name: str) -> dict[str, Any]:
    """Return a model's shape: a name of `SHAPES`, or `NAME@LAYERS` with fewer layers."""
    base, _, layers = name.partition("@")
    return SHAPES[base] | ({"num_hidden_layers": int(layers)} if layers else {})


@contextmanager
def engine_of(name: str, **settings: Any) -> Iterator[tuple[TrainingEngine, Counting]]:
    """Return an engine with a model of a named shape on the fake device, and what counts its work."""
    shape = shape_of(name)
    with fake_cuda() as counting, no_files(shape):
        yield make_engine(**settings), counting


def training(name: str, load: Case, **settings: Any) -> tuple[Counts, Counts]:
    """Return the counts of a step's passes, and of its optimizer steps; all adapters are resident."""
    with engine_of(name, num_slots=max(16, load.num_tenants), **settings) as (engine, counting):
        with patch.object(sides, "TrainingEngine", lambda _: engine):
            side = sides.Fused(engine.settings, load, RANK)
        engine.bank.acquire(side.keys)
        with counting.stretch() as passes:
            side.run_passes()
        with counting.stretch() as steps:
            side.run_steps()
    return passes, steps


class Sampling:
    """An engine with requests that sample; every prompt is of its own."""

    def __init__(self, engine: TrainingEngine, num_adapters: int) -> None:
        self._engine = engine
        self._keys = [f"version-{number}" for number in range(num_adapters)]
        for number, key in enumerate(self._keys):
            spec = AdapterSpec(adapter_id=key, rank=RANK, alpha=32.0, seed=number, **ALL_KINDS)
            engine.bank.add(key, spec, is_trained=False)

    def start(self, num_seqs: int, prompt_tokens: int) -> None:
        """Begin requests of one sample each; they take turns in the adapters."""
        vocab_size = self._engine.info.vocab_size
        for number in range(num_seqs):
            name = f"sample-{number}"
            self._engine.start_sample(
                SampleRequest(
                    op_id=name,
                    scope=name,
                    version=SamplerVersion(key=self._keys[number % len(self._keys)] if self._keys else ""),
                    prompt=np.random.default_rng(number).integers(0, vocab_size, prompt_tokens).astype(np.int32),
                    num_samples=1,
                    params=SamplingParams(max_tokens=256, seed=number),
                    stream=True,
                )
            )

    def step(self) -> set[str]:
        """Run a decode step; return the requests that drew a token."""
        events: Sequence[SampleEvent] = self._engine.decode_step()
        failed = [event.error for event in events if isinstance(event, SampleResult)]
        assert not failed, failed
        return {event.op_id for event in events if isinstance(event, TokenEvent)}


def decoding(name: str, num_seqs: int, num_adapters: int, prompt_tokens: int = PROMPT_TOKENS) -> Counts:
    """Return the counts of a decode step in which all sequences continue, as in the step before it."""
    with engine_of(name, cache_bytes_max=40 << 30) as (engine, counting):
        sampling = Sampling(engine, num_adapters)
        sampling.start(num_seqs, prompt_tokens)
        drawn: set[str] = set()
        while len(drawn) < num_seqs:
            drawn |= sampling.step()
        sampling.step()
        with counting.stretch() as counts:
            drawn = sampling.step()
        assert len(drawn) == num_seqs, f"{len(drawn)} of {num_seqs} sequences drew a token"
    return counts


def prefill(name: str, num_seqs: int) -> Counts:
    """Return the counts of the first step of `num_seqs` prompts."""
    with engine_of(name, cache_bytes_max=40 << 30) as (engine, counting):
        sampling = Sampling(engine, 0)
        sampling.start(num_seqs, PROMPT_TOKENS)
        with counting.stretch() as counts:
            sampling.step()
    return counts
