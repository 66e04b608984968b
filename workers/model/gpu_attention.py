"""Causal attention over packed rows on a GPU: one call for sequences of any length, without a mask.

Does not depend on layers, models or adapters.

Main invariant: a sequence's output and gradient depend only on its own rows. The order of a kernel's sums may depend
on all sequences of a call. In exact mode it depends only on the sequence's request, with backwards in `fixed_order`:

* A request with a long sequence has a call of its own.
* Other requests share one. A backward in a fixed order divides the keys of a sequence between processors if a call has
  fewer sequences, times heads, than the GPU has processors. So this call has at least as many, empty ones among them,
  and adds up each sequence's keys in their order. `selftest.sequence_invariance` tries it when a model is loaded.

The backward of short sequences is a kernel of our own, outside exact mode: the library keeps sums of dq in fp32, padded
by up to 128 rows a sequence, and dk and dv of each query head. `selftest.training_kernels` tries it, too.

Dimensions: T rows of the pass, S sequences of a call, L tokens of a sequence, H query heads, K key-value heads, E head
dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.host.uploads import on_device
from workers.model.attention import AttendPacked, AttendSequences, PackedAttention, Run, add_sinks, runs_of
from workers.model.gpu_operations import define, dense

HEAD_DIM_MAX = 256
HEAD_DIM_MULTIPLE = 8
"""Head dimensions that the variable-length kernel takes: multiples of 8, up to 256."""
SHARED_MAX = 1024
"""In exact mode, tokens of the longest sequence of a request that shares its call. The backward of a lone sequence has
one processor per head then, and of a longer one would take too long."""
LONGEST_MIN = 2
"""The library computes a call whose longest sequence has one token in another way, which takes no empty sequences."""
PADDING_ROWS, WIDTH_MULTIPLE = 128, 32
"""Of the variable-length kernel's buffers: most further rows of a sequence; widths are multiples of 32."""
SHORT_MAX = 256
"""Tokens of the longest sequence of a call whose backward is our own: up to here padding is half as much again."""

ATTENTION_GRADIENTS = (
    "attention_gradients(Tensor(a!) dquery, Tensor(b!) dkey, Tensor(c!) dvalue, Tensor dout, Tensor query, Tensor key, "
    "Tensor value, Tensor out, Tensor log_sums, Tensor ends, int longest, float scaling, int window)"
)
"""Set dquery (T, H, E), dkey and dvalue (T, K, E) from dout (T, H, E) and what a forward took and returned.

`log_sums` (H, T), fp32: the logarithms of the sums of a query's weights. `ends` (S + 1,) int32 and `longest` as in
`Sequences`; a query sees `window` keys at most. Rows and heads of query, key and value may have gaps; the others have
none.
"""
define("workers.model.attention_kernels", ATTENTION_GRADIENTS)


def tile_tokens(head_dim: int) -> int:
    """Return the tokens of a program of `ATTENTION_GRADIENTS`: fewer where a head is wide, for its registers."""
    return 64 if head_dim <= 128 else 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The sequences of one call, one after another, as a kernel takes them."""

    ends: Tensor
    """(S + 1,) int32 on the device: 0, then the row after each sequence."""
    longest: int
    """Tokens of the longest."""
    scaling: float
    window: int | None
    """Keys that a query sees at most, its own included; None: all before it."""
    sinks: Tensor | None = None
    """(H,); see `Attend`."""


class Kernel(Protocol):
    """Variable-length attention, forward and backward. Query, output (T, H, E); key and value (T, K, E)."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output, and the values that the backward needs besides inputs and output."""

    def backward(
        self,
        dout: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        saved: tuple[Tensor, ...],
        sequences: Sequences,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""

    def buffer_bytes(self, num_tokens: int, num_sequences: int, num_heads: int, head_dim: int) -> int:
        """See `AttendSequences`; of calls one after another that have so many rows and sequences together."""


class FlashKernel:
    """Implements `Kernel` by the library's flash attention; bf16 or fp16, on CUDA. The backward: as said above.

    Called directly, because `torch.nn.attention.varlen` of torch 2.11 does not let query heads share keys.
    """

    def __init__(self, *, is_ordered: bool = False, has_own: bool = False) -> None:
        """`is_ordered`: the backward runs in `fixed_order`, which takes more memory.

        `has_own`: that of short sequences is our own, unless it is ordered.
        """
        self._is_ordered = is_ordered
        self._has_own = has_own and not is_ordered

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Kernel`."""
        ends, longest = sequences.ends, max(LONGEST_MIN, sequences.longest)
        out, log_sum_exp, random_state, unused, _ = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            ends,
            ends,
            longest,
            longest,
            0.0,
            sequences.window is None,
            return_debug_mask=False,
            scale=sequences.scaling,
            **_window(sequences.window),
        )
        if sequences.sinks is not None:
            log_sum_exp = add_sinks(out.transpose(0, 1), log_sum_exp, sequences.sinks.unsqueeze(-1))  # (H, T)
        return out, (log_sum_exp, random_state, unused)

    def backward(
        self,
        dout: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        saved: tuple[Tensor, ...],
        sequences: Sequences,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        log_sum_exp, random_state, unused = saved
        if self._has_own and sequences.longest <= SHORT_MAX:
            return short_gradients(dout, inputs, out, log_sum_exp, sequences)
        ends, longest = sequences.ends, max(LONGEST_MIN, sequences.longest)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            dout,
            *inputs,
            out,
            log_sum_exp,
            ends,
            ends,
            longest,
            longest,
            0.0,
            sequences.window is None,
            random_state,
            unused,
            scale=sequences.scaling,
            **_window(sequences.window),
        )
        return gradients

    def buffer_bytes(self, num_tokens: int, num_sequences: int, num_heads: int, head_dim: int) -> int:
        """See `Kernel`. `mha_varlen_bwd` in torch's `flash_api.cpp`; a backward of our own takes none of this.

        Sums of dq in fp32, with up to `PADDING_ROWS` rows more for each sequence, and dk and dv for each query head. To
        add in a fixed order, as many dq as keep every processor busy: most of them if each sequence has its own call.
        """
        num_rows = num_tokens + PADDING_ROWS * num_sequences
        if self._is_ordered:
            num_rows += (num_tokens + PADDING_ROWS) * (-(-num_processors() // num_heads) - 1)
        widened = 2 * num_tokens * num_heads * head_dim * torch.bfloat16.itemsize
        return 4 * num_rows * num_heads * (-(-head_dim // WIDTH_MULTIPLE) * WIDTH_MULTIPLE + 1) + widened


def short_gradients(
    dout: Tensor, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, log_sums: Tensor, sequences: Sequences
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `Kernel.backward` does, by one launch."""
    query, key, value = (dense(rows) for rows in inputs)
    out = out.contiguous()  # the library lays it out as the query, which may be head by head
    gradients = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    window = sequences.longest if sequences.window is None else min(sequences.window, sequences.longest)
    torch.ops.tinkerpool.attention_gradients(
        *gradients, dout, query, key, value, out, log_sums, sequences.ends, sequences.longest, sequences.scaling, window
    )
    return gradients


def _window(window: int | None) -> dict[str, int]:
    """Return the numbers of keys before and after its own that a query sees; -1: all."""
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


class VarlenAttention:
    """Implements `AttendSequences`: one call of a kernel per layer, or one per request. Differentiable."""

    makes_masks = False

    def __init__(
        self,
        kernel: Kernel,
        lengths: Sequence[int],
        counts: Sequence[int] | None = None,
        *,
        sequences_min: int = 0,
    ) -> None:
        """Take sequences of these lengths, from row 0; with `counts`, sequences per request, one call per request.

        `sequences_min`: of a call that requests of at most `SHARED_MAX` tokens a sequence share; 0: they share none.
        """
        self._kernel = kernel
        self._groups = _by_request(lengths, counts)
        self._is_by_request = counts is not None
        self._sequences_min = sequences_min
        self._calls: dict[bool, list[tuple[int, int, Tensor, int]]] = {}
        """With calls that requests share, and without."""

    @classmethod
    def between(cls, like: AttendSequences, ends: Tensor, num_rows: int, longest: int) -> VarlenAttention:
        """Take the sequences between ends (S + 1,), int32 on the device, by one call of the kernel of `like`.

        They have all `num_rows` rows together, and each at most `longest`.
        """
        assert isinstance(like, VarlenAttention)
        attention = cls(like._kernel, ())
        attention._calls[False] = [(0, num_rows, ends, longest)]
        return attention

    @property
    def fewest_sequences(self) -> int | None:
        """See `AttendSequences`; None: some request has a call of its own."""
        if not self._is_by_request:
            return 1
        is_shared = self._sequences_min and all(max(lengths) <= SHARED_MAX for lengths in self._groups)
        return self._sequences_min if is_shared else None

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
        calls = [
            (start, stop, Sequences(ends=ends, longest=longest, scaling=scaling, window=sliding_window, sinks=sinks))
            for start, stop, ends, longest in self._on(query, is_shared=self._is_shared(sliding_window))
        ]
        # Views: linear layers leave these tensors row by row in memory. The backward of `tensor[0]` would copy them.
        rows = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]  # (T, heads, E)
        out: Tensor = _VarlenFunction.apply(*rows, self._kernel, calls)  # type: ignore[no-untyped-call]
        return out.unsqueeze(0)

    def buffer_bytes(self, num_tokens: int, num_sequences: int, num_heads: int, head_dim: int) -> int:
        """See `AttendSequences`; by request, its three gradients are joined from those of the calls."""
        joined = 3 * num_tokens * num_heads * head_dim * torch.bfloat16.itemsize if self._is_by_request else 0
        return joined + self._kernel.buffer_bytes(num_tokens, num_sequences, num_heads, head_dim)

    def _is_shared(self, window: int | None) -> bool:
        """Return whether requests share calls: the library chooses a window's kernel by a call's longest sequence."""
        return self._sequences_min > 0 and window is None

    def _on(self, query: Tensor, *, is_shared: bool) -> list[tuple[int, int, Tensor, int]]:
        """Return first row, row after the last, ends and longest sequence of every call.

        Padding rows at the end are one more sequence, so that their output is finite; by request, of one more request.
        """
        if is_shared not in self._calls:
            groups = list(self._groups)
            missing = query.shape[2] - sum(map(sum, groups))
            if missing and self._is_by_request:
                groups.append([missing])
            elif missing:
                groups = [[*groups[0], missing]]
            if is_shared:
                groups = _sharing(groups, self._sequences_min)
            calls, start = [], 0
            for lengths in groups:
                ends = on_device(torch.tensor([0, *lengths]).cumsum(0), query.device, torch.int32)
                calls.append((start, start + sum(lengths), ends, max(lengths)))
                start += sum(lengths)
            self._calls[is_shared] = calls
        return self._calls[is_shared]


class _VarlenFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, calls: list[tuple[int, int, Sequences]]
    ) -> Tensor:
        ctx.kernel, ctx.calls, ctx.counts = kernel, calls, []
        outputs: list[Tensor] = []
        extras: list[Tensor] = []
        for start, stop, sequences in calls:
            part, saved = kernel.forward(query[start:stop], key[start:stop], value[start:stop], sequences)
            outputs.append(part)
            extras += saved
            ctx.counts.append(len(saved))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        # Saved this way, because an output that is an attribute of `ctx` makes a reference cycle, which keeps the
        # tensors in memory until the garbage collector runs.
        ctx.save_for_backward(query, key, value, out, *extras)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *extras = ctx.saved_tensors
        parts, first = [], 0
        for (start, stop, sequences), count in zip(ctx.calls, ctx.counts, strict=True):
            inputs = query[start:stop], key[start:stop], value[start:stop]
            saved = tuple(extras[first : first + count])
            parts.append(ctx.kernel.backward(dout[start:stop].contiguous(), inputs, out[start:stop], saved, sequences))
            first += count
        joined = parts[0] if len(parts) == 1 else [torch.cat(gradients) for gradients in zip(*parts, strict=True)]
        return *joined, None, None


class SdpaAttention:
    """Implements `AttendSequences` by scaled dot product attention, consecutive sequences of one length at a time.

    For dtypes and head dimensions that the variable-length kernel does not take. Differentiable.
    """

    makes_masks = True
    fewest_sequences = None

    def __init__(self, lengths: Sequence[int], counts: Sequence[int] | None = None) -> None:
        """Take sequences of these lengths, from row 0; with `counts`, of each request, no call has two requests."""
        self._runs: list[Run] = []
        start = 0
        for group in _by_request(lengths, counts):
            self._runs += [Run(start + run.start, run.count, run.length) for run in runs_of(group)]
            start += sum(group)
        self._masks: dict[tuple[int, int, bool], Tensor] = {}

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
        outputs = []
        for run in self._runs:
            q, k, v = (_sequences(tensor, run) for tensor in (query, key, value))  # (S, heads, L, E)
            mask = self._mask(run.length, sliding_window, query.device, has_sinks=sinks is not None)
            if sinks is not None:
                q, k, v = _with_sinks(q, k, v, sinks / scaling)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(out[..., : query.shape[3]].transpose(1, 2).flatten(0, 1))  # (S * L, H, E)
        missing = query.shape[2] - sum(len(out) for out in outputs)
        if missing:
            outputs.append(outputs[0].new_zeros(missing, *outputs[0].shape[1:]))
        return torch.cat(outputs).unsqueeze(0)

    def buffer_bytes(self, num_tokens: int, num_sequences: int, num_heads: int, head_dim: int) -> int:
        """See `AttendSequences`: sums of dq in fp32."""
        return 4 * num_tokens * num_heads * head_dim

    def _mask(self, length: int, window: int | None, device: torch.device, *, has_sinks: bool) -> Tensor | None:
        """Return (L, L), True where a query may see a key, of which sinks have one more; None: plain causal."""
        if not has_sinks and (window is None or length <= window):
            return None
        seen = length if window is None else window
        if (length, seen, has_sinks) not in self._masks:
            positions = torch.arange(length, device=device)
            distance = positions.unsqueeze(1) - positions  # query minus key
            mask = (distance >= 0) & (distance < seen)
            self._masks[length, seen, has_sinks] = F.pad(mask, (0, int(has_sinks)), value=True)
        return self._masks[length, seen, has_sinks]


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (S, H, L, E), keys and values (S, K, L, E) with one more key, whose product with the queries of a
    head is the sink (H,), and whose value is zero.

    One more dimension has the sinks in the queries, and 0 or 1 in the keys: no mask is needed for each head. Kernels
    take dimensions by the multiple.
    """
    wider = (0, HEAD_DIM_MULTIPLE)
    query, key = F.pad(query, wider), F.pad(key, (*wider, 0, 1))
    query[..., -1] = sinks.to(query.dtype).unsqueeze(-1)
    key[..., -1, -1] = 1
    return query, key, F.pad(value, (*wider, 0, 1))


def _by_request(lengths: Sequence[int], counts: Sequence[int] | None) -> list[list[int]]:
    """Return the lengths of sequences by request; all in one list if `counts` is None."""
    groups, first = [], 0
    for count in [len(lengths)] if counts is None else counts:
        groups.append(list(lengths[first : first + count]))
        first += count
    assert first == len(lengths), "the requests have other sequences"
    return groups


def _sharing(groups: Sequence[list[int]], sequences_min: int) -> list[list[int]]:
    """Return the lengths of calls: adjacent groups of short sequences share one, with so many sequences at least."""
    calls: list[list[int]] = []
    for is_short, run in groupby(groups, lambda lengths: max(lengths) <= SHARED_MAX):
        if is_short:
            lengths = [*chain(*run)]
            calls.append(lengths + [0] * (sequences_min - len(lengths)))
        else:
            calls += run
    return calls


def _sequences(tensor: Tensor, run: Run) -> Tensor:
    """Return the run's rows of (1, heads, T, E) as (S, heads, L, E)."""
    rows = tensor.squeeze(0)[:, run.start : run.start + run.count * run.length]
    sequences: Tensor = rows.unflatten(1, (run.count, run.length))
    return sequences.transpose(0, 1)


def attend_packed_for(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    head_dim: int,
    *,
    exact: bool,
    is_shared: bool = True,
    has_own: bool = False,
) -> AttendPacked:
    """Return the attention for a model in this dtype on this device; chosen once, when it is loaded.

    `is_shared`: in exact mode, requests may share calls. `has_own`: see `FlashKernel`.
    """
    if device.type != "cuda":
        return PackedAttention
    has_kernel = dtype in {torch.bfloat16, torch.float16} and head_dim <= HEAD_DIM_MAX
    if has_kernel and head_dim % HEAD_DIM_MULTIPLE == 0:
        kernel = FlashKernel(is_ordered=exact, has_own=has_own)
        if not exact:
            return lambda lengths, _: VarlenAttention(kernel, lengths)
        sequences_min = -(-num_processors() // num_heads) if is_shared else 0
        return lambda lengths, counts: VarlenAttention(kernel, lengths, counts, sequences_min=sequences_min)
    return lambda lengths, counts: SdpaAttention(lengths, counts if exact else None)


def num_processors() -> int:
    """Return the multiprocessors of the GPU."""
    return torch.cuda.get_device_properties("cuda").multi_processor_count
