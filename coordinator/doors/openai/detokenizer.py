"""From tokens to text, piece by piece. What was handed out is never taken back.

A character may be cut into several tokens, and a stop string, too: so text is held back until no later token can change
it. Special tokens have no text that is shown, but they are part of what a stop string is looked for in, as in the
sampler. Knows the tokenizer; not sampling, JSON or requests.

Main invariant: the pieces of a sequence, put together, are the same however they are handed out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

BROKEN = "\ufffd"
"""What bytes decode to that are no character, or not yet."""
_WAITING_MAX = 32
"""Tokens that may wait for the rest of a character, which has 4 bytes at most: more are bytes that are no text."""


class Pieces:
    """The text of one sequence of tokens, in pieces of whole characters."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        """`before` are tokens that stand before the sequence: some decoders take the space from a text's beginning."""
        self._tokenizer = tokenizer
        self._before = list(before)
        self._window: list[int] = []
        """Tokens whose text was handed out last, for the ones behind them to be decoded after; then those."""
        self._num_read = 0
        self._read = ""
        """The text of the window's first `_num_read` tokens."""
        self._begin(self._before)

    def push(self, token: int) -> str:
        """The text that is certain since this token."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(BROKEN) and len(self._window) - self._num_read < _WAITING_MAX:
            return ""
        piece = text[len(self._read) :]
        if piece:
            self._begin(self._window[self._num_read :])
        return piece

    def flush(self) -> str:
        """The text of bytes that were waiting for the rest of their character. What comes next is decoded anew."""
        piece = self._decode(self._window)[len(self._read) :]
        self._begin(self._before)
        return piece

    def _begin(self, read: Sequence[int]) -> None:
        self._window, self._num_read, self._read = list(read), len(read), self._decode(read)

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text


class Detokenizer:
    """The text of one sampled sequence as it is shown: without special tokens, and not beyond its first stop string."""

    def __init__(
        self, tokenizer: Tokenizer, hidden: Collection[int], stops: Sequence[str], before: Sequence[int]
    ) -> None:
        """`hidden` are the tokens that are not shown, `before` some that stand before the sequence."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._stops = tuple(stops)
        self._reach = max((len(stop) for stop in stops), default=1) - 1
        """The longest beginning of a stop string that is none yet, in characters."""
        self._pieces = Pieces(tokenizer, before)
        self._held: list[tuple[str, bool]] = []
        """Characters that may begin a stop string, and whether each is shown."""
        self.is_stopped = False
        """A stop string was completed: nothing more is shown."""

    def push(self, token: int) -> str:
        """What is to be shown since this token."""
        if token not in self._hidden:
            return self._take(self._pieces.push(token), is_shown=True)
        before = self._take(self._pieces.flush(), is_shown=True)
        return before + self._take(self._tokenizer.decode([token], skip_special_tokens=False), is_shown=False)

    def finish(self) -> str:
        """What is to be shown at the end."""
        return self._take(self._pieces.flush(), is_shown=True) + self._show(len(self._held))

    def _take(self, text: str, *, is_shown: bool) -> str:
        """More text; what of all that is held is to be shown now."""
        if self.is_stopped:
            return ""
        if not self._stops:
            return text if is_shown else ""
        self._held += [(character, is_shown) for character in text]
        held = "".join(character for character, _ in self._held)
        found = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if not found:
            return self._show(self._certain(held))
        self.is_stopped = True
        shown = self._show(min(found))
        self._held.clear()
        return shown

    def _certain(self, held: str) -> int:
        """How many characters no stop string can begin in."""
        for place in range(max(0, len(held) - self._reach), len(held)):
            rest = held[place:]
            if any(stop.startswith(rest) for stop in self._stops):
                return place
        return len(held)

    def _show(self, num_characters: int) -> str:
        shown = "".join(character for character, is_shown in self._held[:num_characters] if is_shown)
        del self._held[:num_characters]
        return shown
