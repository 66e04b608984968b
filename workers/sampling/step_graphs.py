"""Decode steps as CUDA graphs: the layers of a step are one launch of the host instead of hundreds.

A graph has fixed shapes and addresses. So each *bucket* has its own, with inputs of its own that `fill` overwrites
before each run: token ids, positions, slots, tables of pages, adapters' addresses. A bucket has powers of two: of
sequences, of the samples of one prompt, of pages and of tiles, and the largest rank. Rows that are left over write to a
page that no sequence has. A graph is captured from a step that ran without it, and must give what that gave; if it
does not, or cannot be captured, there are no graphs from then on. Steps with prompts run without.

Does not depend on requests, or on how tokens are drawn.

Main invariants: what a graph does depends on its inputs' values only, and nothing in it waits or copies from the host.
Addresses are those of the step: the bank may have moved its slabs since the last one.

Dimensions: D sequences, N rows of a bucket (at least D), L tiles of adapters' rows, G query heads per key-value head.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.contract.capacity import num_blocks_for
from workers.model.base_model import BaseModel
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
from workers.sampling.kv_cache import PAGE_TOKENS, PagedCache

logger = logging.getLogger(__name__)

GRAPHS_MAX = 64
"""Graphs that are kept; the least recently used one gives way. Each takes some megabytes."""
TOLERANCE = 2.0**-5
"""Between a graph and the step that it was captured from: they run the same kernels."""


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


Run = Callable[[], Tensor]


class StepGraphs:
    """The graphs of one sampler. Used by one thread only."""

    def __init__(self, model: BaseModel, cache: PagedCache, kernel: PageKernel) -> None:
        """For a model with `sampling_layers`."""
        self._model = model
        self._cache = cache
        self._kernel = kernel
        self._steps: dict[Bucket, GraphStep] = {}
        """The least recently used first."""
        self._is_off = False

    def run(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        tokens: Sequence[NextToken],
        segments: Sequence[Segment],
    ) -> Tensor | None:
        """Return the last hidden states (D, hidden size) of next tokens; None: run without a graph."""
        if self._is_off:
            return None
        self._model.current.begin(())  # the last forward's segments would keep slabs in memory
        adapters = AdapterTables.of(segments, len(self._model.groups))
        heads_per_key = self._model.num_heads // self._model.num_key_value_heads
        of_prompts, own = next_reads(tokens, heads_per_key)
        prompt_width, own_width = (
            power_of_two(num_blocks_for(max(reads.lengths), PAGE_TOKENS)) for reads in (of_prompts, own)
        )
        bucket = Bucket(
            power_of_two(len(tokens)),
            power_of_two(of_prompts.most_queries),
            prompt_width,
            own_width,
            power_of_two(max(1, len(adapters.tiles))),
            adapters.rank_max,
        )
        known = self._steps.pop(bucket, None)
        step = known or GraphStep(self._model, self._cache, self._kernel, bucket)
        step.fill(token_ids, positions, slots_of(tokens), (of_prompts, own), adapters)
        try:
            hidden = step.begin() if known is None else step.replay()
        except GraphError as error:
            logger.warning("decode steps run without graphs, which is slower: %s", error)
            self._is_off = True
            self._steps.clear()
            return None
        self._steps[bucket] = step
        if len(self._steps) > GRAPHS_MAX:
            del self._steps[next(iter(self._steps))]
        return hidden[: len(tokens)]


class GraphError(Exception):
    """A graph cannot be captured, or gives other results than the step that it was captured from."""


class GraphStep:
    """The graph of one bucket, with its inputs."""

    def __init__(self, model: BaseModel, cache: PagedCache, kernel: PageKernel, bucket: Bucket) -> None:
        """Allocate the inputs."""
        num_rows, num_tiles = bucket.num_rows, bucket.num_tiles
        self._model = model
        self._bucket = bucket
        self._heads_per_key = model.num_heads // model.num_key_value_heads
        self._scratch_page = cache.scratch_page
        self._widths = bucket.prompt_width, bucket.own_width
        self._rows = torch.zeros(3, num_rows, dtype=torch.int64, device=cache.device)
        """Token ids, positions, slots."""
        reads = [size for width in self._widths for size in (num_rows + 1, num_rows, num_rows * width)]
        sizes = [*reads, 3 * num_tiles, num_rows]
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int32, device=cache.device)
        """Ends, lengths and tables of both reads, tiles, ranks."""
        self._addresses = torch.zeros(len(model.groups), num_rows, 4, dtype=torch.int64, device=cache.device)
        self._scalings = torch.zeros(num_rows, dtype=torch.float32, device=cache.device)
        *parts, tiles, ranks = self._numbers.split(sizes)
        self._token_ids, self._positions, slots = self._rows
        of_prompts, own = (
            PageReads(ends, lengths, table.view(num_rows, width), most, width * PAGE_TOKENS, is_causal=False)
            for (ends, lengths, table), width, most in zip(
                (parts[:3], parts[3:]), self._widths, (bucket.most_queries, self._heads_per_key), strict=True
            )
        )
        self._routing = Routing((), 1)
        if bucket.rank:
            tables = AdapterTables(self._addresses, tiles.view(num_tiles, 3), ranks, self._scalings, bucket.rank)
            self._routing.runs.append(ForwardRun(tables, [True] * len(model.groups)))
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
        adapters: AdapterTables[NDArray[Any]],
    ) -> None:
        """Overwrite the inputs; what is left over reads and writes the page that no sequence has."""
        num_rows = self._bucket.num_rows
        missing = num_rows - len(token_ids)
        rows = np.stack([np.pad(part, (0, missing)) for part in (token_ids, positions, slots)])
        rows[2, len(token_ids) :] = self._scratch_page * PAGE_TOKENS
        more = [self._heads_per_key] * missing
        both = (
            part.padded(num_rows, more, self._scratch_page).arrays(width)
            for part, width in zip(reads, self._widths, strict=True)
        )
        filled = adapters.padded(num_rows, self._bucket.num_tiles)
        numbers = [*chain(*both), filled.tiles.ravel(), filled.ranks]
        for target, source in (
            (self._rows, rows),
            (self._numbers, np.concatenate(numbers)),
            (self._addresses, filled.addresses),
            (self._scalings, filled.scalings),
        ):
            target.copy_(torch.from_numpy(source), non_blocking=True)

    def begin(self) -> Tensor:
        """Run the step, and capture it for the next ones. Raises GraphError."""
        before = self._model.num_base_matmuls
        expected = self._run()
        self._num_matmuls = self._model.num_base_matmuls - before
        try:
            self._replay = capture(self._run)
        except RuntimeError as error:
            raise GraphError(f"it cannot be captured: {error}") from None
        if not is_same(self._replay(), expected):
            raise GraphError("it gives other results than the step that it was captured from")
        return expected

    def replay(self) -> Tensor:
        """Return the last hidden states (N, hidden size), which the next replay of any graph overwrites."""
        assert self._replay is not None
        self._model.current.count_matmuls(self._num_matmuls)
        return self._replay()

    def _run(self) -> Tensor:
        layers = self._model.sampling_layers
        assert layers is not None
        return layers.forward(self._token_ids, self._positions, self._routing, self._attend)


def capture(run: Run) -> Run:
    """Return what runs a function's kernels again, on the same addresses, and returns its result."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may load adapters meanwhile, on streams of their own.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def is_same(actual: Tensor, expected: Tensor) -> bool:
    """Return whether values are the same to rounding; those of an adapter that has diverged are not numbers in both."""
    return bool(torch.isclose(actual, expected, TOLERANCE, TOLERANCE, equal_nan=True).all())
