"""Provenance in payloads: spans tile a datum and fit their records; what was sent decides what is the same request."""

from typing import Any

import numpy as np
import pytest

from coordinator.base.config import Limits
from coordinator.base.errors import Code, ServiceError
from coordinator.payloads.passes import canonical_pass, decode_pass
from coordinator.payloads.provenance import Key, RecordedSequence, record_bytes, resolved, sequences_of
from tests.support.recorded import PROMPT, PROMPT_KIND, SAMPLED_KIND, recorded_datum, recorded_pass, span
from tests.support.toy_engine import toy_model_info
from tinkerpool.convert import from_tensor, to_tensor
from tinkerpool.names import parse_sequence_id, sequence_id
from tinkerpool.v1 import training_pb2, types_pb2

MODEL, LIMITS = toy_model_info(), Limits()
SAMPLER = "session:sample:0"
FIRST, SECOND = f"{SAMPLER}:1:0", f"{SAMPLER}:2:3"


def record(*tokens: int, temperature: float = 0.5, num_prompt_tokens: int = len(PROMPT)) -> RecordedSequence:
    return RecordedSequence(
        tokens=np.array(tokens, np.int32),
        logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
        temperature=temperature,
        sampler_version="a:train:0:7",
        num_prompt_tokens=num_prompt_tokens,
    )


RECORDS: dict[Key, RecordedSequence] = {
    (SAMPLER, 1, 0): record(4, 5, 6),
    (SAMPLER, 2, 3): record(8, 9, temperature=1.5, num_prompt_tokens=7),
}


def canonical(*data: types_pb2.Datum) -> bytes:
    return canonical_pass(recorded_pass("a", 1, data), MODEL, LIMITS)[0]


def refusal(*data: types_pb2.Datum) -> ServiceError:
    with pytest.raises(ServiceError) as raised:
        resolved(canonical(*data), RECORDS)
    return raised.value


def two_turns() -> types_pb2.Datum:
    """Return a datum of two sequences: prompt 1 2 3, drawn 4 5 6, prompt 7, drawn 8 9."""
    whole = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    advantages = [0, 0, 1, 1, 1, 0, -1, -1]
    return types_pb2.Datum(
        tokens=to_tensor(np.array(whole[:-1], np.int32)),
        loss_inputs={
            "target_tokens": to_tensor(np.array(whole[1:], np.int32)),
            "advantages": to_tensor(np.array(advantages, np.float32)),
        },
        token_spans=[
            span(PROMPT_KIND, FIRST, 0, 3),
            span(SAMPLED_KIND, FIRST, 0, 3),
            span(PROMPT_KIND, SECOND, 6, 1),
            span(SAMPLED_KIND, SECOND, 0, 1),
        ],
        target_spans=[
            span(PROMPT_KIND, FIRST, 1, 2),
            span(SAMPLED_KIND, FIRST, 0, 3),
            span(PROMPT_KIND, SECOND, 6, 1),
            span(SAMPLED_KIND, SECOND, 0, 2),
        ],
    )


def test_a_datum_of_two_turns_gets_what_both_records_say() -> None:
    payload = resolved(canonical(two_turns()), RECORDS)
    [datum] = decode_pass(payload).data
    assert datum.loss_inputs["logprobs"].tolist() == [0, 0, -1, -2, -3, 0, -1, -2]
    assert datum.loss_inputs["temperatures"].tolist() == [0, 0, 0.5, 0.5, 0.5, 0, 1.5, 1.5]
    assert datum.loss_inputs["advantages"].tolist() == [0, 0, 1, 1, 1, 0, -1, -1]
    assert sorted(datum.loss_inputs) == ["advantages", "logprobs", "target_tokens", "temperatures"]
    [logged] = training_pb2.ForwardBackwardRequest.FromString(payload).data
    assert {each.sampler_version for each in logged.target_spans} == {"a:train:0:7"}


def test_what_a_client_sends_for_recorded_inputs_is_not_part_of_its_request() -> None:
    plain, sent = two_turns(), two_turns()
    for name in ("logprobs", "temperatures"):
        sent.loss_inputs[name].CopyFrom(sent.loss_inputs["advantages"])
    sent.token_spans[0].sampler_version = "mine"
    assert canonical(plain) == canonical(sent)


def test_every_part_of_a_span_is_part_of_the_request() -> None:
    plain = canonical(two_turns())
    for name, value in (("kind", PROMPT_KIND), ("sequence_id", SECOND), ("offset", 9)):
        changed = two_turns()
        setattr(changed.token_spans[1], name, value)
        assert canonical(changed) != plain


def test_prompt_targets_may_be_any_token_because_no_loss_reads_them() -> None:
    """The cookbook's rl_loop pads the targets of a prompt with token 0."""
    datum = recorded_datum(FIRST, [4, 5, 6])
    targets = from_tensor(datum.loss_inputs["target_tokens"]).copy()
    targets[: len(PROMPT) - 1] = 0
    datum.loss_inputs["target_tokens"].CopyFrom(to_tensor(targets))
    resolved(canonical(datum), RECORDS)


def test_the_sequences_of_a_request_are_read_once_each() -> None:
    malformed = two_turns()
    malformed.token_spans[0].sequence_id = "nonsense"
    assert sequences_of([two_turns(), malformed]) == [(SAMPLER, 1, 0), (SAMPLER, 2, 3)]


def changed(**changes: Any) -> types_pb2.Datum:
    datum = recorded_datum(FIRST, [4, 5, 6])
    for name, spans in changes.items():
        del getattr(datum, name)[:]
        getattr(datum, name).extend(spans)
    return datum


@pytest.mark.parametrize(
    ("datum", "message"),
    [
        (
            changed(token_spans=[], target_spans=[]),
            "has no provenance, which stable_reinforce needs: sample with record_",
        ),
        (changed(target_spans=[]), "loss_fn_input_spans cover 0 positions, but there are 5 tokens"),
        (changed(token_spans=[span(PROMPT_KIND, FIRST, 0, 4)]), "model_input_spans cover 4 positions"),
        (changed(target_spans=[span(PROMPT_KIND, FIRST, 0, 5)]), "has no sampled token"),
        (
            changed(token_spans=[span(PROMPT_KIND, "x", 0, 5)]),
            "expected the sequence_id of a sampled sequence, got 'x'",
        ),
        (changed(token_spans=[types_pb2.ProvenanceSpan(sequence_id=FIRST, length=5)]), "neither prompt nor sampled"),
        (changed(token_spans=[span(PROMPT_KIND, FIRST, -1, 5)]), "offset -1 and length 5: send 0 or more"),
        (
            changed(target_spans=[span(PROMPT_KIND, FIRST, 0, 3), span(SAMPLED_KIND, FIRST, 0, 2)]),
            "is not 0 at position 2, whose target is a token of a prompt by its span",
        ),
    ],
)
def test_spans_that_cannot_be_are_refused_without_a_record(datum: types_pb2.Datum, message: str) -> None:
    with pytest.raises(ServiceError) as raised:
        canonical(datum)
    assert raised.value.code is Code.INVALID_ARGUMENT
    assert message in raised.value.message


def test_spans_that_do_not_fit_their_record_are_refused_with_the_place() -> None:
    other = refusal(recorded_datum(FIRST, [4, 9, 6]))
    assert other.code is Code.INVALID_ARGUMENT
    assert f"token 1 of {FIRST} is 9, but it is 5" in other.message
    longer = refusal(recorded_datum(FIRST, [4, 5, 6, 7]))
    assert f"names tokens 0 to 4 of {FIRST}, but the sequence has 3" in longer.message
    prompt = changed(token_spans=[span(PROMPT_KIND, FIRST, 1, 3), span(SAMPLED_KIND, FIRST, 0, 2)])
    assert f"names tokens 1 to 4 of {FIRST}, but the prompt has 3" in refusal(prompt).message
    unknown = refusal(recorded_datum(f"{SAMPLER}:9:0", [4]))
    assert (unknown.code, unknown.reason) == (Code.FAILED_PRECONDITION, "NOT_RECORDED")


def test_ids_of_sequences_are_read_as_they_are_made() -> None:
    made = sequence_id("0a1b-2:sample:3:45", 6)
    assert parse_sequence_id(made) == ("0a1b-2:sample:3", 45, 6)
    assert parse_sequence_id(f"a:sample:1:{4 * 10**18}:0")[1] == 4 * 10**18, "a copy of a client numbers so"
    for text in (
        "",
        "a",
        f"{made}:7",
        made.replace("sample", "train"),
        f"{made}x",
        "a:sample:1:2:-3",
        f"a:sample:1:{2**63}:0",
    ):
        with pytest.raises(ValueError, match="sequence_id"):
            parse_sequence_id(text)


def test_stored_bytes_of_a_record_grow_by_eight_a_token() -> None:
    assert record_bytes(2, 100) - record_bytes(2, 99) == 8
    assert record_bytes(0, 0) > 0
