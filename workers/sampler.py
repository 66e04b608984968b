"""Continuous batching of everybody's samples, on the base model and bank that train: one forward per decode step.

Knows requests, sequences and versions; not tenants. The parts: `sample_pass` (the forward), `kv_cache` (what a sequence
has seen), `drawing` (a token from logits), `stop_strings`. A request's way: queue, prompt (computed once), waves of
sequences that begin together and leave one by one, result.

Main invariant: a sample's tokens and log-probabilities depend on its version, prompt, parameters and index alone. A
request that fails or is cancelled ends alone.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from workers.allocator import is_out_of_memory
from workers.bank import Bank
from workers.base_model import BaseModel
from workers.drawing import draw, uniform
from workers.kv_cache import PromptCache, WaveCache
from workers.messages import (
    ErrorCode,
    ItemError,
    SampledSequence,
    SampleEvent,
    SampleRequest,
    SampleResult,
    StopReason,
    TokenEvent,
)
from workers.sample_pass import LogitsRow, Outcome, Part, SamplePass
from workers.snapshot import DamagedStateError, OtherAdapterError, read_state
from workers.stop_strings import StopStrings, load_tokenizer

logger = logging.getLogger(__name__)


class SampleError(Exception):
    """A request cannot be run; the message is for the user."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class _Sequence:
    """One continuation that has begun."""

    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Running:
    """One request and how far it is."""

    request: SampleRequest
    stop_strings: StopStrings | None
    finished: list[SampledSequence | None]
    prompt: PromptCache | None = None
    """From when it is computed until the last sequence has begun."""
    first: LogitsRow | None = None
    """What every sequence's first token is drawn from; kept as long as `prompt`."""
    prompt_logprobs: NDArray[np.float32] | None = None
    num_begun: int = 0
    """Sequences that have begun."""
    engine_s: float = 0.0
    is_over: bool = False

    @property
    def key(self) -> str:
        return self.request.version.key

    @property
    def num_waiting(self) -> int:
        return self.request.num_samples - self.num_begun

    @property
    def num_tokens_max(self) -> int:
        return len(self.request.prompt) + self.request.params.max_tokens


@dataclass(slots=True, eq=False)
class _Wave:
    """Sequences of one request that began together and have not ended, in the order of their rows in the cache."""

    owner: _Running
    cache: WaveCache
    sequences: list[_Sequence]


@dataclass(slots=True, eq=False)
class _Prefill:
    """A prompt that is to be computed."""

    owner: _Running


_Unit = _Wave | _Prefill


class Sampler:
    """All sample requests of one worker. One thread only, the engine's."""

    def __init__(
        self,
        base_model: BaseModel,
        bank: Bank,
        *,
        num_rows_max: int = 64,
        prefill_tokens_max: int = 1024,
        cache_bytes_max: int = 2 << 30,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """At most `num_rows_max` sequences run at a time, and prompts of `prefill_tokens_max` tokens (or one) a step.

        The caches of all that run, at their full length, have at most `cache_bytes_max`, unless it is one request.
        What does not fit waits its turn.
        """
        self._base_model = base_model
        self._bank = bank
        self._pass = SamplePass(base_model, bank)
        self._num_rows_max = num_rows_max
        self._prefill_tokens_max = prefill_tokens_max
        self._cache_bytes_max = cache_bytes_max
        self._clock = clock
        self._queue: deque[_Running] = deque()
        self._running: list[_Running] = []
        """Admitted, in the order of their requests."""
        self._waves: list[_Wave] = []
        self._events: list[SampleEvent] = []
        self._tokenizer: Tokenizer | None = None

    # ------------------------------------------------------------------ Engine

    def start_sample(self, request: SampleRequest) -> None:
        """Queue a request. What is wrong with it comes as its result."""
        try:
            self._queue.append(self._checked(request))
        except Exception as error:  # noqa: BLE001 (told as the request's result)
            self._events.append(SampleResult(op_id=request.op_id, error=_failure(request.op_id, error)))

    def cancel_sample(self, op_id: str) -> None:
        """Stop a request; unknown ids are ignored."""
        for owner in (*self._queue, *self._running):
            if owner.request.op_id == op_id:
                self._end(owner, ItemError(code=ErrorCode.CANCELLED, message="the sample was cancelled"))

    def can_decode(self) -> bool:
        """Whether there is anything to do or to tell."""
        return bool(self._events or self._queue or self._running)

    def decode_step(self) -> Sequence[SampleEvent]:
        """Compute the prompts whose turn it is, and one token more of every running sequence, in one forward."""
        for units in self._groups([*self._waves, *map(_Prefill, self._admit())]):
            self._advance(units)
        for owner in [owner for owner in self._running if owner.first is not None]:
            self._begin_wave(owner)
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Forget every request, without events."""
        for owner in (*self._queue, *self._running):
            self._release(owner)
        self._queue.clear()
        self._running.clear()
        self._waves.clear()
        self._events.clear()

    # ------------------------------------------------------------------ coming

    def _checked(self, request: SampleRequest) -> _Running:
        """A request that can be run; its version is held from now on. Raises SampleError and what reading raises."""
        model, prompt, params = self._base_model, request.prompt, request.params
        wrong = None
        if not len(prompt):
            wrong = "the prompt is empty; it needs at least one token"
        elif len(prompt) + params.max_tokens > model.max_seq_len:
            wrong = (
                f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}; together they may be at "
                f"most {model.max_seq_len}"
            )
        elif int(prompt.min()) < 0 or int(prompt.max()) >= model.vocab_size:
            wrong = f"token ids of the prompt must be 0 to {model.vocab_size - 1}"
        if wrong is not None:
            raise SampleError(ErrorCode.INVALID_ARGUMENT, wrong)
        stop_strings = None
        if params.stop_strings:
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(model.path)
            stop_strings = StopStrings(self._tokenizer, params.stop_strings)
        self._hold(request)
        return _Running(request, stop_strings, [None] * request.num_samples)

    def _hold(self, request: SampleRequest) -> None:
        version = request.version
        if not version.key:
            return
        if version.key not in self._bank:
            if version.spec is None or version.state is None:
                raise SampleError(ErrorCode.OUT_OF_ORDER, "this worker does not hold the version to sample from")
            host = read_state(self._bank.layout(version.spec), version.spec, version.state.weights, None)
            self._bank.add(version.key, version.spec, host, is_trained=False)
        self._bank.hold(version.key)

    def _admit(self) -> list[_Running]:
        """Take the requests whose turn it is from the queue, in the order they came."""
        admitted: list[_Running] = []
        num_tokens = 0
        num_rows = sum(len(wave.sequences) for wave in self._waves)
        num_rows += sum(owner.num_waiting for owner in self._running)
        num_bytes = sum(self._cache_bytes(owner) for owner in self._running)
        while self._queue:
            owner = self._queue[0]
            num_tokens += len(owner.request.prompt)
            num_bytes += self._cache_bytes(owner)
            has_room = num_rows < self._num_rows_max and num_bytes <= self._cache_bytes_max
            if (self._running and not has_room) or (admitted and num_tokens > self._prefill_tokens_max):
                break
            num_rows += owner.num_waiting
            self._queue.popleft()
            self._running.append(owner)
            admitted.append(owner)
        return admitted

    def _cache_bytes(self, owner: _Running) -> int:
        """What a request's caches have at most."""
        model = self._base_model
        num_rows = min(owner.request.num_samples, self._num_rows_max)
        value_bytes = int(model.model.dtype.itemsize)
        token_bytes = 2 * model.num_layers * model.num_key_value_heads * model.head_dim * value_bytes
        return token_bytes * (len(owner.request.prompt) + num_rows * owner.num_tokens_max)

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
        parts = [_part(unit) for unit in units]
        try:
            outcomes = self._pass.run(parts)
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
            for unit, part, outcome in zip(units, parts, outcomes, strict=True):
                self._take_in(unit, part, outcome)
            return
        if len(units) == 1:
            self._end(units[0].owner, failure)
            return
        middle = len(units) // 2
        self._advance(units[:middle])
        self._advance(units[middle:])

    def _take_in(self, unit: _Unit, part: Part, outcome: Outcome) -> None:
        owner = unit.owner
        if owner.is_over:
            return
        if isinstance(unit, _Prefill):
            assert isinstance(part.cache, PromptCache)
            owner.prompt, (owner.first,), owner.prompt_logprobs = part.cache, outcome.rows, outcome.prompt_logprobs
            return
        try:
            self._take_wave(unit, outcome.rows)
        except Exception as error:  # noqa: BLE001 (told as the request's result)
            self._end(owner, _failure(owner.request.op_id, error))

    # ------------------------------------------------------------------ sequences

    def _begin_wave(self, owner: _Running) -> None:
        """Begin as many of a request's sequences as there are free rows; each draws its first token."""
        num_free = self._num_rows_max - sum(len(wave.sequences) for wave in self._waves)
        count = min(num_free, owner.num_waiting)
        begun = [_Sequence(owner.num_begun + number) for number in range(count)]
        owner.num_begun += count
        assert owner.first is not None
        assert owner.prompt is not None
        try:
            going = [sequence for sequence in begun if not self._take(owner, sequence, owner.first)]
            if going:
                self._waves.append(_Wave(owner, WaveCache(owner.prompt, len(going), owner.num_tokens_max), going))
        except Exception as error:  # noqa: BLE001 (told as the request's result)
            self._end(owner, _failure(owner.request.op_id, error))
            return
        if owner.num_waiting == 0:
            owner.prompt = owner.first = None
        self._end_if_finished(owner)

    def _take_wave(self, wave: _Wave, rows: Sequence[LogitsRow]) -> None:
        """Draw the next token of every sequence of a wave; those that end leave."""
        wave.cache.advance()
        has_ended = [self._take(wave.owner, *taken) for taken in zip(wave.sequences, rows, strict=True)]
        for index in reversed(range(len(has_ended))):
            if has_ended[index]:
                wave.cache.remove(index)
                wave.sequences[index] = wave.sequences[-1]
                wave.sequences.pop()
        if not wave.sequences:
            self._waves.remove(wave)
        self._end_if_finished(wave.owner)

    def _take(self, owner: _Running, sequence: _Sequence, row: LogitsRow) -> bool:
        """Draw a sequence's next token and tell it; whether the sequence has ended. Raises SampleError."""
        request, params = owner.request, owner.request.params
        if not np.isfinite(row.logits).all():
            raise SampleError(
                ErrorCode.NON_FINITE, "the model's logits are infinite or not a number; the adapter may have diverged"
            )
        tokens, logprobs = sequence.tokens, sequence.logprobs
        reason = StopReason.LENGTH if params.max_tokens == 0 else None
        if reason is None:
            token = draw(row.logits, params, uniform(params.seed, sequence.index, len(tokens)))
            tokens.append(token)
            logprobs.append(float(row.logprobs[token]))
            if request.stream:
                self._events.append(
                    TokenEvent(op_id=request.op_id, sequence_index=sequence.index, token=token, logprob=logprobs[-1])
                )
            if token in params.stop_tokens or (owner.stop_strings and owner.stop_strings.is_completed(tokens)):
                reason = StopReason.STOP
            elif len(tokens) == params.max_tokens:
                reason = StopReason.LENGTH
        if reason is not None:
            owner.finished[sequence.index] = SampledSequence(
                tokens=np.array(tokens, np.int32), logprobs=np.array(logprobs, np.float32), stop_reason=reason
            )
        return reason is not None

    # ------------------------------------------------------------------ going

    def _end_if_finished(self, owner: _Running) -> None:
        if not owner.is_over and all(sequence is not None for sequence in owner.finished):
            self._end(owner)

    def _end(self, owner: _Running, error: ItemError | None = None) -> None:
        """Tell the request's result and forget it."""
        request = owner.request
        finished = [sequence for sequence in owner.finished if sequence is not None]
        num_sampled = sum(len(sequence.tokens) for sequence in finished)
        num_sampled += sum(len(s.tokens) for wave in self._waves if wave.owner is owner for s in wave.sequences)
        is_prefilled = owner.prompt is not None or owner.num_begun > 0
        result = SampleResult(
            op_id=request.op_id,
            sequences=() if error else tuple(finished),
            prompt_logprobs=None if error else owner.prompt_logprobs,
            error=error,
            num_prompt_tokens=len(request.prompt) if is_prefilled else 0,
            num_sampled_tokens=num_sampled,
            engine_s=owner.engine_s,
        )
        self._events.append(result)
        self._release(owner)
        self._waves = [wave for wave in self._waves if wave.owner is not owner]
        if owner in self._queue:
            self._queue.remove(owner)
        else:
            self._running.remove(owner)

    def _release(self, owner: _Running) -> None:
        owner.is_over = True
        owner.prompt = owner.first = None
        if owner.key:
            self._bank.unhold(owner.key)


def _part(unit: _Unit) -> Part:
    owner = unit.owner
    if isinstance(unit, _Wave):
        tokens = np.array([sequence.tokens[-1] for sequence in unit.sequences], np.int64)
        return Part(key=owner.key, tokens=tokens, cache=unit.cache)
    prompt = owner.request.prompt.astype(np.int64)
    cache = PromptCache(len(prompt))
    return Part(key=owner.key, tokens=prompt, cache=cache, wants_prompt_logprobs=owner.request.prompt_logprobs)


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
