"""Layers of experts behind a router: mixtures of experts.

transformers' router and experts are replaced by ones that compute the same from the same weights. The router is a
frozen linear; a row's choices depend on that row alone, and no row is dropped, however many choose the same expert.

Depends on the names that transformers gives to a layer's weights; not on the bank or on tenants.

Main invariant: the weights are those that were loaded, not copied.

Dimensions: T rows of the pass, k experts of a row, D hidden size, F inner size, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from workers.contract.adapted_modules import JoinedRows
from workers.model.clamped_gate import gate_of
from workers.model.expert_groups import GroupedDispatch, GroupedSegments
from workers.model.expert_products import (
    ALIGNED_BYTES,
    AdaptersOfPass,
    Dispatch,
    Dispatching,
    ExpertFunction,
    ExpertLayer,
    ExpertWeights,
    each_choice,
)
from workers.model.expert_shares import ExpertSegments
from workers.model.families import alternatives
from workers.model.linears import CurrentPass
from workers.model.numerics import EXPERT_ROWS, Numerics
from workers.model.pretrained import UnsupportedModelError
from workers.model.segments import Routing
from workers.rows import GroupShape

ROUTER = "logits"
"""The name of a router's linear."""
GATE, UP, DOWN = "w1", "w3", "w2"
"""What adapters call the three linears of the experts, in the names of the Tinker service."""
SHARED_GATE = "shared_expert_gate"
"""The name of a linear that weighs an expert which every row has; like the router it is frozen."""
OTHER_CHOICES_MAX = 0.25
"""Part of a probe's choices that rounding may change."""
_WEIGHTS = {"gate_up_proj", "down_proj"}
_BIASES = {"gate_up_proj_bias", "down_proj_bias"}
_ROUTERS = {"gate", "router"}
"""What transformers calls the router of a layer."""
_CHILDREN = {*_ROUTERS, "experts", "shared_expert", SHARED_GATE}


def is_router(shape: GroupShape) -> bool:
    """Return whether a group of linears is a router's."""
    return shape.names[0].endswith(f".{ROUTER}")


class GivenChoices:
    """The experts that the model's own code chose in a probe, which routers take in place of their own.

    In bf16 rounding sends a token elsewhere now and then, and its log-probabilities are others then.
    """

    def __init__(self, of_layers: Sequence[Tensor]) -> None:
        """Take those of each layer's rows, (N, k)."""
        self._of_layers = of_layers
        self._num_others = 0

    def in_place_of(self, own: Tensor, layer: int) -> Tensor:
        """Return choices (T, k) of a layer for its own, of which rows from N on are padding."""
        given = self._of_layers[layer]
        is_own = (given.unsqueeze(2) == own[: len(given)].unsqueeze(1)).any(2)
        self._num_others += int((~is_own).sum())
        return torch.cat([given, own[len(given) :]])

    @property
    def part_of_others(self) -> float:
        """How many of all choices the routers would not have made."""
        return self._num_others / sum(given.numel() for given in self._of_layers)


class Router(nn.Module):
    """Replaces a router: softmax over the experts, of which each row takes the k largest. Its linear is replaced in
    turn by one that is frozen. A softmax over the k largest alone is the same, if weights sum to 1.
    """

    def __init__(self, theirs: Any, layer: int, shared: ExpertPass) -> None:
        super().__init__()
        self._layer, self._shared = layer, shared
        num_experts, hidden_size = theirs.weight.shape
        bias = getattr(theirs, "bias", None)
        self.logits = nn.Linear(hidden_size, num_experts, bias=bias is not None, device="meta")
        self.logits.weight = theirs.weight
        if bias is not None:
            self.logits.bias = bias
        self.num_choices = int(theirs.top_k)
        self._is_normalised = bool(getattr(theirs, "norm_topk_prob", True))
        """Whether a row's weights sum to 1."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (T, E), weights (T, k), fp32, and choices (T, k) of hidden states (T, D), as transformers."""
        logits = self.logits(hidden.reshape(-1, hidden.shape[-1]))
        scores = torch.softmax(logits, -1, dtype=torch.float32)
        weights, choices = scores.topk(self.num_choices, -1)
        if (given := self._shared.given) is not None:
            choices = given.in_place_of(choices, self._layer)
            weights = scores.gather(-1, choices)
        if self._is_normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, choices


class ExpertPass:
    """What all layers of experts of one base model share: how rows are padded, the segments of the pass, and choices in
    a probe.
    """

    def __init__(self, current: CurrentPass) -> None:
        self.current = current
        self.rows_min = EXPERT_ROWS
        """See `Numerics.expert_rows`."""
        self.is_grouped = False
        """Whether rows are sorted on the device, and kernels of our own add what adapters add there."""
        self.given: GivenChoices | None = None
        """In place of the routers' choices."""
        self._segments: WeakKeyDictionary[Routing, AdaptersOfPass] = WeakKeyDictionary()
        """Of the pass; gone with its routing, or it would keep slabs of the bank in memory."""

    def use(self, numerics: Numerics, *, is_grouped: bool) -> None:
        """Compute all layers' experts this way from now on."""
        self.rows_min, self.is_grouped = numerics.expert_rows, is_grouped

    def dispatch(self, choices: Tensor, num_experts: int) -> Dispatching:
        """Return where rows go that have chosen these experts (T, k)."""
        if self.is_grouped:
            return GroupedDispatch(choices, num_experts)
        return Dispatch(each_choice(choices), num_experts, self.rows_min, choices.device)

    def segments(self, choices: Tensor, gate_up: int, down: int) -> AdaptersOfPass:
        """Return the segments of the pass, whose rows have made choices (T, k); the groups are those of any layer."""
        routing = self.current.routing
        if routing not in self._segments:
            num_rows, num_choices = choices.shape
            self._segments[routing] = (
                GroupedSegments(routing, num_choices, gate_up)
                if self.is_grouped
                else ExpertSegments(routing, num_rows, gate_up, down)
            )
        return self._segments[routing]


class Experts(nn.Module):
    """Replaces the experts of a layer."""

    def __init__(self, theirs: Any, name: str, first: int, num_choices: int, shared: ExpertPass) -> None:
        """Take the weights; `first` is the index of the first of its two groups, `num_choices` is k."""
        super().__init__()
        for parameter, weight in theirs.named_parameters():
            setattr(self, parameter, weight)
        gate_up, down = theirs.gate_up_proj.detach(), theirs.down_proj.detach()
        if theirs.is_transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        num_experts, hidden_size, inner_size = down.shape
        self.shapes = (
            GroupShape(
                index=first,
                kind="mlp",
                names=(f"{name}.{GATE}", f"{name}.{UP}"),
                d_in=hidden_size,
                d_outs=(inner_size, inner_size),
                num_Bs=num_experts,
            ),
            GroupShape(
                index=first + 1,
                kind="mlp",
                names=(f"{name}.{DOWN}",),
                d_in=inner_size,
                d_outs=(hidden_size,),
                num_As=num_experts,
            ),
        )
        self.num_experts, self.inner_size, self.num_choices = num_experts, inner_size, num_choices
        self.weights = ExpertWeights(
            gate_up=gate_up,
            down=down,
            apply_gate=gate_of(theirs),
            gate_up_bias=theirs.gate_up_proj_bias.detach() if theirs.has_bias else None,
            down_bias=theirs.down_proj_bias.detach() if theirs.has_bias else None,
            is_interleaved=not theirs.is_concatenated,
        )
        self.shared = shared
        self._layer = ExpertLayer(self.weights, first, first + 1)

    def forward(self, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        """Return (T, D) of hidden states (T, D), chosen experts and their weights (T, k), as transformers calls it."""
        current = self.shared.current
        current.count_matmuls(3)
        dispatch = self.shared.dispatch(choices, self.num_experts)
        segments = self.shared.segments(choices, self.shapes[0].index, self.shapes[1].index)
        if not torch.is_grad_enabled():
            return self._layer.forward(hidden, weights, dispatch, segments)[0]
        out: Tensor = ExpertFunction.apply(  # type: ignore[no-untyped-call]
            hidden, weights, current.anchor, self._layer, dispatch, segments
        )
        return out

    @property
    def joined(self) -> dict[str, JoinedRows]:
        """Where transformers has the linears, by their names in `shapes`."""
        (gate_up, down), width = self.shapes, 1 if self.weights.is_interleaved else self.inner_size
        gate, up = (
            JoinedRows(linear="gate_up_proj", begin=begin, width=width, period=2 * width, is_of_experts=True)
            for begin in (0, width)
        )
        whole = JoinedRows(linear="down_proj", begin=0, width=down.d_outs[0], period=down.d_outs[0], is_of_experts=True)
        return dict(zip((*gate_up.names, *down.names), (gate, up, whole), strict=True))


@contextmanager
def choices_of_probe(layers: Sequence[Experts], choices: Sequence[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Let routers choose as the model's own code did in a probe, (N, k) of each layer; in fp32 they choose themselves.

    Raises UnsupportedModelError at the end if rounding does not explain their own choices.
    """
    if not layers or dtype == torch.float32:
        yield
        return
    shared = layers[0].shared
    shared.given = given = GivenChoices(choices)
    yield
    shared.given = None
    if given.part_of_others > OTHER_CHOICES_MAX:
        raise UnsupportedModelError(
            f"the routers choose other experts than the model's own code, {given.part_of_others:.0%} of all; this "
            "architecture has a feature that is not supported"
        )


def replace_experts(model: nn.Module, current: CurrentPass) -> tuple[Experts, ...]:
    """Replace the routers and experts of every layer; return the experts in order. Raises UnsupportedModelError."""
    layers: list[Experts] = []
    shared = ExpertPass(current)
    for name, module in list(model.named_modules()):
        if {parameter for parameter, _ in module.named_parameters(recurse=False)} & _WEIGHTS:
            _check_experts(name, module)
            block = name.rpartition(".")[0]
            _check_block(block, model)
            router_name = f"{block}.{_router_of(model.get_submodule(block))}"
            router = Router(model.get_submodule(router_name), len(layers), shared)
            layers.append(Experts(module, name, 2 * len(layers), router.num_choices, shared))
            model.set_submodule(router_name, router)
            model.set_submodule(name, layers[-1])
    return tuple(layers)


def _check_experts(name: str, theirs: Any) -> None:
    """Raise UnsupportedModelError for experts of another form."""
    found = {parameter for parameter, _ in theirs.named_parameters()}
    wanted = _WEIGHTS | _BIASES if getattr(theirs, "has_bias", False) else _WEIGHTS
    has_norms = getattr(theirs, "has_post_expert_norm", False)  # transformers 5.17 knows none
    if found != wanted or has_norms or not getattr(theirs, "has_gate", False):
        raise UnsupportedModelError(
            f"the experts of {name} have {', '.join(sorted(found))}; supported are experts of transformers' interface "
            f"with a gate, without norms; {alternatives()}"
        )
    weight = theirs.down_proj
    multiple = ALIGNED_BYTES // weight.element_size()
    widths = dict(
        zip(("inner", "hidden") if theirs.is_transposed else ("hidden", "inner"), weight.shape[1:], strict=True)
    )
    for width, size in widths.items():
        if size % multiple:
            raise UnsupportedModelError(
                f"the {width} size of {name} is {size}; products of experts in "
                f"{str(weight.dtype).removeprefix('torch.')} take multiples of {multiple} ({ALIGNED_BYTES} bytes); "
                f"{alternatives()}"
            )


def _check_block(name: str, model: nn.Module) -> None:
    """Raise UnsupportedModelError for a layer of experts of another form."""
    block = model.get_submodule(name)
    children = {child for child, _ in block.named_children()}
    router: Any = getattr(block, _router_of(block), None)
    weights = set() if router is None else {parameter for parameter, _ in router.named_parameters()}
    if not children <= _CHILDREN or weights - {"bias"} != {"weight"} or not hasattr(router, "top_k"):
        raise UnsupportedModelError(
            f"{name} has {', '.join(sorted(children))}; supported are experts behind one linear router, with "
            f"and without a shared expert; {alternatives()}"
        )
    if len(inputs := signature(router.forward).parameters) != 1:
        raise UnsupportedModelError(
            f"the router of {name} takes {', '.join(inputs)}; supported are routers that take hidden states alone; "
            f"{alternatives()}"
        )


def _router_of(block: nn.Module) -> str:
    """Return the name of a layer's router; empty if it has none, or several."""
    found = [name for name, _ in block.named_children() if name in _ROUTERS]
    return found[0] if len(found) == 1 else ""
