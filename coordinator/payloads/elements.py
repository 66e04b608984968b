"""Counts the elements of a message in its bytes, before any object of it exists.

A field of two bytes becomes an object of a hundred. So a door counts first, by tags and lengths of the wire format, and
decodes only messages with at most `ELEMENTS_MAX` elements. Does not depend on the messages' meaning.

Main invariants: the time of a count is bounded by the limit, not by the size of the message; whatever the decoder would
make an object of has been counted.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from coordinator.base.config import ELEMENTS_MAX
from coordinator.base.errors import Code, ServiceError

INLINE_BYTES_MAX = ELEMENTS_MAX
"""Bodies up to this size are parsed on the event loop: they cannot have too many elements. Larger ones are counted, for
up to a tenth of a second, and so are parsed on a thread, in turns of the tenants."""

_Table: TypeAlias = "dict[int, _Table | None]"
"""The fields of a message that hold elements, by tag: the table of a nested message, or None for packed numbers."""
M = TypeVar("M", bound=Message)

_VARINT, _FIXED64, _BYTES, _START, _END, _FIXED32 = range(6)
"""Wire types: the lowest three bits of a tag."""
_VARINT_BYTES_MAX = 10
_HEAD_FIELDS_MAX = 64
_HEAD_BYTES_MAX = 1024
"""Of the head of a refused message: fields that are read, and the length of one. Names and numbers are shorter."""


class TooManyElements(ServiceError):
    """A message with more than `ELEMENTS_MAX` elements. It is refused permanently, and was not decoded."""

    def __init__(self) -> None:
        super().__init__(
            Code.INVALID_ARGUMENT,
            "REQUEST_TOO_LARGE",
            f"the request has more than {ELEMENTS_MAX} fields and list items: send fewer sequences or names at once",
        )


class _Malformed(Exception):
    """The bytes are no message."""


def parse(message_type: type[M], body: bytes) -> M:
    """Return the message in `body`. Raises TooManyElements, and DecodeError if it is none."""
    if len(body) > INLINE_BYTES_MAX:  # every element has at least one byte
        count_elements(message_type, body)
    return message_type.FromString(body)


def count_elements(message_type: type[Message], body: bytes) -> int:
    """Return the number of elements of the message in `body`, at most `ELEMENTS_MAX`. Raises TooManyElements.

    Return 0 for bytes that are no message: the decoder stops where the count did.
    """
    try:
        return ELEMENTS_MAX - _count(body, 0, len(body), _table(message_type.DESCRIPTOR), ELEMENTS_MAX)
    except (_Malformed, IndexError):
        return 0


def parse_head(message_type: type[M], body: bytes) -> M:
    """Return a message with only the names and numbers at the beginning of `body`; empty if it has none."""
    nested, pieces, position = _table(message_type.DESCRIPTOR), [], 0
    try:
        for _ in range(_HEAD_FIELDS_MAX):
            if (start := position) >= len(body):
                break
            tag, size, position = _next(body, start)
            position += size
            if position - start <= _HEAD_BYTES_MAX and tag not in nested:
                pieces.append(body[start:position])
        return message_type.FromString(b"".join(pieces))
    except (_Malformed, IndexError, DecodeError):
        return message_type()


def _count(body: bytes, position: int, end: int, nested: _Table, left: int) -> int:
    """Return `left` less the number of elements from `position` to `end`. Raises TooManyElements below 0."""
    while position < end:
        left -= 1
        if left < 0:
            raise TooManyElements
        tag, size = body[position], body[position + 1]
        if tag & 0x87 == _BYTES:  # the tag has one byte, as almost always
            position += 2
            if size >= 0x80:
                size, position = _varint(body, position - 1)
            if size and tag in nested:
                inner = nested[tag]
                left = left - size if inner is None else _count(body, position, position + size, inner, left)
            position += size
        elif tag & 0x87 == _VARINT and size < 0x80:
            position += 2
        else:
            tag, size, position = _next(body, position)
            if size and tag in nested:
                inner = nested[tag]
                left = left - size if inner is None else _count(body, position, position + size, inner, left)
            position += size
    if left < 0:
        raise TooManyElements
    if position > end:
        raise _Malformed
    return left


def _next(body: bytes, position: int) -> tuple[int, int, int]:
    """Return the tag at `position`, the size of its contents, and where they begin. Raises _Malformed, IndexError."""
    tag = body[position]
    position += 1
    if tag >= 0x80:
        tag, position = _varint(body, position - 1)
    wire_type = tag & 7
    if wire_type == _BYTES:
        size = body[position]
        position += 1
        return (tag, size, position) if size < 0x80 else (tag, *_varint(body, position - 1))
    if wire_type == _VARINT:
        return tag, 0, position + 1 if body[position] < 0x80 else _varint(body, position)[1]
    if wire_type in (_START, _END):
        return tag, 0, position
    if wire_type in (_FIXED32, _FIXED64):
        return tag, 4 if wire_type == _FIXED32 else 8, position
    raise _Malformed


def _varint(body: bytes, position: int) -> tuple[int, int]:
    value = 0
    for index in range(_VARINT_BYTES_MAX):
        byte = body[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise _Malformed


@cache
def _table(descriptor: Any) -> _Table:
    table: _Table = {}
    for field in descriptor.fields:
        tag = field.number << 3 | _BYTES
        if field.message_type is not None:
            table[tag] = _table(field.message_type)
        elif field.is_repeated and field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            table[tag] = None
    return table
