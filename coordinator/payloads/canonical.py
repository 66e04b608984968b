"""Canonical bytes of a message, and the idempotency hash of a payload."""

from __future__ import annotations

import hashlib

from google.protobuf.message import Message


def digest(payload: bytes, kind: str) -> bytes:
    """Return the idempotency hash of a payload and its kind of operation."""
    return hashlib.sha256(kind.encode() + b"\0" + payload).digest()


def serialize(message: Message) -> bytes:
    """Return the canonical bytes of a message."""
    return message.SerializeToString(deterministic=True)
