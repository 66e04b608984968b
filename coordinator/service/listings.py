"""Lists: pages that are bounded by rows and by bytes, made in slices by turns of the tenants.

A slice of rows is read and made into messages in a turn of its tenant. Other calls run between two slices, and a call
that is cancelled ends there. Does not depend on what is listed. Main invariant: of a list no more is in memory at a
time than a slice, or a page of about `PAGE_BYTES_MAX`. A page begins behind a row, not at a number: rows that are
created or deleted between two pages shift no other row.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from coordinator.base.errors import invalid
from coordinator.limits.turns import Turns
from coordinator.storage.rows import Listing, Place
from tinkerpool.v1.adapters_pb2 import ListAdaptersRequest
from tinkerpool.v1.admin_pb2 import ListApiKeysRequest, ListTenantsRequest
from tinkerpool.v1.checkpoints_pb2 import ListCheckpointsRequest
from tinkerpool.v1.sessions_pb2 import ListSessionsRequest

R = TypeVar("R")
M = TypeVar("M", bound=Message)
ListRequest = (
    ListAdaptersRequest | ListApiKeysRequest | ListCheckpointsRequest | ListSessionsRequest | ListTenantsRequest
)
LARGE_LISTS = (ListAdaptersRequest, ListCheckpointsRequest, ListSessionsRequest)
"""Requests for rows with metadata."""
TOKEN = re.compile(r"(-?\d{1,16}(?:\.\d{1,17})?(?:e[+-]\d{1,2})?):([!-~]{1,256})", re.ASCII)
"""A page's token: the sort key of the last row of the page before, whose number is finite in this form."""
TOKEN_DIGITS_MAX = 15
"""Of a token that is a number, which SQLite can hold."""
PAGE_ROWS_MAX = 1000
PAGE_BYTES_MAX = 1 << 20
"""Bytes of messages after which a page ends; its token goes on behind them."""
SLICE_ROWS = 16
"""Rows of a slice: 256 KiB of metadata at most, one or two milliseconds."""


@dataclass(frozen=True, slots=True)
class Listed(Generic[R, M]):
    """A part of a list, as messages."""

    listing: Listing[R]
    make: Callable[[R], M | None]
    """Makes the message of a row; None: it is leaving the list."""
    turns: Turns
    tenant_id: str

    @property
    def num_total(self) -> int:
        """The number of rows of the whole list."""
        return self.listing.num_total

    async def slices(self) -> AsyncGenerator[list[M]]:
        """Yield the messages in slices, an empty one where all its rows have left the list meanwhile."""
        keys = self.listing.keys
        for start in range(0, len(keys), SLICE_ROWS):
            async with self.turns.turn(self.tenant_id) as turn:
                made = map(self.make, self.listing.read(keys[start : start + SLICE_ROWS]))
                messages = [message for message in made if message is not None]
                turn.use(sum(message.ByteSize() for message in messages))
            yield messages
            await asyncio.sleep(0)

    async def page(self) -> tuple[list[M], str, int]:
        """Return the first messages, up to `PAGE_BYTES_MAX`, the next page's token and the total number of rows."""
        messages: list[M] = []
        sort_keys = self.listing.sort_keys
        num_rows = num_bytes = 0
        async with aclosing(self.slices()) as slices:
            async for each in slices:
                messages += each
                num_rows = min(num_rows + SLICE_ROWS, len(sort_keys))
                num_bytes += sum(message.ByteSize() for message in each)
                if num_bytes >= PAGE_BYTES_MAX:
                    break
        if num_rows == len(sort_keys) and not self.listing.has_more:
            return messages, "", self.num_total
        created_at, key = sort_keys[num_rows - 1]
        return messages, f"{created_at!r}:{key}", self.num_total


def page_bounds(request: ListRequest, default_size: int) -> tuple[int, Place]:
    """Return the most rows of the page that a request asks for, and its place. Raises ServiceError INVALID_ARGUMENT."""
    limit, skip = rows_of_page(request.page_size, default_size), request.skip
    if skip < 0:
        raise invalid(f"skip must be 0 or more, not {skip}")
    if named := TOKEN.fullmatch(request.page_token):
        return limit, Place((float(named[1]), named[2]), skip)
    # The token of an older pool is the number of rows before the page: a client may hold one over an upgrade.
    return limit, Place(skip=number_of(request.page_token) + skip)


def rows_of_page(size: int, default_size: int = PAGE_ROWS_MAX) -> int:
    """Return the most rows of a page of this size, 0: of the default size. Raises ServiceError INVALID_ARGUMENT."""
    if size < 0:
        raise invalid(f"page_size must be 0 or more, not {size}")
    return min(size or default_size, PAGE_ROWS_MAX)


def number_of(token: str) -> int:
    """Return the number that a page's token is, 0 for an empty one. Raises ServiceError INVALID_ARGUMENT."""
    if token and not (token.isascii() and token.isdecimal() and len(token) <= TOKEN_DIGITS_MAX):
        raise invalid(
            f"page_token {token[:40]!r} is not a token of this service: send the next_page_token of the page before"
        )
    return int(token or 0)
