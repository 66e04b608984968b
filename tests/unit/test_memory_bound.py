"""The ceilings of the coordinator's memory: their sum with the default settings, as docs/security.md has it."""

from __future__ import annotations

import re
from pathlib import Path

from coordinator.base.config import DATUMS_MAX, MESSAGE_BYTES_MAX, GrpcConfig, HttpConfig, Limits
from coordinator.checkpoints.published_weights import HELD_BYTES_MAX
from coordinator.checkpoints.snapshots import AT_ONCE_BYTES
from coordinator.cycle.phases import DECODED_BYTES_MAX, INSTALL_BYTES_MAX
from coordinator.doors.grpc.intake import RESERVED_READERS, WAITING_MAX
from coordinator.limits.results import COPIES, OF_TENANT_MAX, RESPONSE_BYTES_MAX
from coordinator.operations.in_flight import REQUEST_BYTES_MAX, RESULT_BYTES_MAX
from coordinator.sampling.sample import UNREAD_MAX
from coordinator.scheduling.state_budget import BYTES_MAX
from scripts.attack.report import MEMORY_GROWTH_MAX

MIB = 1 << 20
PAGE = Path(__file__).parents[2] / "docs" / "security.md"
STREAM_BYTES = 64 << 10
"""What the gRPC door receives of a call before its request is read."""
LOGPROB_BYTES = 8
UNREAD_TOKEN_BYTES = 1 << 10
"""A message and its place in a queue."""
GROWN = 4
"""Copies of one large message while it is decoded: bytes, objects, payload and arrays."""


def ceilings() -> dict[str, int]:
    """Return the ceilings in bytes, by the names that the page has."""
    grpc, http = GrpcConfig().receive_bytes_max, HttpConfig().receive_bytes_max
    being_logged = grpc - RESERVED_READERS * MESSAGE_BYTES_MAX
    largest_result = Limits().sample_logprobs_max * LOGPROB_BYTES
    beyond_part = (RESPONSE_BYTES_MAX // OF_TENANT_MAX) * max(0, COPIES * largest_result - OF_TENANT_MAX)
    return {
        "requests over gRPC": grpc,
        "their payloads, until they are durable": being_logged,
        "calls that wait to be read": WAITING_MAX * STREAM_BYTES,
        "bodies over HTTP": http,
        "queued requests": REQUEST_BYTES_MAX,
        "small results in the queues of waits": RESULT_BYTES_MAX,
        "tokens that were streamed and not read": UNREAD_MAX * UNREAD_TOKEN_BYTES,
        "results that are being sent": RESPONSE_BYTES_MAX + beyond_part,
        "one message that is decoded or encoded": GROWN * MESSAGE_BYTES_MAX,
        "payloads decoded for one pass": DECODED_BYTES_MAX,
        "states of adapters in one phase": BYTES_MAX + INSTALL_BYTES_MAX,
        "snapshots that are being written": AT_ONCE_BYTES,
        "published weights without a file": HELD_BYTES_MAX,
    }


def test_all_ceilings_together_are_below_the_documented_bound() -> None:
    assert sum(ceilings().values()) <= MEMORY_GROWTH_MAX


def test_page_of_security_has_each_ceiling_and_their_sum() -> None:
    rows = dict(re.findall(r"^\| ([a-z][^|]*) \| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    expected = {name: str(size // MIB) for name, size in ceilings().items()}
    expected["in all"] = str(sum(ceilings().values()) // MIB)
    assert {name: rows.get(name) for name in expected} == expected


def test_a_request_of_the_most_datums_fits_into_a_message() -> None:
    assert DATUMS_MAX * 3 * 4 * 1024 <= MESSAGE_BYTES_MAX, "1,024 sequences of 1,024 tokens with two loss inputs"
