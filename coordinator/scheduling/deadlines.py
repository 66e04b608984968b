"""How long a batch may take before its worker counts as lost: a generous multiple of its predicted time.

Records the times of finished batches in the cost model, and predicts from it. Depends on batches and incarnations; not
on operations or tenants. Main invariant: an incarnation without a finished batch gets `UNKNOWN_S`. (Pings find a worker
sooner that is stopped or cut off.)
"""

from __future__ import annotations

from coordinator.scheduling.cost_model import CycleCosts
from workers.contract.messages import Batch, LoadItem, PassItem, SaveItem

FLOOR_S = 8.0
"""Seconds that every batch may take, also an empty one."""
FACTOR = 8.0
"""How many times its prediction a batch may take."""
UNKNOWN_S = 600.0
"""Seconds that a batch may take before any pass was measured, or if it is its incarnation's first one."""
SOLO_FACTOR = 4.0
"""How many times longer a batch may take for each solo loss of its operation: it may only be slow."""
STEP_TOKENS = 640
"""The most rows of a decode step that may be running when a batch arrives: of prompts and of running sequences."""
BYTES_PER_S, SAVE_S = 20e6, 5.0
"""The slowest transfer of states to a worker, and the most seconds that a save may take."""


class Deadlines:
    """The deadlines of one base model's batches."""

    def __init__(self, costs: CycleCosts) -> None:
        self._costs = costs
        self._owed_s: dict[str, float] = {}
        """Incarnation that has finished a batch (and so has loaded its kernels) to the most seconds that decoding gets
        as its share for the last one."""

    def allowed_s(self, batch: Batch, incarnation: str, num_solo_losses: int = 0) -> float:
        """Return the seconds within which the worker must reply."""
        num_tokens, length = _size(batch)
        predicted = self._costs.predicted_s(num_tokens, length) if num_tokens else 0.0
        step = self._costs.predicted_s(STEP_TOKENS, 0.0)  # no backward outweighs long sequences
        if incarnation not in self._owed_s or predicted is None or step is None:
            return UNKNOWN_S
        # Decoding gets its share for the batch before, and finishes its running step: this batch may wait for both.
        waiting = self._owed_s[incarnation] + min(FACTOR * step, UNKNOWN_S)
        states = _state_bytes(batch) / BYTES_PER_S + SAVE_S * _num_saves(batch)
        return (FLOOR_S + FACTOR * predicted + waiting + states) * SOLO_FACTOR**num_solo_losses

    def observe(self, batch: Batch, incarnation: str, seconds: float) -> None:
        """Record the time after which the worker replied to a batch."""
        is_first = incarnation not in self._owed_s
        self._owed_s[incarnation] = seconds * batch.decode_share / (1.0 - batch.decode_share)
        num_tokens, length = _size(batch)
        if num_tokens:
            self._costs.observe_pass(num_tokens, length, seconds, is_pure=not is_first and not batch.installs)

    def forget(self, incarnation: str) -> None:
        """Drop the state of an incarnation that has ended."""
        self._owed_s.pop(incarnation, None)


def _state_bytes(batch: Batch) -> int:
    states = [install.state for install in batch.installs] + [i.state for i in batch.items if isinstance(i, LoadItem)]
    return sum(len(s.weights) + len(s.optimizer or b"") + len(s.gradient or b"") for s in states if s is not None)


def _num_saves(batch: Batch) -> int:
    return sum(isinstance(item, SaveItem) for item in batch.items)


def _size(batch: Batch) -> tuple[int, float]:
    """Return the tokens of the batch's passes, and the mean length of the sequence that a token is in."""
    lengths = [len(datum.tokens) for item in batch.items if isinstance(item, PassItem) for datum in item.data]
    num_tokens = sum(lengths)
    return num_tokens, sum(length * length for length in lengths) / max(1, num_tokens)
