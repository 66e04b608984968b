"""A base model's tokenizer, fetched from the pool, so that a user needs no model hub.

The files are kept below the user's tinkerpool folder, in a folder named after their contents. `transformers` reads them
if it is installed, else `tokenizers`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinkerpool.credentials import home


def load_tokenizer(files: Mapping[str, bytes]) -> Any:
    """A tokenizer of its files. Raises ImportError that says what to install if no library is there to read them."""
    directory = keep(files, home() / "tokenizers")
    if importlib.util.find_spec("transformers") is not None:
        return importlib.import_module("transformers").AutoTokenizer.from_pretrained(str(directory))
    if importlib.util.find_spec("tokenizers") is not None:
        return PlainTokenizer(directory)
    raise ImportError("get_tokenizer needs a library that reads tokenizers: pip install transformers (or tokenizers)")


def keep(files: Mapping[str, bytes], cache: Path) -> Path:
    """The folder that holds exactly these files. Raises ValueError for a file name that is a path."""
    digest = hashlib.sha256()
    for name in sorted(files):
        if name != Path(name).name or name in {"", ".", ".."}:
            raise ValueError(f"the pool sent a tokenizer file with a path for a name: {name[:80]!r}")
        digest.update(f"{len(name)} {len(files[name])} {name}".encode() + files[name])
    directory = cache / digest.hexdigest()[:32]
    if not directory.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=cache, prefix=".new-"))
        for name, content in files.items():
            (temporary / name).write_bytes(content)
        try:
            os.rename(temporary, directory)  # noqa: PTH104  # Path.rename says nothing else
        except OSError:  # somebody else was faster
            shutil.rmtree(temporary)
    return directory


class PlainTokenizer:
    """`tokenizers.Tokenizer` with the few methods that a training loop needs, named as in transformers."""

    def __init__(self, directory: Path) -> None:
        self.name_or_path = str(directory)
        self._tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(directory / "tokenizer.json"))
        config_file = directory / "tokenizer_config.json"
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
        self.eos_token: str | None = _content(config.get("eos_token"))
        self.bos_token: str | None = _content(config.get("bos_token"))
        self.pad_token: str | None = _content(config.get("pad_token"))

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-text token, None if there is none."""
        return self.convert_tokens_to_ids(self.eos_token)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, None if there is none."""
        return self.convert_tokens_to_ids(self.bos_token)

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token, None if there is none."""
        return self.convert_tokens_to_ids(self.pad_token)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return len(self)

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int] | int, *, skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, token: str | None) -> int | None:
        """Id of a token, None if there is no such token."""
        return None if token is None else self._tokenizer.token_to_id(token)


def _content(token: Any) -> str | None:
    """A token of the configuration is a string, or an object with its text."""
    content: str | None = token["content"] if isinstance(token, dict) else token
    return content
