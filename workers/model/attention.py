"""Attention: how a model's layers call the `Attend` of the pass, and causal attention over packed rows on a CPU.

transformers' layers call one registered function, without a mask; it calls the `Attend` that began the pass.

On a CPU packed rows are attended sequence by sequence. Consecutive sequences of one length are one call of the kernel,
which computes every sequence and head by itself: the bits are those of each sequence solo.

Does not depend on adapters, or on models beyond names of attributes.

Main invariant: a sequence's output and gradient depend only on its own rows. Rows of no sequence get zeros.

Dimensions: T rows of the pass, S sequences in a run, L tokens of a sequence, H query heads, K key-value heads, E head
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from workers.model.families import alternatives
from workers.model.pretrained import UnsupportedModelError

ATTENTION_NAME = "tinkerpool"
"""The name of `_attention` in transformers' table of attentions.

Its table of masks does not have the name, so transformers makes none: `Attend` keeps sequences apart. Even a mask of
None under the name would have it guess the sequences from position ids, for which it waits for the device."""
# The overloads: a call needs no lookup.
_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Attend(Protocol):
    """The attention of a pass: the seam between the base model and its callers (packed training, key-value cache)."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend: query (1, H, T, E), key and value (1, K, T, E), rotary embedding applied; return (1, T, H, E).

        `layer` counts the layers of full attention from 0. With `sliding_window` w, a query at position i sees keys at
        positions i - w + 1 to i; with None, all up to i. With `sinks` (H,), each query of a head sees one more key,
        whose score is the sink and whose value is zero. T includes padding rows at the end, whose output is ignored but
        must be finite.
        """


class AttendSequences(Attend, Protocol):
    """An `Attend` of whole sequences, one after another from row 0."""

    makes_masks: bool
    """Whether it keeps a mask (L, L) for every length L above a sliding window."""

    @property
    def fewest_sequences(self) -> int | None:
        """How many sequences one call for all has at least, further ones empty; None: there are several calls."""

    def buffer_bytes(self, num_tokens: int, num_sequences: int, num_heads: int, head_dim: int) -> int:
        """Return the bytes that the kernel's backward allocates at most, besides gradients, for rows in sequences."""


AttendPacked = Callable[[Sequence[int], Sequence[int]], AttendSequences]
"""Makes the `Attend` of whole sequences, one after another from row 0. Takes their lengths and, in row order, the
number of sequences of each request, because the results of a request may have to depend only on that request."""


class LayerAttention:
    """The attention of all layers of one model: the `Attend` of the current pass. Used by one thread."""

    def __init__(self, model: Any) -> None:
        """Let the layers of a model of transformers attend here, without masks."""
        self.current: Attend | None = None
        if ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS:
            ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
        model.set_attn_implementation(ATTENTION_NAME)
        # Some layers have a window of their own, others pass on the config's.
        self.has_sliding_window = getattr(model.config, "sliding_window", None) is not None
        self.has_sinks = False
        layers = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
        numbers = {index: number for number, index in enumerate(sorted({layer.layer_idx for layer in layers}))}
        for module in layers:
            module.tinkerpool_attention = self
            module.tinkerpool_number = numbers[module.layer_idx]
            self.has_sliding_window |= getattr(module, "sliding_window", None) is not None
            self.has_sinks |= getattr(module, "sinks", None) is not None

    def begin(self, attend: Attend) -> None:
        """Attend this way in the next forward, and in its backward."""
        self.current = attend

    def end(self) -> None:
        """Drop the `Attend` of the last pass."""
        self.current = None


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend in one layer, as transformers calls it: (1, heads, T, head_dim) each -> (1, T, heads, head_dim)."""
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"the model's code makes masks of its own, in {type(module).__name__}; supported is causal attention, with "
            f"and without a sliding window; {alternatives()}"
        )
    sinks = getattr(module, "sinks", None)
    if kwargs.get("softcap") or kwargs.get("s_aux") is not sinks or not getattr(module, "is_causal", True):
        raise UnsupportedModelError("soft-capped or non-causal attention, and sinks of another form, are not supported")
    scaling = module.head_dim**-0.5 if scaling is None else scaling
    attention: LayerAttention = module.tinkerpool_attention
    assert attention.current is not None, "no pass has begun"
    out = attention.current(
        module.tinkerpool_number, query, key, value, scaling=scaling, sliding_window=sliding_window, sinks=sinks
    )
    return out, None


def add_sinks(out: Tensor, log_sum_exp: Tensor, sinks: Tensor) -> Tensor:
    """Weaken the output (.., E) of an attention by sinks, in place; return its log-sum-exps (..) with sinks.

    A sink has a part of the weight, and no value. A backward that takes output and log-sum-exps gives the gradients
    with sinks, without a change: weights are exp(score - log_sum_exp), and do not sum to 1.
    """
    with_sinks = torch.logaddexp(log_sum_exp, sinks.to(log_sum_exp.dtype))
    out.mul_((log_sum_exp - with_sinks).exp_().unsqueeze(-1))
    return with_sinks


@dataclass(frozen=True, slots=True)
class Run:
    """`count` consecutive sequences of `length` tokens, beginning at row `start`."""

    start: int
    count: int
    length: int


def runs_of(lengths: Sequence[int]) -> tuple[Run, ...]:
    """Return the runs of equal lengths among sequences that follow one another from row 0."""
    runs: list[Run] = []
    start = 0
    for length in lengths:
        assert length > 0, "an empty sequence"
        if runs and runs[-1].length == length:
            runs[-1] = Run(runs[-1].start, runs[-1].count + 1, length)
        else:
            runs.append(Run(start, 1, length))
        start += length
    return tuple(runs)


class PackedAttention:
    """Implements `AttendSequences` by the library's kernel for a CPU. Differentiable."""

    makes_masks = True
    fewest_sequences = 1

    def __init__(self, lengths: Sequence[int], _counts: Sequence[int] | None = None) -> None:
        """Take sequences of these lengths, from row 0; no result depends on two of them, in one request or several."""
        self.runs = runs_of(lengths)
        self._masks: dict[tuple[int, int], Tensor] = {}

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Attend`."""
        masks = [self._mask(run.length, sliding_window, query) for run in self.runs]
        out: Tensor = _PackedAttentionFunction.apply(  # type: ignore[no-untyped-call]
            query, key, value, self.runs, masks, scaling, sinks
        )
        return out

    def buffer_bytes(self, num_tokens: int, num_sequences: int, num_heads: int, head_dim: int) -> int:
        """See `AttendSequences`: none."""
        return 0

    def _mask(self, length: int, window: int | None, like: Tensor) -> Tensor | None:
        """Return the additive mask (L, L) of a sliding window that is shorter than L; otherwise None: plain causal."""
        if window is None or length <= window:
            return None
        mask = self._masks.get((length, window))
        if mask is None:
            distance = torch.arange(length).unsqueeze(1) - torch.arange(length)  # (L, L) query minus key
            hidden = (distance < 0) | (distance >= window)
            mask = torch.zeros(length, length).masked_fill_(hidden, float("-inf")).to(like.device, like.dtype)
            self._masks[length, window] = mask
        return mask


class _PackedAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        runs: Sequence[Run],
        masks: Sequence[Tensor | None],
        scaling: float,
        sinks: Tensor | None,
    ) -> Tensor:
        num_groups = query.shape[1] // key.shape[1]
        if num_groups > 1:
            key, value = key.repeat_interleave(num_groups, dim=1), value.repeat_interleave(num_groups, dim=1)
        outputs, saved = [], []
        for run, mask in zip(runs, masks, strict=True):
            q, k, v = (_sequences(tensor, run) for tensor in (query, key, value))  # (S, H, L, E)
            out, log_sum_exp = _attend(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scaling)
            if sinks is not None:
                log_sum_exp = add_sinks(out, log_sum_exp, sinks.unsqueeze(-1))  # (S, H, L)
            outputs.append(out)
            saved.append((q, k, v, out, log_sum_exp))
        ctx.saved = saved
        ctx.runs, ctx.masks, ctx.scale, ctx.num_groups = runs, masks, scaling, num_groups
        return _packed(outputs, query.shape[2]).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        num_rows = dout.shape[1]
        dout = dout.transpose(1, 2)  # (1, H, T, E)
        dqs, dks, dvs = [], [], []
        for run, mask, (q, k, v, out, log_sum_exp) in zip(ctx.runs, ctx.masks, ctx.saved, strict=True):
            dq, dk, dv = _attend_backward(
                _sequences(dout, run),
                q,
                k,
                v,
                out,
                log_sum_exp,
                0.0,
                mask is None,
                attn_mask=mask,
                scale=ctx.scale,
            )
            dqs.append(dq)
            dks.append(_sum_groups(dk, ctx.num_groups))
            dvs.append(_sum_groups(dv, ctx.num_groups))
        return _packed(dqs, num_rows), _packed(dks, num_rows), _packed(dvs, num_rows), None, None, None, None


def _sequences(tensor: Tensor, run: Run) -> Tensor:
    """Return the run's rows of (1, H, T, E) as a view (S, H, L, E)."""
    rows = tensor[0, :, run.start : run.start + run.count * run.length]
    sequences: Tensor = rows.unflatten(1, (run.count, run.length))
    return sequences.transpose(0, 1)


def _packed(runs: list[Tensor], num_rows: int) -> Tensor:
    """Return runs (S, H, L, E) one after another, then zeros: (1, H, T, E), rows outermost in memory."""
    parts = [run.transpose(1, 2).flatten(0, 1) for run in runs]  # (S * L, H, E) each
    missing = num_rows - sum(part.shape[0] for part in parts)
    if missing:
        parts.append(parts[0].new_zeros(missing, *parts[0].shape[1:]))
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows.transpose(0, 1).unsqueeze(0)


def _sum_groups(grad: Tensor, num_groups: int) -> Tensor:
    """Add the gradients of repeated heads (S, H, L, E) in a fixed order: (S, K, L, E)."""
    if num_groups == 1:
        return grad
    grouped: Tensor = grad.unflatten(1, (-1, num_groups))
    total = grouped[:, :, 0] + grouped[:, :, 1]
    for group in range(2, num_groups):
        total += grouped[:, :, group]
    return total
