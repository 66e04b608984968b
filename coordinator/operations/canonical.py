"""Canonical bytes of a message and their hash: equal exactly when the request is the same."""

from __future__ import annotations

import hashlib

from google.protobuf.message import Message


def digest(body: bytes, kind: str) -> bytes:
    """The idempotency hash of a body; the kind is part of it."""
    return hashlib.sha256(kind.encode() + b"\0" + body).digest()


def serialize(message: Message) -> bytes:
    """The canonical bytes of a message."""
    return message.SerializeToString(deterministic=True)
