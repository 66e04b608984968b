"""How a pool's processes log: one event a line in JSON, and what `up` reads of it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from io import StringIO
from typing import Any

import pytest

from tests.support.logs import logged_by
from workers.contract.logs import TEXT, JsonFormatter, LogConfig, about, message_in, take_over

MOMENT = datetime(2026, 11, 26, 16, 18, 51, 123_000, tzinfo=UTC)


def record(message: str, *args: object, **values: Any) -> logging.LogRecord:
    found = logging.makeLogRecord(
        {"name": "coordinator.cycle", "levelno": 30, "levelname": "WARNING", "msg": message, "args": args, **values}
    )
    found.created = MOMENT.timestamp()
    return found


def test_an_event_in_json_has_its_time_in_utc_its_text_and_the_ids_that_it_is_about() -> None:
    ids = about(operation="a:7", adapter="a", cycle=12, worker="w0", incarnation="w0-1")
    assert json.loads(JsonFormatter().format(record("%s is late", "w0", **ids))) == {
        "time": "2026-11-26T16:18:51.123+00:00",
        "level": "warning",
        "logger": "coordinator.cycle",
        "message": "w0 is late",
        "operation": "a:7",
        "adapter": "a",
        "cycle": 12,
        "worker": "w0",
        "incarnation": "w0-1",
    }
    event = json.loads(JsonFormatter().format(record("ready", **about(adapter="a"))))
    assert event.keys() == {"time", "level", "logger", "message", "adapter"}, "ids that an event lacks are left out"


def test_an_event_in_json_is_one_line_of_ascii_also_with_a_traceback_and_line_breaks() -> None:
    try:
        raise RuntimeError("first\nsecond \u4e03 \ud800")
    except RuntimeError:
        line = JsonFormatter().format(record("failed\nat\u2028once", exc_info=sys.exc_info(), stack_info="Stack:\n  x"))
    assert line.isascii()
    assert len(line.splitlines()) == 1
    event = json.loads(line)
    assert event["message"] == "failed\nat\u2028once"
    assert event["exception"].startswith("Traceback (most recent call last):\n")
    assert event["exception"].endswith("RuntimeError: first\nsecond \u4e03 \ud800")
    assert event["stack"] == "Stack:\n  x"


@pytest.mark.parametrize("formatter", [JsonFormatter(), logging.Formatter(TEXT)])
def test_the_messages_of_one_logger_are_found_in_a_log_of_either_format(formatter: logging.Formatter) -> None:
    lines = [formatter.format(record(f"line {name}", name=name)) for name in ("tinkerpool.start", "tinkerpool.serve")]
    lines += ["Fatal Python error: Aborted", "17", ""]
    assert [message_in(line, "tinkerpool.start") for line in lines] == ["line tinkerpool.start", *[None] * 4]


def test_a_level_or_format_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="log level is 'loud'; it must be one of debug, info, warning, error"):
        LogConfig(level="loud")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="log format is 'xml'; it must be one of text, json"):
        LogConfig(format="xml")  # type: ignore[arg-type]


@pytest.fixture
def library() -> Iterator[logging.Logger]:
    logger = logging.getLogger("a_library")
    yield logger
    logger.handlers.clear()


def test_a_library_that_brings_a_handler_of_its_own_logs_through_those_of_the_process(
    library: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    own = StringIO()
    library.addHandler(logging.StreamHandler(own))
    library.propagate = False
    take_over("a_library")
    library.error("broken")
    assert own.getvalue() == ""
    assert logged_by("a_library", caplog) == ["broken"]
