"""Continuous batching of everybody's samples, on the base model and bank that train: one forward per decode step.

Knows requests and versions; not tenants. The parts: `running` (a request), `seats` (who may run, and the memory for
it), `sample_pass` (the forward), `drawing` (a token from logits). A request's way: its line; a first seat, with memory
for its prompt and one sequence; its prompt, some blocks of it a step; a token a step of every sequence that has a seat;
result.

Main invariant: a sample's tokens and log-probabilities depend on its version, prompt, parameters and index alone. A
request that fails or is cancelled ends alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from tokenizers import Tokenizer

from workers.bank.bank import Bank
from workers.bank.snapshot import DamagedStateError, OtherAdapterError, read_state
from workers.contract.capacity import SEQUENCE_SLOTS, what_is_too_large
from workers.contract.messages import ErrorCode, ItemError, SampleEvent, SampleRequest, SampleResult
from workers.host.allocator import is_out_of_memory
from workers.host.host_memory import free_bytes
from workers.model.base_model import BaseModel
from workers.sampling.drawing import NonFiniteLogitsError, check_finite, draw_rows
from workers.sampling.kv_cache import KVCache, block_bytes
from workers.sampling.running import Running, RunningSequence
from workers.sampling.sample_pass import LogitsRows, NextPart, Outcome, Part, PromptPart, SamplePass
from workers.sampling.seats import Seats
from workers.sampling.stop_strings import StopStrings, load_tokenizer

logger = logging.getLogger(__name__)

MEMORY_SHARE = 1 / 4
"""Of the memory that is free when a worker starts, what keys and values may have at most."""


class SampleError(Exception):
    """A request cannot be run; the message is for the user."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, eq=False)
class _Decode:
    """The next token of all sequences of a request."""

    owner: Running


@dataclass(frozen=True, slots=True, eq=False)
class _Prefill:
    """A request's prompt, from where it is to `stop`."""

    owner: Running
    stop: int


_Unit = _Decode | _Prefill


class Sampler:
    """All sample requests of one worker. One thread only, the engine's."""

    def __init__(
        self,
        base_model: BaseModel,
        bank: Bank,
        *,
        num_rows_max: int = SEQUENCE_SLOTS,
        prefill_tokens_max: int = 512,
        cache_bytes_max: int = 2 << 30,
        clock: Callable[[], float] = time.perf_counter,
        free_bytes: Callable[[torch.device], int] = free_bytes,
    ) -> None:
        """At most `num_rows_max` sequences run at a time, and prompts of `prefill_tokens_max` tokens a step.

        Keys and values have `cache_bytes_max`, 2 GiB, or a quarter of the memory that is free now if that is less, and
        never more: what does not fit waits its turn, and what can never fit is refused. On a CPU they take memory as
        they are first used; what was computed for a prompt is kept for the next one that begins alike as long as
        nobody needs the place.
        """
        self._base_model = base_model
        self._bank = bank
        num_bytes = min(cache_bytes_max, int(free_bytes(base_model.device) * MEMORY_SHARE))
        num_blocks = max(1, num_bytes // block_bytes(base_model))
        self._seats = Seats(
            num_blocks,
            lambda key: bank.entry(key) if key else None,
            num_seats_max=num_rows_max,
            prefill_tokens_max=prefill_tokens_max,
        )
        self._cache = KVCache(base_model, num_blocks)
        self._pass = SamplePass(base_model, bank, self._cache)
        self._clock = clock
        self._events: list[SampleEvent] = []
        self._tokenizer: Tokenizer | None = None

    @property
    def num_cache_blocks(self) -> int:
        """How much memory there is for keys and values."""
        return self._seats.pool.num_blocks

    @property
    def untaken_bytes(self) -> int:
        """Memory for keys and values that will be taken when it is first used; others must leave it free."""
        if self._base_model.device.type != "cpu":
            return 0
        return self._seats.pool.num_never_taken * block_bytes(self._base_model)

    @property
    def are_samples_alike(self) -> bool:
        """Whether a sample's bits do not depend on its company, as far as attention goes."""
        return self._pass.are_samples_alike

    # ------------------------------------------------------------------ Engine

    def start_sample(self, request: SampleRequest) -> None:
        """Queue a request. What is wrong with it comes as its result."""
        try:
            owner = self._checked(request)
            self._hold(request)
        except Exception as error:  # noqa: BLE001 (told as the request's result)
            self._events.append(SampleResult(op_id=request.op_id, error=_failure(request.op_id, error)))
        else:
            self._seats.add(owner)

    def cancel_sample(self, op_id: str) -> None:
        """Stop a request; unknown ids are ignored."""
        for owner in list(self._seats):
            if owner.request.op_id == op_id:
                self._end(owner, ItemError(code=ErrorCode.CANCELLED, message="the sample was cancelled"))

    def can_decode(self) -> bool:
        """Whether there is anything to do or to tell."""
        return bool(self._events or self._seats)

    def decode_step(self) -> Sequence[SampleEvent]:
        """Give out seats; then compute pieces of prompts and a token more of every running sequence, in one forward."""
        self._seats.give()
        decodes = [_Decode(owner) for owner in self._seats.running if owner.sequences]
        stops = self._seats.plan_prefill(is_decoding=bool(decodes))
        for units in self._groups([*decodes, *(_Prefill(*planned) for planned in stops.items())]):
            self._advance(units)
        for owner in [owner for owner in self._seats.running if owner.first is not None and owner.num_free_seats]:
            self._guarded(owner, owner.begin)
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Forget every request, without events, and every prompt."""
        for owner in list(self._seats):
            self._release(owner)
        self._events.clear()
        self._seats.pool.drop_all()

    # ------------------------------------------------------------------ coming

    def _checked(self, request: SampleRequest) -> Running:
        """A request that can be run. Raises SampleError, and ValueError for stop strings that cannot be used."""
        wrong = self._what_is_wrong(request)
        if wrong:
            raise SampleError(ErrorCode.INVALID_ARGUMENT, wrong)
        stop_strings = None
        if request.params.stop_strings:
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(self._base_model.path)
            stop_strings = StopStrings(self._tokenizer, request.params.stop_strings)
        owner = Running(request, stop_strings, self._base_model.vocab_size)
        too_large = what_is_too_large(len(request.prompt), request.params.max_tokens, self.num_cache_blocks)
        if too_large:
            raise SampleError(ErrorCode.INVALID_ARGUMENT, too_large)
        return owner

    def _what_is_wrong(self, request: SampleRequest) -> str:
        """What makes a request impossible whatever memory there is; empty if nothing does."""
        model, prompt, targets = self._base_model, request.prompt, request.prompt_targets
        max_tokens = request.params.max_tokens
        if not len(prompt):
            return "the prompt is empty; it needs at least one token"
        if len(prompt) + max_tokens > model.max_seq_len:
            return (
                f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}; together they may be at most "
                f"{model.max_seq_len}"
            )
        if int(prompt.min()) < 0 or int(prompt.max()) >= model.vocab_size:
            return f"token ids of the prompt must be 0 to {model.vocab_size - 1}"
        if targets is None:
            return ""
        if targets.ndim != 2 or len(targets) != len(prompt) - 1:
            return (
                f"prompt_targets has the shape {targets.shape}; it needs a row for each token of the prompt but the "
                f"first: {len(prompt) - 1} rows"
            )
        if targets.size and (int(targets.min()) < -1 or int(targets.max()) >= model.vocab_size):
            return f"token ids of prompt_targets must be 0 to {model.vocab_size - 1}, or -1 where none is wanted"
        return ""

    def _hold(self, request: SampleRequest) -> None:
        version = request.version
        if not version.key:
            return
        if version.state is not None and version.key in self._bank and not self._bank.entry(version.key).num_holders:
            # Who sends a state knows of none here: this one may be of a save that was never accepted.
            self._bank.remove(version.key)
        if version.key not in self._bank:
            if version.spec is None or version.state is None:
                raise SampleError(ErrorCode.OUT_OF_ORDER, "this worker does not hold the version to sample from")
            host = read_state(self._bank.layout(version.spec), version.spec, version.state.weights, None)
            self._bank.add(version.key, version.spec, host, is_trained=False)
        self._bank.hold(version.key)

    # ------------------------------------------------------------------ a step

    def _groups(self, units: Sequence[_Unit]) -> Iterator[list[_Unit]]:
        """Units of one version together, of as many versions as fit in the bank at once: mostly one group."""
        by_key: dict[str, list[_Unit]] = {"": []}
        for unit in units:
            by_key.setdefault(unit.owner.key, []).append(unit)
        group, *keys = by_key.pop(""), *by_key
        for start in range(0, max(1, len(keys)), self._bank.num_slots):
            for key in keys[start : start + self._bank.num_slots]:
                group += by_key[key]
            yield group
            group = []

    def _advance(self, units: Sequence[_Unit]) -> None:
        """Run one pass and take in what it gives. If it fails its halves, down to what fails alone."""
        units = [unit for unit in units if not unit.owner.is_over]
        if not units:
            return
        begin_s = self._clock()
        parts = [self._part(unit) for unit in units]
        try:
            outcome = self._pass.run(parts)
        except Exception as error:
            # An exception's traceback holds the pass's tensors; they must go before the halves are tried.
            failure = _item_error(error)
            logger.warning("a decode step of %d parts failed: %s", len(units), failure.message, exc_info=error)
            del error
        else:
            engine_s = self._clock() - begin_s
            num_rows = sum(len(part.tokens) for part in parts)
            for unit, part in zip(units, parts, strict=True):
                unit.owner.engine_s += engine_s * len(part.tokens) / num_rows
            self._take_in(units, outcome)
            return
        if len(units) == 1:
            self._end(units[0].owner, failure)
            return
        middle = len(units) // 2
        self._advance(units[:middle])
        self._advance(units[middle:])

    def _part(self, unit: _Unit) -> Part:
        owner = unit.owner
        if isinstance(unit, _Prefill):
            return PromptPart(
                key=owner.key,
                prompt=owner.prompt,
                tokens=owner.request.prompt[owner.position : unit.stop].astype(np.int64),
                start=owner.position,
                first_row=owner.outputs.first_row,
                note=owner.note,
            )
        for sequence in owner.sequences:
            self._cache.clear(self._seats.extend(sequence))
        return NextPart(
            key=owner.key,
            prompt=owner.prompt,
            tokens=np.array([sequence.tokens[-1] for sequence in owner.sequences], np.int64),
            places=[sequence.place for sequence in owner.sequences],
        )

    def _take_in(self, units: Sequence[_Unit], outcome: Outcome) -> None:
        """Go on with what a pass gave: note prompts, and draw the next token of everybody else at once."""
        drawing: list[tuple[Running, slice]] = []
        for unit, place in zip(units, outcome.places, strict=True):
            if isinstance(unit, _Decode):
                assert place is not None
                drawing.append((unit.owner, place))
                continue
            self._seats.note_prefilled(unit.owner, unit.stop)
            unit.owner.first = None if place is None or outcome.rows is None else outcome.rows.some(place).alone()
            if unit.owner.failure is not None:
                self._end(unit.owner, _item_error(unit.owner.failure))
        if drawing:
            assert outcome.rows is not None
            self._draw(drawing, outcome.rows)

    def _draw(self, drawing: Sequence[tuple[Running, slice]], rows: LogitsRows) -> None:
        """Draw the next token of every sequence of some requests, from its row; if that fails, each request alone."""
        params = [owner.request.params for owner, _ in drawing for _ in owner.sequences]
        mine = rows.pick([place for _, owned in drawing for place in range(owned.start, owned.stop)])
        try:
            check_finite(mine.logits)
            tokens = draw_rows(mine.logits, params, [number for owner, _ in drawing for number in owner.numbers()])
            logprobs = mine.logprobs_of(tokens)
        except Exception as error:  # noqa: BLE001 (told as the request's result)
            if len(drawing) == 1:
                owner = drawing[0][0]
                self._end(owner, _failure(owner.request.op_id, error))
                return
            for one in drawing:
                self._draw([one], rows)
            return
        stop = 0
        for owner, _ in drawing:
            start, stop = stop, stop + len(owner.sequences)
            own = slice(start, stop)
            self._guarded(owner, partial(owner.take, tokens[own], logprobs[own], mine, start))

    def _guarded(self, owner: Running, draw: Callable[[], tuple[list[SampleEvent], list[RunningSequence]]]) -> None:
        """Let a request draw tokens, and tell them; end what has ended, the request itself if the drawing fails."""
        try:
            events, ended = draw()
        except Exception as error:  # noqa: BLE001 (told as the request's result)
            self._end(owner, _failure(owner.request.op_id, error))
            return
        self._events += events
        for sequence in ended:
            self._seats.leave(owner, sequence)
        if owner.is_finished:
            self._end(owner)

    # ------------------------------------------------------------------ going

    def _end(self, owner: Running, error: ItemError | None = None) -> None:
        """Tell the request's result and forget it."""
        self._events.append(owner.result(error))
        self._release(owner)

    def _release(self, owner: Running) -> None:
        """Give back all that a request holds."""
        owner.is_over = True
        self._seats.remove(owner)
        if owner.key:
            self._bank.unhold(owner.key)
        self._seats.pool.drop_orphans()


def _failure(op_id: str, error: Exception) -> ItemError:
    """What a request answers; what nobody expected is logged as well."""
    failure = _item_error(error)
    if failure.code is ErrorCode.INTERNAL:
        logger.error("sample %s failed", op_id, exc_info=error)
    return failure


def _item_error(error: Exception) -> ItemError:
    """What a request answers when `error` ended it. Never a stack or a path."""
    match error:
        case SampleError():
            return ItemError(code=error.code, message=str(error))
        case NonFiniteLogitsError():
            return ItemError(code=ErrorCode.NON_FINITE, message=str(error))
        case DamagedStateError() | OtherAdapterError():
            return ItemError(code=ErrorCode.DATA_LOSS, message=str(error))
        case ValueError() if type(error) is ValueError:
            return ItemError(code=ErrorCode.INVALID_ARGUMENT, message=str(error))
    if is_out_of_memory(error):
        message = (
            "there is not enough memory for this sample; send a shorter prompt, or ask for fewer tokens or samples"
        )
        return ItemError(code=ErrorCode.OUT_OF_MEMORY, message=message)
    return ItemError(code=ErrorCode.INTERNAL, message="the worker failed to sample; its log has the reason")
