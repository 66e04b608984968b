"""Provenance: which recorded samples the tokens of a datum come from, and what the records say about them.

For losses with `recorded` inputs. A request names, run by run, the sampled sequences behind its positions. Its
canonical form has these spans as they were sent, and its idempotency hash covers that form alone: a repeat needs no
record. Its payload has the log-probabilities, the temperatures and the weights of the sampler in addition: a replay
needs none either. Pure; the caller reads the records.

Main invariant: a drawn position of a payload has the token, the log-probability and the temperature of its record, or
the request is refused. Positions of prompts have temperature 0 and advantage 0.

Legend: n tokens of a datum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.base.errors import invalid, unmet
from coordinator.payloads.canonical import serialize
from tinkerpool import names
from tinkerpool.convert import from_tensor, to_tensor
from tinkerpool.v1 import training_pb2, types_pb2
from workers.contract.loss_inputs import TEMPERATURES

Spans = Sequence[types_pb2.ProvenanceSpan]
Key = tuple[str, int, int]
"""Of a sequence: its sampler, the seq of its sample, its index."""
PROMPT, SAMPLED = types_pb2.PROVENANCE_KIND_PROMPT, types_pb2.PROVENANCE_KIND_SAMPLED
TOKEN_BYTES, SEQUENCE_BYTES, RECORD_BYTES = 8, 16, 256
"""What a record counts as stored bytes: of each token, of each sequence, of the record itself."""
RECORDED_TOKENS_MAX = 1 << 22
"""Tokens of all sequences that one request names, about what its own 16 MiB can have: they are in memory together."""
RECORD = "sample with record_stability_info=True"
SHIFT = "Targets are shifted by one from the input, and so are their spans"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSequence:
    """A sampled sequence, as its record has it."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    temperature: float
    """Of the log-probabilities, above 0."""
    sampler_version: str
    num_prompt_tokens: int


def record_bytes(num_sequences: int, num_tokens: int) -> int:
    """Return the stored bytes that the record of a sample counts, with this many tokens in all its sequences."""
    return RECORD_BYTES + SEQUENCE_BYTES * num_sequences + TOKEN_BYTES * num_tokens


def check_spans(where: str, datum: types_pb2.Datum, num_tokens: int, advantages: NDArray[np.float32]) -> None:
    """Check what can be checked of a datum's spans without records. Raises ServiceError INVALID_ARGUMENT."""
    if not datum.token_spans and not datum.target_spans:
        raise invalid(
            f"{where} has no provenance, which stable_reinforce needs: {RECORD}, and name the sampled sequences with "
            "Datum.with_provenance",
            "NO_PROVENANCE",
        )
    for name, spans in (("model_input_spans", datum.token_spans), ("loss_fn_input_spans", datum.target_spans)):
        _check_tiling(f"{where}.{name}", spans, num_tokens)
    if not any(span.kind == SAMPLED and span.length for span in datum.target_spans):
        raise invalid(f"{where}.loss_fn_input_spans has no sampled token: leave a datum without one out")
    for start, span in _placed(datum.target_spans):
        if span.kind == PROMPT and advantages[start : start + span.length].any():
            position = start + int(np.flatnonzero(advantages[start : start + span.length])[0])
            raise invalid(
                f"{where}.loss_fn_inputs['advantages'] is not 0 at position {position}, whose target is a token of a "
                f"prompt by its span: only sampled tokens have advantages. {SHIFT}"
            )


def sequences_of(data: Iterable[types_pb2.Datum]) -> list[Key]:
    """Return the sequences that some datums name, each once; without ids that are malformed."""
    keys: dict[Key, None] = {}
    for datum in data:
        for span in (*datum.token_spans, *datum.target_spans):
            try:
                keys[names.parse_sequence_id(span.sequence_id)] = None
            except ValueError:
                continue  # `check_spans` refuses it
    return list(keys)


def resolved(payload: bytes, records: Mapping[Key, RecordedSequence]) -> bytes:
    """Return a pass's payload with what the records say, from its canonical form as it was sent.

    Raises ServiceError FAILED_PRECONDITION if a record is missing, INVALID_ARGUMENT if it does not fit the datum.
    """
    request = training_pb2.ForwardBackwardRequest.FromString(payload)
    for index, datum in enumerate(request.data):
        where = f"data[{index}]"
        tokens, targets = (from_tensor(tensor) for tensor in (datum.tokens, datum.loss_inputs["target_tokens"]))
        logprobs, temperatures = np.zeros(len(targets), np.float32), np.zeros(len(targets), np.float32)
        for start, span in _placed(datum.token_spans):
            _fill_version(f"{where}.model_input_spans", span, tokens[start : start + span.length], records)
        for start, span in _placed(datum.target_spans):
            drawn = slice(start, start + span.length)
            record = _fill_version(f"{where}.loss_fn_input_spans", span, targets[drawn], records)
            if span.kind == SAMPLED:
                logprobs[drawn] = record.logprobs[span.offset : span.offset + span.length]
                temperatures[drawn] = record.temperature
        datum.loss_inputs["logprobs"].CopyFrom(to_tensor(logprobs))
        datum.loss_inputs[TEMPERATURES].CopyFrom(to_tensor(temperatures))
    return serialize(request)


def _check_tiling(label: str, spans: Spans, num_tokens: int) -> None:
    for number, span in enumerate(spans):
        try:
            names.parse_sequence_id(span.sequence_id)
        except ValueError as error:
            raise invalid(f"{label}[{number}].sequence_id: {error}") from None
        if span.kind not in (PROMPT, SAMPLED):
            raise invalid(f"{label}[{number}] is neither prompt nor sampled: set its kind")
        if span.offset < 0 or span.length < 0:
            raise invalid(f"{label}[{number}] has offset {span.offset} and length {span.length}: send 0 or more")
    if (total := sum(span.length for span in spans)) != num_tokens:
        raise invalid(f"{label} cover {total} positions, but there are {num_tokens} tokens: name each position once")


def _placed(spans: Spans) -> Iterator[tuple[int, types_pb2.ProvenanceSpan]]:
    """Yield each span with the position at which it starts."""
    start = 0
    for span in spans:
        yield start, span
        start += span.length


def _fill_version(
    label: str, span: types_pb2.ProvenanceSpan, tokens: NDArray[np.int32], records: Mapping[Key, RecordedSequence]
) -> RecordedSequence:
    """Check a span, whose tokens in the datum are `tokens`, and set its sampler's version; return its record."""
    record = records.get(names.parse_sequence_id(span.sequence_id))
    if record is None:
        raise unmet(
            "NOT_RECORDED",
            f"{label}: there is no record of a sequence {span.sequence_id} of yours. {RECORD}; a record lives until "
            "the session of its sampling client ends, and for a day after its sample or its last use. Sample again, or "
            "use importance_sampling, which needs no record",
        )
    end, length = span.offset + span.length, len(record.tokens)
    if span.kind == PROMPT:
        length = record.num_prompt_tokens
    if end > length:
        what = "the prompt" if span.kind == PROMPT else "the sequence"
        raise invalid(f"{label} names tokens {span.offset} to {end} of {span.sequence_id}, but {what} has {length}")
    if span.kind == SAMPLED and (wrong := np.flatnonzero(record.tokens[span.offset : end] != tokens)).size:
        place = int(wrong[0])
        raise invalid(
            f"{label} says that token {span.offset + place} of {span.sequence_id} is {int(tokens[place])}, but it is "
            f"{int(record.tokens[span.offset + place])}. {SHIFT}"
        )
    span.sampler_version = record.sampler_version
    return record
