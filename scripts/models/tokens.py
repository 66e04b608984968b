"""The tokenizer of the shipped base model, and its training text as tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from scripts.models.kjv_text import Chapter
from scripts.models.recipe import Recipe

END_OF_TEXT, PAD, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
"""Token ids 0 to 3. There is no beginning-of-text token."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CHAT_PAIR_STRIDE = 20
"""Every 20th pair of neighbouring verses is also a chat: about a tenth of the tokens."""


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE: every string of any script round-trips."""
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
    """Return neighbouring verses as a user's turn and an assistant's answer, in the chat template's form."""
    pairs = [pair for chapter in chapters for pair in itertools.pairwise(chapter.verses)]
    return [
        f"{TURN_START}user\n{verse}{TURN_END}\n{TURN_START}assistant\n{answer}{TURN_END}\n"
        for verse, answer in pairs[::CHAT_PAIR_STRIDE]
    ]


def token_stream(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return one int64 tensor (tokens,): each text after an end-of-text token."""
    ids: list[int] = []
    for text_ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        ids.append(tokenizer.convert_tokens_to_ids(END_OF_TEXT))
        ids.extend(text_ids)
    return torch.tensor(ids, dtype=torch.int64)


def training_batches(stream: torch.Tensor, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Yield batches (batch_rows, window_tokens + 1) without end; each epoch has another offset and order."""
    epoch = 0
    while True:
        generator = torch.Generator().manual_seed(recipe.seed * 100_003 + epoch)
        offset = int(torch.randint(recipe.window_tokens, (1,), generator=generator))
        num_windows = (len(stream) - offset - 1) // recipe.window_tokens
        starts = offset + recipe.window_tokens * torch.randperm(num_windows, generator=generator)
        windows = starts[:, None] + torch.arange(recipe.window_tokens + 1)
        yield from (stream[rows] for rows in windows.split(recipe.batch_rows)[:-1])
        epoch += 1
