"""Tokenizers of the kinds whose offsets differ."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

SHIPPED_MODEL = Path(__file__).parents[3] / "workers" / "models" / "kjv-2m"
CORPUS = [
    "Hello there, how are you?  I am fine.\nAnd you?\n\nGood night.",
    "user assistant system tool [INST] [/INST] é",
] * 3


@pytest.fixture(scope="session")
def shipped() -> Any:
    return AutoTokenizer.from_pretrained(SHIPPED_MODEL)


@pytest.fixture(scope="session")
def trimmed() -> Any:
    """Bytes, as Llama 3 has them: the offsets of a token leave its leading spaces out."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return with_special_tokens(tokenizer)


@pytest.fixture(scope="session")
def spaced() -> Any:
    """Words with a space before each, as sentencepiece has them in Llama 2: also before the text's first word."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [word for text in CORPUS for word in text.split()]
    tokenizer.train_from_iterator(
        words, trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    )
    return with_special_tokens(tokenizer)


def with_special_tokens(tokenizer: tokenizers.Tokenizer) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
