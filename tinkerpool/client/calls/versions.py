"""Which versions of client and pool work together. Pure."""

from __future__ import annotations

import re

_NUMBERS = re.compile(r"(\d+)\.(\d+)\b")


def mismatch(client: str, pool: str) -> str | None:
    """Return a sentence for the user of a client and a pool that are more than one minor version apart, else None.

    A version that does not begin with two numbers fits every other one.
    """
    ours, theirs = _NUMBERS.match(client), _NUMBERS.match(pool)
    if ours is None or theirs is None:
        return None
    major, minor = int(theirs[1]), int(theirs[2])
    if int(ours[1]) == major and abs(int(ours[2]) - minor) <= 1:
        return None
    return (
        f"this client is tinkerpool {client}, the pool {pool}: they fit if their minor versions differ by at most one. "
        f"Install the pool's: pip install 'tinkerpool=={major}.{minor}.*'"
    )
