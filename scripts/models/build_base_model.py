"""Train the small base model that the project ships, from the text to a Hugging Face directory.

    python -m scripts.models.build_base_model --output workers/models/kjv-2m

The text is the King James Version of the Bible (1611, copyright expired), read from the Debian package
bible-kjv-text, whose data file is "provided for unrestricted use" (the whole legend: kjv_text.py). Documents are
chapters, one verse a line, without references. The last chapters that hold 3 % of the bytes are held out: neither the
tokenizer nor the model sees them.

The model is a Qwen3 causal LM with tied embeddings over a byte-level BPE, trained from scratch on the CPU. About a
tenth of what it reads is the same verses as chat turns (user: a verse, assistant: the next), so that the chat
template's tokens mean something to it. Weights are stored as bfloat16 while config.json asks for float32, so that
`from_pretrained` computes in float32; held-out bits per byte are measured on the saved directory, loaded that way.

A run is deterministic for a seed on one machine with the same thread count and library versions; elsewhere the last
bits differ, the figures hardly.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Spinning OpenMP threads cost up to a factor of ten on busy cores; libgomp reads this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from scripts.models.kjv_text import PACKAGE, Chapter, load_chapters, split_tail

END_OF_TEXT, PAD, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
"""Token ids 0 to 3. There is no beginning-of-text token."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

HELD_OUT_FRACTION = 0.03
CHAT_PAIR_STRIDE = 20
"""Every 20th pair of neighbouring verses is also read as a chat: about a tenth of the tokens."""

SAMPLE_PROMPTS = ("And God said", "The LORD is my", "Now it came to pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the weights, besides the text."""

    seed: int = 0
    steps: int = 3000
    """Optimizer steps."""
    batch_rows: int = 8
    """Windows per step."""
    window_tokens: int = 256
    """Length of a training window, and of an evaluation window."""
    vocab_size: int = 2048
    """Byte-level BPE entries, the four special tokens among them."""
    hidden_size: int = 192
    num_layers: int = 5
    intermediate_size: int = 512
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    learning_rate: float = 3e-3
    """Peak, after the warm-up; a cosine takes it down to a hundredth."""
    warmup_steps: int = 60
    weight_decay: float = 0.1
    """On matrices; norms are not decayed."""
    grad_norm_max: float = 1.0
    threads: int = 2


# ---------------------------------------------------------------------------------------------------------- tokens


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE: every string round-trips, whatever its script."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=[TURN_START, TURN_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def chat_texts(chapters: list[Chapter]) -> list[str]:
    """Neighbouring verses as a user's turn and an assistant's answer, in the chat template's form."""
    pairs = [pair for chapter in chapters for pair in itertools.pairwise(chapter.verses)]
    return [
        f"{TURN_START}user\n{verse}{TURN_END}\n{TURN_START}assistant\n{answer}{TURN_END}\n"
        for verse, answer in pairs[::CHAT_PAIR_STRIDE]
    ]


def token_stream(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """One int64 tensor (tokens,): each text after an end-of-text token."""
    ids: list[int] = []
    for text_ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        ids.append(tokenizer.convert_tokens_to_ids(END_OF_TEXT))
        ids.extend(text_ids)
    return torch.tensor(ids, dtype=torch.int64)


def training_batches(stream: torch.Tensor, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Batches (batch_rows, window_tokens + 1) for ever: every epoch cuts the stream at another offset and shuffles."""
    epoch = 0
    while True:
        generator = torch.Generator().manual_seed(recipe.seed * 100_003 + epoch)
        offset = int(torch.randint(recipe.window_tokens, (1,), generator=generator))
        num_windows = (len(stream) - offset - 1) // recipe.window_tokens
        starts = offset + recipe.window_tokens * torch.randperm(num_windows, generator=generator)
        windows = starts[:, None] + torch.arange(recipe.window_tokens + 1)
        yield from (stream[rows] for rows in windows.split(recipe.batch_rows)[:-1])
        epoch += 1


# ----------------------------------------------------------------------------------------------------------- model


def new_model(recipe: Recipe) -> Qwen3ForCausalLM:
    """Random weights; positions up to 1,024 are allowed, though training sees `window_tokens` of them."""
    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        intermediate_size=recipe.intermediate_size,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def token_losses(model: Qwen3ForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihoods (rows * tokens,) in nats of each window's tokens after its first."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits  # (rows, tokens, vocab)
    return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten(), reduction="none")


@torch.no_grad()
def bits_per_byte(model: Qwen3ForCausalLM, stream: torch.Tensor, num_bytes: int, window_tokens: int) -> float:
    """Held-out bits per byte of plain text, over windows that do not overlap (so half a window of context on average).

    End-of-text tokens between chapters are paid for and count no bytes.
    """
    model.eval()
    nats = 0.0
    for start in range(0, len(stream) - 1, window_tokens):
        nats += float(token_losses(model, stream[None, start : start + window_tokens + 1]).sum())
    return nats / math.log(2) / num_bytes


def train(model: Qwen3ForCausalLM, stream: torch.Tensor, recipe: Recipe, checkpoints: Checkpoints) -> None:
    """Train in place for `recipe.steps`, from the last checkpoint if there is one."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        betas=(0.9, 0.95),
    )
    first_step = checkpoints.resume(model, optimizer)
    model.train()
    started_s = time.monotonic()
    smooth_loss = math.nan
    for step, batch in enumerate(training_batches(stream, recipe)):
        if step >= recipe.steps:
            break
        if step < first_step:
            continue
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        loss = token_losses(model, batch).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_norm_max)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        smooth_loss = loss.item() if math.isnan(smooth_loss) else 0.95 * smooth_loss + 0.05 * loss.item()
        done = step + 1 - first_step
        if done % 20 == 0 or step + 1 == recipe.steps:
            elapsed_s = time.monotonic() - started_s
            tokens_per_s = done * batch[:, 1:].numel() / elapsed_s
            left_s = elapsed_s / done * (recipe.steps - step - 1)
            print(
                f"step {step + 1}/{recipe.steps}  loss {smooth_loss:.3f} nats/token  {tokens_per_s:.0f} tokens/s  "
                f"{elapsed_s:.0f} s gone, {left_s:.0f} s left",
                flush=True,
            )
        checkpoints.maybe_save(model, optimizer, step + 1)
    checkpoints.save(model, optimizer, recipe.steps)


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine from the peak to a hundredth of it at the last step."""
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return recipe.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


class Checkpoints:
    """One resumable checkpoint in a folder, replaced every few minutes."""

    def __init__(self, folder: Path, every_s: float, tokenizer: PreTrainedTokenizerFast) -> None:
        self._folder = folder
        self._every_s = every_s
        self._tokenizer = tokenizer
        self._saved_s = self._started_s = time.monotonic()
        self._spent_before_s = 0.0
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def spent_s(self) -> float:
        """Wall time of the training so far, that of interrupted runs included."""
        return self._spent_before_s + time.monotonic() - self._started_s

    def resume(self, model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer) -> int:
        """Load the checkpoint if there is one; the number of steps it had done."""
        path = self._folder / "state.pt"
        if not path.exists():
            return 0
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        self._spent_before_s = float(state["spent_s"])
        print(f"resuming from {path} at step {state['step']}", flush=True)
        return int(state["step"])

    def maybe_save(self, model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Save if the last checkpoint is old."""
        if time.monotonic() - self._saved_s >= self._every_s:
            self.save(model, optimizer, step)

    def save(self, model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Save the training state, and beside it a model directory that loads."""
        self._saved_s = time.monotonic()
        partial = self._folder / "state.pt.partial"
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save({**state, "spent_s": self.spent_s}, partial)
        partial.replace(self._folder / "state.pt")
        save_directory(model, self._tokenizer, self._folder / "model")


# ---------------------------------------------------------------------------------------------------------- output


def save_directory(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the Hugging Face directory whole, then put it in place of what was there."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weights = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "model.safetensors").chmod(0o644)  # safetensors makes it private to its owner
    config = model.config
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(partial)
    stop_tokens = [SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(TURN_END)]
    GenerationConfig(
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        eos_token_id=stop_tokens,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
    ).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


@torch.no_grad()
def sample(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, temperature: float) -> str:
    """The prompt and 60 tokens after it, as text; temperature 0 is greedy. Seeded."""
    torch.manual_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    options: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    if not temperature:
        options |= {"temperature": None, "top_p": None}
    output = model.generate(**inputs, max_new_tokens=60, **options)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def chat_sample(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """The assistant's answer to one user turn at temperature 0.8. Seeded."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    whole = sample(model, tokenizer, str(prompt), temperature=0.8)
    return whole.rpartition("assistant\n")[2].strip()


def write_card(directory: Path, recipe: Recipe, facts: dict[str, Any], samples: dict[str, str]) -> None:
    """README.md: what the model is made of, how good it is, what it writes, how to make it again."""
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
enough to ship with tinkerpool. It writes recognisable words and biblical phrases. It knows nothing else, follows no
instructions, and its verses mean nothing: it is a base to fine-tune in demonstrations and tests.

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

The weights, being made from that text alone, are given under the project's licence (Apache-2.0) and the legend above.

A document is a chapter, one verse a line, without references, and ends with `<|endoftext|>`. The other special tokens
are `<|pad|>`, `<|im_start|>` and `<|im_end|>`. About a tenth of the training tokens are the same verses as chat turns
(user: a verse, assistant: the next one), so that the chat template answers with a verse and stops.

## What it writes

{shown}

## Make it again

    python -m scripts.models.build_base_model --output workers/models/{directory.name}{flags}

Bits per byte are the negative log-likelihood in bits of the held-out text and its end-of-text tokens, over windows of
{recipe.window_tokens} tokens that do not overlap, divided by the text's bytes in UTF-8.
"""
    (directory / "README.md").write_text(card)


def build(output: Path, text_file: Path | None, recipe: Recipe, checkpoint_folder: Path, checkpoint_s: float) -> None:
    """The whole way: text, tokenizer, training, saved directory, measurement of the saved files, model card."""
    torch.set_num_threads(recipe.threads)
    train_chapters, held_out_chapters = split_tail(load_chapters(text_file), HELD_OUT_FRACTION)
    train_texts = [chapter.text for chapter in train_chapters]
    held_out_texts = [chapter.text for chapter in held_out_chapters]
    chats = chat_texts(train_chapters)
    tokenizer = train_tokenizer(train_texts + chats, recipe.vocab_size)
    stream = token_stream([*train_texts, "".join(chats)], tokenizer)
    held_out_stream = token_stream(held_out_texts, tokenizer)
    held_out_bytes = sum(len(text.encode()) for text in held_out_texts)
    print(f"{len(stream)} training tokens, {len(held_out_stream)} held-out tokens, {held_out_bytes} bytes", flush=True)

    model = new_model(recipe)
    print(f"{model.num_parameters()} parameters", flush=True)
    checkpoints = Checkpoints(checkpoint_folder, checkpoint_s, tokenizer)
    train(model, stream, recipe, checkpoints)
    minutes = checkpoints.spent_s / 60
    save_directory(model, tokenizer, output)

    saved = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32, local_files_only=True)
    saved_tokenizer = AutoTokenizer.from_pretrained(output, local_files_only=True)
    facts = {
        "num_parameters": saved.num_parameters(),
        "bits_per_byte": bits_per_byte(saved, held_out_stream, held_out_bytes, recipe.window_tokens),
        "held_out_chapters": [f"{chapter.book} {chapter.number}" for chapter in held_out_chapters],
        "held_out_bytes": held_out_bytes,
        "train_bytes": sum(len(text.encode()) for text in train_texts),
        "train_tokens": len(stream),
        "epochs": recipe.steps * recipe.batch_rows * recipe.window_tokens / len(stream),
        "bytes_per_token": held_out_bytes / len(held_out_stream),
        "minutes": minutes,
    }
    samples = {f"Greedy, after {prompt!r}": sample(saved, saved_tokenizer, prompt, 0.0) for prompt in SAMPLE_PROMPTS}
    samples |= {
        f"Temperature 0.8, after {prompt!r}": sample(saved, saved_tokenizer, prompt, 0.8) for prompt in SAMPLE_PROMPTS
    }
    question = "And the king said unto his servants, Whose is this house?"
    samples[f"Chat, asked {question!r}"] = chat_sample(saved, saved_tokenizer, question)
    write_card(output, recipe, facts, samples)
    shutil.rmtree(checkpoint_folder)
    print(json.dumps({"output": str(output), "bits_per_byte": facts["bits_per_byte"]}), flush=True)


def main() -> None:
    """Read the command line and build."""
    defaults = Recipe()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the directory to write; replaced if it exists")
    parser.add_argument("--text", type=Path, help="bible.data, or the plain text inside it (default: the package's)")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--threads", type=int, default=defaults.threads)
    parser.add_argument(
        "--checkpoints",
        type=Path,
        help="folder for the resumable checkpoint, removed at the end (default: OUTPUT.work)",
    )
    parser.add_argument("--checkpoint-every", type=float, default=180.0, metavar="SECONDS")
    args = parser.parse_args()
    recipe = Recipe(seed=args.seed, steps=args.steps, threads=args.threads)
    folder = args.checkpoints or args.output.with_name(args.output.name + ".work")
    build(args.output, args.text, recipe, folder, args.checkpoint_every)


if __name__ == "__main__":
    main()
