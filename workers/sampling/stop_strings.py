"""Stop strings: finds the token with which a sequence completes one of them.

Does not depend on sampling. Special tokens are decoded as text too.

Main invariant: the search is in the decoded text of the last tokens, so a string is found for every way in which tokens
divide it, also inside a token's text or a character's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

SLACK_TOKENS = 8
"""Tokens decoded in addition to a stop string's length in bytes: the first ones may decode differently without the
tokens before them, and some have no text."""


class StopStrings:
    """The stop strings of one request."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._window = max(len(string.encode()) for string in strings) + SLACK_TOKENS

    def is_completed(self, tokens: Sequence[int]) -> bool:
        """Return whether the last token completes a stop string; the text before it has none."""
        text: str = self._tokenizer.decode(list(tokens[-self._window :]), skip_special_tokens=False)
        return any(string in text for string in self._strings)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Return the tokenizer of a model directory. Raises ValueError if it has no tokenizer.json."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError("this base model has no tokenizer.json, so stop strings cannot be used; use stop tokens")
    return Tokenizer.from_file(str(path))
