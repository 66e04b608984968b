"""The model and the sequence number that a truncated body names."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
from hypothesis import strategies as st

from coordinator.doors.tinker.unreadable import read_head, read_json, read_protobuf
from tinkerpool.compat import tinker_pb2 as wire

MODEL = "s:train:0"
BODIES = [
    {"model_id": MODEL, "path": 'a,"seq_id": 7', "seq_id": 1234, "ttl_seconds": -1},
    {"forward_input": {"data": [1, 2]}, "model_id": MODEL, "seq_id": 1234, "more": [1, 2, 3]},
]


@hypothesis.settings(max_examples=300)
@hypothesis.given(body=st.sampled_from(BODIES), cut=st.integers(0, 120))
def test_the_seq_of_a_truncated_json_body_is_read_right_or_not_at_all(body: dict[str, Any], cut: int) -> None:
    text = json.dumps(body).encode()
    head = read_head(read_json, text[:cut])
    assert head is not None or cut <= text.index(b"1234, ") + 4
    if head is not None:
        assert (head.model_id, head.seq_id) == (MODEL, 1234)
        assert head.is_forward == ("forward_input" in body)


@hypothesis.given(cut=st.integers(0, 40), seq=st.integers(1, (1 << 31) - 1))
def test_the_seq_of_a_truncated_pass_is_read_right_or_not_at_all(cut: int, seq: int) -> None:
    begun = wire.ForwardBackwardRequest(model_id=MODEL, seq_id=seq).SerializeToString()
    content = begun + wire.ForwardBackwardRequest(loss_fn="cross_entropy", forward_only=True).SerializeToString()
    head = read_head(read_protobuf, content[:cut])
    assert (head is not None) == (cut >= len(begun))
    assert head is None or (head.model_id, head.seq_id) == (MODEL, seq)


@hypothesis.settings(max_examples=500)
@hypothesis.given(st.binary(max_size=40))
def test_no_bytes_raise_or_name_an_invalid_seq(begun: bytes) -> None:
    for content in (begun, b"\n\x02m:" + begun, b'{"model_id": "m", ' + begun):
        for read in (read_protobuf, read_json):
            head = read_head(read, content)
            assert head is None or head.seq_id >= 1
