"""Replaces the layers of a loaded model: linears by multi-LoRA linears, what is between by faster code.

Depends on the names that transformers gives to modules; not on the bank, losses or tenants.

Main invariant: every linear of the model is replaced, or the model is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from workers.contract.adapted_modules import AdaptedModule, ModuleKind
from workers.model.experts import ROUTER, SHARED_GATE, Experts, replace_experts
from workers.model.families import alternatives
from workers.model.fused_modules import fuse_gates, fuse_rms_norms, fuse_rotary
from workers.model.gated_delta import FROZEN, GatedDelta, joined_modules, replace_delta_layers
from workers.model.linears import CurrentPass, LinearGroup, MultiLoraLinear
from workers.model.pretrained import UnsupportedModelError
from workers.rows import GroupKind, GroupShape

SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_q", "in_proj_k", "in_proj_v"),
    FROZEN,
)
"""Leaf names of linears that read the same input and are computed together."""
KIND_OF_PARENT: Mapping[str, ModuleKind] = {
    "self_attn": "attn",
    "attention": "attn",
    "attn": "attn",
    "linear_attn": "attn",
    "mlp": "mlp",
    "shared_expert": "mlp",
}
FROZEN_LEAVES = (*FROZEN, ROUTER, SHARED_GATE)
"""Linears that adapters do not adapt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The layers that have replaced those of a model."""

    linears: tuple[LinearGroup, ...]
    """In the order of the forward, the unembedding last."""
    delta: tuple[GatedDelta, ...]
    """Linear attention."""
    experts: tuple[Experts, ...]

    @property
    def shapes(self) -> tuple[GroupShape, ...]:
        """The shapes of all groups, by their indices; the unembedding is the last."""
        return (*(shape for layer in self.experts for shape in layer.shapes), *(group.shape for group in self.linears))


def replace_layers(model: Any, current: CurrentPass) -> Layers:
    """Replace linear attention, experts, linears, norms, rotary functions and gates. Layers share `current`.

    Raises UnsupportedModelError.
    """
    layers = replace_products(model, current)
    fuse_rms_norms(model)
    fuse_rotary(model)
    fuse_gates(model)
    return layers


def adapted_modules(model: nn.Module, layers: Layers) -> tuple[AdaptedModule, ...]:
    """Return what adapters can adapt of a model whose layers were replaced."""
    joined = joined_modules(model)
    for experts in layers.experts:
        joined |= experts.joined
    return tuple(
        replace(module, joined=joined.get(module.name))
        for shape in layers.shapes
        if shape.kind != "frozen"
        for module in shape.modules
    )


def decoder_layers(model: Any, num_layers: int) -> list[nn.Module]:
    """Return the decoder layers in the order of the forward. Raises UnsupportedModelError if not `num_layers`."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if len(layers) != num_layers:
        raise UnsupportedModelError(
            f"the model has {len(layers)} decoder layers that transformers can run again in the backward, and "
            f"{num_layers} layers in its config.json; its architecture is not supported"
        )
    return layers


def replace_products(model: Any, current: CurrentPass) -> Layers:
    """Replace what has products with weights, which needs only their shapes. As `replace_layers`."""
    delta_layers = replace_delta_layers(model, current)
    experts = replace_experts(model, current)
    linears = _replace_linears(model, current, first=2 * len(experts))
    return Layers(linears=linears, delta=delta_layers, experts=experts)


def _replace_linears(model: Any, current: CurrentPass, first: int) -> tuple[LinearGroup, ...]:
    """Replace the linears; the first group has this index."""
    unembedding = model.get_output_embeddings()
    groups: list[LinearGroup] = []
    by_parent: dict[str, list[str]] = {}
    unembedding_name = ""
    for name, module in model.named_modules():
        if module is unembedding:
            unembedding_name = name
        elif isinstance(module, nn.Linear):
            parent, _, leaf = name.rpartition(".")
            by_parent.setdefault(parent, []).append(leaf)
    if unembedding_name != "lm_head" or not hasattr(model, "model"):
        raise UnsupportedModelError(
            f"{model.config.model_type} calls its layers {model.base_model_prefix!r} and its output layer "
            f"{unembedding_name!r}; passes and exports need the names of Llama, 'model' and 'lm_head': {alternatives()}"
        )
    for parent, leaves in by_parent.items():
        kind = KIND_OF_PARENT.get(parent.rpartition(".")[2])
        if kind is None and not set(leaves) <= set(FROZEN_LEAVES):
            raise UnsupportedModelError(
                f"the model has linear layers in {parent!r}, which is neither attention nor MLP; {alternatives()}"
            )
        for siblings in _sibling_groups(leaves):
            names = tuple(f"{parent}.{leaf}" for leaf in siblings)
            own_kind: GroupKind = kind if kind is not None and siblings[0] not in FROZEN_LEAVES else "frozen"
            groups.append(_replace_group(model, current, first + len(groups), own_kind, names))
    if not groups:
        raise UnsupportedModelError("the model has no linear layers but its output layer")
    groups.append(_replace_group(model, current, first + len(groups), "unembed", (unembedding_name,)))
    return tuple(groups)


def _replace_group(
    model: Any, current: CurrentPass, index: int, kind: GroupKind, names: tuple[str, ...]
) -> LinearGroup:
    linears = [model.get_submodule(name) for name in names]
    shape = GroupShape(
        index=index,
        kind=kind,
        names=names,
        d_in=linears[0].in_features,
        d_outs=tuple(linear.out_features for linear in linears),
    )
    assert all(linear.in_features == shape.d_in for linear in linears)
    group = LinearGroup(shape, linears, current)
    for position, (name, linear) in enumerate(zip(names, linears, strict=True)):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, MultiLoraLinear(linear, group, position))
    return group


def _sibling_groups(leaves: list[str]) -> list[tuple[str, ...]]:
    """Return the leaf names of one module, siblings together, in order of their first member."""
    groups: list[tuple[str, ...]] = []
    for leaf in leaves:
        if any(leaf in group for group in groups):
            continue
        siblings = next((names for names in SIBLINGS if leaf in names and set(names) <= set(leaves)), (leaf,))
        groups.append(siblings)
    return groups
