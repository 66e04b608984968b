"""The model card of the shipped base model, with samples."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from scripts.models.kjv_text import PACKAGE
from scripts.models.recipe import Recipe


@torch.no_grad()
def sample(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, temperature: float) -> str:
    """Return the prompt and 60 sampled tokens, as text; temperature 0 is greedy. The seed is fixed."""
    torch.manual_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    options: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    if not temperature:
        options |= {"temperature": None, "top_p": None}
    output = model.generate(**inputs, max_new_tokens=60, **options)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def chat_sample(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """Return the assistant's answer to one user turn at temperature 0.8. The seed is fixed."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    whole = sample(model, tokenizer, str(prompt), temperature=0.8)
    return whole.rpartition("assistant\n")[2].strip()


def write_card(directory: Path, recipe: Recipe, facts: dict[str, Any], samples: dict[str, str]) -> None:
    """Write README.md: the model's text and recipe, its quality, samples, and the command that builds it."""
    shown = "\n\n".join(f"{title}:\n\n```text\n{text.strip()}\n```" for title, text in samples.items())
    defaults = Recipe()
    flags = "".join(
        f" --{name.replace('_', '-')} {getattr(recipe, name)}"
        for name in ("seed", "steps", "threads")
        if getattr(recipe, name) != getattr(defaults, name)
    )
    card = f"""---
license: other
license_name: unrestricted-use
language: en
library_name: transformers
pipeline_tag: text-generation
---
# {directory.name}

A Qwen3 causal LM of {facts["num_parameters"]:,} parameters, trained from scratch on the King James Version, small
enough to ship with tinkerpool. It writes recognisable words and biblical phrases. It follows no instructions, and
its verses have no meaning: it is a base to fine-tune in demonstrations and tests.

| | |
|---|---|
| Held-out bits per byte | **{facts["bits_per_byte"]:.3f}** (these files, computed in float32) |
| Held-out text | the last {len(facts["held_out_chapters"])} chapters ({facts["held_out_bytes"]:,} bytes, 3 %): \
{facts["held_out_chapters"][0]} to {facts["held_out_chapters"][-1]} |
| Training text | {facts["train_bytes"]:,} bytes, {facts["train_tokens"]:,} tokens with the chat turns |
| Seed | {recipe.seed} |
| Steps | {recipe.steps} of {recipe.batch_rows} x {recipe.window_tokens} tokens ({facts["epochs"]:.1f} epochs), \
AdamW, peak learning rate {recipe.learning_rate} |
| Training time | {facts["minutes"]:.0f} minutes on {recipe.threads} shared CPU threads |
| Tokenizer | byte-level BPE, {recipe.vocab_size} entries, {facts["bytes_per_token"]:.2f} bytes per token held out |
| Shape | {recipe.num_layers} layers, hidden {recipe.hidden_size}, {recipe.num_heads} heads and {recipe.num_kv_heads} \
key-value heads of {recipe.head_dim}, MLP {recipe.intermediate_size}, tied embeddings |
| Positions | 1,024 allowed, {recipe.window_tokens} trained: a little worse beyond that |
| Weights | bfloat16 on disk; config.json asks for float32, which is how the figures were measured |
| Made with | Python {sys.version.split()[0]}, torch {torch.__version__.split("+")[0]} |

## Text and licence

The text comes from the Debian package {PACKAGE}. Its copyright file says: "The copyright for the King James Version
text of the Bible is expired since the translation was done in 1611 under King James the first of Great Britain." Its
data file carries this legend:

> Bible Retrieval System. Chip Chapin, Hewlett Packard Company. Initial release, September 5, 1989. Last Updated:
> April 26, 1993. This file is provided for unrestricted use provided that this legend is included on all tape media
> and as a part of the software program in whole or part. Users may copy, modify or distribute this file at will.

The weights are trained on that text only and licensed under the project's licence (Apache-2.0) and the legend above.

A document is a chapter, one verse a line, without references, and ends with `<|endoftext|>`. The other special tokens
are `<|pad|>`, `<|im_start|>` and `<|im_end|>`. About a tenth of the training tokens are the same verses as chat turns
(user: a verse, assistant: the next one), so that the chat template answers with a verse and stops.

## What it writes

{shown}

## Rebuild

    python -m scripts.models.build_base_model --output workers/models/{directory.name}{flags}

Bits per byte are the negative log-likelihood in bits of the held-out text and its end-of-text tokens, over windows of
{recipe.window_tokens} tokens that do not overlap, divided by the text's bytes in UTF-8.
"""
    (directory / "README.md").write_text(card)
