"""Reads an exported adapter, and adds it to the weights that it adapts.

Of experts, for which PEFT has two parameters of a layer, each linear of each expert is a module here, with the name
that files give it: `...mlp.experts.3.gate_proj`.

Dimensions: r rank, D inputs, F outputs, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional as F

from workers.bank.state_files import PEFT_PREFIX

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_A, _B = ".lora_A.weight", ".lora_B.weight"
GATE_UP = ".base_layer"
"""Behind the name of experts, whose gates and ups are PEFT's inner layer; the outer one is down."""
LEAVES = ("gate_proj", "up_proj", "down_proj")
"""What files call the linears of an expert."""
PARAMETERS = ("gate_up_proj", "gate_up_proj", "down_proj")
"""The parameters of all experts of a layer that have them."""
_BLOCK_ROWS = 4096
"""Rows of a weight that are in fp32 at a time."""


def weight_of_expert(weights: Tensor, expert: int, leaf: str, form: Any) -> Tensor:
    """Return a linear of one expert, (F, D), as a view of the parameter of all experts, (E, ..).

    `form` is transformers' module, with its `is_transposed` and `is_concatenated`.
    """
    weight = weights[expert].T if form.is_transposed else weights[expert]
    if leaf == LEAVES[-1]:
        return weight
    number = LEAVES.index(leaf)
    return weight.chunk(2)[number] if form.is_concatenated else weight[number::2]


class ExportedAdapter:
    """The files of a PEFT directory, in memory."""

    def __init__(self, directory: Path, model: Any) -> None:
        """Read the files; the form of experts is that of a base model of transformers, whose weights are not read.

        Raises OSError, and safetensors' error for a damaged file. The client has checked the names.
        """
        config = json.loads((directory / CONFIG).read_text())
        self.scaling = float(config["lora_alpha"]) / int(config["r"])
        tensors = safetensors.torch.load_file(directory / WEIGHTS)
        self._matrices = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}
        self._experts: dict[str, int] = {}
        """How many experts there are, by the full name of a layer's."""
        if config.get("target_parameters"):
            self._take_experts_apart(int(config["r"]), dict(model.named_modules()))
        self.modules = tuple(name.removesuffix(_A) for name in self._matrices if name.endswith(_A))
        """Full names of the modules that it adapts."""

    def _take_experts_apart(self, rank: int, modules: Mapping[str, Any]) -> None:
        for name in [name for name in self._matrices if name.endswith(f"{GATE_UP}{_A}")]:
            experts = name.removesuffix(f"{GATE_UP}{_A}")
            for module, leaves in ((f"{experts}{GATE_UP}", LEAVES[:2]), (experts, LEAVES[2:])):
                n = len(leaves)
                A, B = self._matrices.pop(f"{module}{_A}"), self._matrices.pop(f"{module}{_B}")
                As = A.unflatten(0, (-1, n, rank))  # (E, n, r, D)
                if getattr(modules.get(experts), "is_concatenated", True):
                    B = B.unflatten(0, (n, -1))  # (n, F, n r E)
                else:
                    B = B.unflatten(0, (-1, n)).transpose(0, 1)
                Bs = B.unflatten(2, (n, rank, -1))  # (n, F, n, r, E)
                self._experts[experts] = len(As)
                for expert in range(len(As)):
                    for number, leaf in enumerate(leaves):
                        self._matrices[f"{experts}.{expert}.{leaf}{_A}"] = As[expert, number]
                        self._matrices[f"{experts}.{expert}.{leaf}{_B}"] = Bs[number, :, number, :, expert]

    def factors(self, module: str) -> tuple[Tensor, Tensor]:
        """Return A (r, D) and B (F, r) of a module, fp32."""
        return self._matrices[f"{module}{_A}"], self._matrices[f"{module}{_B}"]

    def shape(self, module: str) -> tuple[int, int]:
        """Return (F, D) of the weight that a module must have."""
        A, B = self.factors(module)
        return B.shape[0], A.shape[1]

    def add_to(self, module: str, weight: Tensor) -> None:
        """Add scaling * B A to a weight (F, D) in its place, rounded once to its dtype."""
        A, B = self.factors(module)
        for rows, B_rows in zip(weight.split(_BLOCK_ROWS), B.split(_BLOCK_ROWS), strict=True):
            rows.copy_(torch.addmm(rows.float(), B_rows, A, alpha=self.scaling))

    def attach(self, model: Any) -> Callable[[], None]:
        """Let a model of transformers compute with the adapter; return what takes it off again.

        It is added to the outputs of the linears, so that tied weights do not change.
        """
        hooks = [
            model.get_submodule(experts).register_forward_hook(partial(self._outputs_of_experts, experts))
            for experts in self._experts
        ]
        for module in self.modules:
            if module.rsplit(".", 2)[0] in self._experts:
                continue

            def add(_: Any, args: tuple[Tensor, ...], output: Tensor, module: str = module) -> Tensor:
                return (output.float() + self._delta(module, args[0])).to(output.dtype)

            hooks.append(model.get_submodule(module).register_forward_hook(add))

        def detach() -> None:
            for hook in hooks:
                hook.remove()

        return detach

    def _delta(self, module: str, x: Tensor) -> Tensor:
        """Return what the adapter adds to a module's output (.., F) for x (.., D), fp32."""
        A, B = self.factors(module)
        return self.scaling * ((x.float() @ A.T) @ B.T)

    def _outputs_of_experts(self, name: str, experts: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the output (N, D) of a layer's experts with the adapter, in place of `output`."""
        hidden, choices, weights = args
        out = torch.zeros_like(output)
        for expert in choices.unique().tolist():
            rows, places = torch.where(choices == expert)
            gate, up, down = (f"{name}.{expert}.{leaf}" for leaf in LEAVES)
            x = hidden[rows]
            gate_up_proj, down_proj = (
                weights[expert].T if experts.is_transposed else weights[expert]
                for weights in (experts.gate_up_proj, experts.down_proj)
            )
            biases = (
                [experts.gate_up_proj_bias[expert], experts.down_proj_bias[expert]] if experts.has_bias else [None] * 2
            )
            deltas = [self._delta(gate, x), self._delta(up, x)]
            joined = torch.cat(deltas, -1) if experts.is_concatenated else torch.stack(deltas, -1).flatten(1)
            inner = experts._apply_gate((F.linear(x, gate_up_proj, biases[0]).float() + joined).to(x.dtype))
            y = F.linear(inner, down_proj, biases[1]).float() + self._delta(down, inner)
            out.index_add_(0, rows, (y.to(x.dtype) * weights[rows, places, None]).to(out.dtype))
        return out
