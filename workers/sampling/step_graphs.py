"""Decode steps as CUDA graphs: a step up to its logits is one launch of the host instead of hundreds.

A graph has fixed shapes and addresses. So each *bucket* has its own, with inputs of its own that `fill` overwrites
before each run: token ids, positions, slots, tables of pages, temperatures, adapters' addresses. A bucket has powers of
two: of sequences, of the samples of one prompt, of pages and of tiles, and the largest rank. Rows that are left over
write to a page that no sequence has. All graphs write logits and log-probabilities to one place. A graph is captured
from a step that ran without it, and must give what that gave; if it does not, or cannot be captured, there are no
graphs from then on. Steps with prompts run without.

Does not depend on requests, or on how tokens are drawn.

Main invariants: what a graph does depends on its inputs' values only, and nothing in it waits or copies from the host.
Addresses are those of the step: the bank may have moved its slabs since the last one.

Dimensions: D sequences, N rows of a bucket (at least D), L tiles of rows, G query heads per key-value head, V
vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.contract.capacity import num_blocks_for
from workers.contract.messages import LOGPROBS_TEMPERATURE_MIN
from workers.host.input_block import InputBlock
from workers.model.base_model import BaseModel
from workers.model.few_rows import ROWS_MAX
from workers.model.fused_runs import AdapterTables, ForwardRun
from workers.model.gpu_operations import power_of_two
from workers.model.segments import Routing, Segment
from workers.sampling.attention.decode_plan import NextToken
from workers.sampling.attention.pages import (
    HostReads,
    PagedAttention,
    PageKernel,
    PageReads,
    StepTables,
    next_reads,
    slots_of,
)
from workers.sampling.graph_pool import GraphError, GraphPool, Run
from workers.sampling.kv_cache import PAGE_TOKENS, PagedCache

logger = logging.getLogger(__name__)

GRAPHS_MAX = 64
"""Graphs that are kept; the least recently used one gives way. Each takes some megabytes."""


class Bucket(NamedTuple):
    """What the shapes of a graph depend on."""

    num_rows: int
    """N."""
    most_queries: int
    """Query rows of the most samples of one prompt."""
    prompt_width: int
    """Pages of the longest prompt."""
    own_width: int
    """Pages of the sequence with the most tokens of its own."""
    num_tiles: int
    """L."""
    rank: int
    """The largest padded rank; 0: no adapter."""
    is_tempered: bool
    """Whether log-probabilities of any row are at a temperature other than 1."""


class StepGraphs:
    """The graphs of one sampler. Used by one thread only."""

    def __init__(
        self, model: BaseModel, cache: PagedCache, kernel: PageKernel, num_sequences: int, pool: GraphPool
    ) -> None:
        """For a model with `sampling_layers`, and at most so many sequences in a step."""
        self._model = model
        self._cache = cache
        self._kernel = kernel
        self._pool = pool
        shape = power_of_two(num_sequences), model.vocab_size
        self.logits, self.logprobs = (torch.zeros(shape, dtype=torch.float32, device=model.device) for _ in range(2))
        """What the last step gave, in its first rows."""
        self._steps: dict[Bucket, GraphStep] = {}
        """The least recently used first."""
        self._adapters = PlacedAdapters((), len(model.groups))
        """Of the last step."""
        self._is_off = False

    def run(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        tokens: Sequence[NextToken],
        segments: Sequence[Segment],
        temperatures: NDArray[np.float64],
        drawn: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Return the logits (D, V), fp32, of next tokens, and their log-probabilities; None: run without a graph.

        `temperatures` (D,) are those of the log-probabilities. The next step overwrites both. `drawn` (at least D,) are
        token ids on the device, to be taken in place of `token_ids`.
        """
        if self._is_off:
            return None
        self._model.current.begin(())  # the last forward's segments would keep slabs in memory
        num_rows = power_of_two(len(tokens))
        if not self._adapters.are_of(segments, num_rows):
            self._adapters = PlacedAdapters(segments, len(self._model.groups), num_rows)
        adapters = self._adapters.tables
        heads_per_key = self._model.num_heads // self._model.num_key_value_heads
        of_prompts, own = next_reads(tokens, heads_per_key)
        prompt_width, own_width = (
            power_of_two(num_blocks_for(max(reads.lengths), PAGE_TOKENS)) for reads in (of_prompts, own)
        )
        bucket = Bucket(
            num_rows,
            power_of_two(of_prompts.most_queries),
            prompt_width,
            own_width,
            power_of_two(max(1, len(adapters.tiles))),
            adapters.rank_max,
            is_tempered=bool((temperatures != 1).any()),
        )
        known = self._steps.pop(bucket, None)
        results = self.logits[: bucket.num_rows], self.logprobs[: bucket.num_rows]
        step = known or GraphStep(self._model, self._cache, self._kernel, bucket, results)
        step.fill(token_ids, positions, slots_of(tokens), (of_prompts, own), temperatures, adapters)
        if drawn is not None:
            step.take(drawn[: len(tokens)])
        try:
            if known is None:
                step.begin(self._pool)
            else:
                step.replay()
        except GraphError as error:
            logger.warning("decode steps run without graphs, which is slower: %s", error)
            self._is_off = True
            self._steps.clear()
            return None
        self._steps[bucket] = step
        if len(self._steps) > GRAPHS_MAX:
            del self._steps[next(iter(self._steps))]
        return self.logits[: len(tokens)], self.logprobs[: len(tokens)]


class PlacedAdapters:
    """The adapters of a step's rows. Does not hold them, which would keep slabs in memory."""

    def __init__(self, segments: Sequence[Segment], num_groups: int, num_rows: int = 0) -> None:
        """Make the tables of so many rows and their segments, of a model with so many groups of linears."""
        needs_all_rows = bool(segments) and num_rows <= ROWS_MAX
        self.tables = AdapterTables.of(segments, num_groups, num_rows=num_rows if needs_all_rows else 0)
        self._num_rows, self._rows = num_rows, _rows(segments)
        self._addresses = [segment.adapter.addresses for segment in segments]
        """One array for each slot: the same array is the same place in memory."""

    def are_of(self, segments: Sequence[Segment], num_rows: int) -> bool:
        """Return whether there are as many rows, and segments have the same, and adapters at the same addresses."""
        return (num_rows, _rows(segments)) == (self._num_rows, self._rows) and all(
            segment.adapter.addresses is addresses for segment, addresses in zip(segments, self._addresses, strict=True)
        )


def _rows(segments: Sequence[Segment]) -> list[tuple[int, int, float]]:
    return [(segment.start, segment.stop, segment.adapter.scaling) for segment in segments]


class GraphStep:
    """The graph of one bucket, with its inputs."""

    def __init__(
        self, model: BaseModel, cache: PagedCache, kernel: PageKernel, bucket: Bucket, results: tuple[Tensor, Tensor]
    ) -> None:
        """Allocate the inputs; `results` (N, V) get logits and log-probabilities."""
        num_rows, num_tiles, num_groups = bucket.num_rows, bucket.num_tiles, len(model.groups)
        self._model = model
        self._bucket = bucket
        self._logits, self._logprobs = results
        self._heads_per_key = model.num_heads // model.num_key_value_heads
        self._scratch_page = cache.scratch_page
        self._widths = bucket.prompt_width, bucket.own_width
        sizes = [size for width in self._widths for size in (num_rows + 1, num_rows, num_rows * width)]
        self._rows = InputBlock(
            [(np.int64, (3, num_rows)), (np.float32, (num_rows, 1)), *((np.int32, (size,)) for size in sizes)],
            cache.device,
        )
        """Token ids, positions and slots; temperatures; ends, lengths and tables of both reads."""
        rows, self._temperatures, *parts = self._rows.tensors
        self._token_ids, self._positions, slots = rows
        of_prompts, own = (
            PageReads(ends, lengths, table.view(num_rows, width), most, width * PAGE_TOKENS, is_causal=False)
            for (ends, lengths, table), width, most in zip(
                (parts[:3], parts[3:]), self._widths, (bucket.most_queries, self._heads_per_key), strict=True
            )
        )
        self._tables = InputBlock(AdapterTables.shapes(num_groups, num_rows, num_tiles), cache.device)
        """Addresses, tiles, ranks and scalings of adapters."""
        self._filled: AdapterTables[NDArray[Any]] | None = None
        """What `_tables` have."""
        self._routing = Routing((), 1)
        if bucket.rank:
            addresses, tiles, ranks, scalings = self._tables.tensors
            tables = AdapterTables(addresses, tiles, ranks, scalings, bucket.rank)
            self._routing.runs.append(ForwardRun(tables, [True] * num_groups, has_all_rows=num_rows <= ROWS_MAX))
        step_tables = StepTables(num_rows, num_rows, slots, of_prompts, own, chunks=None)
        self._attend = PagedAttention(cache, kernel, step_tables)
        self._replay: Run | None = None
        self._num_matmuls = 0

    def fill(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        reads: tuple[HostReads, HostReads],
        temperatures: NDArray[np.float64],
        adapters: AdapterTables[NDArray[Any]],
    ) -> None:
        """Overwrite the inputs; what is left over reads and writes the page that no sequence has.

        Tables of adapters are never written to, and sent when they are others than in the last run of this graph.
        """
        num_rows, num_used = self._bucket.num_rows, len(token_ids)
        block, (rows, divisors, *targets) = self._rows.blank()
        for row, values in zip(rows, (token_ids, positions, slots), strict=True):
            row[:num_used] = values
        rows[2, num_used:] = self._scratch_page * PAGE_TOKENS
        divisors[:] = 1
        divisors[:num_used, 0] = np.maximum(temperatures, LOGPROBS_TEMPERATURE_MIN)
        more = [self._heads_per_key] * (num_rows - num_used)
        both = (
            part.padded(num_rows, more, self._scratch_page).arrays(width)
            for part, width in zip(reads, self._widths, strict=True)
        )
        for target, source in zip(targets, chain(*both), strict=True):
            target[:] = source
        self._rows.send(block)
        if self._bucket.rank and adapters is not self._filled:
            self._fill_tables(adapters)

    def take(self, token_ids: Tensor) -> None:
        """Overwrite the first token ids by others on the device."""
        self._token_ids[: len(token_ids)].copy_(token_ids)

    def _fill_tables(self, adapters: AdapterTables[NDArray[Any]]) -> None:
        """Overwrite the tables of adapters."""
        block, targets = self._tables.blank()
        adapters.write(targets)
        self._tables.send(block)
        self._filled = adapters

    def begin(self, pool: GraphPool) -> None:
        """Run the step, and capture it for the next ones. Raises GraphError."""
        before = self._model.num_base_matmuls
        expected = self._run().clone()
        self._num_matmuls = self._model.num_base_matmuls - before
        self._replay = pool.captured(self._run, expected)

    def replay(self) -> None:
        """Write the logits and log-probabilities, as the next replay of any graph does."""
        assert self._replay is not None
        self._model.current.count_matmuls(self._num_matmuls)
        self._replay()

    def _run(self) -> Tensor:
        """Write the results; return the logits (N, V)."""
        layers = self._model.sampling_layers
        assert layers is not None
        hidden = layers.forward(self._token_ids, self._positions, self._routing, self._attend)
        self._logits.copy_(self._model.unembed(hidden, self._routing))
        tempered = self._logits / self._temperatures if self._bucket.is_tempered else self._logits
        torch.log_softmax(tempered, -1, out=self._logprobs)
        return self._logits
