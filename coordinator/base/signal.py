"""A wake-up without data: a producer signals that its state has changed, and receivers read that state.

Does not depend on what changes. Main invariant: a notification is never lost; several before a receiver looks count as
one.
"""

from __future__ import annotations

import asyncio


class Signal:
    """Sets the event of every receiver. A receiver clears its own event before it reads the state."""

    def __init__(self) -> None:
        self._receivers: list[asyncio.Event] = []

    def subscribe(self, receiver: asyncio.Event) -> None:
        """Set this event at each notification from now on."""
        self._receivers.append(receiver)

    def notify(self) -> None:
        """Wake every receiver."""
        for receiver in self._receivers:
            receiver.set()
