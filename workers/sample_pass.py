"""The forward of one decode step: one new token of many samples and some whole prompts, in one pass of the base model.

Knows rows, versions and caches; not requests, nor how tokens are drawn.

Main invariant: a part's outcome depends on that part and its version alone. A pass that failed can be run again: it
changes nothing but what lies behind the caches' lengths.

Dimensions: T rows of the pass, D hidden size, N rows of logits, V vocabulary, P tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.bank import Bank
from workers.base_model import BaseModel
from workers.kv_cache import PromptCache, StepAttention, WaveCache
from workers.lora import Segment

LOGIT_ROWS = 256
"""Rows of logits that are held at once for the log-probabilities of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of the pass that belong together: the next token of every sequence of a wave, or a prompt."""

    key: str
    """Their version's key in the bank; empty for the base model alone."""
    tokens: NDArray[np.int64]
    """(S,) of a wave, (P,) of a prompt."""
    cache: WaveCache | PromptCache
    """A prompt's is empty, and filled by the pass."""
    wants_prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """Logits and log-probabilities (V,) of the next token, on the CPU, untempered."""

    logits: NDArray[np.float32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the pass gives a part."""

    rows: list[LogitsRow]
    """One per sequence of a wave; of a prompt, the last one's."""
    prompt_logprobs: NDArray[np.float32] | None
    """(P,), the first NaN: nothing comes before it."""


class SamplePass:
    """Runs passes on one base model and bank. One thread only."""

    def __init__(self, base_model: BaseModel, bank: Bank) -> None:
        self._base_model = base_model
        self._bank = bank

    @torch.no_grad()
    def run(self, parts: Sequence[Part]) -> list[Outcome]:
        """One forward. Parts of one version stand together; at most as many versions as the bank has slots."""
        device = self._base_model.device
        tokens = np.concatenate([part.tokens for part in parts])
        positions = np.concatenate([_positions(part) for part in parts])
        hidden = self._base_model.forward(
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(positions).to(device),
            self._segments([(part.key, len(part.tokens)) for part in parts]),
            StepAttention([part.cache for part in parts], self._base_model.attend_packed),
        )  # (T, D)
        of_part = hidden.split([len(part.tokens) for part in parts])
        drawn = [
            rows if isinstance(part.cache, WaveCache) else rows[-1:] for part, rows in zip(parts, of_part, strict=True)
        ]
        runs = [(part.key, len(rows)) for part, rows in zip(parts, drawn, strict=True)]
        logits = iter(self._logits(torch.cat(drawn), runs))
        return [
            Outcome(
                [next(logits) for _ in range(len(drawn_rows))],
                self._prompt_logprobs(part, rows) if part.wants_prompt_logprobs else None,
            )
            for part, rows, drawn_rows in zip(parts, of_part, drawn, strict=True)
        ]

    def _segments(self, runs: Sequence[tuple[str, int]]) -> list[Segment]:
        """One segment per version from runs of rows (version key, count) in row order."""
        counts: dict[str, int] = {}
        for key, count in runs:
            counts[key] = counts.get(key, 0) + count
        keys = [key for key in counts if key]
        rows = dict(zip(keys, self._bank.acquire(keys), strict=True))
        segments = []
        stop = 0
        for key, count in counts.items():
            start, stop = stop, stop + count
            if key:
                segments.append(Segment(start, stop, rows[key].groups))
        return segments

    def _logits(self, hidden: Tensor, runs: Sequence[tuple[str, int]]) -> list[LogitsRow]:
        """Rows for drawing, from hidden states (N, D)."""
        logits = self._base_model.unembed(hidden, self._segments(runs)).float()  # (N, V)
        logprobs = logits.log_softmax(-1)
        return [LogitsRow(*pair) for pair in zip(logits.cpu().numpy(), logprobs.cpu().numpy(), strict=True)]

    def _prompt_logprobs(self, part: Part, hidden: Tensor) -> NDArray[np.float32]:
        """Log-probability (P,) of every prompt token, from the prompt's hidden states (P, D)."""
        out = np.full(len(part.tokens), np.nan, np.float32)
        targets = torch.from_numpy(part.tokens[1:]).to(hidden.device)
        for start in range(0, len(targets), LOGIT_ROWS):
            stop = min(start + LOGIT_ROWS, len(targets))
            segments = self._segments([(part.key, stop - start)])
            logits = self._base_model.unembed(hidden[start:stop], segments).float()  # (N, V)
            logprobs = logits.log_softmax(-1).gather(1, targets[start:stop].unsqueeze(1))  # (N, 1)
            out[start + 1 : stop + 1] = logprobs.squeeze(1).cpu().numpy()
        return out


def _positions(part: Part) -> NDArray[np.int64]:
    if isinstance(part.cache, WaveCache):
        return np.full(len(part.tokens), part.cache.length, np.int64)
    return np.arange(len(part.tokens), dtype=np.int64)
