"""HTTP/2 written by hand, to send what no client library sends: unread streams, unfinished bodies, resets in a row.

A connection keeps the pool's flow control, so that the pool has no reason to close it, and opens its own window only as
far as the attack wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import defaultdict

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
CANCEL = 8
FRAME_BYTES = 16_384
WINDOW_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0
_WINDOW = 65_535
_ZEROS = bytes(FRAME_BYTES)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return one frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def message(payload: bytes) -> bytes:
    """Return a gRPC message on the wire: not compressed, with its length."""
    return b"\0" + struct.pack(">I", len(payload)) + payload


class Connection:
    """One HTTP/2 connection without TLS. `open` it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_ended = 0
        """Streams that the pool has ended."""
        self.answered: set[int] = set()
        """Streams on which the pool has sent a message."""
        self.has_begun = False
        """For floods: whether the first frames were sent."""
        self._reader, self._writer = reader, writer
        self._encoder = hpack.Encoder()
        self._encoder.header_table_size = 0  # every header is written out, so that streams do not depend on each other
        self._next_stream = 1
        self._first_window = _WINDOW
        self._window = _WINDOW
        self._windows: defaultdict[int, int] = defaultdict(int)
        self._opened = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, address: str, *, window: int = _WINDOW, is_read: bool = True, source: str | None = None
    ) -> Connection:
        """Connect. `window`: bytes of each stream that the pool may send. `is_read`: read what the pool sends.

        `source`: the address to connect from; each of 127.0.0.0/8 is one to the pool.
        """
        host, _, port = address.rpartition(":")
        local = None if source is None else (source, 0)
        connection = cls(*await asyncio.open_connection(host, int(port), local_addr=local))
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, window)
        connection._writer.write(PREFACE + frame(SETTINGS, 0, 0, settings))
        await connection._writer.drain()
        if is_read:
            connection._reading = asyncio.create_task(connection._read())
        return connection

    @property
    def is_closed(self) -> bool:
        """Whether the pool has closed the connection."""
        return self._reader.at_eof() or (self._reading is not None and self._reading.done())

    def head(self, path: str, key: str = "") -> tuple[int, bytes]:
        """Return a new stream and the frame that begins a gRPC call on it."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._windows[stream] += 0
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "127.0.0.1"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ]
        if key:
            headers.append(("authorization", f"Bearer {key}"))
        return stream, frame(HEADERS, END_HEADERS, stream, self._encoder.encode(headers, huffman=False))

    async def write(self, data: bytes) -> None:
        """Write frames. Raises OSError if the pool has closed the connection."""
        self._writer.write(data)
        await self._writer.drain()

    async def call(self, path: str, request: bytes, key: str = "") -> int:
        """Begin a call and send its request; return its stream. Raises OSError, or TimeoutError without a window."""
        stream, head = self.head(path, key)
        await self.write(head)
        data = message(request)
        while stream in self._windows:
            part, data = data[:FRAME_BYTES], data[FRAME_BYTES:]
            await self._send(stream, part, END_STREAM if not data else 0)
            if not data:
                break
        return stream

    async def send_most(self, path: str, num_bytes: int, key: str = "") -> int:
        """Send a request of zeros of which the last byte never comes; return the bytes that the pool took.

        Returns early if the pool ends the stream, or takes nothing more for some seconds.
        """
        stream, head = self.head(path, key)
        await self.write(head)
        left = num_bytes - 1
        with contextlib.suppress(TimeoutError, OSError):
            await self._send(stream, b"\0" + struct.pack(">I", num_bytes))
            while left and stream in self._windows:
                part = _ZEROS[:left]
                await self._send(stream, part)
                left -= len(part)
        return num_bytes - 1 - left

    async def _send(self, stream: int, data: bytes, flags: int = 0) -> None:
        """Send at most one frame of data once both windows have room. Raises TimeoutError if none opens."""
        while not self.is_closed and stream in self._windows:
            if min(self._window, self._windows[stream] + self._first_window) >= len(data):
                self._window -= len(data)
                self._windows[stream] -= len(data)
                await self.write(frame(DATA, flags, stream, data))
                return
            self._opened.clear()
            async with asyncio.timeout(WINDOW_TIMEOUT_S):
                await self._opened.wait()

    async def close(self) -> None:
        """Close the connection, also if the pool does not read what was written."""
        if self._reading is not None:
            self._reading.cancel()
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._writer.wait_closed()
        except TimeoutError:
            self._writer.transport.abort()
        except OSError:
            pass

    async def _read(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await self._reader.readexactly(9)
                length = int.from_bytes(head[:3], "big")
                kind, flags, stream = struct.unpack(">BBI", head[3:])
                payload = await self._reader.readexactly(length)
                if kind == SETTINGS and not flags & ACK:
                    self._set(payload)
                    self._writer.write(frame(SETTINGS, ACK, 0))
                elif kind == PING and not flags & ACK:
                    self._writer.write(frame(PING, ACK, 0, payload))
                elif kind == WINDOW_UPDATE:
                    self._open_window(stream, int.from_bytes(payload, "big"))
                if kind == DATA and length:
                    self.answered.add(stream)
                if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
                    self.num_ended += 1
                    self._windows.pop(stream, None)
                    self._opened.set()

    def _set(self, payload: bytes) -> None:
        for setting, value in struct.iter_unpack(">HI", payload):
            if setting == INITIAL_WINDOW_SIZE:
                self._first_window = value
        self._opened.set()

    def _open_window(self, stream: int, num_bytes: int) -> None:
        if stream == 0:
            self._window += num_bytes
        elif stream in self._windows:
            self._windows[stream] += num_bytes
        self._opened.set()
