"""Write a random miniature causal LM, in the shape of a real architecture, as a Hugging Face directory.

Half a megabyte, written in well under a second, equal bytes for equal arguments and library versions. Its samples
are noise. The tokenizer is the 256 bytes and two special tokens, so every text has as many tokens as bytes.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import safetensors.torch
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

Architecture = Literal[
    "qwen3",
    "llama",
    "gemma3",
    "llama3",
    "smollm2",
    "mistral",
    "mistral-window",
    "qwen3.5",
    "qwen3-next",
    "qwen3-moe",
    "gpt-oss",
    "qwen3.5-moe",
]

NUM_BYTES = 256
END_OF_TEXT_ID = 256
PAD_ID = 257
VOCAB_SIZE_MIN = 258

WINDOW = 8
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WEIGHT_STD = 0.1
"""Larger than the 0.02 of real initializations, so that logits differ and tests of equality are meaningful."""


def build_mini_model(
    directory: Path | str,
    architecture: Architecture = "qwen3",
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE_MIN,
) -> Path:
    """Write a random model and its byte tokenizer into `directory`, made if missing, and return that path.

    Hidden size 64, two layers, four heads and two key-value heads of 16, MLP 128, float32, 512 positions. Gemma 3 has
    one layer with a sliding window of 8 tokens and one with full attention; "mistral-window" has that window in both,
    "mistral" has none. "llama3" has the rotary scaling of Llama 3.1, stretching 64 positions to 512; "smollm2" has
    three heads to one key-value head. "qwen3.5" and "qwen3-next" are hybrids: the first layer has linear attention,
    with two heads of 16 for keys and four for values. "qwen3-moe" has eight experts of 32 in each layer, and a token
    goes to two of them; so has "qwen3.5-moe", a hybrid, with an expert of 48 that all tokens share; and so has
    "gpt-oss", with biases, sinks, a gate that is clamped at 1, and the window of Gemma 3 in its first layer. Every
    weight is drawn, norms included. Entries of the vocabulary above 257 have no text. The global random state is left
    as it was. Raises ValueError if `vocab_size` is under 258 or the architecture is
    unknown.
    """
    if vocab_size < VOCAB_SIZE_MIN:
        raise ValueError(f"vocab_size is {vocab_size}; the bytes and special tokens need at least {VOCAB_SIZE_MIN}")
    return write_random_model(directory, _config(architecture, vocab_size), seed)


def write_random_model(directory: Path | str, config: Any, seed: int = 0) -> Path:
    """Write a model of this config, every weight drawn, and the byte tokenizer; see `build_mini_model`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _draw_weights(model)
    model.generation_config = GenerationConfig(eos_token_id=END_OF_TEXT_ID, pad_token_id=PAD_ID)
    model.save_pretrained(directory)
    _byte_tokenizer().save_pretrained(directory)
    return directory


def build_mini_vision_model(directory: Path | str, *, is_tied: bool = True, seed: int = 0) -> Path:
    """Write a random checkpoint of Qwen3.5 as it is published, which can see, into `directory`; return that path.

    Its text model is as "qwen3.5" of `build_mini_model`. It has a vision tower, and weights to predict more tokens at a
    time (`mtp.*`), which transformers does not load.
    """
    directory = Path(directory)
    text = _config("qwen3.5", VOCAB_SIZE_MIN)
    text.tie_word_embeddings = is_tied
    sizes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(
        text_config=text.to_dict(),
        vision_config=sizes | {"patch_size": 4, "num_position_embeddings": 16},
        tie_word_embeddings=is_tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3_5ForConditionalGeneration(config)
        _draw_weights(model)
        more = {"mtp.fc.weight": torch.randn(64, 128)}
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(file) | more, file, {"format": "pt"})
    _byte_tokenizer().save_pretrained(directory)
    return directory


def _config(architecture: Architecture, vocab_size: int) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": PAD_ID,
        "tie_word_embeddings": True,
    }
    match architecture:
        case "qwen3":
            return Qwen3Config(**shape)
        case "llama":
            return LlamaConfig(**shape | {"tie_word_embeddings": False})
        case "gemma3":
            kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
            return Gemma3TextConfig(**shape, **kinds, query_pre_attn_scalar=16)
        case "llama3":
            return LlamaConfig(**shape | {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE})
        case "smollm2":
            rope = {"rope_type": "default", "rope_theta": 100_000.0}
            heads = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
            return LlamaConfig(**shape | heads | {"rope_parameters": rope, "rms_norm_eps": 1e-5})
        case "mistral" | "mistral-window":
            window = WINDOW if architecture == "mistral-window" else None
            return MistralConfig(**shape | {"tie_word_embeddings": False, "sliding_window": window})
        case "qwen3.5" | "qwen3-next":
            make = Qwen3_5TextConfig if architecture == "qwen3.5" else partial(Qwen3NextConfig, num_experts=0)
            return make(**shape | HYBRID)
        case "qwen3-moe":
            return Qwen3MoeConfig(**shape | EXPERTS | {"norm_topk_prob": True})
        case "qwen3.5-moe":
            return Qwen3_5MoeTextConfig(**shape | HYBRID | EXPERTS | {"shared_expert_intermediate_size": 48})
        case "gpt-oss":
            experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}
            kinds = {"tie_word_embeddings": False, "sliding_window": WINDOW, "swiglu_limit": 1.0}
            return GptOssConfig(**shape | experts | kinds)
    raise ValueError(f"unknown architecture {architecture!r}; expected one of {', '.join(get_args(Architecture))}")


@torch.no_grad()
def _draw_weights(model: Any) -> None:
    """Draw every parameter: initializations leave norms and biases at constants that hide mistakes."""
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape) * WEIGHT_STD
        parameter.copy_(noise if parameter.ndim >= 2 else parameter + noise)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token id = byte value, then `<|endoftext|>` and `<|pad|>`."""
    characters = _byte_characters()
    vocab = {characters[byte]: byte for byte in range(NUM_BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|pad|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def _byte_characters() -> list[str]:
    """Return the printable character that byte-level tokenizers (since GPT-2) write for each byte value."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(NUM_BYTES)]


def main() -> None:
    """Write a model for trying things out."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("directory", type=Path)
    command.add_argument("architecture", choices=get_args(Architecture), nargs="?", default="qwen3")
    args = command.parse_args()
    print(build_mini_model(args.directory, args.architecture))


if __name__ == "__main__":
    main()
