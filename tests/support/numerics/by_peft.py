"""What PEFT computes and trains, in fp32 with autograd: the reference of adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM

from workers.contract.adapted_modules import AdaptedModule, peft_name_of_experts
from workers.contract.messages import AdamParams, Datum


def logprobs(model: Any, data: Sequence[Datum]) -> list[torch.Tensor]:
    results = []
    for datum in data:
        logits = model(input_ids=torch.from_numpy(datum.tokens).long()[None], use_cache=False).logits[0]
        targets = torch.from_numpy(datum.loss_inputs["target_tokens"]).long()
        results.append(logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])
    return results


def cross_entropy(logprobs: Sequence[torch.Tensor], data: Sequence[Datum]) -> torch.Tensor:
    weights = [torch.from_numpy(datum.loss_inputs["weights"]) for datum in data]
    return -torch.stack([(p * w).sum() for p, w in zip(logprobs, weights, strict=True)]).sum()


def peft_name(name: str) -> str:
    """Return PEFT's name of one of our matrices."""
    return "base_model.model." + name.replace(".weight", ".default.weight")


def flags_for(model_directory: Path) -> dict[str, bool]:
    """Return the flags of an adapter that PEFT can train: it takes a dense MLP of Qwen3-Next for one of experts, and
    experts share no factor in it.
    """
    model_type = json.loads((model_directory / "config.json").read_text())["model_type"]
    return {"train_mlp": False} if model_type in {"qwen3_next", "qwen3_moe", "qwen3_5_moe_text", "gpt_oss"} else {}


def own_parts(
    named: Mapping[str, torch.Tensor], modules: Sequence[AdaptedModule]
) -> dict[str, tuple[torch.Tensor, torch.Tensor, slice]]:
    """Return for each of our matrices PEFT's matrix that it is or is in, and which rows and columns of it.

    Where PEFT adapts one linear that joins n modules, their As are one below the other, their Bs in blocks.
    """
    parts, used = {}, set()
    for module in modules:
        joined = [each for each in modules if each.joined and each.linear_name == module.linear_name]
        number = joined.index(module) if joined else 0
        for name, own_name in ((module.A_name, ".lora_A.weight"), (module.B_name, ".lora_B.weight")):
            theirs = peft_name(module.linear_name + own_name)
            if theirs not in named:
                continue
            used.add(theirs)
            matrix = named[theirs]
            rank = matrix.shape[0 if name == module.A_name else 1] // (len(joined) or 1)
            own = range(number * rank, (number + 1) * rank)
            if name == module.A_name:
                parts[name] = matrix, torch.tensor(own), slice(None)
            else:
                runs = module.joined.runs(module.d_out) if module.joined else (range(module.d_out),)
                rows = torch.tensor([row for run in runs for row in run])
                parts[name] = matrix, rows, slice(own.start, own.stop)
    assert used == set(named), "PEFT has other matrices"
    return parts


def own_matrices(named: Mapping[str, torch.Tensor], modules: Sequence[AdaptedModule]) -> dict[str, torch.Tensor]:
    """Return PEFT's matrices, or their gradients, by our names."""
    return {name: matrix[rows][:, columns] for name, (matrix, rows, columns) in own_parts(named, modules).items()}


def own_gradients(gradients: Mapping[str, torch.Tensor], modules: Sequence[AdaptedModule]) -> dict[str, torch.Tensor]:
    """Return the gradients of PEFT's matrices by our names; of a factor that experts share, the sum over its copies."""
    gradients, own = dict(gradients), dict[str, torch.Tensor]()
    of_experts = [module for module in modules if module.is_of_experts]
    for linear in dict.fromkeys(module.linear_name for module in of_experts):
        parts = [module for module in of_experts if module.linear_name == linear]
        num_parts, num_experts = len(parts), max(parts[0].num_As, parts[0].num_Bs)
        name = peft_name_of_experts(linear)
        A = gradients.pop(peft_name(f"{name}.lora_A.weight")).view(num_experts, num_parts, -1, parts[0].d_in)
        B = gradients.pop(peft_name(f"{name}.lora_B.weight")).unflatten(1, (num_parts, -1, num_experts))
        for number, module in enumerate(parts):
            assert module.joined is not None
            rows = [row for run in module.joined.runs(module.d_out) for row in run]
            own_A, own_B = A[:, number], B[rows, number].permute(2, 0, 1)
            own[module.A_name] = own_A.sum(0, keepdim=True) if module.num_As == 1 else own_A
            own[module.B_name] = own_B.sum(0, keepdim=True) if module.num_Bs == 1 else own_B
    return own | own_matrices(gradients, [module for module in modules if not module.is_of_experts])


def trained_by_peft(
    model_directory: Path,
    adapter: Path,
    data: Sequence[Datum],
    params: AdamParams,
    num_steps: int,
    modules: Sequence[AdaptedModule],
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train one tenant with PEFT, autograd and torch's AdamW; return its losses and final matrices by our names.

    The zeros beside the blocks of a joined B are not trained.
    """
    base = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    masks = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for mask, rows, columns in own_parts(masks, modules).values():
        mask[rows, columns] = 1
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = cross_entropy(logprobs(model, data), data)
        loss.backward()
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            parameter.grad *= masks[name]
        torch.nn.utils.clip_grad_norm_(parameters.values(), params.grad_clip_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, own_matrices({name: parameter.detach() for name, parameter in parameters.items()}, modules)
