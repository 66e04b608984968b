"""Train the small base model that the project ships, from the text to a Hugging Face directory.

    python -m scripts.models.build_base_model --output workers/models/kjv-2m

The text is the King James Version of the Bible (1611, copyright expired), read from the Debian package
bible-kjv-text, whose data file is "provided for unrestricted use" (the whole legend: kjv_text.py). Documents are
chapters, one verse a line, without references. The last chapters with 3 % of the bytes are held out: neither the
tokenizer nor the model is trained on them.

The model is a Qwen3 causal LM with tied embeddings over a byte-level BPE, trained from scratch on the CPU. About a
tenth of its training text is the same verses as chat turns (user: a verse, assistant: the next), so that it learns the
chat template's tokens. Weights are stored as bfloat16 while config.json asks for float32, so that
`from_pretrained` computes in float32; held-out bits per byte are measured on the saved directory, loaded that way.

A run is deterministic for a seed on one machine with the same thread count and library versions. Elsewhere the last
bits differ, and the figures slightly.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from pathlib import Path

# Spinning OpenMP threads cost up to a factor of ten on busy cores; libgomp reads this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from scripts.models.card import chat_sample, sample, write_card
from scripts.models.kjv_text import load_chapters, split_tail
from scripts.models.recipe import Recipe
from scripts.models.tokens import (
    END_OF_TEXT,
    PAD,
    SPECIAL_TOKENS,
    TURN_END,
    chat_texts,
    token_stream,
    train_tokenizer,
    training_batches,
)

HELD_OUT_FRACTION = 0.03
SAMPLE_PROMPTS = ("And God said", "The LORD is my", "Now it came to pass")


def new_model(recipe: Recipe) -> Qwen3ForCausalLM:
    """Create a model with random weights and 1,024 positions; training uses the first `window_tokens`."""
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
    """Return negative log-likelihoods (rows * tokens,) in nats of each window's tokens after the first."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits  # (rows, tokens, vocab)
    return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten(), reduction="none")


@torch.no_grad()
def bits_per_byte(model: Qwen3ForCausalLM, stream: torch.Tensor, num_bytes: int, window_tokens: int) -> float:
    """Measure held-out bits per byte of plain text, over disjoint windows (half a window of context on average).

    End-of-text tokens between chapters count as bits and not as bytes.
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
                f"{elapsed_s:.0f} s elapsed, {left_s:.0f} s left",
                flush=True,
            )
        checkpoints.save_if_due(model, optimizer, step + 1)
    checkpoints.save(model, optimizer, recipe.steps)


def learning_rate(step: int, recipe: Recipe) -> float:
    """Return the rate of a step: linear warm-up, then a cosine from the peak to a hundredth of it at the last step."""
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
        """Return the wall time of the training so far, interrupted runs included."""
        return self._spent_before_s + time.monotonic() - self._started_s

    def resume(self, model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer) -> int:
        """Load the checkpoint if there is one; return its number of steps."""
        path = self._folder / "state.pt"
        if not path.exists():
            return 0
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        self._spent_before_s = float(state["spent_s"])
        print(f"resuming from {path} at step {state['step']}", flush=True)
        return int(state["step"])

    def save_if_due(self, model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Save if the last checkpoint is old."""
        if time.monotonic() - self._saved_s >= self._every_s:
            self.save(model, optimizer, step)

    def save(self, model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Save the training state, and a model directory that loads."""
        self._saved_s = time.monotonic()
        partial = self._folder / "state.pt.partial"
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save({**state, "spent_s": self.spent_s}, partial)
        partial.replace(self._folder / "state.pt")
        save_directory(model, self._tokenizer, self._folder / "model")


def save_directory(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the whole Hugging Face directory, then replace an older one."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weights = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "model.safetensors").chmod(0o644)  # safetensors creates it with mode 600
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


def build(output: Path, text_file: Path | None, recipe: Recipe, checkpoint_folder: Path, checkpoint_s: float) -> None:
    """Build the directory: text, tokenizer, training, saving, measurement of the saved files, model card."""
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
