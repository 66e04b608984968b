"""What parts of the product have logged, among the records of all threads of the process."""

from __future__ import annotations

import logging

import pytest


def records_of(caplog: pytest.LogCaptureFixture, *loggers: str) -> list[logging.LogRecord]:
    """Return the records of loggers and those below them, oldest first.

    Sessions of other tests, whose pools are gone, log too until the process ends: their threads send heartbeats.
    """
    prefixes = tuple(f"{logger}." for logger in loggers)
    return [each for each in caplog.records if f"{each.name}.".startswith(prefixes)]


def logged_by(logger: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages of a logger and those below it, oldest first."""
    return [each.getMessage() for each in records_of(caplog, logger)]
