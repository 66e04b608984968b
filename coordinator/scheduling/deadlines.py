"""How long a batch may take before its worker is given up: a generous multiple of what it is predicted to take.

Feeds `costs` with the batches that were answered, and predicts by it; knows batches and lives, not what is computed or
who asked. A worker that is stopped or cut off is found sooner, by its pings.
"""

from __future__ import annotations

from coordinator.scheduling.cost_model import CycleCosts
from workers.contract.messages import Batch, LoadItem, PassItem, SaveItem

FLOOR_S = 8.0
"""Also an empty batch may take this long."""
FACTOR = 8.0
"""How many times its prediction a batch may take."""
UNKNOWN_S = 600.0
"""What a batch may take while nothing is known of any size, or its worker has not answered one before."""
ALONE_FACTOR = 4.0
"""How many times longer a batch may take for each worker that has died of it alone: it may just be slow."""
STEP_TOKENS = 640
"""The most rows of a decode step that may be under way when a batch comes: of prompts and of running sequences."""
BYTES_PER_S, SAVE_S = 20e6, 5.0
"""How slowly states may travel to a worker, and how long one may take to be handed out."""


class Deadlines:
    """What the batches of one base model may take."""

    def __init__(self, costs: CycleCosts) -> None:
        self._costs = costs
        self._owed_s: dict[str, float] = {}
        """By life that has answered a batch, so that loading kernels is behind it: what decoding gets for the last
        one, at the most."""

    def allowed_s(self, batch: Batch, incarnation: str, deaths_alone: int = 0) -> float:
        """Seconds until the worker's answer must be there."""
        num_tokens, length = _size(batch)
        predicted = self._costs.predicted_s(num_tokens, length) if num_tokens else 0.0
        step = self._costs.predicted_s(STEP_TOKENS, 0.0)  # no backward outweighs long sequences
        if incarnation not in self._owed_s or predicted is None or step is None:
            return UNKNOWN_S
        # Decoding gets its share for the batch before, and ends the step that it is in: this one may wait for both.
        waiting = self._owed_s[incarnation] + min(FACTOR * step, UNKNOWN_S)
        states = _state_bytes(batch) / BYTES_PER_S + SAVE_S * _num_saves(batch)
        return (FLOOR_S + FACTOR * predicted + waiting + states) * ALONE_FACTOR**deaths_alone

    def observe(self, batch: Batch, incarnation: str, seconds: float) -> None:
        """A batch was answered after this time."""
        is_first = incarnation not in self._owed_s
        self._owed_s[incarnation] = seconds * batch.decode_share / (1.0 - batch.decode_share)
        num_tokens, length = _size(batch)
        if num_tokens:
            self._costs.observe_pass(num_tokens, length, seconds, is_pure=not is_first and not batch.installs)

    def forget(self, incarnation: str) -> None:
        """That life has ended."""
        self._owed_s.pop(incarnation, None)


def _state_bytes(batch: Batch) -> int:
    states = [install.state for install in batch.installs] + [i.state for i in batch.items if isinstance(i, LoadItem)]
    return sum(len(s.weights) + len(s.optimizer or b"") + len(s.gradient or b"") for s in states if s is not None)


def _num_saves(batch: Batch) -> int:
    return sum(isinstance(item, SaveItem) for item in batch.items)


def _size(batch: Batch) -> tuple[int, float]:
    """Tokens of the batch's passes, and the mean length of the sequence that a token is in."""
    lengths = [len(datum.tokens) for item in batch.items if isinstance(item, PassItem) for datum in item.data]
    num_tokens = sum(lengths)
    return num_tokens, sum(length * length for length in lengths) / max(1, num_tokens)
