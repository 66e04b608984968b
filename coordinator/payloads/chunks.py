"""Canonical chunks: the units in which a request is cut. Pure; independent of load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """A canonical chunk: datums `start` to `stop` of a request. A function of only the request and the base model."""

    start: int
    stop: int
    num_tokens: int


def cut_chunks(lengths: list[int], chunk_tokens: int) -> tuple[Chunk, ...]:
    """Cut a request into canonical chunks: whole sequences in order, up to `chunk_tokens`; a longer one is its own."""
    chunks: list[Chunk] = []
    start, total = 0, 0
    for index, length in enumerate(lengths):
        if index > start and total + length > chunk_tokens:
            chunks.append(Chunk(start, index, total))
            start, total = index, 0
        total += length
    chunks.append(Chunk(start, len(lengths), total))
    return tuple(chunks)
