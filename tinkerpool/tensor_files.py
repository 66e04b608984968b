"""Reads the header of a safetensors file: the names, shapes and places of its tensors, without their values.

The format: eight bytes with the length of the header, little-endian; the header in JSON; the tensors. For the light
client, which does not need the library, and for changes in a file, for which the library gives no offsets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

_HEADER_BYTES_MAX = 100 << 20
"""Safetensors' own limit."""


def read_header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the entries of a file's tensors by name, and the offset from which theirs count.

    Raises ValueError for a file of another format, OSError.
    """
    with file.open("rb") as stream:
        text, offset = read_header_text(stream)
    header = json.loads(text)
    header.pop("__metadata__", None)
    return header, offset


def read_header_text(stream: BinaryIO) -> tuple[str, int]:
    """Return the header of an open file as it is, and the offset from which the places of its tensors count.

    Raises ValueError for a file of another format, OSError.
    """
    num_bytes = int.from_bytes(stream.read(8), "little")
    header = stream.read(num_bytes) if num_bytes <= _HEADER_BYTES_MAX else b""
    if not header or len(header) != num_bytes:
        raise ValueError(f"{Path(stream.name).name} is not a safetensors file")
    return header.decode(), 8 + num_bytes
