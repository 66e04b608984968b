"""One random number of a sample, as tests compare them."""

from __future__ import annotations

from workers.sampling.drawing import uniforms


def uniform(seed: int, stream: int, position: int) -> float:
    """Return the number that decides a sequence's token at a position."""
    return float(uniforms(seed, stream, position, 1)[0])
