"""The files of a base model: where they are, and whether they are complete. Imports neither torch nor transformers.

Main invariant: a model is looked for in local directories and the local hub cache, and never fetched.
"""

from __future__ import annotations

from pathlib import Path

from tinkerpool.model_weights import PICKLES, weight_files

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A tokenizer has one of these."""


def find_directory(path: Path | str) -> Path:
    """Return a model directory: `path` itself, or the directory in the local hub cache of a model with that name.

    Raises FileNotFoundError, which has the command that downloads the model, if it is not in the cache.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), local_files_only=True))
    except LocalEntryNotFoundError:
        raise FileNotFoundError(
            f"the model {path} is not in this machine's hub cache, and a pool downloads nothing: run `hf download "
            f"{path}` first, or give a directory that has it"
        ) from None


def check_files(path: Path | str) -> None:
    """Raise FileNotFoundError if a model is not there, or lacks a file that a worker or a client needs."""
    directory = find_directory(path)
    missing = _missing(directory)
    if missing:
        raise FileNotFoundError(
            f"{directory} is no complete model directory: there is no {', and no '.join(missing)} in it. Copy the "
            "missing files into it, or give another model with --model"
        )


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Return the files of a model directory from which clients make the tokenizer, by name."""
    files = [directory / name for name in TOKENIZER_FILES]
    return {file.name: file.read_bytes() for file in files if file.is_file()}


def _missing(directory: Path) -> list[str]:
    missing = [] if (directory / "config.json").is_file() else ["config.json"]
    if not any((directory / name).is_file() for name in _VOCABULARIES):
        missing.append("tokenizer (tokenizer.json)")
    try:
        files = weight_files(directory)
    except (OSError, ValueError):
        return missing  # it is for the loader to report
    missing += [file.name for file in files if not file.is_file()]
    if not files and not any(directory.glob(PICKLES)):
        missing.append("file of weights (model.safetensors)")
    return missing
