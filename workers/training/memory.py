"""Estimates the peak memory of a pass before it runs, and decides by it how many tokens fit and if layers run again.

Depends on the shapes of a model's linears, the tensors that a pass keeps, and the memory that is free. The decisions
change no bits.

Main invariant: the estimate is an upper bound in fp32 on the CPU, and on a GPU. It adds the tensors that autograd keeps
of all layers, those that the backward of the largest layer holds on top, and buffers of the attention's kernel; tests
compare it with a count of every tensor of passes. Activations are counted in the model's dtype on a GPU, and as fp32 on
a CPU, where many are. Buffers of other kernels are not counted; `USED_FRACTION` leaves room for them.

Dimensions: T rows of the pass, D hidden size, Q all query heads together, K all key-value heads together, M inner size
of the MLP, R padded rank, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.contract.settings import Recompute
from workers.host.free_memory import MemoryShare
from workers.model import expert_products, expert_shares, packed_delta
from workers.model.base_model import BaseModel
from workers.model.clamped_gate import HELD_VALUES, ClampedGate
from workers.model.pretrained import activation_of
from workers.training import device_logits, logits
from workers.training.kernel_scores import num_parts_of

USED_FRACTION = 0.8
"""The part of the free memory that the tensors of a pass may take. The rest is for gaps between them in the heap (see
`scripts/bench/memory.py`), buffers of kernels, and other work of the process."""
KEPT_FRACTION = 0.75
"""Graphs may keep this part of the above. The rest is for passes that run without one. A pass that finds too little
memory drops the graphs."""
FULL_BYTES = 4
"""Of an fp32 value."""
INDEX_BYTES = 8
"""Of a row's number."""
COUNT_BYTES = 9
"""Of a choice and an expert, while a GPU sorts the rows of experts: a comparison, its copy as a number, a sum."""
MASK_BYTES = 4
"""Bytes of a sliding window's mask for each pair of tokens, on the CPU."""
MASK_MAKING_BYTES = 11
"""Further bytes while the mask is made: distances (int64) and three comparisons."""


ACTIVATION_INPUTS = 256
"""Inputs with which an activation is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The size of a pass."""

    num_tokens: int
    """T."""
    lengths: Sequence[int]
    """Tokens of the sequences; each length once is enough."""
    num_sequences: int = 1
    """Of the whole pass, at most."""
    rank: int
    """The largest padded rank."""
    num_adapters: int = 1
    num_targets: int = 1
    """Most targets of a token."""
    pending_values: int = 0
    """Values of pending gradients; the pass keeps a copy of them, in case it must be undone."""


class PassMemory:
    """The peak of a pass on one base model."""

    def __init__(self, base_model: BaseModel) -> None:
        shapes, config = base_model.group_shapes, base_model.config  # the unembedding is the last shape
        self._attend = base_model.attend_packed([1], [1])
        self._value_bytes = base_model.dtype.itemsize if base_model.device.type == "cuda" else FULL_BYTES
        """Of an activation."""
        self._is_deferred = base_model.is_deferred
        self._has_kernels = base_model.scores_by_kernels
        self._is_fused = base_model.trains_by_kernels
        """Whether adapters and their gradients are added by kernels of our own, without tensors of theirs, and x A^T is
        kept in fp32."""
        self._is_usual = base_model.training_layers is not None
        """Whether layers are in few kernels: between two of them there are a sum and what is to be added to it."""
        self._adds_at_once = base_model.current.can_batch and not self._is_fused
        """Whether what adapters add to an output is a tensor of its own; otherwise it is added by products."""
        of_experts = {shape.index for layer in base_model.expert_layers for shape in layer.shapes}
        inner = [shape for shape in shapes[:-1] if shape.index not in of_experts]
        unembedding = shapes[-1]
        self._num_layers = int(config.num_hidden_layers)
        self._hidden = unembedding.d_in
        self._vocab_size = unembedding.d_outs[0]
        self._num_linears = sum(len(shape.names) for shape in inner)
        self._widest = max(shape.d_in + sum(shape.d_outs) for shape in (*inner, unembedding))
        self._activation = 1 + _further_values(activation_of(config))
        """Values that autograd keeps of an activation, for each of its inputs."""
        self._mlp = max((max(shape.d_in, *shape.d_outs) for shape in inner if shape.kind == "mlp"), default=0)
        self._head_dim = int(getattr(config, "head_dim", None) or self._hidden // config.num_attention_heads)
        self._num_heads = int(config.num_attention_heads)
        self._queries = self._head_dim * self._num_heads
        self._keys = self._head_dim * int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        self._delta = base_model.delta_shape
        self._group_values_max = base_model.delta_group_values
        self._num_expert_layers = len(base_model.expert_layers)
        self._experts = base_model.expert_layers[0] if base_model.expert_layers else None
        is_clamped = self._experts is not None and isinstance(self._experts.weights.apply_gate, ClampedGate)
        self._gate = HELD_VALUES if is_clamped else self._activation
        """The same of the gate of experts."""
        self._num_attention_layers = base_model.num_attention_layers
        window = getattr(config, "sliding_window", None)
        self._window = int(window) if self._attend.makes_masks and window is not None and _has_window(config) else None
        """Longer sequences have a mask; None: no sequence has one."""
        modules = base_model.model.modules()
        norms = [getattr(module, "weight", None) for module in modules if type(module).__name__.endswith("Norm")]
        self._num_norms: int = sum(weight is not None and weight.numel() == self._hidden for weight in norms)
        self._linear_values = sum(shape.d_in + sum(shape.d_outs) for shape in inner)

    def peak_bytes(self, load: Load, *, backward: bool, recompute: bool = False) -> int:
        """Return the bytes that a pass allocates, at its peak."""
        token_bytes = load.num_tokens * self._value_bytes
        # Besides: cosines and sines of at most two kinds, tokens, positions, what losses take of every target.
        besides = load.num_tokens * FULL_BYTES * (4 * self._head_dim + 8 + 8 * load.num_targets)
        kept_experts, experts = self._expert_bytes(load, backward=False)
        logits_bytes, fixed_bytes = self._logits_bytes(load), self._gradient_bytes(load)
        if not self._is_deferred:  # its loss keeps a block; others have none while layers run
            logits_bytes, fixed_bytes = 0, fixed_bytes + logits_bytes
        forward_peak = besides + max(
            token_bytes * max((2 + self._activation) * self._mlp, 6 * self._queries),
            self._delta_bytes(load, backward=False),
            experts,
            logits_bytes,
        )
        forward_peak += token_bytes * 6 * self._hidden
        peak = forward_peak + fixed_bytes
        if backward:
            kept, of_layer = self._kept_values(load.rank), max(2 * self._mlp, 2 * self._queries + 4 * self._keys)
            kept_bytes, again_bytes = token_bytes * kept + kept_experts * self._num_expert_layers, 0
            if recompute:
                kept_bytes = token_bytes * self._num_layers * (1 + self._is_usual) * self._hidden
                again_bytes = token_bytes * -(-kept // self._num_layers) + kept_experts * min(
                    1, self._num_expert_layers
                )
            # The backward of a layer holds on top, with the last hidden states, their gradient, and its own gradients:
            experts = self._expert_bytes(load, backward=True)[1]
            layer_bytes = max(token_bytes * of_layer, self._delta_bytes(load, backward=True), experts)
            transient = token_bytes * 6 * self._hidden + max(again_bytes + layer_bytes, logits_bytes)
            peak = besides + kept_bytes + transient + fixed_bytes
            peak += self._attend.buffer_bytes(load.num_tokens, load.num_sequences, self._num_heads, self._head_dim)
        kept_masks, making_masks = self._mask_bytes(load.lengths)  # made in the forward of the first layer
        return max(peak, forward_peak + making_masks) + kept_masks

    def _kept_values(self, rank: int) -> int:
        """Return the values per token that autograd keeps of all layers.

        The input of every linear, twice the residual stream (both norms' inputs), gate, activation and up, and of the
        attention queries, keys and values, repeated to all heads, its output, and the inputs of norms of heads. Counted
        as all inputs and outputs of linears (two outputs of D values each stand for the residual stream), the
        activation, four times Q, D for each further norm, and x A^T of every linear. An activation of several
        operations counts as often as autograd keeps one of its values. The full attention of hybrids has a gate and
        rotates a part of each head: it keeps eight times Q.
        """
        further_norms = max(0, self._num_norms - 2 * self._num_layers - 1)
        return (
            self._linear_values
            + self._num_layers * self._activation * self._mlp
            + self._num_attention_layers * (4 if self._delta is None else 8) * self._queries
            + further_norms * self._hidden
            + self._num_linears * rank * (FULL_BYTES // self._value_bytes if self._is_fused else 1)
        )

    def _delta_bytes(self, load: Load, *, backward: bool) -> int:
        """Return the bytes that a layer of linear attention holds: its inputs, their gradients, one group's tensors."""
        if self._delta is None:
            return 0
        *_, values = widths = self._delta.conv_widths
        group = packed_delta.group_values(
            self._delta, load.num_tokens, load.lengths, self._group_values_max, backward=backward
        )
        return load.num_tokens * self._value_bytes * (2 * sum(widths) + values) + FULL_BYTES * group

    def _expert_bytes(self, load: Load, *, backward: bool) -> tuple[int, int]:
        """Return the bytes that autograd keeps of a layer of experts, and those that the layer holds while it runs.

        It keeps gates and up of all experts' rows, and where rows go. It holds inputs, outputs and the inner values of
        these rows, and of each adapter's shares the padded rows and copies of the experts' matrices.
        Before, a GPU counts the choices of every expert.
        """
        if self._experts is None:
            return 0, 0
        hidden, inner, num_experts = self._hidden, self._experts.inner_size, self._experts.num_experts
        num_chosen = load.num_tokens * self._experts.num_choices
        rows_min = max(self._experts.shared.rows_min, expert_products.ROWS_MULTIPLE)
        num_rows = num_chosen + min(num_chosen, num_experts) * (rows_min - 1)
        num_shares = min(num_chosen, num_experts * load.num_adapters)
        share_rows = num_chosen * (1 + 1 / expert_shares.SHARES_PER_DOUBLING) + expert_shares.SHARE_ROWS * num_shares
        kept = self._value_bytes * (num_rows * 2 * inner + load.num_tokens * 3 * load.rank)
        kept += INDEX_BYTES * (2 * num_rows + 4 * int(share_rows))
        of_shares = int(share_rows) * (inner + 4 * load.rank) + 2 * num_shares * load.rank * inner
        if backward:
            values = num_rows * ((5 + self._gate) * inner + max(2 * inner, hidden)) + of_shares
        else:
            values = max(num_rows * (self._gate * inner + max(inner, hidden)), num_rows * inner + of_shares)
        counts = COUNT_BYTES * num_chosen * num_experts if self._experts.shared.is_grouped else 0
        return kept, kept + max(self._value_bytes * values, counts)

    def _logits_bytes(self, load: Load) -> int:
        """Return the bytes of a block of logits, of what adapters add to it, and of its log-probabilities in fp32.

        Kernels of our own do without the last; what they sum of the gradient for adapters, they sum in parts.
        """
        if self._is_deferred:
            num_rows = device_logits.block_rows_of(self._vocab_size, has_kernels=self._has_kernels)
            num_rows = min(load.num_tokens, num_rows)
        else:
            num_rows = logits.block_rows_of(self._vocab_size)
        if self._has_kernels:
            value_bytes = (1 + self._adds_at_once) * self._value_bytes
        else:
            value_bytes = FULL_BYTES + 2 * self._value_bytes
        num_parts = num_parts_of(self._vocab_size) if self._has_kernels and self._is_fused else 0
        return num_rows * (value_bytes * self._vocab_size + FULL_BYTES * num_parts * load.rank)

    def _gradient_bytes(self, load: Load) -> int:
        """Return the bytes of gradients of A and B of the widest linears of every adapter, and of pending gradients."""
        num_values = 0 if self._is_fused else 2 * load.num_adapters * load.rank * self._widest
        return FULL_BYTES * (num_values + load.pending_values)

    def _mask_bytes(self, lengths: Sequence[int]) -> tuple[int, int]:
        """Return the bytes of the masks of sliding windows while the pass runs, and while they are made."""
        masked = [length for length in set(lengths) if self._window is not None and length > self._window]
        if not masked:
            return 0, 0
        return MASK_BYTES * sum(length**2 for length in masked), MASK_MAKING_BYTES * max(masked) ** 2


class PassRoom:
    """The memory that passes of one engine may take, and what follows from it."""

    def __init__(self, base_model: BaseModel, memory: MemoryShare, recompute: Recompute) -> None:
        """Take a part of `memory`, as it is now."""
        self.recompute = recompute
        self._estimate = PassMemory(base_model)
        self._share = memory
        self.measure()

    def measure(self, reserved_bytes: int = 0) -> None:
        """Set the room from the memory that is free now, without what others will take of it while passes run."""
        self._num_bytes = int(USED_FRACTION * (self._share.free_bytes() - reserved_bytes))

    def num_fitting(self, load_of: Callable[[int], Load], most: int, *, backward: bool, recompute: bool) -> int:
        """Return the largest number of tokens, at most `most`, whose `load_of` fits."""

        def fits(num_tokens: int) -> bool:
            peak_bytes = self._estimate.peak_bytes(load_of(num_tokens), backward=backward, recompute=recompute)
            return peak_bytes <= self._num_bytes

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

    def must_recompute(self, load: Load) -> bool:
        """Return whether layers of a pass with a backward are recomputed."""
        if self.recompute != "auto":
            return self.recompute == "on"
        return self._estimate.peak_bytes(load, backward=True) > self._num_bytes

    def can_keep(self, load: Load) -> bool:
        """Return whether the memory of a pass with a backward may stay its graphs' until they are dropped."""
        return self._estimate.peak_bytes(load, backward=True) <= KEPT_FRACTION * self._num_bytes


def _further_values(activation: Callable[[Tensor], Tensor]) -> int:
    """Return the values that autograd keeps for each input of an activation, besides the input and the output.

    None for a kernel of the library; some activations are written as many operations.
    """
    x = torch.linspace(-4, 4, ACTIVATION_INPUTS).requires_grad_()
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.numel() >= x.numel():
            kept[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = activation(x)
    further = kept.keys() - {tensor.untyped_storage().data_ptr() for tensor in (x, y)}
    return -(-sum(kept[each] for each in further) // x.nbytes)


def _has_window(config: Any) -> bool:
    """Return whether any layer has a sliding window; without a list of layer types, all layers have one."""
    kinds = getattr(config, "layer_types", None)
    return kinds is None or "sliding_attention" in kinds
