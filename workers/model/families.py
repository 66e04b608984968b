"""The families of models that are tested, and those that are refused by name. Data only: imports nothing of a model.

A family is a `model_type` of transformers. A model of another family is served if the probe passes (`pretrained`), and
messages name the families here as the ones to take instead.

Main invariant: each family of `TESTED` has every test of the families, and a row in `docs/models.md`; each of `REFUSED`
has a row there, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """A family whose small random models pass every test of the families."""

    title: str
    """Its models, as people call them."""
    special: str = ""
    """What it has that the others do not, as the tests' models have it."""


NUM_NAMED = 5
"""The first so many tested families are the best known, and messages name them."""
TESTED: Mapping[str, Family] = {
    "qwen3": Family("Qwen 3", "norms of queries and keys"),
    "qwen2": Family("Qwen 2, 2.5", "biases of queries, keys and values"),
    "llama": Family("Llama 2, 3, SmolLM2", "scaled rotary positions"),
    "gemma3_text": Family("Gemma 3, text", "sliding windows, four norms in a layer"),
    "mistral": Family("Mistral", "with and without a sliding window"),
    "ministral": Family("Ministral", "sliding windows in some layers"),
    "ministral3": Family("Ministral 3", "queries scaled by position"),
    "phi": Family("Phi 1, 1.5, 2", "attention and MLP side by side, rotary positions in a part of a head"),
    "phi3": Family("Phi 3, 3.5, 4", "one linear for queries, keys and values, one for gate and up"),
    "olmo": Family("OLMo", "norms without weights"),
    "olmo2": Family("OLMo 2", "norms behind attention and MLP"),
    "olmo3": Family("OLMo 3", "the same with sliding windows in some layers"),
    "glm": Family("GLM 4 (9B)", "interleaved rotary positions, one linear for gate and up"),
    "glm4": Family("GLM 4 (0414)", "the same with four norms in a layer"),
    "smollm3": Family("SmolLM3", "layers without positions"),
    "starcoder2": Family("StarCoder 2", "biases, an MLP without gate"),
    "exaone4": Family("EXAONE 4", "layers without positions beside sliding windows"),
    "seed_oss": Family("Seed-OSS", "heads wider than the hidden size divided by their number"),
    "hunyuan_v1_dense": Family("Hunyuan, dense", "norms of queries and keys behind the rotary positions"),
    "stablelm": Family("StableLM 2", "a norm for each head, attention and MLP side by side"),
    "apertus": Family("Apertus", "an activation with weights of its own (xIELU)"),
    "arcee": Family("Arcee AFM", "squared ReLU, an MLP without gate"),
    "ernie4_5": Family("ERNIE 4.5, dense", "interleaved rotary positions, biases"),
    "helium": Family("Helium", "interleaved rotary positions"),
    "granite": Family("Granite 3, dense", "multipliers of embeddings, residuals, attention and logits"),
    "cohere": Family("Command R", "scaled logits, attention and MLP side by side"),
    "cohere2": Family("Command R7B", "the same with sliding windows in some layers"),
    "nemotron": Family("Nemotron, Minitron", "rotary positions in a part of a head, norms of 1 + weight"),
    "qwen3_5_text": Family("Qwen 3.5, 3.6, dense text", "linear attention in some layers, gated attention in others"),
    "qwen3_next": Family("Qwen3-Next", "the same, its weights in another order; experts beside one for every token"),
    "qwen3_moe": Family("Qwen 3, mixtures", "experts in place of the MLP"),
    "olmoe": Family("OLMoE", "the same, weights of experts that do not sum to 1"),
    "mixtral": Family("Mixtral", "the same, weights of experts in fp32"),
    "qwen2_moe": Family("Qwen 1.5, 2, mixtures", "experts beside one for every token, and dense layers"),
    "qwen3_5_moe_text": Family("Qwen 3.5, 3.6, mixtures, text", "a hybrid with experts beside one for every token"),
    "gpt_oss": Family("gpt-oss", "experts with biases and a clamped gate, attention with sinks, sliding windows"),
}

TESTS = (
    "losses and gradients against plain autograd",
    "training and samples with other tenants against the same alone, bit by bit",
    "log-probabilities of samples against the trainer's",
    "exported adapters against PEFT, alone and merged",
    "memory of a pass against its estimate",
)
"""What the models of each tested family are tested for."""

_GEMMA_4 = (
    "Gemma 4 has heads of two widths and inputs of every layer from a second embedding, and neither can be packed yet; "
    "take a text model of Gemma 3"
)
REFUSED: Mapping[str, str] = {"gemma4": _GEMMA_4, "gemma4_text": _GEMMA_4}
"""Families that no other check refuses with a reason of use; the reason of each, with what to take instead."""


def alternatives() -> str:
    """Return in a phrase what to take instead of a model that is refused."""
    titles = [family.title for family in TESTED.values()]
    known = "; ".join(titles[:NUM_NAMED])
    return f"take a dense model: {known}; or one of the {len(titles) - NUM_NAMED} other families in docs/models.md"
