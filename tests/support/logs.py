"""What one part of the product has logged, among the records of all threads of the process."""

from __future__ import annotations

import pytest


def logged_by(logger: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages of a logger and those below it, oldest first.

    Sessions of other tests, whose pools are gone, log too until the process ends: their threads send heartbeats.
    """
    return [each.getMessage() for each in caplog.records if f"{each.name}.".startswith(f"{logger}.")]
