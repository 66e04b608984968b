"""Attention of one sampling step over pages of keys and values on a GPU, by the library's kernel or one of our own.

A page is a block of `PAGE_TOKENS` tokens, all heads of a token together. The rows of a step are the next tokens of
running sequences first, then chunks of prompts. A next token's keys are in two places: its prompt's pages, which all
samples of the prompt share, and its own. It attends to each in a call of its own, and the two results are joined by
their log-sum-exps. So a prompt is stored once and read once for all of its samples, and no page is copied. Query heads
that share keys are rows of one product: a next token is G query rows with K heads. The tables of all pages go to the
device once a step; no operation waits for it.

Does not depend on requests, versions or tokens.

Main invariants: every call takes the keys of a sequence in one piece (`NUM_SPLITS`), or in parts that begin at the same
keys in every call (`PART_KEYS`), and a page of one size. So a row's result depends on its own queries and keys, not on
the other rows of the step. The kernels read no key beyond a sequence's length, so pages need no clearing.

Dimensions: T rows of the step, D next tokens, S sequences of a call, P pages, B tokens of a page, K key-value heads, H
query heads, G query heads per key-value head, E head dimension, W pages of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.contract.capacity import num_blocks_for
from workers.host.uploads import on_device
from workers.model.attention import add_sinks
from workers.model.base_model import BaseModel
from workers.model.gpu_attention import HEAD_DIM_MAX, HEAD_DIM_MULTIPLE
from workers.model.gpu_operations import define, has_kernels, power_of_two
from workers.model.sampling_layers import Projected
from workers.sampling.attention.decode_plan import NextToken
from workers.sampling.attention.step import PromptChunk
from workers.sampling.kv_cache import PAGE_TOKENS, PagedCache, PromptBlocks

ROTATE = (
    "rotate(Tensor(a!) query, Tensor(b!) keys, Tensor(c!) values, Tensor projected, Tensor cos, Tensor sin, "
    "Tensor? query_weight, Tensor? key_weight, Tensor slots, int num_next, float eps)"
)
"""From `model.sampling_layers.Projected`, set query (T, H, E), the first `num_next` rows as G rows of K heads each, and
the slots of keys and values (P, B, K, E). Heads are normalised first if weights (E,) are given."""
JOIN = "join(Tensor(a!) out, Tensor first, Tensor first_sums, Tensor second, Tensor second_sums)"
"""Set out (D, H, E) to the sum of two results (D * G, K, E) of attention, by the log-sum-exps (K, D * G) of each."""
ATTEND_PAGES = (
    "attend_pages(Tensor(a!) out, Tensor(b!) log_sums, Tensor query, Tensor keys, Tensor values, Tensor ends, "
    "Tensor lengths, Tensor table, Tensor? behinds, int most_queries, bool is_causal, float scaling, int window)"
)
"""Set `out` (P, rows, heads, E) and `log_sums` (P, heads, rows), fp32, to the results of a `PageKernel` for each of P
parts of the keys, from the tensors of its arguments and of `PageReads`; window 0: none. The log-sum-exp of a part
without keys is minus infinity, and its result is not written."""
JOIN_PARTS = "join_parts(Tensor(a!) out, Tensor(b!) log_sums, Tensor parts, Tensor part_sums)"
"""Set `out` (rows, heads, E) and `log_sums` (heads, rows) to those of all keys, from the results of `ATTEND_PAGES`."""
define("workers.sampling.attention.page_kernels", ROTATE, JOIN)
define("workers.sampling.attention.attend_kernels", ATTEND_PAGES, JOIN_PARTS)

NEXT_ROWS, CHUNK_ROWS, WINDOW_ROWS = 16, 64, 32
"""Query rows of a program of `ATTEND_PAGES`: of next tokens, which wait for keys, of chunks of prompts, and of these in
a window, which takes more registers."""
TILE_VALUES = 8192
"""At most, of a program's sums, which are in registers, and of the keys of a tile, two of which are in shared memory
beside their values."""
PART_KEYS, PARTS_MAX = 1024, 16
"""Keys of a part of `ATTEND_PAGES`, so that few sequences with long contexts have many programs; and the most parts,
because their results take memory: the last has all keys that are left. Chunks have one part, because of their rows."""
NUM_SPLITS = 1
"""Parts that a sequence's keys are cut into. The kernel's own choice depends on all sequences of a call."""


@dataclass(frozen=True, slots=True)
class PageReads:
    """The sequences of one call, as the kernel takes them; tensors are int32 on the device."""

    ends: Tensor
    """(S + 1,): 0, then the query row after each sequence."""
    lengths: Tensor
    """(S,) keys of each sequence."""
    table: Tensor
    """(S, W) each sequence's pages, filled up with zeros."""
    most_queries: int
    """At least the query rows of the sequence with the most."""
    most_keys: int
    """At least the keys of the sequence with the most."""
    is_causal: bool
    """Whether the last query row sees all keys, the one before it all but the last, and so on; or all rows see all."""
    behinds: Tensor | None = None
    """(rows,) where windows end: the number of the key behind each row's own token, counted from the sequence's first
    key. None: behind the last key that a row sees."""


class PageKernel(Protocol):
    """Attention over pages."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        reads: PageReads,
        scaling: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend from queries (rows, heads, E) to pages (P, B, K, E); heads is a multiple of K.

        `window`: keys that a row sees at most, its own included. Return the result, shaped like the queries, and the
        log-sum-exps of its scores (heads, rows), fp32: zeros and minus infinity where a row sees no key.
        """


def flash_pages(
    query: Tensor, keys: Tensor, values: Tensor, reads: PageReads, scaling: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Implement `PageKernel` by the library's flash attention; bf16 or fp16, on CUDA; without windows.

    It swaps query heads and rows by itself for single query rows, with two copies, unless the call is causal or no
    heads share keys: neither is so here. `mha_varlen_fwd` in torch's `flash_api.cpp`.
    """
    assert window is None, "see `page_kernel_for`"
    out, log_sum_exp, *_ = torch.ops.aten._flash_attention_forward(
        query,
        keys,
        values,
        reads.ends,
        reads.ends,  # not read: `seqused_k` and `block_table` say where keys are
        reads.most_queries,
        reads.most_keys,
        0.0,
        reads.is_causal,
        return_debug_mask=False,
        scale=scaling,
        window_size_left=-1,
        window_size_right=0 if reads.is_causal else -1,
        seqused_k=reads.lengths,
        block_table=reads.table,
        num_splits=NUM_SPLITS,
    )
    return out, log_sum_exp


def takes_tables() -> bool:
    """Return whether the library's flash attention takes tables of pages."""
    arguments = {argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments}
    return {"block_table", "seqused_k", "num_splits"} <= arguments


def triton_pages(
    query: Tensor, keys: Tensor, values: Tensor, reads: PageReads, scaling: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Implement `PageKernel` by a kernel of our own, on CUDA; queries may have gaps between heads and rows."""
    assert query.stride(2) == 1
    assert keys.is_contiguous()
    assert values.is_contiguous()
    num_heads, of_reads = query.shape[1], (reads.ends, reads.lengths, reads.table)
    how = reads.behinds, reads.most_queries, reads.is_causal, scaling, window or 0
    attend_pages = torch.ops.tinkerpool.attend_pages
    out = query.new_empty(query.shape)
    log_sums = query.new_empty(num_heads, len(query), dtype=torch.float32)
    num_parts = 1 if reads.is_causal else min(PARTS_MAX, num_blocks_for(reads.table.shape[1] * PAGE_TOKENS, PART_KEYS))
    if num_parts == 1:
        attend_pages(out.unsqueeze(0), log_sums.unsqueeze(0), query, keys, values, *of_reads, *how)
    else:
        parts = query.new_empty(num_parts, *query.shape, dtype=torch.float32)
        part_sums = log_sums.new_empty(num_parts, *log_sums.shape)
        attend_pages(parts, part_sums, query, keys, values, *of_reads, *how)
        torch.ops.tinkerpool.join_parts(out, log_sums, parts, part_sums)
    return out, log_sums


def tile_rows(head_dim: int, *, is_causal: bool, has_window: bool = False) -> int:
    """Return the query rows of a program, times heads that share keys; one number for all calls of a kind."""
    most = (WINDOW_ROWS if has_window else CHUNK_ROWS) if is_causal else NEXT_ROWS
    return min(most, TILE_VALUES // power_of_two(head_dim))


def page_kernel_for(model: BaseModel) -> PageKernel | None:
    """Return the kernel for a model on its device; None: attention is by blocks (`step`).

    The library's is used if it takes tables of pages, which it does as of torch 2.12, and no layer has a sliding
    window; otherwise the one of our own, if kernels in Triton can be launched.
    """
    has_kernel = model.device.type == "cuda" and model.dtype in {torch.bfloat16, torch.float16}
    has_kernel = has_kernel and model.head_dim <= HEAD_DIM_MAX and model.head_dim % HEAD_DIM_MULTIPLE == 0
    if not has_kernel:
        return None
    if takes_tables() and not model.has_sliding_window:
        return flash_pages
    return triton_pages if has_kernels(model.device) else None


@dataclass(frozen=True, slots=True)
class StepTables:
    """Where the rows of one step write their keys and values, and what they read."""

    num_next: int
    """D: the first rows."""
    num_rows: int
    """Rows of the step without padding."""
    slots: Tensor
    """(rows,) int64: page times B plus the place in it, of each row's token."""
    of_prompts: PageReads | None
    """The next tokens' reads of their prompts, (D * G, K) query rows and heads; None if D is 0."""
    own: PageReads | None
    """Their reads of their own pages."""
    chunks: PageReads | None
    """The reads of the rows after them; None if there are none."""


class PageSteps:
    """Implements `step.Steps`."""

    are_prompts_last = True
    is_batch_invariant = True

    def __init__(self, cache: PagedCache, kernel: PageKernel, heads_per_key: int, *, has_windows: bool = False) -> None:
        """`heads_per_key` is G; `has_windows`: whether any layer has a sliding window."""
        self._cache = cache
        self._kernel = kernel
        self._heads_per_key = heads_per_key
        self._has_windows = has_windows

    def begin(self, chunks: Sequence[PromptChunk], tokens: Sequence[NextToken]) -> PagedAttention:
        """See `step.Steps`."""
        tables = make_tables(chunks, tokens, self._heads_per_key, self._cache.device, has_windows=self._has_windows)
        return PagedAttention(self._cache, self._kernel, tables)


@dataclass(frozen=True, slots=True)
class HostReads:
    """The sequences of one call on the host; see `PageReads`."""

    counts: list[int]
    """Query rows of each sequence."""
    lengths: list[int]
    pages: Sequence[Sequence[int]]
    """Of each sequence at least the pages that its keys are in."""
    is_causal: bool

    @property
    def most_queries(self) -> int:
        """Query rows of the sequence with the most."""
        return max(self.counts)

    def arrays(self, width: int | None = None) -> list[NDArray[np.int32]]:
        """Return ends, lengths and the table, flat, with `width` pages of each sequence; None: as many as needed."""
        table = np.zeros((len(self.pages), width or num_blocks_for(max(self.lengths), PAGE_TOKENS)), np.int32)
        for row, length, own in zip(table, self.lengths, self.pages, strict=True):
            num_pages = num_blocks_for(length, PAGE_TOKENS)
            row[:num_pages] = own[:num_pages]
        return [np.cumsum([0, *self.counts], dtype=np.int32), np.array(self.lengths, np.int32), table.ravel()]

    def padded(self, num_seqs: int, more: Sequence[int], page: int) -> HostReads:
        """Return `num_seqs` sequences: these, further ones of `more` query rows, and some without; all read `page`."""
        missing = num_seqs - len(self.counts)
        counts = [*self.counts, *more, *[0] * (missing - len(more))]
        return HostReads(counts, [*self.lengths, *[1] * missing], [*self.pages, *[[page]] * missing], self.is_causal)

    def on_device(self, parts: Sequence[Tensor]) -> PageReads:
        """Return the reads whose `arrays` are on the device."""
        ends, lengths, table = parts
        table = table.view(len(self.pages), -1)
        return PageReads(ends, lengths, table, self.most_queries, max(self.lengths), self.is_causal)


def next_reads(tokens: Sequence[NextToken], heads_per_key: int) -> tuple[HostReads, HostReads]:
    """Return next tokens' reads of their prompts, and of their own pages; `heads_per_key` is G."""
    groups = [list(own) for _, own in groupby(tokens, key=lambda token: id(token.prompt))]
    prompts = [own[0].prompt for own in groups]
    counts = [heads_per_key * len(own) for own in groups]
    pages = [prompt.blocks for prompt in prompts]
    of_prompts = HostReads(counts, [prompt.length for prompt in prompts], pages, is_causal=False)
    lengths = [token.own.length + 1 for token in tokens]
    own_pages = [token.own.blocks for token in tokens]
    return of_prompts, HostReads([heads_per_key] * len(tokens), lengths, own_pages, is_causal=False)


def slots_of(tokens: Sequence[NextToken]) -> NDArray[np.int64]:
    """Return the slots of next tokens, (D,)."""
    return np.array([token.own.blocks[-1] * PAGE_TOKENS + token.own.length % PAGE_TOKENS for token in tokens], np.int64)


def make_tables(
    chunks: Sequence[PromptChunk],
    tokens: Sequence[NextToken],
    heads_per_key: int,
    device: torch.device,
    *,
    has_windows: bool = False,
) -> StepTables:
    """Return the tables of a step whose rows are `tokens` and then `chunks`; `heads_per_key` is G.

    `has_windows`: with what windows need.
    """
    assert [token.row for token in tokens] == list(range(len(tokens)))
    calls = list(next_reads(tokens, heads_per_key)) if tokens else []
    if chunks:
        counts = [chunk.stop - chunk.start for chunk in chunks]
        pages = [chunk.prompt.blocks for chunk in chunks]
        calls.append(HostReads(counts, [chunk.stop for chunk in chunks], pages, is_causal=True))
    arrays = [array for call in calls for array in call.arrays()]
    parts = on_device(np.concatenate(arrays), device).split([len(array) for array in arrays])
    reads = [call.on_device(parts[3 * place : 3 * place + 3]) for place, call in enumerate(calls)]
    slots = np.concatenate([slots_of(tokens), *(_slots(chunk.prompt, chunk.start, chunk.stop) for chunk in chunks)])
    of_prompts, own = (reads[0], reads[1]) if tokens else (None, None)
    if of_prompts is not None and has_windows:
        positions = np.array([token.prompt.length + token.own.length for token in tokens], np.int32)
        behinds = on_device(np.repeat(positions + 1, heads_per_key), device)
        of_prompts = replace(of_prompts, behinds=behinds)
    return StepTables(
        num_next=len(tokens),
        num_rows=len(slots),
        slots=on_device(slots, device),
        of_prompts=of_prompts,
        own=own,
        chunks=reads[-1] if chunks else None,
    )


class PagedAttention:
    """Implements `Attend` and `AttendsProjected` of `model` for one step, and writes keys and values to the cache."""

    def __init__(self, cache: PagedCache, kernel: PageKernel, tables: StepTables) -> None:
        self._cache = cache
        self._kernel = kernel
        self._tables = tables

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Attend`."""
        tables = self._tables
        keys, values = self._cache.layer(layer)
        queries, key_rows, value_rows = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        for memory, rows in ((keys, key_rows), (values, value_rows)):
            memory.flatten(0, 1)[tables.slots] = rows[: tables.num_rows]
        parts = list[Tensor]()  # (rows, H, E)
        how = scaling, sliding_window
        if tables.of_prompts is not None and tables.own is not None:
            rows = queries[: tables.num_next]
            parts.append(self._next(rows, keys, values, tables.of_prompts, tables.own, *how, sinks))
        if tables.chunks is not None:
            rows = queries[tables.num_next : tables.num_rows]
            out, log_sums = self._kernel(rows, keys, values, tables.chunks, *how)
            if sinks is not None:
                add_sinks(out.transpose(0, 1), log_sums, sinks.unsqueeze(-1))
            parts.append(out)
        if len(queries) > tables.num_rows:
            parts.append(queries.new_zeros(len(queries) - tables.num_rows, *queries.shape[1:]))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.unsqueeze(0)

    def projected(self, layer: int, projected: Projected) -> Tensor:
        """See `AttendsProjected`: all but the products is one kernel before them, and one behind them."""
        tables, rows, norms = self._tables, projected.rows, projected.norms
        keys, values = self._cache.layer(layer)
        num_keys, head_dim = keys.shape[2:]
        query = rows.new_empty(len(rows), rows.shape[1] // head_dim - 2 * num_keys, head_dim)
        weights = (None, None, 0.0) if norms is None else (norms.query, norms.key, norms.eps)
        where = tables.slots, tables.num_next
        torch.ops.tinkerpool.rotate(
            query, keys, values, rows, projected.cos, projected.sin, *weights[:2], *where, weights[2]
        )
        chunks = None
        if tables.chunks is not None:
            chunks, _ = self._kernel(query[tables.num_next :], keys, values, tables.chunks, projected.scaling)
        if tables.of_prompts is None or tables.own is None:
            assert chunks is not None
            return chunks.flatten(1)
        out = torch.empty_like(query)
        queries = query[: tables.num_next].view(-1, num_keys, head_dim)  # (D * G, K, E)
        first, second = (
            self._kernel(queries, keys, values, reads, projected.scaling) for reads in (tables.of_prompts, tables.own)
        )
        torch.ops.tinkerpool.join(out[: tables.num_next], *first, *second)
        if chunks is not None:
            out[tables.num_next :] = chunks
        return out.flatten(1)

    def _next(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        of_prompts: PageReads,
        own: PageReads,
        scaling: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return the attention (D, H, E) of next tokens' queries (D, H, E) over their prompts and their own pages."""
        num_keys = keys.shape[2]
        rows = queries.unflatten(1, (num_keys, -1)).transpose(1, 2).flatten(0, 1)  # (D * G, K, E)
        (first, first_sums), (second, second_sums) = (
            self._kernel(rows, keys, values, reads, scaling, window) for reads in (of_prompts, own)
        )
        share = (first_sums - second_sums).sigmoid_().t().unsqueeze(-1)  # (D * G, K, 1): of all weights, the prompt's
        joined = torch.lerp(second.float(), first.float(), share).unflatten(0, (len(queries), -1))  # (D, G, K, E)
        merged: Tensor = joined.transpose(1, 2).flatten(1, 2)  # (D, H, E)
        if sinks is not None:
            sums = torch.logaddexp(first_sums, second_sums).unflatten(1, (len(queries), -1))  # (K, D, G)
            add_sinks(merged.transpose(0, 1), sums.transpose(1, 2).flatten(0, 1), sinks.unsqueeze(-1))
        return merged.to(queries.dtype)


def _slots(prompt: PromptBlocks, start: int, stop: int) -> NDArray[np.int64]:
    """Return the slots of a prompt's tokens from `start` to `stop`."""
    positions = np.arange(start, stop)
    slots: NDArray[np.int64] = np.array(prompt.blocks)[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    return slots
