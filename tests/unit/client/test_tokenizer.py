"""Tokenizers are fetched from the pool and cached by their contents."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tinkerpool.client.tokenizer import PlainTokenizer, keep, load_tokenizer

MODEL = Path(__file__).parents[3] / "workers" / "models" / "kjv-2m"
TEXT = "In the beginning God created the heaven and the earth."


@pytest.fixture
def files() -> dict[str, bytes]:
    return {name: (MODEL / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}


def without(monkeypatch: pytest.MonkeyPatch, *absent: str) -> None:
    """Hide libraries. Patched: they are installed where tests run."""
    find = importlib.util.find_spec

    def find_spec(name: str, *args: Any) -> Any:
        return None if name in absent else find(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_transformers_and_tokenizers_give_the_same_tokens(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = load_tokenizer(files)
    without(monkeypatch, "transformers")
    plain = load_tokenizer(files)
    assert isinstance(plain, PlainTokenizer)
    tokens = plain.encode(TEXT)
    assert tokens == full.encode(TEXT)
    assert plain.decode(tokens) == full.decode(tokens) == TEXT
    assert plain.decode([*tokens, plain.eos_token_id or 0], skip_special_tokens=True) == TEXT
    assert (plain.eos_token, plain.eos_token_id) == (full.eos_token, full.eos_token_id)
    assert (plain.pad_token_id, plain.bos_token_id, len(plain)) == (full.pad_token_id, full.bos_token_id, len(full))


def test_a_tokenizer_of_transformers_is_loaded_without_torch() -> None:
    code = "import sys; from tinkerpool.client.tokenizer import load_tokenizer; from pathlib import Path; "
    code += f"folder = Path({str(MODEL)!r}); names = ('tokenizer.json', 'tokenizer_config.json'); "
    code += "load_tokenizer({name: (folder / name).read_bytes() for name in names}); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    modules = set(ast.literal_eval(done.stdout))
    assert "transformers" in modules
    assert "torch" not in modules


def test_the_error_for_a_missing_tokenizer_library_names_what_to_install(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "transformers", "tokenizers")
    with pytest.raises(ImportError, match="pip install transformers"):
        load_tokenizer(files)


def test_the_cache_has_one_folder_per_contents(tmp_path: Path) -> None:
    first = keep({"a": b"1", "b": b"2"}, tmp_path)
    assert keep({"b": b"2", "a": b"1"}, tmp_path) == first
    assert keep({"a": b"12", "b": b""}, tmp_path) != first
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {"a": b"1", "b": b"2"}
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "..", ""])
def test_a_file_cannot_be_written_outside_the_cache(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="path for a name"):
        keep({name: b""}, tmp_path)
    assert list(tmp_path.iterdir()) == []
