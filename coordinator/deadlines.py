"""How long a batch may take before its worker is given up: a generous multiple of what it is predicted to take.

Learns from batches that were answered; knows tokens and seconds, not what is computed or who asked. A prediction is a
bound on purpose: attention makes a token dearer the longer its sequence, at most in proportion to the length. A worker
that is stopped or cut off is found sooner, by its pings.
"""

from __future__ import annotations

from workers.messages import Batch, LoadItem, PassItem, SaveItem

FLOOR_S = 8.0
"""Also an empty batch may take this long."""
FACTOR = 8.0
"""How many times its prediction a batch may take."""
UNKNOWN_S = 600.0
"""What a batch may take while nothing is known of its size, or its worker has not answered one before."""
ALONE_FACTOR = 4.0
"""How many times longer a batch may take for each worker that has died of it alone: it may just be slow."""
BYTES_PER_S, SAVE_S = 20e6, 5.0
"""How slowly states may travel to a worker, and how long one may take to be handed out."""
MEMORY = 0.8
"""Weight of what was known before against what a batch shows."""
TOKENS_MIN = 64
"""A batch with fewer tokens shows little about the price of one: it counts only while there is nothing better."""


class Deadlines:
    """What the batches of one base model may take."""

    def __init__(self) -> None:
        self._s_per_token = 0.0
        self._length = 0.0
        """Mean length of the sequences that this price comes from."""
        self._is_rough = True
        """It comes from batches with too few tokens, or from none."""
        self._last_s: dict[str, float] = {}
        """What the last batch of each life took that has answered one: loading kernels and memory is behind it."""

    def allowed_s(self, batch: Batch, incarnation: str, deaths_alone: int = 0) -> float:
        """Seconds until the worker's answer must be there."""
        num_tokens, length = _size(batch)
        if incarnation not in self._last_s or (num_tokens and not self._s_per_token):
            return UNKNOWN_S
        predicted = num_tokens * self._s_per_token * max(1.0, length / self._length if self._length else 1.0)
        # Decoding gets as long as the batch before took, so this one may first wait that long.
        waiting = self._last_s[incarnation] + _state_bytes(batch) / BYTES_PER_S + SAVE_S * _num_saves(batch)
        return (FLOOR_S + FACTOR * predicted + waiting) * ALONE_FACTOR**deaths_alone

    def observe(self, batch: Batch, incarnation: str, seconds: float) -> None:
        """A batch was answered after this time."""
        is_first = incarnation not in self._last_s
        self._last_s[incarnation] = 0.0 if is_first else seconds
        num_tokens, length = _size(batch)
        is_rough = num_tokens < TOKENS_MIN
        if not num_tokens or (is_first and self._s_per_token) or (is_rough and not self._is_rough):
            return
        weight = MEMORY if self._s_per_token and is_rough == self._is_rough else 0.0
        self._is_rough = is_rough
        self._s_per_token = weight * self._s_per_token + (1 - weight) * seconds / num_tokens
        self._length = weight * self._length + (1 - weight) * length

    def forget(self, incarnation: str) -> None:
        """That life has ended."""
        self._last_s.pop(incarnation, None)


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
