"""Where the time of a batch goes: packing, forward, losses, backward, optimizer steps.

On a GPU, which computes behind the host, a phase has the time until its kernels were sent, and the phase that waits
for their results has the rest: `loss` in a pass, `step` in a step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

Phase = Literal["pack", "forward", "loss", "backward", "step"]


class PhaseTimes:
    """The seconds of each phase of one batch. One thread only."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._since = 0.0

    def begin(self) -> None:
        """Begin a phase now."""
        self._since = time.perf_counter()

    def end(self, phase: Phase) -> None:
        """End this phase now, and begin the next one."""
        now = time.perf_counter()
        self._seconds[phase] += now - self._since
        self._since = now

    def take(self) -> Mapping[str, float]:
        """Return the seconds of each phase since the last call."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds
