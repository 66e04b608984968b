"""The form in which weights leave the pool: for PEFT, with the Tinker service's names of tensors, encrypted.

Does not depend on the disk, on rows or on what a checkpoint is. Main invariant: the tensors keep their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyrage

from coordinator.base.errors import ServiceError, invalid
from workers.contract.adapted_modules import leaf_names
from workers.contract.contents import PIECE_BYTES
from workers.contract.messages import AdapterSpec, ModelInfo

ENCRYPTED = ".age"
"""Suffix of an encrypted file: https://age-encryption.org/v1."""
RECIPIENTS_MAX = 10
RECIPIENT_LENGTH_MAX = 4000
"""An RSA key of 4,096 bits, the largest that age takes, has 720, and a comment may follow."""
LENGTH_BYTES = 8
"""Of a safetensors file: the length of its header, little-endian; then come the header in JSON, and the data."""
_UNEMBEDDING, _TINKERS_UNEMBEDDING = "base_model.model.lm_head.", "base_model.model.model.unembed_tokens."
"""Prefixes of a trained unembedding's tensors: PEFT's, and the one that Tinker's service writes and its tools read."""


def peft_config(spec: AdapterSpec, model: ModelInfo) -> dict[str, Any]:
    """Return `adapter_config.json` for PEFT's `LoraConfig`: the modules by leaf name, scaling alpha / rank.

    They have the pool's names, which are the Tinker service's: see `joined_exports` for PEFT's.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "target_modules": sorted(leaf_names(model.modules, *spec.kinds)),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
    }


def tinkers_head(head: bytes) -> bytes:
    """Return the length and header of a safetensors file with Tinker's names. Offsets in it count from its end."""
    header = {
        _TINKERS_UNEMBEDDING + name.removeprefix(_UNEMBEDDING) if name.startswith(_UNEMBEDDING) else name: entry
        for name, entry in json.loads(head[LENGTH_BYTES:]).items()
    }
    return head_of(header)


def head_of(header: Mapping[str, Any]) -> bytes:
    """Return the length and header of a safetensors file."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data is aligned
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def head_bytes(beginning: bytes) -> int:
    """Return the size of length and header of a safetensors file that begins so."""
    return LENGTH_BYTES + int.from_bytes(beginning[:LENGTH_BYTES], "little")


def encrypt(pieces: Iterable[bytes], recipients: Sequence[str], write: Callable[[int, bytes], None]) -> None:
    """Encrypt a content to `recipients`, piece by piece. Other threads run meanwhile.

    `write` takes a place and the bytes from there on. Raises ServiceError INVALID_ARGUMENT for recipients that nothing
    can be encrypted to, which `check_recipients` finds, and an OSError that `pieces` or `write` raises.
    """
    source, sink = _Source(pieces), _Sink(write)
    try:
        with _refusing(recipients):
            pyrage.encrypt_io(source, sink, [_recipient(text) for text in recipients])
    except ServiceError:
        if (error := source.error or sink.error) is not None:  # the library makes one of its own of it
            raise error from None
        raise
    sink.flush()


def check_recipients(recipients: Sequence[str]) -> None:
    """Raise ServiceError INVALID_ARGUMENT for recipients that nothing can be encrypted to; it is tried with each."""
    if len(recipients) > RECIPIENTS_MAX:
        raise invalid(f"{len(recipients)} recipients of an encrypted export, at most {RECIPIENTS_MAX}")
    for text in recipients:
        if len(text) > RECIPIENT_LENGTH_MAX:
            raise invalid(
                f"a recipient of an encrypted export has {len(text)} characters, at most {RECIPIENT_LENGTH_MAX}"
            )
        encrypt((), [text], lambda start, piece: None)


def _recipient(text: str) -> object:
    """Return the public key that a recipient's text is."""
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    recipient: object = kind.Recipient.from_str(text)
    return recipient


@contextmanager
def _refusing(recipients: Sequence[str]) -> Iterator[None]:
    """Turn errors of the library into refusals. Some keys make it panic: the exception's class cannot be imported."""
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if not is_panic and not isinstance(error, pyrage.RecipientError | pyrage.EncryptError):
            raise
        raise invalid(
            f"{', '.join(recipients)[:80]!r} is no recipient of an encrypted export "
            f"({'nothing can be encrypted to it' if is_panic else error}): send a public key of age ('age1...', see "
            "age-keygen) or of SSH ('ssh-ed25519 ...' or 'ssh-rsa ...')"
        ) from None


class _Source:
    """What is encrypted. The library holds the interpreter's lock, but for the moments in which it calls a method."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.error: OSError | None = None
        self._pieces = iter(pieces)
        self._left = memoryview(b"")

    def read(self, num_bytes: int) -> bytes:
        try:
            self._left = self._left or memoryview(next(self._pieces, b""))
        except OSError as error:
            self.error = error
            raise
        piece, self._left = bytes(self._left[:num_bytes]), self._left[num_bytes:]
        return piece


class _Sink:
    """Takes what the library writes, and hands it on in larger pieces."""

    def __init__(self, write: Callable[[int, bytes], None]) -> None:
        self.error: OSError | None = None
        self._write = write
        self._start = 0
        self._gathered = bytearray()

    def write(self, piece: bytes) -> int:
        self._gathered += piece
        if len(self._gathered) >= PIECE_BYTES:
            self.flush()
        return len(piece)

    def flush(self) -> None:
        try:
            self._write(self._start, bytes(self._gathered))
        except OSError as error:
            self.error = error
            raise
        self._start += len(self._gathered)
        self._gathered.clear()


def cannot_be_used(files: Sequence[str]) -> ServiceError | None:
    """Return why the weights in these files cannot be used in this pool; None: they can."""
    if not any(name.endswith(ENCRYPTED) for name in files):
        return None
    return invalid(
        "this checkpoint is encrypted, and the pool has no key to it: download it, or use another checkpoint",
        "CHECKPOINT_ENCRYPTED",
    )
