"""How much memory a pass takes at its peak, before it is run, and so: what fits, and when layers run twice.

Knows the shapes of a model's linears, and what the passes keep of them; not how much memory there is.

Main invariant: an upper bound in fp32 on the CPU. It counts what autograd keeps of every layer and what the backward of
one layer, the one of most, holds on top; tests compare it with a count of every tensor of real passes. Values are
counted as fp32 in any data type, for many are, and kernels' own buffers are not counted: leave room for them.

Dimensions: T rows of the pass, D hidden size, Q all query heads together, K all key-value heads together, M inner size
of the MLP, R padded rank, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from workers.rows import GroupShape
from workers.training import device_logits, logits

Recompute = Literal["off", "on", "auto"]
"""Whether layers run again in the backward instead of keeping what they computed: never, always, or where a pass would
not fit otherwise."""
VALUE_BYTES = 4
MASK_BYTES = 4
"""Per pair of tokens that a sliding window's mask keeps, on the CPU."""
MASK_MAKING_BYTES = 11
"""The same while it is made, on top: distances (int64) and three comparisons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a pass is asked to carry."""

    num_tokens: int
    """T."""
    lengths: Sequence[int]
    """Of the sequences."""
    rank: int
    """The largest padded rank."""
    num_adapters: int = 1
    num_targets: int = 1
    """Of a token, at most."""
    pending_values: int = 0
    """Values of gradients that are pending; the pass keeps a copy, in case it must be undone."""


class PassMemory:
    """The peak of a pass on one base model."""

    def __init__(
        self,
        model: nn.Module,
        config: Any,
        shapes: Sequence[GroupShape],
        *,
        is_deferred: bool = False,
        makes_masks: bool = True,
    ) -> None:
        """`shapes` are all linears in the order of the forward, the unembedding last; a deferred pass has blocks of
        logits as `device_logits` makes them; `makes_masks` is the attention's."""
        self._is_deferred = is_deferred
        inner, unembedding = shapes[:-1], shapes[-1]
        self._num_layers = int(config.num_hidden_layers)
        self._hidden = unembedding.d_in
        self._vocab_size = unembedding.d_outs[0]
        self._num_linears = sum(len(shape.names) for shape in inner)
        self._widest = max(shape.d_in + sum(shape.d_outs) for shape in shapes)
        self._mlp = max((max(shape.d_in, *shape.d_outs) for shape in inner if shape.kind == "mlp"), default=0)
        self._head_dim = int(getattr(config, "head_dim", None) or self._hidden // config.num_attention_heads)
        self._queries = self._head_dim * int(config.num_attention_heads)
        self._keys = self._head_dim * int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        window = getattr(config, "sliding_window", None)
        self._window = int(window) if makes_masks and window is not None and _has_window(config) else None
        """Above how many tokens a sequence has a mask; None: none has."""
        norms = [
            getattr(module, "weight", None) for module in model.modules() if type(module).__name__.endswith("Norm")
        ]
        self._num_norms: int = sum(weight is not None and weight.numel() == self._hidden for weight in norms)
        self._linear_values = sum(shape.d_in + sum(shape.d_outs) for shape in inner)

    def peak_bytes(self, load: Load, *, backward: bool, recompute: bool = False) -> int:
        """Bytes that a pass takes at its peak beyond what is there before it."""
        per_token = forward = 6 * self._hidden + max(3 * self._mlp, 6 * self._queries)
        if backward:
            kept = self._kept_values(load.rank)
            of_one_layer = -(-kept // self._num_layers)
            per_token = self._transient_values() + kept
            if recompute:
                per_token = self._transient_values() + of_one_layer + self._num_layers * self._hidden
        # Besides: cosines and sines of at most two kinds, tokens, positions, what losses take of every target.
        besides = 4 * self._head_dim + 8 + 8 * load.num_targets
        values, forward_values = (load.num_tokens * (each + besides) for each in (per_token, forward))
        values += self._fixed_values(load)
        kept_masks, making_masks = self._mask_bytes(load.lengths)  # made in the forward of the first layer
        return max(values * VALUE_BYTES, forward_values * VALUE_BYTES + making_masks) + kept_masks

    def num_fitting(
        self, room_bytes: int, load_of: Callable[[int], Load], most: int, *, backward: bool, recompute: bool
    ) -> int:
        """The largest number of tokens, at most `most`, whose `load_of` fits in `room_bytes`."""

        def fits(num_tokens: int) -> bool:
            return self.peak_bytes(load_of(num_tokens), backward=backward, recompute=recompute) <= room_bytes

        if fits(most):
            return most
        low, high = 0, most - 1
        while low < high:
            middle = (low + high + 1) // 2
            if fits(middle):
                low = middle
            else:
                high = middle - 1
        return low

    def _kept_values(self, rank: int) -> int:
        """Per token, what autograd keeps of all layers.

        The input of every linear, twice the residual stream (both norms' inputs), gate, activation and up, and of the
        attention queries, keys and values, repeated to all heads, its output, and what norms of heads read. Counted as
        all inputs and outputs of linears (two outputs of D values each stand for the residual stream), the activation,
        four times Q, D for each further norm, and x A^T of every linear.
        """
        further_norms = max(0, self._num_norms - 2 * self._num_layers - 1)
        return (
            self._linear_values
            + self._num_layers * (self._mlp + 4 * self._queries)
            + further_norms * self._hidden
            + self._num_linears * rank
        )

    def _transient_values(self) -> int:
        """Per token, what the backward of a layer holds on top: in the MLP, or in the attention; around it both ways
        the last hidden states, their gradient, and a layer's own gradients of D values."""
        return 6 * self._hidden + max(2 * self._mlp, 2 * self._queries + 4 * self._keys)

    def _fixed_values(self, load: Load) -> int:
        """Whatever the number of tokens: a block of logits three times, gradients of A and B of the widest linears of
        every adapter, and copies of pending gradients."""
        if self._is_deferred:
            num_rows = min(load.num_tokens, device_logits.block_rows_of(self._vocab_size))
        else:
            num_rows = logits.block_rows_of(self._vocab_size)
        return 3 * num_rows * self._vocab_size + 2 * load.num_adapters * load.rank * self._widest + load.pending_values

    def _mask_bytes(self, lengths: Sequence[int]) -> tuple[int, int]:
        """What masks of sliding windows take while the pass runs, and while they are made."""
        masked = [length for length in set(lengths) if self._window is not None and length > self._window]
        if not masked:
            return 0, 0
        return MASK_BYTES * sum(length**2 for length in masked), MASK_MAKING_BYTES * max(masked) ** 2


def _has_window(config: Any) -> bool:
    """Whether any layer slides: transformers lists the kinds of layers, or else means all of them."""
    kinds = getattr(config, "layer_types", None)
    return kinds is None or "sliding_attention" in kinds
