"""The outputs of a request for its prompt's tokens, gathered while the prompt is computed.

Does not depend on models, caches or batches.

Main invariant: the outputs for a position depend only on its logits, the request and its seed, and use no random
number of a sequence.

Dimensions: p tokens of the prompt, N rows, V vocabulary, k tokens wanted at a position.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.contract.messages import SampleRequest, TokenLogprobs
from workers.sampling.drawing import ALTERNATIVES, Distribution, check_finite, likeliest, uniforms


class PromptOutputs:
    """Log-probabilities of a prompt's tokens, of other tokens at their positions, and drawn alternatives."""

    def __init__(self, request: SampleRequest, vocab_size: int) -> None:
        """Allocate the outputs that the request wants."""
        self._request = request
        length, last_n = len(request.prompt), request.prompt_logprobs_last_n
        self._params = replace(request.params, top_k=-1, top_p=1.0)
        self._begin = max(1, length - last_n) if last_n else 1
        """The first position whose own and likeliest tokens are wanted."""
        self.logprobs = np.full(length, np.nan, np.float32) if request.prompt_logprobs else None
        """(p,), as in `SampleResult.prompt_logprobs`; the fields below are like fields of `SampleResult` too."""
        self.topk = _allocate(length, min(request.topk_prompt_logprobs, vocab_size))
        targets = request.prompt_targets
        self.targets = None if targets is None else np.zeros(targets.shape, np.float32)
        self.alternatives = _allocate(length - 1, request.prompt_alt_tokens_k)
        self.first_row = self._first_row()
        """The first position whose logits are needed; they are about the next token. p - 1 or more: none is needed."""

    def _first_row(self) -> int:
        none = len(self._request.prompt) - 1
        if self.alternatives is not None:
            return 0
        first = none if self.logprobs is None and self.topk is None else self._begin - 1
        if self._request.prompt_targets is not None:
            asked = np.flatnonzero((self._request.prompt_targets >= 0).any(axis=1))
            first = min(first, int(asked[0])) if len(asked) else first
        return first

    def note(self, row: int, logits: Tensor) -> None:
        """Take the logits (N, V) of the positions from `row` on; the prompt's last position is not among them.

        Raises NonFiniteLogitsError.
        """
        stop = row + len(logits)
        values = logits.cpu().numpy()
        check_finite(values)
        logprobs = logits.log_softmax(-1)
        begin = max(row, self._begin - 1)
        if self.logprobs is not None and begin < stop:
            own = self._request.prompt[begin + 1 : stop + 1]
            self.logprobs[begin + 1 : stop + 1] = _picked(logprobs[begin - row :], own[:, None])[:, 0]
        if self.topk is not None:
            for position in range(begin, stop):
                of_position = logprobs[position - row].cpu().numpy()
                picked = likeliest(of_position, self.topk.token_ids.shape[1])
                _put(self.topk, position + 1, picked, of_position)
        if self.targets is not None:
            assert self._request.prompt_targets is not None
            wanted = self._request.prompt_targets[row:stop]
            self.targets[row:stop] = np.where(wanted < 0, 0, _picked(logprobs, np.maximum(wanted, 0)))
        if self.alternatives is not None:
            self._draw(self.alternatives, row, values, logprobs.cpu().numpy())

    def _draw(self, drawn: TokenLogprobs, row: int, logits: NDArray[np.float32], logprobs: NDArray[np.float32]) -> None:
        count = drawn.token_ids.shape[1]
        numbers = [uniforms(self._params.seed, ALTERNATIVES + i, row, len(logits)) for i in range(count)]
        for index, values in enumerate(logits):
            distribution = Distribution(values, self._params)
            picked = np.array([distribution.pick(float(stream[index])) for stream in numbers])
            _put(drawn, row + index, picked, logprobs[index])


def _allocate(num_rows: int, k: int) -> TokenLogprobs | None:
    """Return empty outputs for k tokens a row; None if k is 0."""
    if not k:
        return None
    return TokenLogprobs(
        token_ids=np.zeros((num_rows, k), np.int32), logprobs=np.full((num_rows, k), np.nan, np.float32)
    )


def _put(into: TokenLogprobs, row: int, tokens: NDArray[np.intp], logprobs: NDArray[np.float32]) -> None:
    into.token_ids[row] = tokens
    into.logprobs[row] = logprobs[tokens]


def _picked(logprobs: Tensor, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the log-probabilities (N, k) of tokens (N, k), from (N, V)."""
    picked: NDArray[np.float32] = (
        logprobs.gather(1, torch.from_numpy(tokens.astype(np.int64)).to(logprobs.device)).cpu().numpy()
    )
    return picked
