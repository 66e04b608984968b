"""The naive twin: one sequence at a time, transformers' own attention, explicit LoRA matrices, autograd.

Shares no code with the engine, so that agreement is a proof.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from workers.contract.messages import AdapterSpec, Datum


class NaiveLora(nn.Module):
    """y = W x + alpha / r * B A x; the second part only in these elements of y, if some are given."""

    def __init__(self, linear: nn.Module, A: Tensor, B: Tensor, scaling: float, elements: Tensor | None = None) -> None:
        super().__init__()
        self.linear = linear
        self.lora_A = nn.Parameter(A.clone())
        self.lora_B = nn.Parameter(B.clone())
        self.scaling = scaling
        self.elements = elements

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        delta = self.scaling * (x @ self.lora_A.T @ self.lora_B.T)
        return out + delta if self.elements is None else out.index_add(-1, self.elements, delta)


class NaiveFactors(nn.Module):
    """A (E or 1, r, D) and B (E or 1, F, r) of one linear of all experts of a layer."""

    def __init__(self, A: Tensor, B: Tensor, scaling: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(A.clone())
        self.lora_B = nn.Parameter(B.clone())
        self.scaling = scaling

    def forward(self, x: Tensor, expert: int) -> Tensor:
        A, B = (factor[expert if len(factor) > 1 else 0] for factor in (self.lora_A, self.lora_B))
        return self.scaling * (x @ A.T @ B.T)


class NaiveExperts(nn.Module):
    """transformers' experts, one after another, with the factors of each."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts = experts
        self.factors: dict[str, NaiveFactors] = {}

    def forward(self, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(len(self.experts.down_proj)):
            rows, places = torch.where(choices == expert)
            if len(rows):
                out = out.index_add(0, rows, weights[rows, places, None] * self.one(hidden[rows], expert))
        return out

    def one(self, x: Tensor, expert: int) -> Tensor:
        if isinstance(self.experts, GptOssExperts):
            return self.one_of_gpt_oss(x, expert)
        gate, up = (x @ self.experts.gate_up_proj[expert].T).chunk(2, -1)
        inner = self.experts.act_fn(gate + self.delta("w1", x, expert)) * (up + self.delta("w3", x, expert))
        down: Tensor = inner @ self.experts.down_proj[expert].T
        return down + self.delta("w2", inner, expert)

    def one_of_gpt_oss(self, x: Tensor, expert: int) -> Tensor:
        gate_up = (x @ self.experts.gate_up_proj[expert] + self.experts.gate_up_proj_bias[expert]).unflatten(
            -1, (-1, 2)
        )
        gate, up = gate_up[..., 0] + self.delta("w1", x, expert), gate_up[..., 1] + self.delta("w3", x, expert)
        gate, up = gate.clamp(max=self.experts.limit), up.clamp(-self.experts.limit, self.experts.limit)
        inner = (up + 1) * gate * torch.sigmoid(self.experts.alpha * gate)
        down: Tensor = inner @ self.experts.down_proj[expert] + self.experts.down_proj_bias[expert]
        return down + self.delta("w2", inner, expert)

    def delta(self, name: str, x: Tensor, expert: int) -> Tensor:
        factors = self.factors.get(name)
        return torch.zeros(()) if factors is None else factors(x, expert)


def joined_projection(linear_attn: Any, leaf: str) -> tuple[str, Tensor]:
    """Return the linear of transformers' linear attention that a projection is in, and its elements of the output.

    Qwen3.5 has all queries, all keys and all values; Qwen3-Next has queries, keys, values and gates of each key head.
    """
    key_dim, value_dim = linear_attn.head_k_dim, linear_attn.head_v_dim
    heads, values_per_key = linear_attn.num_k_heads, linear_attn.num_v_heads // linear_attn.num_k_heads
    of_head = {"q": key_dim, "k": key_dim, "v": values_per_key * value_dim, "z": values_per_key * value_dim}
    if hasattr(linear_attn, "in_proj_qkvz"):
        joined, owners = "in_proj_qkvz", [part for _ in range(heads) for part in of_head for _ in range(of_head[part])]
    else:
        joined, owners = "in_proj_qkv", [part for part in "qkv" for _ in range(heads * of_head[part])]
    return joined, torch.tensor([element for element, part in enumerate(owners) if leaf == f"in_proj_{part}"])


class NaiveModel:
    """A base model with one adapter; keys of `weights` are `<module>.lora_A.weight` and `<module>.lora_B.weight`."""

    def __init__(self, directory: Path, spec: AdapterSpec, weights: Mapping[str, Tensor]) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
        self.model.eval().requires_grad_(False)
        self.modules: dict[str, NaiveLora | NaiveFactors] = {}
        for name in {key.removesuffix(".lora_A.weight").removesuffix(".lora_B.weight") for key in weights}:
            A, B = weights[f"{name}.lora_A.weight"], weights[f"{name}.lora_B.weight"]
            parent, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(parent)
            if A.ndim == 3:
                if not isinstance(module, NaiveExperts):
                    module = NaiveExperts(module)
                    self.model.set_submodule(parent, module)
                self.modules[name] = module.factors[leaf] = NaiveFactors(A, B, spec.alpha / spec.rank)
                continue
            joined, elements = (leaf, None) if hasattr(module, leaf) else joined_projection(module, leaf)
            lora = NaiveLora(getattr(module, joined), A, B, spec.alpha / spec.rank, elements)
            setattr(module, joined, lora)
            self.modules[name] = lora

    def logprobs(self, datum: Datum) -> Tensor:
        """Return the log-probabilities of the targets, in their shape, at their temperatures if they have some."""
        tokens = torch.from_numpy(datum.tokens).long()
        targets = torch.from_numpy(datum.loss_inputs["target_tokens"]).long()
        logits = self.model(input_ids=tokens[None], use_cache=False).logits[0]
        if (temperatures := datum.loss_inputs.get("temperatures")) is not None:
            logits = logits / torch.from_numpy(np.where(temperatures > 0, temperatures, 1)[:, None])
        columns = targets if targets.ndim == 2 else targets[:, None]
        picked: Tensor = logits.log_softmax(-1).gather(1, columns)
        return picked.view(targets.shape)

    def gradients(self) -> dict[str, Tensor]:
        named = {}
        for name, lora in self.modules.items():
            assert lora.lora_A.grad is not None
            assert lora.lora_B.grad is not None
            named[f"{name}.lora_A.weight"] = lora.lora_A.grad
            named[f"{name}.lora_B.weight"] = lora.lora_B.grad
        return named


PlainLoss = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]


def _cross_entropy(p: Tensor, x: Mapping[str, Tensor], c: Mapping[str, float]) -> Tensor:
    return (-p * x["weights"]).sum()


def _importance_sampling(p: Tensor, x: Mapping[str, Tensor], c: Mapping[str, float]) -> Tensor:
    return -(torch.exp(p - x["logprobs"]) * x["advantages"]).sum()


def _bounds(x: Mapping[str, Tensor], c: Mapping[str, float], low: float, high: float) -> tuple[Tensor, Tensor]:
    return (
        x.get("clip_low_threshold", torch.tensor(c.get("clip_low_threshold", low))),
        x.get("clip_high_threshold", torch.tensor(c.get("clip_high_threshold", high))),
    )


def _ppo(p: Tensor, x: Mapping[str, Tensor], c: Mapping[str, float]) -> Tensor:
    ratio = torch.exp(p - x["logprobs"])
    clipped = torch.clamp(ratio, *_bounds(x, c, 0.8, 1.2))
    return -torch.min(ratio * x["advantages"], clipped * x["advantages"]).sum()


def _cispo(p: Tensor, x: Mapping[str, Tensor], c: Mapping[str, float]) -> Tensor:
    ratio = torch.exp(p - x["logprobs"])
    return -(torch.clamp(ratio, *_bounds(x, c, 0.0, 4.0)).detach() * p * x["advantages"]).sum()


def _dro(p: Tensor, x: Mapping[str, Tensor], c: Mapping[str, float]) -> Tensor:
    beta = c.get("beta", 0.05)
    return -(p * x["advantages"] - 0.5 * beta * (p - x["logprobs"]) ** 2).sum()


def _gspo(p: Tensor, x: Mapping[str, Tensor], c: Mapping[str, float]) -> Tensor:
    mask = x.get("sequence_ratio_mask", torch.ones_like(p))
    log_ratio = ((p.detach() - x["logprobs"]) * mask).sum() / mask.sum()
    ratio = torch.exp(log_ratio + p - p.detach())
    clipped = torch.clamp(ratio, *_bounds(x, c, 1 - 3e-4, 1 + 4e-4))
    return -torch.min(ratio * x["advantages"], clipped * x["advantages"]).sum()


def _stable_reinforce(p: Tensor, x: Mapping[str, Tensor], c: Mapping[str, float]) -> Tensor:
    total = torch.zeros(())
    drawn = [t for t in range(len(p)) if x["temperatures"][t] > 0]
    ratio = torch.exp(sum((p[t].detach() - x["logprobs"][t] for t in drawn), torch.zeros(())))
    for t in drawn:
        weight = torch.minimum(ratio, torch.ones(())) if x["advantages"][t] < 0 else 1.0
        total = total - weight * x["advantages"][t] * p[t]
    return total + 0 * p.sum()


PLAIN_LOSSES: Mapping[str, PlainLoss] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
    "stable_reinforce": _stable_reinforce,
}


def plain_inputs(datum: Datum) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in datum.loss_inputs.items()}


def naive_pass(
    model: NaiveModel, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float]
) -> tuple[float, list[Tensor], dict[str, Tensor]]:
    """Return loss, log-probabilities and gradients of one request."""
    total = torch.zeros(())
    logprobs = []
    for datum in data:
        p = model.logprobs(datum)
        logprobs.append(p.detach())
        total = total + PLAIN_LOSSES[loss_fn](p, plain_inputs(datum), config)
    total.backward()
    return float(total.detach()), logprobs, model.gradients()
