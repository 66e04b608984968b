"""Reads an exported adapter, and adds it to the weights that it adapts.

Dimensions: r rank, D inputs, F outputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from workers.bank.state_files import PEFT_PREFIX

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_A, _B = ".lora_A.weight", ".lora_B.weight"
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
        self.modules = tuple(name.removesuffix(_A) for name in self._matrices if name.endswith(_A))
        """Full names of the modules that it adapts."""

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
        hooks = []
        for module in self.modules:
            A, B = self.factors(module)

            def add(_: Any, args: tuple[Tensor, ...], output: Tensor, A: Tensor = A, B: Tensor = B) -> Tensor:
                delta = (args[0].float() @ A.T) @ B.T
                return (output.float() + self.scaling * delta).to(output.dtype)

            hooks.append(model.get_submodule(module).register_forward_hook(add))

        def detach() -> None:
            for hook in hooks:
                hook.remove()

        return detach
