"""What PEFT computes and trains, in fp32 with autograd: the reference of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM

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


def trained_by_peft(
    model_directory: Path, adapter: Path, data: Sequence[Datum], params: AdamParams, num_steps: int
) -> tuple[list[float], dict[str, Any]]:
    """Train one tenant with PEFT, autograd and torch's AdamW; return its losses and final parameters."""
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
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = cross_entropy(logprobs(model, data), data)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), params.grad_clip_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, parameters
