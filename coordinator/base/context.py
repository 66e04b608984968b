"""The context that all parts of a coordinator share: settings, clock, epoch, and the record of fatal errors."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.base.config import CoordinatorConfig
from coordinator.base.failure import Failure
from coordinator.base.time import Time


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One epoch of a coordinator."""

    config: CoordinatorConfig
    time: Time
    failure: Failure
    epoch: int
