"""Replaces the layers of a loaded model: linears by multi-LoRA linears, attention by the `Attend` of the pass.

Depends on the names that transformers gives to modules; not on the bank, losses or tenants.

Main invariant: every linear of the model is replaced, or the model is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from workers.model.fused_modules import fuse_rms_norms, fuse_rotary
from workers.model.lora.linears import LinearGroup, MultiLoraLinear
from workers.model.lora.routing import CurrentPass
from workers.model.pretrained import UnsupportedModelError
from workers.rows import GroupShape, ModuleKind

ATTENTION_NAME = "tinkerpool"
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Leaf names of linears that read the same input and are computed together."""
KIND_OF_PARENT: Mapping[str, ModuleKind] = {"self_attn": "attn", "attention": "attn", "attn": "attn", "mlp": "mlp"}


def replace_layers(model: Any, current: CurrentPass) -> tuple[LinearGroup, ...]:
    """Replace linears, norms, rotary functions and attention; return the linears in the order of the forward.

    The last group is the unembedding. The layers share `current`. Raises UnsupportedModelError.
    """
    groups = _replace_linears(model, current)
    fuse_rms_norms(model)
    fuse_rotary(model)
    _register_attention()
    model.set_attn_implementation(ATTENTION_NAME)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.tinkerpool_pass = current
    return groups


def decoder_layers(model: Any, num_layers: int) -> list[nn.Module]:
    """Return the decoder layers in the order of the forward. Raises UnsupportedModelError if not `num_layers`."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if len(layers) != num_layers:
        raise UnsupportedModelError(
            f"the model has {len(layers)} decoder layers that transformers can run again in the backward, and "
            f"{num_layers} layers in its config.json; its architecture is not supported"
        )
    return layers


def _replace_linears(model: Any, current: CurrentPass) -> tuple[LinearGroup, ...]:
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
    for parent, leaves in by_parent.items():
        kind = KIND_OF_PARENT.get(parent.rpartition(".")[2])
        if kind is None:
            raise UnsupportedModelError(
                f"the model has linear layers in {parent!r}, which is neither attention nor MLP; supported are "
                "dense decoder-only models in the shape of Llama, Qwen 2 and 3, Mistral, SmolLM2 and Gemma 3"
            )
        for siblings in _sibling_groups(leaves):
            names = tuple(f"{parent}.{leaf}" for leaf in siblings)
            groups.append(_replace_group(model, current, len(groups), kind, names))
    if not unembedding_name or not groups:
        raise UnsupportedModelError("the model has no linear output layer or no linear layers at all")
    groups.append(_replace_group(model, current, len(groups), "unembed", (unembedding_name,)))
    return tuple(groups)


def _replace_group(
    model: Any, current: CurrentPass, index: int, kind: ModuleKind, names: tuple[str, ...]
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


def _register_attention() -> None:
    """Route attention to the `Attend` of the pass, and keep transformers from making masks. Idempotent."""
    if ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _no_mask)


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Make no mask: `Attend` keeps sequences apart, and transformers would guess them from position ids."""


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
    assert attention_mask is None, "transformers made a mask although it was told not to"
    if kwargs.get("softcap") or kwargs.get("s_aux") is not None or not getattr(module, "is_causal", True):
        raise UnsupportedModelError("soft-capped, sink or non-causal attention is not supported")
    scaling = module.head_dim**-0.5 if scaling is None else scaling
    current: CurrentPass = module.tinkerpool_pass
    assert current.attend is not None
    out = current.attend(module.layer_idx, query, key, value, scaling=scaling, sliding_window=sliding_window)
    return out, None
