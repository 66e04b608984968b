"""Sampling from one sampler in several processes: a handle without a key, and disjoint sequence numbers.

Main invariant: no two clients of a sampler use the same sequence number, though they do not communicate.
"""

from __future__ import annotations

import base64
import json
import secrets
from dataclasses import asdict, dataclass

SEQS_PER_CLIENT = 10**9
"""Sequence numbers in a client's block. The first block belongs to the client that created the sampler."""
BLOCKS = 4 * 10**9
"""Number of blocks; the service accepts seqs up to 4e18. Of 1,000 copies, two draw the same block with odds 1:8,000."""


def first_seq(*, is_copy: bool) -> int:
    """Return the seq of a client's first request. A copy draws a block of its own."""
    return (1 + secrets.randbelow(BLOCKS - 1) if is_copy else 0) * SEQS_PER_CLIENT + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerHandle:
    """Address and id of a sampler, without credentials."""

    base_url: str
    """Address of the pool, as given to the client."""
    sampler_id: str
    base_model: str

    def encode(self) -> str:
        """Return the handle as one word, for another process."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def decode(cls, handle: str) -> SamplerHandle:
        """Return the handle of such a word. Raises ValueError for any other."""
        try:
            return cls(**json.loads(base64.urlsafe_b64decode(handle)))
        except (ValueError, TypeError):
            raise ValueError("this is no sampler handle: take one from SamplingClient.get_sampler_handle()") from None
