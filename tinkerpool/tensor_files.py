"""Reads the header of a safetensors file: the names, shapes and places of its tensors, without their values.

The format: eight bytes with the length of the header, little-endian; the header in JSON; the tensors. For the light
client, which does not need the library, and for changes in a file, for which the library gives no offsets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_HEADER_BYTES_MAX = 100 << 20
"""Safetensors' own limit."""


def read_header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the entries of a file's tensors by name, and the offset from which theirs count.

    Raises ValueError for a file of another format, OSError.
    """
    with file.open("rb") as stream:
        num_bytes = int.from_bytes(stream.read(8), "little")
        if num_bytes > _HEADER_BYTES_MAX:
            raise ValueError(f"{file.name} is not a safetensors file")
        header = json.loads(stream.read(num_bytes))
    header.pop("__metadata__", None)
    return header, 8 + num_bytes
