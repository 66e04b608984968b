"""JSONL files: one JSON object a line. Every error names the file and the line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from tinkerpool.data.chat import TrainOn
from tinkerpool.data.examples import to_datum
from tinkerpool.data.lengths import num_tokens, truncate
from tinkerpool.types import Datum

T = TypeVar("T")
TooLong = Literal["refuse", "truncate", "drop"]


def load(
    path: str | Path,
    tokenizer: Any,
    *,
    max_length: int | None = None,
    too_long: TooLong = "refuse",
    train_on: TrainOn = "all",
    with_end: bool = True,
) -> list[Datum]:
    """Return the datums of a file whose lines are chats, prompts with completions, or texts.

    Args:
        path: of the JSONL file.
        tokenizer: as `chat_datum` and `completion_datum` need it.
        max_length: most tokens of a datum. None: no limit here; the pool refuses more than its model takes.
        too_long: what to do with a longer line: "refuse" the file, "truncate" the line at its end, or "drop" it.
        train_on: in chats, "all" messages of the assistant or the "last" one.
        with_end: whether completions and texts end with the end-of-text token.

    Raises:
        ValueError: a line of another form, too long, or without anything to train on; or no line remains.
        OSError: the file cannot be read.
    """
    if too_long not in {"refuse", "truncate", "drop"}:
        raise ValueError(f"too_long is {too_long!r}; it must be 'refuse', 'truncate' or 'drop'")

    def convert(record: dict[str, Any]) -> Datum | None:
        datum = to_datum(tokenizer, record, train_on=train_on, with_end=with_end)
        if max_length is None or num_tokens(datum) <= max_length:
            return datum
        if too_long == "refuse":
            raise ValueError(
                f"{num_tokens(datum)} tokens are more than max_length, {max_length}: raise it, or say "
                "too_long='truncate' or 'drop'"
            )
        return truncate(datum, max_length) if too_long == "truncate" else None

    data = [datum for datum in read_jsonl(path, convert) if datum is not None]
    if not data:
        raise ValueError(f"{path}: all lines are longer than max_length, {max_length} tokens")
    return data


def read_jsonl(path: str | Path, convert: Callable[[dict[str, Any]], T]) -> list[T]:
    """Return what `convert` makes of the object in each line; empty lines are skipped.

    Raises:
        ValueError: a line without a JSON object, one for which `convert` raises ValueError, or no line at all.
        OSError: the file cannot be read.
    """
    return [item for _, item in numbered_jsonl(path, convert)]


def numbered_jsonl(path: str | Path, convert: Callable[[dict[str, Any]], T]) -> list[tuple[int, T]]:
    """Return the number of each line, from 1, beside what `read_jsonl` returns for it. Raises as `read_jsonl`."""
    found: list[tuple[int, T]] = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                found.append((number, convert(_object(line))))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not found:
        raise ValueError(f"{path}: the file is empty; expected one JSON object a line")
    return found


def _object(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line. Raises ValueError."""
    try:
        record = json.loads(line.rstrip().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8, got the byte {line[error.start]:#x} at position {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"expected one JSON object a line: {error.msg} at column {error.colno}") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    return record
