"""Layers of linear attention by the gated delta rule: Gated DeltaNet, as Qwen3.5 and Qwen3-Next have it.

transformers' layer computes one sequence a row of a batch, and ignores where packed sequences begin. It is replaced by
one that takes apart the weights which belong to queries, keys, values and gates, because adapters adapt each of them
alone, and gives the results of its linears to the `Recur` of the pass.

Depends on the names that transformers gives to a layer's weights; not on adapters, or on how a pass computes the rule.

Main invariant: the linears of a layer are views of the weights that were loaded, except where Qwen3-Next's order, key
head by key head, has to be undone.

Dimensions: T rows of the pass, D hidden size, H key heads, G value heads for each key head, E key head dimension, P
value head dimension, K = H E, V = H G P.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from workers.contract.adapted_modules import JoinedRows
from workers.model.delta_rule import Convolve, DeltaInputs, DeltaShape, DeltaWeights
from workers.model.linears import CurrentPass
from workers.model.pretrained import UnsupportedModelError

JOINED, INTERLEAVED = "in_proj_qkv", "in_proj_qkvz"
"""Names of the linear by which a layer of Qwen3.5 and of Qwen3-Next is known."""
LINEARS = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "in_proj_b", "in_proj_a")
"""The linears that read a layer's input, in the order of `DeltaInputs`."""
FROZEN = ("in_proj_b", "in_proj_a")
"""Those that adapters do not adapt: their outputs are one number for each head."""


class GatedDelta(nn.Module):
    """Replaces a layer of transformers. Its linears are replaced in turn by multi-LoRA linears."""

    def __init__(self, theirs: Any, number: int, current: CurrentPass) -> None:
        """Take the weights; `number` counts such layers of the model from 0. Raises UnsupportedModelError."""
        super().__init__()
        if theirs.conv1d.bias is not None or theirs.activation not in {"silu", "swish"}:
            raise UnsupportedModelError(
                "linear attention whose convolution has a bias, or another activation than SiLU, is not supported"
            )
        self._number = number
        self._current = current
        self.joined = _joined_rows(theirs)
        """Where transformers has those of `LINEARS` that it joins, by name."""
        for name, weight in zip(LINEARS, _input_weights(theirs, self.joined), strict=True):
            setattr(self, name, _linear(weight))
        self.out_proj = theirs.out_proj
        widths = [theirs.key_dim, theirs.key_dim, theirs.value_dim]
        conv = theirs.conv1d.weight.detach().squeeze(1).t().float()  # (W, 2 K + V)
        self.delta_weights = DeltaWeights(
            shape=DeltaShape(
                num_key_heads=int(theirs.num_k_heads),
                num_value_heads=int(theirs.num_v_heads),
                key_dim=int(theirs.head_k_dim),
                value_dim=int(theirs.head_v_dim),
                history=len(conv) - 1,
            ),
            conv=[part.contiguous() for part in conv.split(widths, 1)],
            decay=theirs.A_log.detach().float().exp(),
            dt_bias=theirs.dt_bias.detach().float(),
            norm=theirs.norm.weight.detach().float(),
            norm_eps=float(theirs.norm.variance_epsilon),
        )

    def use(self, convolve: Convolve) -> None:
        """Compute the heads of chunks this way from now on."""
        self.delta_weights = replace(self.delta_weights, convolve=convolve)

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Return (1, T, D) for (1, T, D), as transformers calls it."""
        rows = [getattr(self, name)(hidden_states).squeeze(0) for name in LINEARS]
        recur = self._current.recur
        assert recur is not None, "a pass of a hybrid began without its linear attention"
        out = recur(self._number, self.delta_weights, DeltaInputs.of(rows))
        projected: Tensor = self.out_proj(out.unsqueeze(0))
        return projected


def replace_delta_layers(model: nn.Module, current: CurrentPass) -> tuple[GatedDelta, ...]:
    """Replace every layer of linear attention, all of one shape; return them in order. Raises UnsupportedModelError."""
    layers: list[GatedDelta] = []
    for name, module in list(model.named_modules()):
        if hasattr(module, JOINED) or hasattr(module, INTERLEAVED):
            layer = GatedDelta(module, len(layers), current)
            model.set_submodule(name, layer)
            layers.append(layer)
    if len({layer.delta_weights.shape for layer in layers}) > 1:
        raise UnsupportedModelError("the model's layers of linear attention have different sizes")
    return tuple(layers)


def joined_modules(model: nn.Module) -> dict[str, JoinedRows]:
    """Return where transformers has them, for the modules of the replaced layers that it joins with others."""
    return {
        f"{name}.{leaf}": rows
        for name, layer in model.named_modules()
        if isinstance(layer, GatedDelta)
        for leaf, rows in layer.joined.items()
    }


def _joined_rows(theirs: Any) -> dict[str, JoinedRows]:
    """Return the rows of queries, keys and values, and of Qwen3-Next's gates, by the names in `LINEARS`.

    Qwen3.5 has all queries, all keys, all values. Qwen3-Next has for each key head E rows of queries, E of keys, G P of
    values and G P of gates.
    """
    is_interleaved = hasattr(theirs, INTERLEAVED)
    num_periods, num_linears = (theirs.num_k_heads, 4) if is_interleaved else (1, 3)
    rows = (theirs.key_dim, theirs.key_dim, theirs.value_dim, theirs.value_dim)
    widths = [num_rows // num_periods for num_rows in rows[:num_linears]]
    return {
        name: JoinedRows(linear=INTERLEAVED if is_interleaved else JOINED, begin=begin, width=width, period=sum(widths))
        for name, begin, width in zip(LINEARS[:num_linears], accumulate(widths[:-1], initial=0), widths, strict=True)
    }


def _input_weights(theirs: Any, joined: Mapping[str, JoinedRows]) -> list[Tensor]:
    """Return the weights (F, D) of `LINEARS`."""
    parts = [
        getattr(theirs, rows.linear)
        .weight.detach()
        .unflatten(0, (-1, rows.period))[:, rows.begin : rows.begin + rows.width]
        .flatten(0, 1)
        for rows in joined.values()
    ]
    if hasattr(theirs, JOINED):
        return [*parts, *(linear.weight.detach() for linear in (theirs.in_proj_z, theirs.in_proj_b, theirs.in_proj_a))]
    per_key = theirs.num_v_heads // theirs.num_k_heads
    heads = theirs.in_proj_ba.weight.detach()
    of_heads = heads.unflatten(0, (theirs.num_k_heads, 2, per_key))  # strength, then decay, of each key head
    return [*parts, *(of_heads[:, part].flatten(0, 1) for part in (0, 1))]


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
