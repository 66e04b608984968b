"""The canonical bytes of a payload, and its idempotency hash: equal exactly when two requests ask for the same.

What a canonical message has is decided in `passes` and `samples`.
"""

from __future__ import annotations

import hashlib

from google.protobuf.message import Message


def serialize(message: Message) -> bytes:
    """Return the canonical bytes of a message."""
    return message.SerializeToString(deterministic=True)


def digest(payload: bytes, kind: str) -> bytes:
    """Return the idempotency hash of a payload and its kind of operation."""
    return hashlib.sha256(kind.encode() + b"\0" + payload).digest()
