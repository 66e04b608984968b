"""Reads an exported adapter, and adds it to the weights that it adapts.

Of experts, for which PEFT has two parameters of a layer, each linear of each expert is a module here, with the name
that files give it: `...mlp.experts.3.gate_proj`.

Dimensions: r rank, D inputs, F outputs, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
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
_BLOCK_ROWS = 4096
"""Rows of a weight that are in fp32 at a time."""


class ExportedAdapter:
    """The files of a PEFT directory, in memory."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError, and safetensors' error for a damaged file. The client has checked the names."""
        config = json.loads((directory / CONFIG).read_text())
        self.scaling = float(config["lora_alpha"]) / int(config["r"])
        tensors = safetensors.torch.load_file(directory / WEIGHTS)
        self._matrices = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}
        self._experts: dict[str, int] = {}
        """How many experts there are, by the full name of a layer's."""
        if config.get("target_parameters"):
            self._take_experts_apart(int(config["r"]))
        self.modules = tuple(name.removesuffix(_A) for name in self._matrices if name.endswith(_A))
        """Full names of the modules that it adapts."""

    def _take_experts_apart(self, rank: int) -> None:
        for name in [name for name in self._matrices if name.endswith(f"{GATE_UP}{_A}")]:
            experts = name.removesuffix(f"{GATE_UP}{_A}")
            for module, leaves in ((f"{experts}{GATE_UP}", LEAVES[:2]), (experts, LEAVES[2:])):
                n = len(leaves)
                A, B = self._matrices.pop(f"{module}{_A}"), self._matrices.pop(f"{module}{_B}")
                As = A.unflatten(0, (-1, n, rank))  # (E, n, r, D)
                Bs = B.unflatten(1, (n, rank, -1)).unflatten(0, (n, -1))  # (n, F, n, r, E)
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
            gates = F.linear(x, experts.gate_up_proj[expert])
            deltas = torch.cat([self._delta(gate, x), self._delta(up, x)], -1)
            inner = experts._apply_gate((gates.float() + deltas).to(x.dtype))
            y = F.linear(inner, experts.down_proj[expert]).float() + self._delta(down, inner)
            out.index_add_(0, rows, (y.to(x.dtype) * weights[rows, places, None]).to(out.dtype))
        return out
