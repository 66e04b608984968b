"""A base model's tokenizer, fetched from the pool, so that a user needs no model hub.

The files are cached in the user's tinkerpool folder, under a hash of their contents. `transformers` reads them if it is
installed, else `tokenizers`.
"""

from __future__ import annotations

import asyncio
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

from tinkerpool.client.calls import methods
from tinkerpool.client.calls.connection import Connection
from tinkerpool.credentials import home
from tinkerpool.v1 import sessions_pb2

GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names, in releases of transformers, of the class that does what `tokenizer.json` says and nothing else."""


async def fetch_tokenizer(connection: Connection, base_model: str) -> Any:
    """Fetch a base model's tokenizer. Raises NotFound, ImportError."""
    request = sessions_pb2.GetTokenizerRequest(base_model=base_model)
    response = await connection.call(methods.GET_TOKENIZER, request)
    return await asyncio.to_thread(load_tokenizer, dict(response.files))


def load_tokenizer(files: Mapping[str, bytes]) -> Any:
    """Return the tokenizer of these files. Raises ImportError, naming the libraries that could read them."""
    directory = keep(files, home() / "tokenizers")
    if importlib.util.find_spec("transformers") is not None:
        tokenizer_class = getattr(importlib.import_module("transformers"), _tokenizer_class(directory))
        return tokenizer_class.from_pretrained(str(directory))
    if importlib.util.find_spec("tokenizers") is not None:
        return PlainTokenizer(directory)
    raise ImportError("get_tokenizer needs a library that reads tokenizers: pip install transformers (or tokenizers)")


def keep(files: Mapping[str, bytes], cache: Path) -> Path:
    """Return a folder in the cache with exactly these files. Raises ValueError for a file name that is a path."""
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
            os.rename(temporary, directory)  # noqa: PTH104  # Path.rename raises the same errors
        except OSError:  # another process was faster
            shutil.rmtree(temporary)
    return directory


def _tokenizer_class(directory: Path) -> str:
    """Return the class of transformers that reads these files.

    `AutoTokenizer` imports torch and takes seconds; a tokenizer of the generic class does not need it.
    """
    is_generic = (directory / "tokenizer.json").exists() and (
        _config(directory).get("tokenizer_class") in GENERIC_CLASSES and "auto_map" not in _config(directory)
    )
    return "PreTrainedTokenizerFast" if is_generic else "AutoTokenizer"


def _config(directory: Path) -> dict[str, Any]:
    file = directory / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return config


class PlainTokenizer:
    """Wraps `tokenizers.Tokenizer` with the methods that a training loop needs, named as in transformers."""

    def __init__(self, directory: Path) -> None:
        self.name_or_path = str(directory)
        self._tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(directory / "tokenizer.json"))
        config = _config(directory)
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
        """Return the token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int] | int, *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, token: str | None) -> int | None:
        """Return the id of a token; None if there is no such token."""
        return None if token is None else self._tokenizer.token_to_id(token)


def _content(token: Any) -> str | None:
    """Return the text of a token in the configuration, which is a string or an object."""
    content: str | None = token["content"] if isinstance(token, dict) else token
    return content
