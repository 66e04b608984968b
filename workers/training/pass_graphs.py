"""Training passes as CUDA graphs: the layers are two launches of the host, one for each way, instead of a thousand.

A pass of few rows keeps a GPU busy for less time than the host takes to launch its kernels. A graph has fixed shapes
and addresses, so each *bucket* has its own, with inputs of its own that `Trunk` overwrites before each run: token ids,
positions, where sequences end, adapters' addresses. Rows that are left over are sequences without an adapter, whose
gradients are zero. The first pass of a bucket runs the same functions on the same inputs without a graph, so that all
kernels are compiled when the second one is captured; all graphs use one memory, one after another. If one cannot be
captured, there are none from then on. The loss, whose shapes are the requests', runs between the two without a graph.
Where attention has a call for some request alone, in exact mode, a bucket is one list of requests' lengths.

Depends on a model with `training_layers`; not on requests, losses or the bank. `selftest.training_kernels` tries
graphs when a model is loaded.

Main invariants: what a graph does depends on its inputs' values only, and nothing in it waits or copies from the host.
Addresses are those of the pass: the bank may have moved its slabs since the last one.

Dimensions: T rows of the pass, N rows of a bucket (at least T), S sequences, L tiles, A adapters, Q pieces of segments,
D hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from workers.host.allocator import is_out_of_memory
from workers.host.captures import capturing
from workers.host.input_block import InputBlock
from workers.model.attention import Attend
from workers.model.base_model import BaseModel
from workers.model.fused_runs import AdapterTables, GradientTables, TrainingRun
from workers.model.gpu_attention import VarlenAttention
from workers.model.gpu_operations import TRAINING_TILE_ROWS, blocks_of, num_arrivals, power_of_two
from workers.model.segments import Routing, Segment

logger = logging.getLogger(__name__)

GRAPHS_MAX = 16
"""Buckets that are kept; the least recently used one gives way."""
ROWS_MAX = 8192
"""Of a pass with a graph. The kernels of more rows take longer than their launches."""
STEPS_PER_DOUBLING, STEP_ROWS_MIN = 8, 64
"""Numbers of rows between one power of two and the next: up to an eighth of the rows is left over."""


class Rows(Protocol):
    """The rows of a pass; `passes.Packed` is one."""

    @property
    def tokens(self) -> Tensor:
        """(T,) int64."""

    @property
    def positions(self) -> Tensor:
        """(T,) int64."""

    @property
    def lengths(self) -> Sequence[int]:
        """Of sequences, in row order."""

    @property
    def counts(self) -> Sequence[int]:
        """Sequences of each request, in row order."""

    @property
    def segments(self) -> Sequence[Segment]:
        """In row order."""


class PlainTrunk:
    """The layers of a pass without a graph."""

    def __init__(self, model: BaseModel, rows: Rows, *, recompute: bool = False) -> None:
        """`recompute`: see `BaseModel.forward`."""
        self._model = model
        self._rows = rows
        self._recompute = recompute
        self._hidden: Tensor | None = None

    def forward(self) -> Tensor:
        """Return the last hidden states (T, D), normalised."""
        rows, model = self._rows, self._model
        attend, recur = model.attend_packed(rows.lengths, rows.counts), model.recur_packed(rows.lengths)
        self._hidden = model.forward(
            rows.tokens, rows.positions, rows.segments, attend, recur, recompute=self._recompute
        )
        return self._hidden.detach()

    def backward(self, dhidden: Tensor) -> None:
        """Add every adapter's gradient to its row, from d(loss)/d(hidden) (T, D)."""
        assert self._hidden is not None, "the forward comes first"
        self._model.backward(self._hidden, dhidden)


class Bucket(NamedTuple):
    """What the shapes of a graph depend on."""

    num_rows: int
    """N."""
    num_sequences: int
    """S."""
    longest: int
    """At least the rows of the longest sequence."""
    num_tiles: int
    """L."""
    num_adapters: int
    """A."""
    num_pieces: int
    """Q."""
    rank: int
    """The largest padded rank."""
    requests: tuple[tuple[int, ...], ...]
    """If a request has a call of attention alone, the rows of every request's sequences; otherwise none."""


class PassGraphs:
    """The graphs of one engine's passes with a backward. Used by one thread only."""

    def __init__(self, model: BaseModel) -> None:
        self._model = model
        self._trunks: dict[Bucket, Trunk] = {}
        """The least recently used first."""
        self._pool: Any = None
        self.has_failed = False
        """Whether a graph could not be captured."""

    def trunk(self, rows: Rows, can_keep: Callable[[], bool] = lambda: True) -> Trunk | None:
        """Return the layers of a pass with a backward, its inputs filled; None: run it without a graph.

        `can_keep` returns whether the memory of the pass may stay its graphs'.
        """
        is_off = self.has_failed or not can_capture(self._model)
        if is_off or len(rows.tokens) > ROWS_MAX or not rows.segments or not can_keep():
            return None
        num_rows, longest = len(rows.tokens), power_of_two(max(rows.lengths))
        fewest = self._model.attend_packed(rows.lengths, rows.counts).fewest_sequences
        requests: tuple[tuple[int, ...], ...] = ()
        if fewest is None:
            sequences = iter(rows.lengths)
            requests = tuple(tuple(islice(sequences, count)) for count in rows.counts)
        else:
            num_rows = rows_of_bucket(num_rows)
        lengths = [*rows.lengths, *cut(num_rows - len(rows.tokens), longest)]
        adapters = AdapterTables.of(rows.segments, len(self._model.groups), TRAINING_TILE_ROWS, num_rows)
        num_left = blocks_of(num_rows - len(rows.tokens), TRAINING_TILE_ROWS)
        gradients = GradientTables.of(rows.segments, adapters)
        bucket = Bucket(
            num_rows,
            power_of_two(max(len(lengths), fewest or 0)),
            longest,
            power_of_two(len(adapters.tiles) - num_left) + left_tiles_of_bucket(num_rows),
            power_of_two(len(adapters.ranks)),
            power_of_two(len(gradients.pieces)),
            adapters.rank_max,
            requests,
        )
        trunk = self._trunks.pop(bucket, None) or Trunk(self._model, bucket)
        trunk.fill(rows, lengths, adapters, gradients)
        if trunk.has_run and not trunk.is_captured and not self._captured(trunk):
            return None
        self._trunks[bucket] = trunk
        if len(self._trunks) > GRAPHS_MAX:
            del self._trunks[next(iter(self._trunks))]
        return trunk

    def clear(self) -> bool:
        """Drop all graphs and their memory; return whether there were any."""
        had_graphs = any(trunk.is_captured for trunk in self._trunks.values())
        self._trunks.clear()
        self._pool = None
        return had_graphs

    def _captured(self, trunk: Trunk) -> bool:
        """Capture a bucket's graphs; if that fails, there are none from now on."""
        if not any(each.is_captured for each in self._trunks.values()):
            self._pool = torch.cuda.graph_pool_handle()  # the library drops a pool with its last graph
        try:
            trunk.capture(self._pool)
        except RuntimeError as error:
            self.clear()
            if not is_out_of_memory(error):
                logger.warning("training passes run without graphs, which is slower: %s", error)
                self.has_failed = True
            return False
        return True


class Trunk:
    """The layers of a pass of one bucket, with their inputs: its graphs, once they are captured."""

    def __init__(self, model: BaseModel, bucket: Bucket) -> None:
        """Allocate the inputs."""
        device = model.device
        num_groups = len(model.groups)
        self._model = model
        self._bucket = bucket
        self._num_rows = bucket.num_rows
        """T of the pass whose inputs are filled."""
        self._rows = torch.zeros(2, bucket.num_rows, dtype=torch.int64, device=device)
        """Token ids and positions."""
        self._tables = InputBlock(
            [
                (np.int32, (bucket.num_sequences + 1,)),
                *AdapterTables.shapes(num_groups, bucket.num_adapters, bucket.num_tiles),
                *GradientTables.shapes(num_groups, bucket.num_adapters, bucket.num_pieces),
            ],
            device,
        )
        """Ends of sequences, and what adapters and their gradients need."""
        ends, addresses, tiles, ranks, scalings, of_gradients, pieces, firsts, are_set = self._tables.tensors
        arrivals = torch.zeros(num_arrivals(bucket.num_tiles, bucket.rank), dtype=torch.int32, device=device)
        adapters = AdapterTables(addresses, tiles, ranks, scalings, bucket.rank)
        gradients = GradientTables(of_gradients, pieces, firsts, are_set, arrivals)
        self._run_of_all = TrainingRun(adapters, gradients, [True] * num_groups)
        self._routing = Routing((), 1)
        self._routing.runs.append(self._run_of_all)
        self._dhidden = torch.zeros(bucket.num_rows, model.hidden_size, dtype=model.dtype, device=device)
        own = model.attend_packed([1], [1])
        self._attend: Attend = VarlenAttention.between(own, ends, bucket.num_rows, bucket.longest)
        if bucket.requests:
            self._attend = model.attend_packed([*chain(*bucket.requests)], [*map(len, bucket.requests)])
        self._hidden: Tensor | None = None
        """With the operations that led to it, while a pass runs without a graph."""
        self._replays: tuple[Callable[[], None], Callable[[], None], Tensor] | None = None
        """Forward, backward, and what the forward leaves (N, D)."""
        self._num_matmuls = 0
        self.has_run = False
        """Whether a pass has run, so that all kernels are compiled."""

    @property
    def is_captured(self) -> bool:
        """Whether passes are graphs."""
        return self._replays is not None

    def fill(
        self, rows: Rows, lengths: Sequence[int], adapters: AdapterTables[Any], gradients: GradientTables[Any]
    ) -> None:
        """Overwrite the inputs; `lengths` are those of all sequences, left over rows among them."""
        bucket, num_rows = self._bucket, len(rows.tokens)
        self._num_rows = num_rows
        block, (ends, *targets) = self._tables.blank()
        ends[:] = bucket.num_rows
        ends[: len(lengths) + 1] = [0, *accumulate(lengths)]
        adapters.write(targets[:4])
        gradients.write(targets[4:])
        self._tables.send(block)
        self._run_of_all.begin(gradients.num_set)
        self._rows[:, num_rows:] = 0
        self._rows[0, :num_rows] = rows.tokens
        self._rows[1, :num_rows] = rows.positions

    def forward(self) -> Tensor:
        """Return the last hidden states (T, D), normalised; the next forward of any bucket overwrites them."""
        if self._replays is None:
            before = self._model.num_base_matmuls
            hidden = self._hidden = self._run()
            self._num_matmuls = self._model.num_base_matmuls - before
            return hidden.detach()[: self._num_rows]
        replay, _, hidden = self._replays
        self._model.current.begin(())  # the last forward's segments would keep slabs in memory
        self._model.current.count_matmuls(self._num_matmuls)
        replay()
        return hidden[: self._num_rows]

    def backward(self, dhidden: Tensor) -> None:
        """Add every adapter's gradient to its row, from d(loss)/d(hidden) (T, D) of the last forward."""
        self._dhidden[: self._num_rows] = dhidden
        self._dhidden[self._num_rows :] = 0
        if self._replays is None:
            hidden, self._hidden = self._hidden, None
            assert hidden is not None, "the forward comes first"
            self._model.backward(hidden, self._dhidden)
            self.has_run = True
        else:
            self._replays[1]()

    def capture(self, pool: Any) -> None:
        """Capture both ways; the inputs are filled. Raises RuntimeError."""
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with capturing(forward, pool):
            hidden = self._run()
        with capturing(backward, pool):
            self._model.backward(hidden, self._dhidden)
        self._replays = forward.replay, backward.replay, hidden.detach()

    def _run(self) -> Tensor:
        """Run the layers forwards, on the inputs."""
        tokens, positions = self._rows
        with torch.enable_grad():
            return self._model.forward(tokens, positions, self._routing, self._attend)


def can_capture(model: BaseModel) -> bool:
    """Return whether graphs can hold the layers of a model: usual ones, with attention by ends on the device."""
    is_usual = model.training_layers is not None and model.has_pass_graphs
    return is_usual and isinstance(model.attend_packed([1], [1]), VarlenAttention)


def rows_of_bucket(num_rows: int) -> int:
    """Return N for T rows."""
    step = _step(num_rows)
    return -(-num_rows // step) * step


def left_tiles_of_bucket(num_rows: int) -> int:
    """Return the most tiles of rows that are left over of N: fewer than a step of `rows_of_bucket`."""
    return -(-_step(num_rows) // TRAINING_TILE_ROWS)


def _step(num_rows: int) -> int:
    return max(STEP_ROWS_MIN, power_of_two(num_rows) // 2 // STEPS_PER_DOUBLING)


def cut(num_rows: int, most: int) -> list[int]:
    """Return the lengths of sequences of at most `most` rows that have so many rows together."""
    return [min(most, num_rows - first) for first in range(0, num_rows, most)]
