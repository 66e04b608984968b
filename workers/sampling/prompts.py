"""A request's prompt on a worker: how far it is computed, which blocks it shares, and the outputs for its tokens.

Does not depend on the pool of blocks or on passes: `prefill` decides, these classes record.

Main invariants: the blocks of a prompt are its shared ones first, in chain order and all held, then its private ones.
The outputs for a position depend only on its logits, the request and its seed, and use no random number of a sequence.

Dimensions: p tokens of the prompt, N rows, V vocabulary, k tokens wanted at a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.contract.capacity import num_blocks_for
from workers.contract.messages import SampleRequest, TokenLogprobs
from workers.host.uploads import on_device
from workers.sampling.device_drawing import LISTED_ROWS, draw_rows, likeliest_of
from workers.sampling.drawing import ALTERNATIVES, Distribution, NonFiniteLogitsError, check_finite, uniforms
from workers.sampling.kv_cache import Prefix, PromptBlocks


class Prompt:
    """The tokens of one prompt, and the blocks with their keys and values."""

    def __init__(self, tokens: NDArray[np.int32], num_shareable_blocks: int, block_tokens: int) -> None:
        """Take the tokens; the first `num_shareable_blocks` blocks need not be computed if they are shared already."""
        self.tokens = tokens
        self._block_tokens = block_tokens
        self.blocks: list[int] = []
        """Key-value blocks, as many as are computed or about to be."""
        self.location = PromptBlocks(self.blocks, len(tokens))
        """The same list of blocks, for attention."""
        self.shared: list[Prefix] = []
        self.num_computed = 0
        """Tokens whose keys and values are there."""
        self.num_cached_tokens = 0
        """Tokens that were found in shared blocks instead of being computed."""
        self.kept: Prefix | None = None
        """The last of its shared blocks that has a checkpoint because this prompt was computed up to its end."""
        self._num_shareable_blocks = num_shareable_blocks

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return self.location.length

    @property
    def num_blocks(self) -> int:
        """Blocks that the whole prompt takes."""
        return num_blocks_for(self.length, self._block_tokens)

    @property
    def num_missing_blocks(self) -> int:
        """Blocks that the prompt does not have yet."""
        return self.num_blocks - len(self.blocks)

    @property
    def private_blocks(self) -> list[int]:
        """Blocks after the shared ones."""
        return self.blocks[len(self.shared) :]

    @property
    def is_computed(self) -> bool:
        """Whether the keys and values of all tokens are there."""
        return self.num_computed == self.length

    @property
    def last_shareable(self) -> int:
        """The end of the last block that a prompt with the same tokens need not compute."""
        return (self.length - 1) // self._block_tokens * self._block_tokens

    def shared_until(self, position: int) -> Prefix | None:
        """Return the shared block that ends at a position; None if there is none."""
        number, rest = divmod(position, self._block_tokens)
        return self.shared[number - 1] if not rest and 0 < number <= len(self.shared) else None

    def block_tokens(self, block: int) -> bytes:
        """Return the tokens of a whole block of the prompt."""
        tokens = self.tokens[block * self._block_tokens : (block + 1) * self._block_tokens]
        assert len(tokens) == self._block_tokens
        return tokens.tobytes()

    def next_shareable(self, num_found: int) -> bytes | None:
        """Return the tokens of the block that the prompt needs next after `num_found` others; None: compute it."""
        block = len(self.shared)
        if self.num_computed != block * self._block_tokens:
            return None  # its version was replaced, and no block computed since can be shared
        block += num_found
        return self.block_tokens(block) if block < self._num_shareable_blocks else None

    def use_shared(self, prefixes: Sequence[Prefix]) -> None:
        """Use shared blocks, which the caller holds, as the next ones of the prompt."""
        num_tokens = len(prefixes) * self._block_tokens
        self.shared += prefixes
        self.blocks.extend(prefix.block for prefix in prefixes)
        self.num_computed += num_tokens
        self.num_cached_tokens += num_tokens

    def add_private(self, block: int) -> None:
        """Append a block that will be computed."""
        self.blocks.append(block)

    def make_shared(self, prefix: Prefix) -> None:
        """Replace the first private block by the shared one with the same tokens."""
        self.blocks[len(self.shared)] = prefix.block
        self.shared.append(prefix)

    def keep(self, prefix: Prefix, *, is_lasting: bool) -> Prefix | None:
        """Record that a shared block has a checkpoint of this prompt; return the block whose checkpoint it replaces.

        A lasting one is never replaced.
        """
        replaced, self.kept = self.kept, None if is_lasting else prefix
        return replaced

    def advance(self, stop: int) -> None:
        """Record that all tokens before `stop` are computed."""
        self.num_computed = stop


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
        logprobs = logits.log_softmax(-1)
        begin = max(row, self._begin - 1)
        own = self._request.prompt[row + 1 : stop + 1, None]
        targets = own[:, :0] if self._request.prompt_targets is None else self._request.prompt_targets[row:stop]
        picked = _picked(logits, logprobs, np.hstack((own, np.maximum(targets, 0))))
        if self.logprobs is not None and begin < stop:
            self.logprobs[begin + 1 : stop + 1] = picked[begin - row :, 0]
        if self.targets is not None:
            self.targets[row:stop] = np.where(targets < 0, 0, picked[:, 1:])
        if self.topk is not None and begin < stop:
            found = likeliest_of(logprobs[begin - row :], self.topk.token_ids.shape[1])
            _put(self.topk, begin + 1, found)
        if self.alternatives is not None:
            for start in range(0, len(logits), LISTED_ROWS):
                rows = slice(start, start + LISTED_ROWS)
                _put(self.alternatives, row + start, self._drawn(row + start, logits[rows], logprobs[rows]))

    def _drawn(self, row: int, logits: Tensor, logprobs: Tensor) -> TokenLogprobs:
        """Return tokens that are drawn at the positions from `row` on, of logits and log-probabilities (N, V)."""
        assert self.alternatives is not None
        count = self.alternatives.token_ids.shape[1]
        streams = [uniforms(self._params.seed, ALTERNATIVES + i, row, len(logits)) for i in range(count)]
        numbers = np.stack(streams, axis=1)  # (N, k)
        if not logits.is_cpu:
            drawn = draw_rows(logits, logprobs, [self._params] * len(logits), numbers.tolist()).read()
            tokens = np.array(drawn.tokens, np.int32).reshape(numbers.shape)
            return TokenLogprobs(token_ids=tokens, logprobs=np.array(drawn.logprobs, np.float32).reshape(tokens.shape))
        distributions = [Distribution(values, self._params) for values in logits.numpy()]
        picked = [[own.pick(number) for number in of_row] for own, of_row in zip(distributions, numbers, strict=True)]
        tokens = np.array(picked)
        return TokenLogprobs(
            token_ids=tokens.astype(np.int32), logprobs=np.take_along_axis(logprobs.numpy(), tokens, axis=1)
        )


def _allocate(num_rows: int, k: int) -> TokenLogprobs | None:
    """Return empty outputs for k tokens a row; None if k is 0."""
    if not k:
        return None
    return TokenLogprobs(
        token_ids=np.zeros((num_rows, k), np.int32), logprobs=np.full((num_rows, k), np.nan, np.float32)
    )


def _put(into: TokenLogprobs, row: int, found: TokenLogprobs) -> None:
    """Set the rows from `row` on."""
    into.token_ids[row : row + len(found.token_ids)] = found.token_ids
    into.logprobs[row : row + len(found.logprobs)] = found.logprobs


def _picked(logits: Tensor, logprobs: Tensor, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the log-probabilities (N, k) of tokens (N, k), from (N, V); from a device, in one copy.

    Raises NonFiniteLogitsError if logits (N, V) are not finite.
    """
    picked = logprobs.gather(1, on_device(tokens, logprobs.device, torch.int64))  # (N, k)
    if logits.is_cpu:
        check_finite(logits.numpy())
        return picked.numpy()
    found = torch.cat((picked.flatten(), logits.isfinite().all().view(1))).cpu().numpy()
    if not found[-1]:
        raise NonFiniteLogitsError
    return found[:-1].reshape(tokens.shape)
