"""The base model that the project ships: small, offline, documented, and with the measure that its card states."""

import json
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from workers.contract.adapted_modules import ModuleKind, adapter_params
from workers.model.base_model import BaseModel

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "workers" / "models" / "kjv-2m"
HELD_OUT = ROOT / "tests" / "data" / "kjv_held_out.txt"
"""The last two chapters of the text, separated by an empty line. They are not in the training text."""
DEMO_DATA = ROOT / "scripts" / "demo" / "data"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True).eval()


def test_directory_is_small_and_standard() -> None:
    files = {path.name: path.stat().st_size for path in MODEL.rglob("*")}
    assert sum(files.values()) <= 12_000_000
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(files)


def test_default_loading_computes_in_float32(model: Any) -> None:
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.max_position_embeddings >= 1024


def test_model_card_states_how_the_weights_were_made_and_measured() -> None:
    card = (MODEL / "README.md").read_text()
    assert re.search(r"\| Seed \| \d+ \|", card)
    assert stated_bits_per_byte() <= 1.9
    for fact in ("bible-kjv-text", "unrestricted use", "python -m scripts.models.build_base_model"):
        assert fact in card


def test_held_out_bits_per_byte_are_near_the_card(model: Any, tokenizer: Any) -> None:
    chapters = [chapter.removesuffix("\n") + "\n" for chapter in HELD_OUT.read_text().split("\n\n")]
    bits = sum(text_bits(model, tokenizer, chapter) for chapter in chapters)
    bits_per_byte = bits / sum(len(chapter.encode()) for chapter in chapters)
    assert bits_per_byte <= 1.9
    assert bits_per_byte == pytest.approx(stated_bits_per_byte(), abs=0.25)  # two chapters of the card's 46


@pytest.mark.parametrize("text", ["In the beginning", " two  spaces\n\ttab", "Grüße, 世界 🙂", "0123456789 {}[]\\"])
def test_tokenizer_round_trips(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.all_special_ids)


def test_special_tokens_and_chat_template(tokenizer: Any, model: Any) -> None:
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2, 3]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 1, None)
    assert model.generation_config.eos_token_id == [0, 3]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hear me."}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|im_start|>user\nHear me.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode(prompt)) == prompt


@pytest.mark.parametrize("name", ["train", "test"])
def test_demo_pairs_are_short_enough_to_train_on_in_a_minute(tokenizer: Any, name: str) -> None:
    path = DEMO_DATA / f"plain_english.{name}.jsonl"
    pairs = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.stat().st_size < 200_000
    assert all(pair["prompt"].endswith("\n") and pair["completion"].endswith("\n") for pair in pairs)
    assert all(pair["prompt"] != pair["completion"] for pair in pairs)
    assert max(len(tokenizer.encode(pair["prompt"] + pair["completion"])) for pair in pairs) <= 96


def stated_bits_per_byte() -> float:
    match = re.search(r"Held-out bits per byte \| \*\*([\d.]+)\*\*", (MODEL / "README.md").read_text())
    assert match is not None
    return float(match[1])


@torch.no_grad()
def text_bits(model: Any, tokenizer: Any, text: str, window_tokens: int = 256) -> float:
    """Negative log-likelihood in bits of a document after an end-of-text token, in windows as the card states."""
    ids = torch.tensor([tokenizer.eos_token_id, *tokenizer.encode(text)])
    bits = 0.0
    for start in range(0, len(ids) - 1, window_tokens):
        window = ids[start : start + window_tokens + 1]
        log_probs = model(input_ids=window[None, :-1], use_cache=False).logits[0].log_softmax(-1)  # (tokens, vocab)
        bits -= float(log_probs.gather(1, window[1:, None]).sum()) / math.log(2)
    return bits


def test_two_workers_of_one_process_load_the_model_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """While transformers loads a model, it changes torch for all threads. Patched to measure the overlap."""
    load, num_loading, most = AutoModelForCausalLM.from_pretrained, 0, 0

    def from_pretrained(*args: Any, **options: Any) -> Any:
        nonlocal num_loading, most
        num_loading += 1
        most = max(most, num_loading)
        time.sleep(0.1)
        loaded = load(*args, **options)
        num_loading -= 1
        return loaded

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with ThreadPoolExecutor() as threads:
        models = list(threads.map(BaseModel, [MODEL] * 2))
    assert most == 1
    first, second = (list(model.model.parameters()) for model in models)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_size_of_an_adapter_is_known_from_the_shapes_of_its_modules(model: Any) -> None:
    """What a save reserves of its tenant's bytes."""
    info = BaseModel(MODEL).info(is_thread_count_invariant=True, are_samples_batch_invariant=True)
    kinds: dict[ModuleKind, tuple[str, ...]] = {"attn": ("self_attn",), "mlp": ("mlp",), "unembed": ("lm_head",)}
    linears = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    for kind, parts in kinds.items():
        assert adapter_params(info.modules, kind) == sum(
            each.in_features + each.out_features for name, each in linears.items() if set(parts) & {*name.split(".")}
        )
