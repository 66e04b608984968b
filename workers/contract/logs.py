"""How the processes of a pool log: as lines of text, or as one JSON object a line.

An event's ids are beside its message: `logger.warning("...", extra=about(adapter=..., cycle=...))`. JSON has each as a
field; text has those that the message names. Main invariants: an event in JSON is one line of ASCII, its traceback
included; no event has contents of requests or keys, whatever the level.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, get_args

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What the processes of a pool log, and how."""

    level: LogLevel = "info"
    """Least severe messages to log."""
    format: LogFormat = "text"
    """"json": each event is a JSON object on a line of its own, with the ids that it is about as fields."""

    def __post_init__(self) -> None:
        for name, kind in (("level", LogLevel), ("format", LogFormat)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"log {name} is {getattr(self, name)!r}; it must be one of {', '.join(get_args(kind))}"
                )

    def apply(self) -> None:
        """Log like this in this process, to stderr, from now on. In JSON, also the warnings of libraries."""
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter() if self.format == "json" else logging.Formatter(TEXT))
        logging.basicConfig(level=self.level.upper(), handlers=[handler])
        logging.captureWarnings(self.format == "json")


class JsonFormatter(logging.Formatter):
    """Makes a line of JSON of an event."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the event as one line."""
        event: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        event |= getattr(record, "about", {})
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            event["stack"] = self.formatStack(record.stack_info)
        return json.dumps(event)


def about(
    *,
    operation: str = "",
    adapter: str = "",
    cycle: int = 0,
    worker: str = "",
    incarnation: str = "",
    error_id: str = "",
) -> dict[str, object]:
    """Return the `extra` of an event that is about these; "" and 0 stand for none.

    Args:
        operation: its name.
        adapter: its id.
        cycle: its id.
        worker: its id, the same for all its incarnations.
        incarnation: its name.
        error_id: the id that the caller was told.
    """
    ids = {
        "operation": operation,
        "adapter": adapter,
        "cycle": cycle,
        "worker": worker,
        "incarnation": incarnation,
        "error_id": error_id,
    }
    return {"about": {name: value for name, value in ids.items() if value}}


def take_over(logger: str) -> None:
    """Let what a library logs pass through the handlers of this process, instead of its own."""
    found = logging.getLogger(logger)
    found.handlers.clear()
    found.propagate = True


def message_in(line: str, logger: str) -> str | None:
    """Return the message of a line that this logger has written, in either format; None for any other line."""
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if isinstance(event, dict):
        return event["message"] if event.get("logger") == logger else None
    _, is_found, message = line.partition(f" {logger}: ")
    return message if is_found else None
