"""Moves the large contents of states between a coordinator and a worker, piece by piece, beside their messages.

In the message a `Moved` stands for such a content. The contents of a batch or a sample arrive before it; those of a
result stay with the worker until they were fetched. Does not depend on Ray, or on what a state holds.

Main invariant: a message is handed on only when its contents are complete, so a caller sees no part of a state.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol, TypeVar

from workers.contract.contents import LARGE_BYTES, PIECE_BYTES, Content, Spool, piece_of, pieces_of
from workers.contract.messages import AdapterState, Batch, BatchResult, LoadItem, SampleRequest

logger = logging.getLogger(__name__)

AT_ONCE = 4
"""Pieces that are on their way at a time."""

Message = TypeVar("Message", Batch, BatchResult, SampleRequest)


class Call(Protocol):
    """Calls a method of the worker's `Aside`, and returns its reply. Raises WorkerLost."""

    async def __call__(self, method: str, /, *arguments: Any) -> Any:
        """See the class."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Stands for a content in a message between processes."""

    key: str
    num_bytes: int

    def __len__(self) -> int:
        return self.num_bytes

    def read(self, start: int, num_bytes: int) -> bytes:
        """See `LargeContent`: a content is put back into its message before anybody reads it."""
        raise AssertionError(f"{self.key} was not put back into its message")


class Aside:
    """The contents that a worker has received and not used, or has yet to send."""

    def __init__(self) -> None:
        self._received: dict[str, BytesIO] = {}
        self._sent: dict[str, Content] = {}
        self._numbers = itertools.count()

    def receive(self, key: str, start: int, piece: bytes) -> None:
        """Add the piece of a content that begins at `start`; no later piece is added before the first one."""
        content = self._received.setdefault(key, BytesIO())
        content.seek(start)
        content.write(piece)

    def put_back(self, message: Message) -> Message:
        """Return a message with the contents that were received for it."""

        def change(content: Content) -> Content:
            return self._received.pop(content.key).getvalue() if isinstance(content, Moved) else content

        return _with_contents(message, change)

    def take_out(self, result: BatchResult) -> BatchResult:
        """Return a result without its large contents, which are held until `drop`."""

        def change(content: Content) -> Content:
            if isinstance(content, bytes) and len(content) <= LARGE_BYTES:
                return content
            moved = Moved(str(next(self._numbers)), len(content))
            self._sent[moved.key] = content
            return moved

        return _with_contents(result, change)

    def piece(self, key: str, start: int) -> bytes:
        """Return the piece of a held content that begins at `start`. Raises OSError."""
        return piece_of(self._sent[key], start, PIECE_BYTES)

    def drop(self, key: str) -> None:
        """End the hold of a content."""
        self._sent.pop(key, None)


_numbers = itertools.count()
"""Of the contents that this process has sent."""


async def send(message: Message, call: Call) -> Message:
    """Send the large contents of a message; return it without them. What `call` raises ends that."""
    large: dict[str, Content] = {}

    def change(content: Content) -> Content:
        if isinstance(content, bytes) and len(content) <= LARGE_BYTES:
            return content
        moved = Moved(str(next(_numbers)), len(content))
        large[moved.key] = content
        return moved

    message = _with_contents(message, change)
    for key, content in large.items():
        await call("receive", key, 0, b"")
        start, pieces = 0, pieces_of(content)
        while pieces_now := await asyncio.to_thread(_next_pieces, pieces):
            starts = itertools.accumulate(map(len, pieces_now), initial=start)
            calls = (call("receive", key, each, piece) for each, piece in zip(starts, pieces_now, strict=False))
            await asyncio.gather(*calls)
            start += sum(map(len, pieces_now))
    return message


def _next_pieces(pieces: Iterator[bytes]) -> list[bytes]:
    """Return the pieces to send next; none behind the end, or if the disk does not give them.

    Then the worker finds the state damaged, as it is.
    """
    try:
        return list(itertools.islice(pieces, AT_ONCE))
    except OSError as error:
        logger.error("a state cannot be read from the disk: %s", error)
        return []


async def fetch(result: BatchResult, call: Call, folder: Path | None) -> BatchResult:
    """Return a result with its large contents, in files on the disk of a folder. What `call` raises ends that.

    Contents for which the disk has no room come in memory: what they are for finds out whether the disk takes them.
    """
    contents: dict[str, Content] = {}
    for moved in _moved(result):
        contents[moved.key] = await _fetched(moved, call, folder)
        await call("drop", moved.key)
    return _with_contents(result, lambda content: contents[content.key] if isinstance(content, Moved) else content)


async def _fetched(moved: Moved, call: Call, folder: Path | None) -> Content:
    try:
        spool = await asyncio.to_thread(Spool, folder)
        async for pieces in _pieces(moved, call):
            await asyncio.to_thread(spool.append, pieces)
    except OSError as error:
        logger.warning("the disk does not take a state of %d bytes, which is held in memory: %s", len(moved), error)
        return b"".join([pieces async for pieces in _pieces(moved, call)])
    return spool.content()


async def _pieces(moved: Moved, call: Call) -> AsyncIterator[bytes]:
    """Yield a content that a worker holds, several pieces at a time."""
    step = AT_ONCE * PIECE_BYTES
    for first in range(0, moved.num_bytes, step):
        starts = range(first, min(first + step, moved.num_bytes), PIECE_BYTES)
        yield b"".join(await asyncio.gather(*(call("piece", moved.key, start) for start in starts)))


def _states(message: Batch | BatchResult | SampleRequest) -> Iterator[AdapterState]:
    return (state for state in message.states if isinstance(state, AdapterState))


def _contents(state: AdapterState) -> list[Content]:
    return [each for each in (state.weights, state.optimizer, state.gradient) if each is not None]


def _moved(result: BatchResult) -> list[Moved]:
    return [each for state in _states(result) for each in _contents(state) if isinstance(each, Moved)]


def _with_contents(message: Message, change: Callable[[Content], Content]) -> Message:
    """Return a message with other contents; the message itself if it has none that is large."""
    if all(isinstance(each, bytes) and len(each) <= LARGE_BYTES for s in _states(message) for each in _contents(s)):
        return message

    def changed(state: Any) -> Any:
        if not isinstance(state, AdapterState):
            return state
        return replace(
            state,
            weights=change(state.weights),
            optimizer=state.optimizer and change(state.optimizer),
            gradient=state.gradient and change(state.gradient),
        )

    if isinstance(message, Batch):
        installs = tuple(replace(each, state=changed(each.state)) for each in message.installs)
        items = tuple(replace(i, state=changed(i.state)) if isinstance(i, LoadItem) else i for i in message.items)
        return replace(message, installs=installs, items=items)
    if isinstance(message, BatchResult):
        return replace(message, results=tuple(replace(each, state=changed(each.state)) for each in message.results))
    return replace(message, version=replace(message.version, state=changed(message.version.state)))
