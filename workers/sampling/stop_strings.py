"""Finds the token with which a sample completes one of its stop strings.

Knows the tokenizer; not sampling. Text is decoded with special tokens in it.

Main invariant: what is looked at is the decoded text of the last tokens, so a string is found however it is cut into
tokens, also in the middle of a token's text or of a character's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

SLACK_TOKENS = 8
"""Tokens decoded beyond a stop string's length in bytes: the first ones may decode differently without what was before
them, and some have no text."""


class StopStrings:
    """Checks samples of one request."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._window = max(len(string.encode()) for string in strings) + SLACK_TOKENS

    def is_completed(self, tokens: Sequence[int]) -> bool:
        """Whether the sample's text has a stop string in it, given that it had none before the last token."""
        text: str = self._tokenizer.decode(list(tokens[-self._window :]), skip_special_tokens=False)
        return any(string in text for string in self._strings)


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory. Raises ValueError if it has none of the kind that can be used here."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError("this base model has no tokenizer.json, so stop strings cannot be used; use stop tokens")
    return Tokenizer.from_file(str(path))
