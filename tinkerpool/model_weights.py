"""The weights in a model's directory: in which files they are, and what tells them from others.

For the light client and for workers. Depends on the formats of files alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tinkerpool.tensor_files import read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file of weights, and the one that names several."""
PICKLES = "pytorch_model*.bin"
"""Files of an older format."""
_PIECES, _PIECE_BYTES = 4, 4096
"""What `weights_id` reads of a tensor: so many pieces, evenly spaced, of so many bytes."""


def weight_files(directory: Path) -> list[Path]:
    """Return the files in safetensors that transformers loads: the single one, or else those that the index names.

    Raises OSError, and ValueError for an index of another form.
    """
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not (directory / INDEX).is_file():
        return []
    try:
        names = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return [directory / name for name in sorted(set(names))]
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{directory / INDEX} is no index of weights: {error}") from None


def weights_id(directory: Path) -> str:
    """Return what tells the weights in a directory from others; empty if there are none.

    A digest of the name, type and shape of each tensor and of some of its values, 16 KiB at most, so that many
    gigabytes take a second: training changes all tensors, but a change of a few rows may go unnoticed. It does not
    depend on how the tensors are spread over files. Raises OSError, and ValueError for a damaged file.
    """
    digest, contents = hashlib.sha256(), sorted(_contents(directory))
    for content in contents:
        digest.update(f"{content.name} {content.kind} {content.num_bytes}\n".encode())
        with content.file.open("rb", buffering=0) as stream:
            for number in range(_PIECES):
                stream.seek(content.begin + max(0, content.num_bytes - _PIECE_BYTES) * number // (_PIECES - 1))
                piece = stream.read(min(_PIECE_BYTES, content.num_bytes))
                if len(piece) < min(_PIECE_BYTES, content.num_bytes):
                    raise ValueError(f"{content.file.name} ends before {content.name} does")
                digest.update(piece)
    return digest.hexdigest()[:16] if contents else ""


class _Content(NamedTuple):
    """A tensor in a file, or a whole file of which the tensors are not known."""

    name: str
    kind: str
    """Type and shape."""
    num_bytes: int
    file: Path
    begin: int


def _contents(directory: Path) -> Iterator[_Content]:
    files = weight_files(directory)
    for file in files:
        entries, first = read_header(file)
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            yield _Content(name, f"{entry['dtype']} {entry['shape']}", end - begin, file, first + begin)
    if not files:
        for file in directory.glob(PICKLES):
            yield _Content(file.name, "", file.stat().st_size, file, 0)
