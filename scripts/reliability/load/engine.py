"""An engine that takes the time of the shipped model and computes nothing: its cost is that of `docs/benchmarks.md`.

The state is that of the toy engine, a chain of hashes, so that results are checked as in the tests. Main invariant:
waiting uses no processor time, so the machine's cores are left to the coordinator and the clients.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from tests.support.toy_engine import ToyEngine
from workers.contract.messages import Batch, BatchResult, ItemResult, PassItem, SampleEvent, SampleRequest
from workers.contract.protocols import EngineFactory
from workers.contract.settings import EngineSettings

PASS_S, TOKEN_S, ITEM_S = 0.020, 0.00012, 0.00035
"""Seconds of a pass, of each of its tokens, and of an optimizer step, of `kjv-2m`. With them a step of 16 x 1 x 16,
16 x 1 x 64, 32 x 1 x 64 and 16 x 4 x 64 tokens takes 56, 148, 277 and 517 ms; 53, 143, 290 and 508 were measured."""
DECODE_S, SEQUENCE_S, PROMPT_TOKEN_S = 0.008, 0.00025, 0.000044
"""Seconds of a decode step, of each sequence in it, and of a prompt's token. So a step of 4 and of 32 sequences takes 9
and 16 ms, as measured (436 and 2,008 tokens/s); a prompt of 480 tokens took 20 ms more than one that was cached."""
CHUNK_TOKENS, LENGTH_MAX = 256, 512


class TimedEngine(ToyEngine):
    """A toy engine whose batches and decode steps take the time of real ones."""

    def __init__(self, incarnation: str, name: str) -> None:
        super().__init__(incarnation, name=name)
        self._info = replace(self._info, chunk_tokens=CHUNK_TOKENS, max_seq_len=LENGTH_MAX)
        self._num_prompt_tokens = 0

    def run(self, batch: Batch) -> BatchResult:
        """Run a batch for as long as it would take; keep nothing of it but the state."""
        self._seconds_per_batch = batch_s(batch)
        result = super().run(batch)
        self.batches.clear()
        return replace(result, results=tuple(_charged(each) for each in result.results))

    def start_sample(self, request: SampleRequest) -> None:
        """Queue a sample; its prompt lengthens the next decode step."""
        self._num_prompt_tokens += len(request.prompt)
        super().start_sample(request)

    def decode_step(self) -> Sequence[SampleEvent]:
        """Run a decode step for as long as it would take."""
        if self._running:
            time.sleep(DECODE_S + SEQUENCE_S * len(self._running) + PROMPT_TOKEN_S * self._num_prompt_tokens)
        self._num_prompt_tokens = 0
        self._prompts.clear()
        return super().decode_step()


def batch_s(batch: Batch) -> float:
    """Return the seconds that a batch takes."""
    passes = [item for item in batch.items if isinstance(item, PassItem)]
    num_tokens = sum(len(datum.tokens) for item in passes for datum in item.data)
    num_others = len(batch.items) - len(passes)
    return (PASS_S + TOKEN_S * num_tokens if passes else 0.0) + ITEM_S * num_others


def _charged(result: ItemResult) -> ItemResult:
    """Return the result with the engine seconds of real work: they decide when an adapter is snapshotted."""
    return replace(result, engine_s=TOKEN_S * result.num_tokens if result.num_tokens else ITEM_S)


def timed_factory(settings: EngineSettings) -> EngineFactory:
    """Return the factory that `PoolConfig.engine` names."""
    return lambda incarnation: TimedEngine(incarnation, settings.model_name)
