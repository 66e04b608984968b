"""The benchmarks' base models, by name, and their tenants' data.

Depends on torch and transformers, not on engines, PEFT or timing. Importing it configures this process's threads like a
worker's, so import it before any module that imports torch.
"""

from __future__ import annotations

import os

from workers.contract.settings import num_cores
from workers.pool.environment import thread_environment

# Spinning is bounded, so that no side is slowed when several processes share the cores.
os.environ.update(thread_environment(num_cores()) | os.environ)
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import argparse
import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from coordinator.base_models import DEFAULT_MODEL, shipped_models
from scripts.bench.gpu.cases import Case as Case  # noqa: PLC0414  # other modules import it from here
from scripts.bench.gpu.cases import random_data as random_data  # noqa: PLC0414
from scripts.bench.gpu.cases import write_model
from workers.contract.settings import SHIPPED_MODELS_DIR

SHAPES = {"4m": (256, 4, 4, 2, 768, 4096), "27m": (512, 8, 8, 4, 1536, 4096), "tiny": (64, 2, 2, 1, 128, 256)}
"""Hidden size, layers, heads, key-value heads, MLP size, vocabulary; head size 64, tied. Tiny is for --quick."""
HYBRID = "hybrid"
"""A random model of eight layers in the proportions of Qwen3.5's 4B, six of them with linear attention."""
MIXTURE = "mixture"
"""A random mixture of experts: two layers with 64 experts of 256, of which a token takes 8; hidden size 512."""
LARGE_SHAPES = ("0.6b", "8b")
"""Of `gpu.cases`, for a GPU."""
DEFAULT_MODELS = ("kjv-2m", "4m", "27m")

transformers.utils.logging.disable_progress_bar()
# PEFT's advice on merging, which is not done here, and an attribute that PEFT reads by its old name.
warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated", category=FutureWarning)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A base model on disk."""

    name: str
    path: Path
    vocab_size: int
    num_matmul_params: int
    """N: weights of all linear layers, the unembedding included."""
    attention_flops: int
    """FLOP per pair of query and key, in all layers: 6 matmuls (2 forward) of 2 x heads x head size each."""

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the FLOP to train a token of a sequence: 4N, and attention to half of it on average."""
        return 4 * self.num_matmul_params + self.attention_flops * (num_tokens + 1) / 2


@contextlib.contextmanager
def open_models(names: Sequence[str], scratch: Path | None = None) -> Iterator[list[Model]]:
    """Open base models by name: a shape (random weights from a fixed seed), a shipped model, or a directory.

    `scratch`: where random models are written; default: where temporary files are.
    """
    with tempfile.TemporaryDirectory(prefix="bench-models-", dir=scratch) as folder:
        yield [_model(name, _path(name, Path(folder))) for name in names]


def add_model_options(command: argparse.ArgumentParser, default: Sequence[str] = DEFAULT_MODELS) -> None:
    """Add the options that `chosen_models` reads."""
    command.add_argument(
        "--models", nargs="+", type=_known, help=f"names or Hugging Face directories (default: {' '.join(default)})"
    )
    command.add_argument("--also", nargs="+", type=_known, default=[], help="models in addition to the default ones")


def chosen_models(args: argparse.Namespace, default: Sequence[str] = DEFAULT_MODELS) -> list[str]:
    """Return the names for `open_models` from the command line."""
    return [*(args.models or (["tiny"] if args.quick else default)), *args.also]


def _known(text: str) -> str:
    """Refuse a name that `open_models` could not open (for argparse)."""
    if text in (*SHAPES, HYBRID, MIXTURE, *LARGE_SHAPES, *shipped_models()) or (Path(text) / "config.json").is_file():
        return text
    known = ", ".join([*SHAPES, HYBRID, MIXTURE, *LARGE_SHAPES, *shipped_models()])
    raise argparse.ArgumentTypeError(
        f"{text} is neither one of {known} nor a Hugging Face directory with a config.json"
    )


def _path(name: str, folder: Path) -> Path:
    if name in shipped_models():
        return SHIPPED_MODELS_DIR / name
    if name in LARGE_SHAPES:
        path = write_model(name, folder / name, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    elif name in SHAPES:
        path = write_random_model(name, folder / name)
    elif name == HYBRID:
        path = write_hybrid(folder / name)
    elif name == MIXTURE:
        path = write_mixture(folder / name)
    else:
        return Path(name)
    # A pool serves no model without a tokenizer. Benchmarks send tokens, so any tokenizer will do.
    shutil.copy(SHIPPED_MODELS_DIR / DEFAULT_MODEL / "tokenizer.json", path)
    return path


def write_random_model(shape: str, path: Path, *, vocab_size: int | None = None) -> Path:
    """Write a model of one of `SHAPES`: weights from a fixed seed, the shape's vocabulary unless given."""
    hidden, layers, heads, kv_heads, mlp, vocab = SHAPES[shape]
    config = Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        intermediate_size=mlp,
        vocab_size=vocab if vocab_size is None else vocab_size,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def write_hybrid(path: Path) -> Path:
    """Write the model `HYBRID`, with weights from a fixed seed."""
    config = Qwen3_5TextConfig(
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=128,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        intermediate_size=1792,
        vocab_size=4096,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(config).save_pretrained(path)
    return path


def write_mixture(path: Path) -> Path:
    """Write the model `MIXTURE`, with weights from a fixed seed."""
    config = Qwen3MoeConfig(
        hidden_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=256,
        norm_topk_prob=True,
        vocab_size=4096,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def _model(name: str, path: Path) -> Model:
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    linears = [module for module in empty.modules() if isinstance(module, torch.nn.Linear)]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Model(
        name=name if name in (*SHAPES, HYBRID, MIXTURE, *LARGE_SHAPES) else path.resolve().name,
        path=path,
        vocab_size=int(config.vocab_size),
        num_matmul_params=sum(linear.weight.numel() for linear in linears),
        attention_flops=6 * 2 * config.num_hidden_layers * config.num_attention_heads * head_dim,
    )
