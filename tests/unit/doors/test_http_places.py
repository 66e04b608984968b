"""The place in the order that a body names of which only the beginning came."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
from hypothesis import strategies as st

from coordinator.doors.tinker.places import _fields, _members, _place
from tinkerpool.compat import tinker_pb2 as wire

MODEL = "s:train:0"
BODIES = [
    {"model_id": MODEL, "path": 'a,"seq_id": 7', "seq_id": 1234, "ttl_seconds": -1},
    {"forward_input": {"data": [1, 2]}, "model_id": MODEL, "seq_id": 1234, "more": [1, 2, 3]},
]


@hypothesis.settings(max_examples=300)
@hypothesis.given(body=st.sampled_from(BODIES), cut=st.integers(0, 120))
def test_a_place_that_is_read_of_cut_json_is_the_right_one(body: dict[str, Any], cut: int) -> None:
    text = json.dumps(body).encode()
    place = _place(_members, text[:cut])
    assert place is not None or cut <= text.index(b"1234, ") + 4
    if place is not None:
        assert (place.model_id, place.seq_id) == (MODEL, 1234)
        assert place.is_forward == ("forward_input" in body)


@hypothesis.given(cut=st.integers(0, 40), seq=st.integers(1, (1 << 31) - 1))
def test_a_place_that_is_read_of_a_cut_pass_is_the_right_one(cut: int, seq: int) -> None:
    begun = wire.ForwardBackwardRequest(model_id=MODEL, seq_id=seq).SerializeToString()
    content = begun + wire.ForwardBackwardRequest(loss_fn="cross_entropy", forward_only=True).SerializeToString()
    place = _place(_fields, content[:cut])
    assert (place is not None) == (cut >= len(begun))
    assert place is None or (place.model_id, place.seq_id) == (MODEL, seq)


@hypothesis.settings(max_examples=500)
@hypothesis.given(st.binary(max_size=40))
def test_no_bytes_whatever_are_more_than_no_place(begun: bytes) -> None:
    for content in (begun, b"\n\x02m:" + begun, b'{"model_id": "m", ' + begun):
        for read in (_fields, _members):
            place = _place(read, content)
            assert place is None or place.seq_id >= 1
