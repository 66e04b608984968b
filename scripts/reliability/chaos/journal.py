"""What `chaos.py` remembers from one of its lives to the next: files of JSON lines, each durable when it is written.

Knows no pool. A line that was cut off by a kill is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class JsonLines:
    """A file that only grows."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        self.found: list[dict[str, Any]] = [json.loads(line) for line in whole.decode().splitlines()]
        """What was there when it was opened."""
        self._path = path
        with path.open("ab") as file:
            file.truncate(len(whole))

    def add(self, *lines: Mapping[str, Any]) -> None:
        """Add lines; they are durable when this returns."""
        with self._path.open("ab") as file:
            file.writelines(json.dumps(line).encode() + b"\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A finished step of a tenant."""

    step: int
    """From 0."""
    next_seq: int
    """The place after its last one."""
    results: list[tuple[str, str]]
    """Name of each of its operations, and the digest of what the client was given; empty where it is given nothing."""


class Journal:
    """A tenant's adapter and its finished steps: line number `n` is about step `n`."""

    def __init__(self, path: Path) -> None:
        self.adapter_id = ""
        self.lines: list[Line] = []
        self._file = JsonLines(path)
        for fields in self._file.found:
            if "adapter_id" in fields:
                self.adapter_id = fields["adapter_id"]
            else:
                self.lines.append(Line(**fields | {"results": [(name, digest) for name, digest in fields["results"]]}))
        assert [line.step for line in self.lines] == list(range(len(self.lines))), f"{path} skips a step"

    @property
    def next_seq(self) -> int:
        """The place after everything that is in it."""
        return self.lines[-1].next_seq if self.lines else 1

    def begin(self, adapter_id: str) -> None:
        """Note whose steps these are."""
        self.adapter_id = adapter_id
        self._file.add({"adapter_id": adapter_id})

    def add(self, line: Line) -> None:
        """Note a step once everything that it asked for has finished."""
        assert line.step == len(self.lines)
        self._file.add(asdict(line))
        self.lines.append(line)
