"""From tokens to text, piece by piece. A piece is final once it is returned.

A character or a stop string may span several tokens, so text is held back until no later token can change it. Special
tokens have no visible text, but stop strings match their text too, as in the sampler. Depends on the tokenizer alone.

Main invariant: the joined pieces of a sequence do not depend on how the sequence was split.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

BROKEN = "\ufffd"
"""The replacement character, which invalid or incomplete bytes decode to."""
_WAITING_MAX = 32
"""Tokens to hold back for the rest of a character. A character has at most 4 bytes: more tokens are invalid bytes."""


class Pieces:
    """The text of one sequence of tokens, in pieces of whole characters.

    Ours, because `tokenizers.decoders.DecodeStream` never returns the text of bytes that stay incomplete, at the end of
    a sequence or before a special token, and holds back any number of tokens for them.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        """Decode after the tokens `before`, because some decoders strip a text's leading space."""
        self._tokenizer = tokenizer
        self._before = list(before)
        self._window: list[int] = []
        """Tokens of the last piece, which give later tokens their context, and then tokens without a piece so far."""
        self._num_read = 0
        self._read = ""
        """The text of the window's first `_num_read` tokens."""
        self._begin(self._before)

    def push(self, token: int) -> str:
        """Add a token; return the text that became final."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(BROKEN) and len(self._window) - self._num_read < _WAITING_MAX:
            return ""
        piece = text[len(self._read) :]
        if piece:
            self._begin(self._window[self._num_read :])
        return piece

    def flush(self) -> str:
        """Return the text of incomplete bytes, and decode later tokens from the start again."""
        piece = self._decode(self._window)[len(self._read) :]
        self._begin(self._before)
        return piece

    def _begin(self, read: Sequence[int]) -> None:
        self._window, self._num_read, self._read = list(read), len(read), self._decode(read)

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text


class Detokenizer:
    """The visible text of one sampled sequence: without special tokens, up to its first stop string."""

    def __init__(
        self, tokenizer: Tokenizer, hidden: Collection[int], stops: Sequence[str], before: Sequence[int]
    ) -> None:
        """Decode after the tokens `before`, without the text of `hidden` tokens."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._stops = tuple(stops)
        self._reach = max((len(stop) for stop in stops), default=1) - 1
        """Characters of the longest incomplete stop string."""
        self._pieces = Pieces(tokenizer, before)
        self._held: list[tuple[str, bool]] = []
        """Characters that may begin a stop string, and whether each is visible."""
        self.is_stopped = False
        """A stop string was completed: no more text is visible."""

    @property
    def num_held(self) -> int:
        """Visible characters that are held back."""
        return sum(is_shown for _, is_shown in self._held)

    def push(self, token: int) -> str:
        """Add a token; return the visible text that became final."""
        if token not in self._hidden:
            return self._take(self._pieces.push(token), is_shown=True)
        before = self._take(self._pieces.flush(), is_shown=True)
        return before + self._take(self._tokenizer.decode([token], skip_special_tokens=False), is_shown=False)

    def finish(self) -> str:
        """Return the visible text that was still held back."""
        return self._take(self._pieces.flush(), is_shown=True) + self._show(len(self._held))

    def _take(self, text: str, *, is_shown: bool) -> str:
        """Add text; return the visible text that became final."""
        if self.is_stopped:
            return ""
        if not self._stops:
            return text if is_shown else ""
        self._held += [(character, is_shown) for character in text]
        held = "".join(character for character, _ in self._held)
        found = [start for stop in self._stops if (start := held.find(stop)) >= 0]
        if not found:
            return self._show(self._certain(held))
        self.is_stopped = True
        shown = self._show(min(found))
        self._held.clear()
        return shown

    def _certain(self, held: str) -> int:
        """Return the number of characters in front of the first possible stop string."""
        for start in range(max(0, len(held) - self._reach), len(held)):
            rest = held[start:]
            if any(stop.startswith(rest) for stop in self._stops):
                return start
        return len(held)

    def _show(self, num_characters: int) -> str:
        shown = "".join(character for character, is_shown in self._held[:num_characters] if is_shown)
        del self._held[:num_characters]
        return shown
