"""The gated delta rule: a state for each sequence and head that every token reads, corrects and lets decay.

With queries and keys of length one, a state S (E, P), a log decay g <= 0 and a strength 0 < beta < 1 of each token::

    S' = exp(g) S        delta = beta (v - S'^T k)        S = S' + k delta^T        o = S^T q / sqrt(E)

Tokens are computed in chunks: inside of a chunk all deltas are the solution of one triangular system, and only the
state goes from chunk to chunk (Yang et al., "Gated Delta Networks", 2024, section 3.3). A step computes one token.

Before it, queries, keys and values go through a causal convolution of each channel with its own few weights and SiLU;
behind it, the result of each head is normalised and multiplied by SiLU of a gate.

Does not depend on models, passes or adapters: on the library's elementwise kernels, batched products and triangular
solutions, which `selftest` tries.

Main invariant: the numbers of a chunk depend on its own tokens and its own first state alone, not on the other chunks
of a call. Everything is computed in fp32 and rounded once, at the end. Nothing is masked by multiplying with zero.

Dimensions: N chunks or sequences, C tokens of a chunk, W weights of a convolution, H key heads, G value heads for each
key head, E key head dimension, P value head dimension, K = H E, V = H G P.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.model.fused_modules import rms_norm

UNIT_EPS = 1e-6
"""What is added to the square of a query's or key's length."""
LOG_DECAY_MIN = -60.0
"""Of a decay between two tokens of a chunk, at least: nothing is left of a value times e^-60, and the library's `exp`
takes fifteen times as long for results that are too small for fp32."""
STRENGTH_MIN = -80.0
"""beta before the sigmoid, at least: exp of more than 88 is infinite, and its derivative not a number."""


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The sizes of a layer."""

    num_key_heads: int
    """H."""
    num_value_heads: int
    """H G."""
    key_dim: int
    """E."""
    value_dim: int
    """P."""
    history: int
    """Tokens before a token that its convolution reads: W - 1."""

    @property
    def heads_per_key(self) -> int:
        """G."""
        return self.num_value_heads // self.num_key_heads

    @property
    def conv_widths(self) -> tuple[int, int, int]:
        """Values of a token's queries, keys and values: K, K, V."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    @property
    def token_values(self) -> int:
        """Values of a token's queries, keys or values of all value heads, whichever are most."""
        return self.num_value_heads * max(self.key_dim, self.value_dim)


class Convolve(Protocol):
    """Computes the heads of chunks: the seam between the rule and kernels of our own (`delta_heads`)."""

    def __call__(self, rows: Tensor, weights: Tensor, num_heads: int, length: float | None) -> Tensor:
        """Return SiLU of the convolution of rows (N, C + W - 1, K) with weights (W, K), by heads.

        (N, num_heads, C, K / num_heads), fp32. Each token's values of a head are divided by their own length and
        multiplied by `length`, unless it is None. Differentiable by the rows.
        """


def convolved_heads(rows: Tensor, weights: Tensor, num_heads: int, length: float | None) -> Tensor:
    """Implement `Convolve` by operations of torch."""
    heads = _convolved(rows, weights).view(len(rows), -1, num_heads, weights.shape[1] // num_heads)
    if length is None:
        return heads.transpose(1, 2)
    units = unit(heads).transpose(1, 2).contiguous()
    return units if length == 1 else units * length


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The frozen weights of a layer besides its linears; fp32."""

    shape: DeltaShape
    conv: Sequence[Tensor]
    """(W, K) of queries, (W, K) of keys, (W, V) of values; the last weight is the token's own."""
    decay: Tensor
    """(H G,): exp(A_log)."""
    dt_bias: Tensor
    """(H G,)"""
    norm: Tensor
    """(P,)"""
    norm_eps: float
    convolve: Convolve = convolved_heads
    """How the heads of chunks are computed."""


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What a layer's linears give for some tokens. The leading dimensions are (T,), (N, C) or (N,)."""

    qkv: Sequence[Tensor]
    """(..., K), (..., K), (..., V) before the convolution; chunks have W - 1 tokens more, those before the chunk."""
    gate: Tensor
    """(..., V)"""
    strength: Tensor
    """(..., H G): beta before the sigmoid."""
    decay: Tensor
    """(..., H G): the decay's argument."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all of them in the order of the fields."""
        return *self.qkv, self.gate, self.strength, self.decay

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> DeltaInputs:
        """Return the inputs of `tensors()`."""
        return cls(tensors[:3], *tensors[3:])


def chunked(
    inputs: DeltaInputs, weights: DeltaWeights, is_token: Tensor | None, counts: Sequence[int], state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the layer's results (N, C, V), fp32, of N chunks, and the state after the last chunk of each sequence.

    Chunks come in rounds: `counts[i]` sequences have an i-th chunk, the first ones of those that have the one before
    it. `is_token` (N, C) is False at padding behind the last token of a sequence, None without padding. Sequences begin
    with `state` (S, H, G, E, P), or with zeros; only in the first case a state is returned, and all have equally many
    chunks.
    """
    beta, log_decay = coefficients(inputs, weights, is_token)
    num, length = beta.shape[:2]
    shape = weights.shape
    heads, per_key = shape.num_key_heads, shape.heads_per_key
    counts_of_heads = (heads, shape.key_dim**-0.5), (heads, 1.0), (heads * per_key, None)
    query, key, value = (
        weights.convolve(rows, conv, *of_heads)
        for rows, conv, of_heads in zip(inputs.qkv, weights.conv, counts_of_heads, strict=True)
    )  # (N, H, C, E), (N, H, C, E), (N, H G, C, P)
    value = value.unflatten(1, (heads, per_key))  # (N, H, G, C, P)
    beta, log_decay = (each.view(num, length, heads, per_key).permute(0, 2, 3, 1) for each in (beta, log_decay))
    total = log_decay.cumsum(-1)  # (N, H, G, C)
    between = _decays(total)  # (N, H, G, C, C)
    key_t = key.transpose(-1, -2)
    reads = (query @ key_t).unsqueeze(2) * between
    system = (key @ key_t).unsqueeze(2) * between * beta.unsqueeze(-1)
    inverse = _inverse(system) * beta.unsqueeze(-2)
    sizes, keeps_state = [count * heads * per_key for count in counts], state is not None
    # Chunks before `begin` have a state of zeros before them; behind those from `end` on no state is needed.
    begin, end = (0, num) if keeps_state else (counts[0], num - counts[-1])
    reading: Iterator[Sequence[Tensor]] = iter(())
    writing: Iterator[Sequence[Tensor]] = iter(())
    if begin < num:
        passed = total[begin:].exp()  # (N, H, G, C): the decay since the chunk began
        queries = query[begin:].unsqueeze(2) * passed.unsqueeze(-1)  # (N, H, G, C, E)
        of_keys = (inverse[begin:] * passed.unsqueeze(-2)).flatten(2, 3)  # (N, H, G C, C)
        corrections = (of_keys @ key[begin:]).view_as(queries)
        reading = _rounds((corrections, queries), sizes if keeps_state else sizes[1:])
    if end:
        left = (total[:end, ..., -1:] - total[:end]).exp().unsqueeze(-1)  # the decay until the chunk ends
        writes = (key[:end].unsqueeze(2) * left).transpose(-1, -2)  # (N, H, G, E, C)
        kept = total[:end, ..., -1:, None].exp()  # (N, H, G, 1, 1)
        writing = _rounds((writes, kept), sizes if keeps_state else sizes[:-1])
    if state is not None:
        state = state.flatten(0, 2)
    outs = []
    rounds = zip(_rounds((inverse @ value, reads), sizes), [*sizes[1:], sizes[-1]], strict=True)
    for (values, read), goes_on in rounds:
        if state is None:
            deltas = values
            outs.append(read @ deltas)
        else:
            correction, query = next(reading)
            deltas = torch.baddbmm(values, correction, state, alpha=-1)
            outs.append(torch.baddbmm(query @ state, read, deltas))
        if (written := next(writing, None)) is not None:
            write, keep = (_first(each, goes_on) for each in written)
            added = write, _first(deltas, goes_on)
            state = torch.bmm(*added) if state is None else torch.baddbmm(_first(state, goes_on) * keep, *added)
    out = torch.cat(outs) if len(outs) > 1 else outs[0]
    out = out.view(num, heads * per_key, length, -1).transpose(1, 2).contiguous()  # (N, C, H G, P)
    last = state.view(-1, heads, per_key, *state.shape[1:]) if state is not None and keeps_state else None
    return gated(out, inputs.gate, weights), last


def _rounds(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Iterator[Sequence[Tensor]]:
    """Yield each round's matrices of (N, H, G, ..., ...): as many as `sizes` says."""
    flat = [tensor.flatten(0, 2) for tensor in tensors]
    if len(sizes) == 1:  # a view of all rows, whose backward would copy
        return iter([flat])
    return zip(*(tensor.split(sizes) for tensor in flat), strict=True)


def _first(tensor: Tensor, count: int) -> Tensor:
    """Return the first matrices of a batch; all of them without a view, whose backward would copy."""
    return tensor if len(tensor) == count else tensor[:count]


def step(inputs: DeltaInputs, weights: DeltaWeights, before: Sequence[Tensor], state: Tensor) -> Tensor:
    """Return the layer's results (N, V), fp32, of one more token of N sequences; `state` (N, H, G, E, P) is changed.

    `before` has the W - 1 tokens before it: (N, W - 1, K), (N, W - 1, K), (N, W - 1, V).
    """
    windows = [torch.cat([rows, own.unsqueeze(1)], 1) for rows, own in zip(before, inputs.qkv, strict=True)]
    query, key, value = (_convolved(rows, conv).squeeze(1) for rows, conv in zip(windows, weights.conv, strict=True))
    beta, log_decay = coefficients(inputs, weights, None)
    shape = weights.shape
    num, heads, per_key = len(value), shape.num_key_heads, shape.heads_per_key
    query, key = (unit(rows.view(num, heads, -1)) for rows in (query, key))  # (N, H, E)
    query = query * shape.key_dim**-0.5
    value = value.view(num, heads, per_key, -1)  # (N, H, G, P)
    beta, decay = (each.view(num, heads, per_key, 1) for each in (beta, log_decay.exp()))
    seen = torch.stack([query, key], 2).unsqueeze(2) @ state  # (N, H, G, 2, P): what both read in the old state
    delta = (value - seen[..., 1, :] * decay) * beta
    overlap = (query * key).sum(-1)[:, :, None, None]  # (N, H, 1, 1)
    out = seen[..., 0, :] * decay + delta * overlap
    state.mul_(decay.unsqueeze(-1)).addcmul_(key[:, :, None, :, None], delta.unsqueeze(-2))
    return gated(out.flatten(1, 2), inputs.gate, weights)


def coefficients(inputs: DeltaInputs, weights: DeltaWeights, is_token: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return beta and the log decay of each token and value head, (..., H G); zeros at padding.

    By `exp` and `log1p`: the library's sigmoid and softplus compute the last values of a tensor, those behind a
    multiple of 32, by another kernel, and few heads are not a multiple of 32.
    """
    beta = 1 / (1 + torch.exp(-inputs.strength.float().clamp(min=STRENGTH_MIN)))
    argument = inputs.decay.float() + weights.dt_bias
    log_decay = (argument.clamp(min=0) + torch.log1p(torch.exp(-argument.abs()))) * -weights.decay  # softplus
    if is_token is None:
        return beta, log_decay
    padding = ~is_token.unsqueeze(-1)
    return beta.masked_fill(padding, 0.0), log_decay.masked_fill(padding, 0.0)


def unit(rows: Tensor) -> Tensor:
    """Return rows (..., E) divided by their length."""
    units: Tensor = _UnitFunction.apply(rows)  # type: ignore[no-untyped-call]
    return units


def gated(out: Tensor, gate: Tensor, weights: DeltaWeights) -> Tensor:
    """Return results (..., H G, P), normalised by head and multiplied by SiLU of the gate (..., V): (..., V)."""
    normal = rms_norm(out, weights.norm, weights.norm_eps)
    gated: Tensor = normal * F.silu(gate.float()).view(normal.shape)
    return gated.flatten(-2)


def _decays(total: Tensor) -> Tensor:
    """Return exp(total_i - total_j), (..., C, C), of totals (..., C) that fall; 0 where token j comes after i."""
    decays: Tensor = _DecaysFunction.apply(total)  # type: ignore[no-untyped-call]
    return decays


def _inverse(system: Tensor) -> Tensor:
    """Return the inverse of unit lower triangular matrices (..., C, C), whose other values are ignored.

    Those of the rule have no value beyond 1, because no token makes what it reads longer: products with the inverse are
    as exact as solutions, and faster.
    """
    inverse: Tensor = _InverseFunction.apply(system)  # type: ignore[no-untyped-call]
    return inverse


def _convolved(rows: Tensor, weights: Tensor) -> Tensor:
    """Return SiLU of the convolution of rows (N, C + W - 1, K) with weights (W, K): (N, C, K), fp32."""
    out: Tensor = _ConvFunction.apply(rows, weights)  # type: ignore[no-untyped-call]
    return out


class _ConvFunction(torch.autograd.Function):
    """Sums products in a fixed order, the oldest token first. Autograd's own backward takes four copies of the rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        rows = rows.float()
        length = rows.shape[1] - len(weights) + 1
        total = rows[:, :length] * weights[0]
        for offset in range(1, len(weights)):
            total.addcmul_(rows[:, offset : offset + length], weights[offset])
        ctx.save_for_backward(total, weights)
        return F.silu(total)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        total, weights = ctx.saved_tensors
        dtotal = torch.ops.aten.silu_backward.default(dout, total)
        num, length, width = dtotal.shape
        drows = dtotal.new_empty(num, length + len(weights) - 1, width)
        torch.mul(dtotal, weights[0], out=drows[:, :length])
        drows[:, length:].zero_()
        for offset in range(1, len(weights)):
            drows[:, offset : offset + length].addcmul_(dtotal, weights[offset])
        return drows, None


class _DecaysFunction(torch.autograd.Function):
    """Sets the values of later tokens, whose differences are not negative, to zero in place."""

    @staticmethod
    def forward(ctx: Any, total: Tensor) -> Tensor:
        between = total.unsqueeze(-1) - total.unsqueeze(-2)
        decays = between.clamp_(LOG_DECAY_MIN, 0.0).exp_().tril_()
        ctx.save_for_backward(decays)
        return decays

    @staticmethod
    def backward(ctx: Any, ddecays: Tensor) -> Tensor:
        (decays,) = ctx.saved_tensors
        dbetween = (ddecays * decays).tril_()
        dtotal: Tensor = dbetween.sum(-1)
        return dtotal.sub_(dbetween.sum(-2))


class _InverseFunction(torch.autograd.Function):
    """Autograd's own backward solves the systems again."""

    @staticmethod
    def forward(ctx: Any, system: Tensor) -> Tensor:
        identity = torch.eye(system.shape[-1], device=system.device).expand_as(system)
        inverse: Tensor = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, dinverse: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        dsystem: Tensor = transposed @ dinverse @ transposed
        return dsystem.tril_(-1).neg_()


class _UnitFunction(torch.autograd.Function):
    """Autograd's own backward reads the rows twice as often."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        scale = torch.rsqrt(rows.square().sum(-1, keepdim=True) + UNIT_EPS)
        units = rows * scale
        ctx.save_for_backward(units, scale)
        return units

    @staticmethod
    def backward(ctx: Any, dunits: Tensor) -> Tensor:
        units, scale = ctx.saved_tensors
        along = (dunits * units).sum(-1, keepdim=True)
        return torch.addcmul(dunits, units, along, value=-1).mul_(scale)
