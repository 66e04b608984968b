"""The sampler: continuous batching of all tenants' samples, on the base model and bank that train.

Each decode step is one forward: one token of running sequences, on a CPU not always of all, and parts of prompts. The
parts of the room: `slot_queue`, `step_shares`, `prefill`, `kv_cache`, `sample_pass` (with `attention`), `drawing`.

Does not depend on tenants; a request has a version and a scope.

Main invariant: a sample's tokens and log-probabilities depend only on its version, prompt, parameters and index. A
request that fails or is cancelled changes no other request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from tokenizers import Tokenizer

from workers.bank.bank import Bank
from workers.bank.state_files import read_state
from workers.contract.capacity import SEQUENCE_SLOTS, num_announced_blocks
from workers.contract.messages import (
    ErrorCode,
    ItemError,
    SampleEvent,
    SampleRequest,
    SampleResult,
)
from workers.contract.settings import CACHE_SHARE
from workers.host.free_memory import MemoryShare
from workers.model.base_model import BaseModel
from workers.sampling import draws
from workers.sampling.attention.pages import PageKernel, PageSteps
from workers.sampling.attention.step import BlockSteps, Steps
from workers.sampling.delta_states import OWNER_PLACES, DeltaStates, StatePool, state_bytes
from workers.sampling.draw_graphs import DrawGraphs
from workers.sampling.drawing import NonFiniteLogitsError
from workers.sampling.draws import Draw, Flight, late
from workers.sampling.errors import SampleError, check_request, item_error, logged_error
from workers.sampling.graph_pool import GraphPool
from workers.sampling.kv_cache import BlockPool, KVCache, PagedCache, block_bytes
from workers.sampling.prefill import Prefill
from workers.sampling.sample_pass import NextPart, Outcome, Part, PromptPart, SamplePass
from workers.sampling.sequences import ActiveRequest, ActiveSequence, StopStrings, load_tokenizer
from workers.sampling.slot_queue import SequenceSlots
from workers.sampling.step_graphs import StepGraphs
from workers.sampling.step_shares import StepShares

logger = logging.getLogger(__name__)
STATES_SHARE = 1 / 2
"""The part of the memory for samples that a hybrid's states of linear attention take at most."""
NUM_CHECKPOINTS = 64
"""States beyond those of as many sequences and prompts as may run: for prompts that begin alike."""
PREFILL_TOKENS_MAX, PAGED_PREFILL_TOKENS_MAX = 512, 4096
"""What a GPU computes of prompts in the time of some decode steps; it takes hardly longer for few tokens than for so
many, because the host launches as many kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerLimits:
    """How much a sampler does at a time."""

    cache_bytes_max: int | None
    """Bytes of keys and values, unless `cache_share` is less; None: just that."""
    cache_share: float = CACHE_SHARE
    """Keys and values, as a part of the memory that is free at the start of a worker."""
    num_sequences_max: int = SEQUENCE_SLOTS
    """Sequence slots."""
    prefill_tokens_max: int | None = None
    """Tokens of prompts in one step while no sequence is decoding; see `prefill.DECODING_SHARE`. None:
    `PREFILL_TOKENS_MAX`, and over pages on a GPU `PAGED_PREFILL_TOKENS_MAX`."""

    def cache_bytes(self, free_bytes: int) -> int:
        """Return the bytes for keys and values, if so many are free at the start of a worker."""
        num_bytes = int(free_bytes * self.cache_share)
        return num_bytes if self.cache_bytes_max is None else min(self.cache_bytes_max, num_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _Decode:
    """Work of a pass: the next token of sequences of a request."""

    active: ActiveRequest
    sequences: Sequence[ActiveSequence]


@dataclass(frozen=True, slots=True, eq=False)
class _Prefill:
    """Work of a pass: a request's prompt from its current position to `stop`."""

    active: ActiveRequest
    stop: int


_Work = _Decode | _Prefill


class Sampler:
    """All sample requests of one worker. Used by the engine's thread only."""

    def __init__(
        self,
        base_model: BaseModel,
        bank: Bank,
        limits: SamplerLimits,
        memory: MemoryShare | None = None,
        *,
        page_kernel: PageKernel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Allocate the key-value blocks in a part of `memory`; None: of all that is free on the device.

        On a CPU blocks take memory when they are first written; until then it is promised. Attention is over pages, by
        `page_kernel`; None: over blocks.
        """
        block_tokens = KVCache.block_tokens if page_kernel is None else PagedCache.block_tokens
        self._memory = MemoryShare(base_model.device) if memory is None else memory
        self._block_bytes = block_bytes(base_model, block_tokens)
        self._state_bytes = state_bytes(base_model)
        num_bytes = limits.cache_bytes(self._memory.free_bytes())
        num_states = self._num_states(num_bytes, limits.num_sequences_max)
        num_blocks = max(1, (num_bytes - num_states * self._state_bytes) // self._block_bytes)
        self._base_model = base_model
        self._bank = bank
        self.states = StatePool(num_states)
        self.blocks = BlockPool(num_blocks, block_tokens, on_leave=self.states.forget)
        """Both are changed by `prefill` and `slots` only."""
        self.num_sequence_slots = limits.num_sequences_max
        """Sequences that may run at a time."""
        if num_states:
            self.num_sequence_slots = min(self.num_sequence_slots, num_states // OWNER_PLACES - 1)
        own_max = PREFILL_TOKENS_MAX if page_kernel is None else PAGED_PREFILL_TOKENS_MAX
        self._prefill = Prefill(self.blocks, self.states, bank, limits.prefill_tokens_max or own_max)
        self.slots = SequenceSlots(self.blocks, self.states, self._prefill, self.num_sequence_slots)
        self._cache: KVCache | PagedCache
        self._steps: Steps
        graphs: StepGraphs | None = None
        self._draw_graphs: DrawGraphs | None = None
        if page_kernel is None:
            self._cache = cache = KVCache(base_model, num_blocks)
            self._steps = BlockSteps(cache, base_model)
        else:
            self._cache = pages = PagedCache(base_model, num_blocks)
            heads_per_key = base_model.num_heads // base_model.num_key_value_heads
            self._steps = PageSteps(pages, page_kernel, heads_per_key, has_windows=base_model.has_sliding_window)
            if base_model.sampling_layers is not None and base_model.device.type == "cuda":
                pool = GraphPool()
                graphs = StepGraphs(base_model, pages, page_kernel, self.num_sequence_slots, pool)
                self._draw_graphs = DrawGraphs(graphs.logits, graphs.logprobs, pool)
        states = DeltaStates(base_model, num_states) if base_model.delta_layers else None
        self._pass = SamplePass(base_model, bank, self._steps, graphs, states)
        self._flight: Flight | None = None
        """A step that was begun before the tokens of the one before it were read. Requests of it may be over."""
        self._clock = clock
        self._shares = StepShares()
        self._requests: list[ActiveRequest] = []
        """All requests, waiting and running."""
        self._events: list[SampleEvent] = []
        self._tokenizer: Tokenizer | None = None
        self._promise_blocks()

    @property
    def num_cache_blocks_used(self) -> int:
        """Key-value blocks that running samples have."""
        return self.blocks.num_in_use

    @property
    def num_cache_blocks(self) -> int:
        """Key-value blocks of `BLOCK_TOKENS`, in use or not; of larger ones, as many as always fit."""
        return num_announced_blocks(self.blocks.num_blocks, self.blocks.block_tokens)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether attention gives a sample the same bits with any co-batched samples."""
        return self._steps.is_batch_invariant

    def bound_scopes(self, num_more: float) -> None:
        """Let steps compute at most so many rows more of one scope than of another; see `StepShares`."""
        self._shares = StepShares(num_more)

    def start_sample(self, request: SampleRequest) -> None:
        """Queue a request. An error becomes its result."""
        try:
            check_request(request, self._base_model, self.num_cache_blocks)
            active = ActiveRequest(
                request, self._stop_strings(request), self._base_model.vocab_size, self.blocks.block_tokens
            )
            self._pin_version(request)
        except Exception as error:  # noqa: BLE001 (reported as the request's result)
            self._events.append(SampleResult(op_id=request.op_id, error=logged_error(request.op_id, error)))
        else:
            self._requests.append(active)
            self.slots.add(active)

    def cancel_sample(self, op_id: str) -> None:
        """End a request; unknown ids are ignored."""
        for active in list(self._requests):
            if active.request.op_id == op_id:
                self._end(active, ItemError(code=ErrorCode.CANCELLED, message="the sample was cancelled"))

    def can_decode(self) -> bool:
        """Return whether `decode_step` has work to do or events to return."""
        return bool(self._events or self._requests)

    def decode_step(self) -> Sequence[SampleEvent]:
        """Grant slots, run one forward, draw tokens; return the events since the last step.

        Tokens of a step that runs already are those of this step.
        """
        self.slots.grant()
        flight, self._flight = self._flight, None
        if flight is not None and any(not draw.active.is_over for draw in flight.draws):
            self._land(flight)
        else:
            self._step()
        # A request with one slot begins its next sequence in the step in which the last one ended.
        self._draw([late(active) for active in self.slots.running if active.can_begin])
        self._promise_blocks()
        events, self._events = self._events, []
        return events

    def _step(self) -> None:
        """Run one forward, and draw tokens."""
        decoding, stops = self._shares.plan(self.slots.running, self._prefill)
        decodes = [_Decode(*chosen) for chosen in decoding.items()]
        for works in self._groups([*decodes, *(_Prefill(*planned) for planned in stops.items())]):
            self._advance(works)

    def reset(self) -> None:
        """Drop every request, without events, and every cached prompt."""
        for active in list(self._requests):
            self._release(active)
        self._events.clear()
        self.blocks.drop_all()

    def _promise_blocks(self) -> None:
        """Let passes leave the memory free that a CPU will give to blocks when they are first written."""
        if self._base_model.device.type == "cpu":
            blocks = len(self.blocks.untouched) * self._block_bytes
            self._memory.promise(blocks + len(self.states.untouched) * self._state_bytes)

    def _num_states(self, num_bytes: int, num_sequences: int) -> int:
        """Return how many states of linear attention the memory for samples has."""
        if not self._state_bytes:
            return 0
        wanted = 2 * OWNER_PLACES * num_sequences + NUM_CHECKPOINTS
        return max(2 * OWNER_PLACES, min(wanted, int(STATES_SHARE * num_bytes) // self._state_bytes))

    def _stop_strings(self, request: SampleRequest) -> StopStrings | None:
        """Return the request's stop strings; raises ValueError if this model has no tokenizer for them."""
        if not request.params.stop_strings:
            return None
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._base_model.path)
        return StopStrings(self._tokenizer, request.params.stop_strings)

    def _pin_version(self, request: SampleRequest) -> None:
        """Pin the request's version in the bank, and add it first if the request brings its state."""
        version = request.version
        if not version.key:
            return
        if version.state is not None and version.key in self._bank and not self._bank.entry(version.key).num_pins:
            # The sender does not know of a version here: this one may be of a save that was never accepted.
            self._bank.remove(version.key)
        if version.key not in self._bank:
            if version.spec is None or version.state is None:
                raise SampleError(ErrorCode.OUT_OF_ORDER, "this worker does not hold the version to sample from")
            host = read_state(self._bank.layout(version.spec), version.spec, version.state.weights, None)
            self._bank.add(version.key, version.spec, host, is_trained=False)
        self._bank.pin(version.key)

    def _groups(self, works: Sequence[_Work]) -> Iterator[list[_Work]]:
        """Yield groups whose versions fit into the bank together: mostly one group."""
        by_key: dict[str, list[_Work]] = {"": []}
        for work in works:
            by_key.setdefault(work.active.key, []).append(work)
        group = by_key.pop("")
        keys: list[str] = []
        for key, own in by_key.items():
            if not self._bank.fits([*keys, key]):
                yield group
                group, keys = [], []
            group += own
            keys.append(key)
        yield group

    def _advance(self, works: Sequence[_Work]) -> None:
        """Run one pass and apply its outcome. If it fails, run its halves, down to the request that fails solo.

        One that runs out of memory solo is tried once more without other adapters on the device.
        """
        works = [work for work in works if not work.active.is_over]
        if not works:
            return
        begin_s = self._clock()
        parts = [self._part(work) for work in works]
        try:
            outcome = self._pass.run(parts)
        except Exception as error:
            # An exception's traceback holds the pass's tensors, which must be freed before the halves run.
            failure = item_error(error)
            logger.warning("a decode step of %d parts failed: %s", len(works), failure.message, exc_info=error)
            del error
        else:
            end_s = self._clock()
            num_rows = sum(len(part.tokens) for part in parts)
            for work, part in zip(works, parts, strict=True):
                work.active.ran((end_s - begin_s) * len(part.tokens) / num_rows, begin_s, end_s)
            self._apply(works, outcome)
            return
        if len(works) == 1:
            active = works[0].active
            if failure.code is ErrorCode.OUT_OF_MEMORY and self._bank.leave_only({active.key}):
                self._advance(works)
            else:
                self._end(active, failure)
            return
        middle = len(works) // 2
        self._advance(works[:middle])
        self._advance(works[middle:])

    def _part(self, work: _Work) -> Part:
        active = work.active
        if isinstance(work, _Prefill):
            start = active.prompt.num_computed
            return PromptPart(
                key=active.key,
                prompt=active.prompt.location,
                tokens=active.request.prompt[start : work.stop].astype(np.int64),
                start=start,
                logprobs_temperature=active.logprobs_temperature,
                first_row=active.outputs.first_row,
                note=active.note,
                move=self._prefill.move(active, work.stop),
            )
        return self._next_part(active, work.sequences)

    def _next_part(self, active: ActiveRequest, sequences: Sequence[ActiveSequence], num_unread: int = 0) -> NextPart:
        """Return the next token of sequences of a request; `num_unread` of each were drawn and are not read."""
        for sequence in sequences:
            self._cache.clear(self.slots.extend(sequence, num_unread))
        return NextPart(
            key=active.key,
            prompt=active.prompt.location,
            tokens=np.array([sequence.tokens[-1] for sequence in sequences], np.int64),
            logprobs_temperature=active.logprobs_temperature,
            sequences=[sequence.location(num_unread) for sequence in sequences],
            moves=[move for sequence in sequences if (move := self.slots.move(active, sequence)) is not None],
        )

    def _apply(self, works: Sequence[_Work], outcome: Outcome) -> None:
        """Record how far prompts are; draw the next token of all sequences, running or about to begin, at once."""
        drawing: list[Draw] = []
        for work, rows in zip(works, outcome.rows_of, strict=True):
            active = work.active
            if isinstance(work, _Decode):
                assert rows is not None
                assert outcome.logits is not None
                self.slots.moved(active, work.sequences)
                drawing.append(Draw(active, work.sequences, outcome.logits, rows))
                continue
            self._prefill.advance(active, work.stop)
            if active.failure is not None:
                self._end(active, item_error(active.failure))
            elif rows is not None and outcome.logits is not None:
                active.prompt_computed(outcome.logits.some(rows))
                drawing.append(Draw(active, active.begin(), outcome.logits, rows))
        self._draw([*drawing, *(late(work.active) for work in works if work.active.can_begin)])

    def _draw(self, drawing: Sequence[Draw]) -> None:
        """Draw the next token of every sequence of some requests; if that fails, of one request at a time."""
        drawing = [draw for draw in drawing if not draw.active.is_over]
        if not drawing:
            return
        try:
            flight = draws.begin(draws.in_rows(drawing), self._draw_graphs)
        except Exception as error:  # noqa: BLE001 (reported as the request's result)
            if len(drawing) == 1:
                active = drawing[0].active
                self._end(active, logged_error(active.request.op_id, error))
                return
            for one in drawing:
                self._draw([one])
            return
        self._land(flight)

    def _land(self, flight: Flight) -> None:
        """Append tokens to their sequences once they are drawn; before that, begin the step behind them if it can run.

        That step overwrites the logits, so they cannot be drawn from again.
        """
        begin_s = self._clock()
        self._flight = self._next_flight(flight) or self._flight
        try:
            tokens, logprobs, is_finite = flight.arriving.read()
        except Exception as error:  # noqa: BLE001 (reported as the requests' results)
            for draw in flight.draws:
                if not draw.active.is_over:
                    self._end(draw.active, logged_error(draw.active.request.op_id, error))
            return
        end_s, num_rows = self._clock(), len(is_finite)
        stop = stop_row = 0
        for draw, count in zip(flight.draws, flight.counts, strict=True):
            if count:
                draw.active.ran((end_s - begin_s) * len(draw.row_indices) / num_rows, begin_s, end_s)
            start, stop = stop, stop + count
            start_row, stop_row = stop_row, stop_row + len(draw.row_indices)
            if not all(is_finite[start_row:stop_row]):
                if not draw.active.is_over:
                    self._end(draw.active, logged_error(draw.active.request.op_id, NonFiniteLogitsError()))
                continue
            self._run_or_fail(draw.active, partial(draw.append, tokens[start:stop], logprobs[start:stop]))

    def _next_flight(self, flight: Flight) -> Flight | None:
        """Begin the step behind draws whose tokens the host has not read; None: it has other rows, or has no graph.

        A sequence that turns out to have stopped has a row in it that nobody reads. Its blocks are written to by later
        steps only, which the device runs behind this one.
        """
        running, followed = self.slots.running, flight.draws
        if not flight.stays_on_device or len(running) != len(followed):
            return None
        if not all(draw.active.goes_on_with(draw.sequences) for draw in followed):
            return None
        assert self._draw_graphs is not None
        try:
            parts = [self._next_part(draw.active, draw.sequences, num_unread=1) for draw in followed]
            rows = self._pass.follow(parts, self._draw_graphs.tokens)
            if rows is None:
                return None
            ahead = [Draw(draw.active, draw.sequences, rows, draw.rows) for draw in followed]
            return draws.begin(ahead, self._draw_graphs, num_unread=1)
        except Exception as error:
            logger.warning("a decode step cannot begin before the last one's tokens are read", exc_info=error)
            return None

    def _run_or_fail(
        self, active: ActiveRequest, change: Callable[[], tuple[list[SampleEvent], list[ActiveSequence]]]
    ) -> None:
        """Apply a change to a request unless it is over; take its events and ended sequences.

        If the change raises, the request fails.
        """
        if active.is_over:
            return
        try:
            events, ended = change()
        except Exception as error:  # noqa: BLE001 (reported as the request's result)
            self._end(active, logged_error(active.request.op_id, error))
            return
        self._events += events
        for sequence in ended:
            self.slots.end_sequence(active, sequence)
        if active.is_finished:
            self._end(active)

    def _end(self, active: ActiveRequest, error: ItemError | None = None) -> None:
        """Emit the request's result and drop it."""
        self._events.append(active.result(error))
        self._release(active)

    def _release(self, active: ActiveRequest) -> None:
        """Free everything that a request holds."""
        active.end()
        self._requests.remove(active)
        self.slots.remove(active)
        if active.key:
            self._bank.unpin(active.key)
        self.blocks.drop_orphans()
