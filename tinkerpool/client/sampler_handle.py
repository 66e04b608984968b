"""What another process needs to sample from a sampler of this one: a handle without a key, and numbers of its own.

Main invariant: no two clients of a sampler number their requests alike, though they know nothing of each other.
"""

from __future__ import annotations

import base64
import json
import secrets
from dataclasses import asdict, dataclass

SEQS_PER_CLIENT = 10**9
"""Numbers in a client's block. The first block is that of the client that created the sampler."""
BLOCKS = 4 * 10**9
"""Blocks; the service takes numbers up to 4e18. A thousand copies draw the same one once in 8,000 times."""


def first_seq(*, is_copy: bool) -> int:
    """The number of a client's first request. A copy has a block of its own, which it draws."""
    return (1 + secrets.randbelow(BLOCKS - 1) if is_copy else 0) * SEQS_PER_CLIENT + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerHandle:
    """Where a sampler is; who it lets in is not its business."""

    base_url: str
    """Of the pool, as it was given to the client."""
    sampler_id: str
    base_model: str

    def encode(self) -> str:
        """As one word, for another process."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def decode(cls, handle: str) -> SamplerHandle:
        """The handle of such a word. Raises ValueError for any other."""
        try:
            return cls(**json.loads(base64.urlsafe_b64decode(handle)))
        except (ValueError, TypeError):
            raise ValueError("this is no sampler handle: take one from SamplingClient.get_sampler_handle()") from None
