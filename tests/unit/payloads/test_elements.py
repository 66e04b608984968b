"""Elements of a message are counted before it is decoded: never fewer than it has, in a bounded number of reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from coordinator.base.config import DATUMS_MAX, ELEMENTS_MAX
from coordinator.payloads.elements import TooManyElements, count_elements, parse, parse_head
from tests.support.recorded import SAMPLED_KIND, span
from tests.support.toy_pool import datum
from tinkerpool.compat import tinker_pb2 as wire
from tinkerpool.convert import to_tensor
from tinkerpool.v1 import operations_pb2, sampling_pb2, training_pb2, types_pb2

Pass = training_pb2.ForwardBackwardRequest
HEAD = Pass(adapter_id="a", seq=7).SerializeToString()
HEAD_BYTES_MAX = 1 << 17


def num_elements(message: Message) -> int:
    """Count the elements of a decoded message, naively; a packed list counts as one element and its bytes."""
    total = 0
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for key in value:
                inner = value[key]
                total += 3 + (num_elements(inner) if isinstance(inner, Message) else 0)
        elif field.is_repeated and field.message_type is not None:
            total += sum(1 + num_elements(each) for each in value)
        elif field.is_repeated and isinstance(value[0], int):
            total += 1 + sum(1 if 0 <= each < 128 else 2 for each in value)
        elif field.is_repeated:
            total += len(value)
        else:
            total += 1 + (num_elements(value) if isinstance(value, Message) else 0)
    return total


tensors = st.builds(
    types_pb2.Tensor, data=st.binary(max_size=300), dtype=st.integers(0, 3), shape=st.lists(st.integers(0, 300))
)


@given(
    st.one_of(
        st.builds(
            Pass,
            adapter_id=st.text(),
            seq=st.integers(0, 2**40),
            data=st.lists(
                st.builds(
                    types_pb2.Datum,
                    tokens=tensors,
                    loss_inputs=st.dictionaries(st.text(min_size=1), tensors, max_size=3),
                ),
                max_size=5,
            ),
            loss_config=st.dictionaries(st.text(min_size=1), st.floats(0.1, 1), max_size=3),
        ),
        st.builds(operations_pb2.WaitOperationsRequest, names=st.lists(st.text())),
        st.builds(
            sampling_pb2.StopCondition, strings=st.lists(st.text()), tokens=st.lists(st.integers(0, 300), max_size=20)
        ),
    )
)
def test_the_count_of_elements_is_that_of_the_decoded_message(message: Message) -> None:
    assert count_elements(type(message), message.SerializeToString()) == num_elements(message)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_left_to_the_decoder(body: bytes) -> None:
    counted = count_elements(Pass, body)
    try:
        decoded = Pass.FromString(body)
    except DecodeError:
        return
    assert counted >= num_elements(decoded) - 2 * len(decoded.loss_config)  # an entry may lack key and value


def delimited(tag: int, content: bytes) -> bytes:
    """Return a field of bytes or of a nested message."""
    size, length = len(content), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((tag,)) + bytes(length) + bytes((size,)) + content


TINKER_HEAD = wire.ForwardBackwardRequest(model_id="a", seq_id=7).SerializeToString()
EMPTY = 2_000_000
ATTACKS: dict[str, tuple[type[Message], bytes, tuple[int, ...]]] = {
    "data": (Pass, HEAD + b"\x22\x00" * EMPTY, ()),
    "loss inputs": (Pass, HEAD, (0x22, 0x12)),
    "packed shape": (Pass, HEAD, (0x22, 0x0A, 0x1A)),
    "loss options": (Pass, HEAD + b"\x32\x00" * EMPTY, ()),
    "data of the Tinker protocol": (wire.ForwardBackwardRequest, TINKER_HEAD + b"\x1a\x00" * EMPTY, ()),
    "chunks of the Tinker protocol": (wire.ForwardBackwardRequest, TINKER_HEAD, (0x1A, 0x0A)),
    "awaited names": (operations_pb2.WaitOperationsRequest, b"\x0a\x00" * EMPTY, ()),
    "stop strings": (sampling_pb2.StopCondition, b"\x0a\x00" * EMPTY, ()),
}
"""The type of a message, its beginning, and the tags of nested fields of which the innermost one repeats."""


class WatchedBytes(bytes):
    """Bytes that count how often they are read."""

    num_reads = 0

    def __getitem__(self, position: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(position)


class Undecoded:
    """Stands for a message type, and decodes nothing that is longer than the head of a refused message."""

    def __init__(self, message_type: type[Message]) -> None:
        self._type = message_type
        self.DESCRIPTOR = message_type.DESCRIPTOR

    def __call__(self) -> Message:
        return self._type()

    def FromString(self, body: bytes) -> Message:  # noqa: N802  # protobuf's name
        assert len(body) < HEAD_BYTES_MAX
        return self._type.FromString(body)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_message_of_empty_elements_is_refused_undecoded_after_as_many_as_are_allowed(name: str) -> None:
    message_type, body, tags = ATTACKS[name]
    if tags:
        *outer, last = tags
        content = b"\x01" * EMPTY if last == 0x1A else bytes((last, 0)) * EMPTY
        for tag in reversed(tags if last == 0x1A else outer):
            content = delimited(tag, content)
        body += content
    watched = WatchedBytes(body)
    undecoded: Any = Undecoded(message_type)
    is_refused = False
    try:
        parse(undecoded, watched)
    except TooManyElements as error:
        is_refused = f"more than {ELEMENTS_MAX} fields" in error.message
    head: Any = parse_head(undecoded, watched)
    num_reads = watched.num_reads
    del body, message_type, watched, undecoded  # a failure below would print megabytes
    assert is_refused
    assert num_reads < 2 * ELEMENTS_MAX + 1000  # a tag and a length for each element, then the head
    assert (head.DESCRIPTOR is not Pass.DESCRIPTOR) or (head.adapter_id, head.seq, len(head.data)) == ("a", 7, 0)


def test_the_largest_honest_pass_is_decoded() -> None:
    array = to_tensor(np.zeros(16, np.float32))
    inputs = dict.fromkeys(("target_tokens", "logprobs", "advantages", *"abcd"), array)
    message = Pass(adapter_id="a", seq=1, data=[types_pb2.Datum(tokens=array, loss_inputs=inputs)] * DATUMS_MAX)
    assert parse(Pass, message.SerializeToString()) == message
    assert count_elements(Pass, message.SerializeToString()) < ELEMENTS_MAX / 2


def test_a_full_pass_of_conversations_of_eight_turns_that_name_their_samples_is_decoded() -> None:
    spans = [span(SAMPLED_KIND, f"session:sample:0:{number}:0", 1, 2) for number in range(16)]
    inputs = dict.fromkeys(("target_tokens", "logprobs", "advantages"), to_tensor(np.zeros(32, np.float32)))
    datum = types_pb2.Datum(tokens=inputs["advantages"], loss_inputs=inputs, token_spans=spans, target_spans=spans)
    message = Pass(adapter_id="a", seq=1, data=[datum] * DATUMS_MAX)
    assert parse(Pass, message.SerializeToString()) == message


def test_the_head_of_a_malformed_message_is_empty() -> None:
    assert parse_head(Pass, b"\x0a\xff") == Pass()
    assert parse_head(Pass, Pass(adapter_id="x" * 2000, seq=3, data=[datum(3)]).SerializeToString()) == Pass(seq=3)
