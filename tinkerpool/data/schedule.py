"""The learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

ScheduleKind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A warm-up in equal increments to the learning rate, then a decay to a fraction of it."""

    learning_rate: float
    """The highest, >= 0."""
    num_steps: int
    """Steps of the run, warm-up included."""
    kind: ScheduleKind = "linear"
    """How the learning rate decays after the warm-up: not at all, along a line, or along half a cosine wave."""
    warmup_steps: int = 0
    """The first step has 1 / warmup_steps of the learning rate, the last of these all of it. 0: no warm-up."""
    final_fraction: float = 0.0
    """Fraction of the learning rate that the decay reaches behind the last step, 0 to 1."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise ValueError(f"kind is {self.kind!r}; it must be one of {', '.join(get_args(ScheduleKind))}")
        if not 0 <= self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be 0 or more, got {self.learning_rate}")
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}")
        if not 0 <= self.warmup_steps <= self.num_steps:
            raise ValueError(f"warmup_steps must be 0 to num_steps ({self.num_steps}), got {self.warmup_steps}")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"final_fraction must be 0 to 1, got {self.final_fraction}")

    def at(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0; behind the last step, the final one."""
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}")
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.learning_rate
        decayed = min(1.0, (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps))
        rest = 1 - decayed if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * decayed))
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * rest)
