"""Draws names and keys from the seed instead of from the operating system.

Queues hash by number, because a stopping coordinator iterates over sets of queues. Garbage is collected only between
histories: otherwise finalizers would run at a moment that depends on memory.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from unittest import mock

_KEY_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """Make everything random a function of the seed. Leaves the garbage collector off; see `collect_garbage`."""
    random = Random(f"{seed}/names")
    numbers = itertools.count()

    def number_of(queue: object) -> int:
        number: int | None = getattr(queue, "sim_number", None)
        if number is None:
            number = next(numbers)
            queue.sim_number = number  # type: ignore[attr-defined]
        return number

    def new_uuid() -> uuid.UUID:
        return uuid.UUID(int=random.getrandbits(128), version=4)

    def new_hex(num_bytes: int) -> str:
        return random.randbytes(num_bytes).hex()

    def new_secret(num_bytes: int) -> str:
        return "".join(random.choices(_KEY_ALPHABET, k=(4 * num_bytes + 2) // 3))

    with (
        mock.patch.object(uuid, "uuid4", new_uuid),
        mock.patch.object(secrets, "token_hex", new_hex),
        mock.patch.object(secrets, "token_urlsafe", new_secret),
        mock.patch.object(asyncio.Queue, "__hash__", number_of),
    ):
        gc.disable()
        yield


def collect_garbage() -> None:
    """Collect garbage; to be called between histories."""
    gc.collect()
