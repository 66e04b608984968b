"""Forms of ids and paths. Pure strings; does not depend on tenants or on storage.

adapter     `<session id>:train:<index>`
sampler     `<session id>:sample:<index>`
operation   `<adapter or sampler id>:<seq>`
sequence    `<name of the sample>:<index>`
checkpoint  `tinker://<adapter id>/<weights|sampler_weights|external_weights>/<name>`
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SCHEME = "tinker://"
TRAINING = "weights"
SAMPLER = "sampler_weights"
EXTERNAL = "external_weights"
CHECKPOINT_KINDS = (TRAINING, SAMPLER, EXTERNAL)
INDEX_MAX = 999_999_999
"""The highest number of an adapter or sampler in a session, and of a sequence in a sample."""

_CHECKPOINT_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
_ADAPTER_ID = re.compile(r"[A-Za-z0-9-]{1,64}:train:[0-9]{1,9}")
_SEQUENCE_ID = re.compile(r"([A-Za-z0-9-]{1,64}:sample:[0-9]{1,9}):([0-9]{1,19}):([0-9]{1,9})")
_ADAPTER_NAME_LENGTH_MAX = 100
_TENANT_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def adapter_id(session_id: str, index: int) -> str:
    """Return the id of a session's adapter number `index` (from 0)."""
    return f"{session_id}:train:{index}"


def sampler_id(session_id: str, index: int) -> str:
    """Return the id of a session's sampler number `index` (from 0)."""
    return f"{session_id}:sample:{index}"


def operation_name(target_id: str, seq: int) -> str:
    """Return the name of an operation: its adapter or sampler, and its seq."""
    return f"{target_id}:{seq}"


def parse_operation_name(name: str) -> tuple[str, int]:
    """Return target and seq of an operation's name; `("", 0)`, which no operation has, for other text."""
    target_id, _, seq = name.rpartition(":")
    is_canonical = seq.isascii() and seq.isdecimal() and seq[0] != "0" and len(seq) < 20 and int(seq) < 1 << 63
    return (target_id, int(seq)) if is_canonical else ("", 0)


def sequence_id(operation: str, index: int) -> str:
    """Return the id of a sequence that a sample drew: the sample's name, and the sequence's index in it."""
    return f"{operation}:{index}"


def parse_sequence_id(text: str) -> tuple[str, int, int]:
    """Return sampler id, seq and index of a sequence. Raises ValueError."""
    match = _SEQUENCE_ID.fullmatch(text)
    if match is None or int(match[2]) >= 1 << 63:
        raise ValueError(f"expected the sequence_id of a sampled sequence, got {text[:200]!r}")
    return match[1], int(match[2]), int(match[3])


def is_adapter_id(text: str) -> bool:
    """Return whether `text` has the form of an adapter's id."""
    return _ADAPTER_ID.fullmatch(text) is not None


def is_adapter_name(name: str) -> bool:
    """Return whether `name` may name an adapter: 1 to 100 printable characters, no `/`, no space at the ends.

    Without `/`, the name stands for the id in a path: `NAME/weights/step`. It has not the form of an id.
    """
    is_text = name.isprintable() and name == name.strip() and "/" not in name and not is_adapter_id(name)
    return is_text and 1 <= len(name) <= _ADAPTER_NAME_LENGTH_MAX


def is_checkpoint_name(name: str) -> bool:
    """Return whether `name` may name a checkpoint: 1 to 128 letters, digits, `-`, `_`, `.`, the first one no dot."""
    return _CHECKPOINT_NAME.fullmatch(name) is not None


def is_tenant_name(name: str) -> bool:
    """Return whether `name` may name a tenant: 1 to 64 letters, digits, `-`, `_`."""
    return _TENANT_NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """A parsed checkpoint path."""

    adapter_id: str
    kind: str
    """`weights`, `sampler_weights` or `external_weights`."""
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.adapter_id}/{self.kind}/{self.name}"

    @classmethod
    def parse(cls, path: str) -> CheckpointPath:
        """Parse `tinker://<adapter id>/<kind>/<name>`. Raises ValueError, which names the malformed part."""
        expected = f"expected {SCHEME}<adapter id>/<{'|'.join(CHECKPOINT_KINDS)}>/<name>, got {path[:200]!r}"
        if not path.startswith(SCHEME):
            raise ValueError(f"a checkpoint path begins with {SCHEME}: {expected}")
        parts = path.removeprefix(SCHEME).split("/")
        if len(parts) != 3:
            raise ValueError(f"a checkpoint path has three parts: {expected}")
        adapter, kind, name = parts
        if _ADAPTER_ID.fullmatch(adapter) is None:
            raise ValueError(f"malformed adapter id in a checkpoint path: {expected}")
        if kind not in CHECKPOINT_KINDS:
            raise ValueError(f"unknown kind of checkpoint: {expected}")
        if not is_checkpoint_name(name):
            raise ValueError(f"malformed checkpoint name: {expected}")
        return cls(adapter, kind, name)
