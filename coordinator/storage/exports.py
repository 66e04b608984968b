"""The form in which weights leave the pool: for PEFT, with the Tinker service's names of tensors, encrypted.

Does not depend on the disk, on rows or on what a checkpoint is. Main invariant: the tensors keep their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyrage

from coordinator.base.errors import ServiceError, invalid
from workers.contract.adapted_modules import leaf_names
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


def encrypted(content: bytes, recipients: Sequence[str]) -> bytes:
    """Return content encrypted to `recipients`. Other threads run meanwhile.

    Raises ServiceError INVALID_ARGUMENT for recipients that nothing can be encrypted to. `check_recipients` finds them.
    """
    source, sink = _Source(content), _Sink()
    with _refusing(recipients):
        pyrage.encrypt_io(source, sink, [_recipient(text) for text in recipients])
    return bytes(sink.content)


def check_recipients(recipients: Sequence[str]) -> None:
    """Raise ServiceError INVALID_ARGUMENT for recipients that nothing can be encrypted to; it is tried with each."""
    if len(recipients) > RECIPIENTS_MAX:
        raise invalid(f"{len(recipients)} recipients of an encrypted export, at most {RECIPIENTS_MAX}")
    for text in recipients:
        if len(text) > RECIPIENT_LENGTH_MAX:
            raise invalid(
                f"a recipient of an encrypted export has {len(text)} characters, at most {RECIPIENT_LENGTH_MAX}"
            )
        encrypted(b"", [text])


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
    """A file to encrypt. The library holds the interpreter's lock, but for the moments in which it calls a method."""

    def __init__(self, content: bytes) -> None:
        self._content = memoryview(content)
        self._start = 0

    def read(self, num_bytes: int) -> bytes:
        piece = bytes(self._content[self._start : self._start + num_bytes])
        self._start += len(piece)
        return piece


class _Sink:
    """Takes what the library writes."""

    def __init__(self) -> None:
        self.content = bytearray()

    def write(self, piece: bytes) -> int:
        self.content += piece
        return len(piece)

    def flush(self) -> None:
        pass


def cannot_be_used(files: Sequence[str]) -> ServiceError | None:
    """Return why the weights in these files cannot be used in this pool; None: they can."""
    if not any(name.endswith(ENCRYPTED) for name in files):
        return None
    return invalid(
        "this checkpoint is encrypted, and the pool has no key to it: download it, or use another checkpoint",
        "CHECKPOINT_ENCRYPTED",
    )
