"""Exports compute what the engine computes: in PEFT, merged by PEFT, and merged by us."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5ForConditionalGeneration

from tests.support.exports import Files, export, pool_of, vllm_refuses
from tests.support.mini_model import Architecture, build_mini_model, build_mini_vision_model
from tests.support.numerics.by_peft import flags_for
from tests.support.numerics.exports import DATA, checkpoint_files, train
from tests.support.numerics.harness import Driver
from tinkerpool.errors import ExportError
from workers.export.adapter import ExportedAdapter

TIED = "ignore:Model has `tie_word_embeddings=True`:UserWarning"
MERGES_TIED = "ignore:Model with `tie_word_embeddings=True`:UserWarning"
UNTIED = "ignore:Input and output embeddings are no longer tied:UserWarning"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(TIED)]


def engine_logprobs(driver: Driver) -> list[torch.Tensor]:
    (result,) = driver.train(driver.backward("a", DATA))
    return [torch.from_numpy(logprobs) for logprobs in result.logprobs]


def difference(model: Any, expected: list[torch.Tensor]) -> float:
    """Return the largest difference of a model's log-probabilities of `DATA` from these."""
    largest = 0.0
    for datum, wanted in zip(DATA, expected, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(datum.tokens).long()[None], use_cache=False).logits[0]
        targets = torch.from_numpy(datum.loss_inputs["target_tokens"]).long()
        actual = logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        largest = max(largest, float((actual - wanted).abs().max()))
    return largest


def load(directory: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, **options)


def facts(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "tinkerpool.json").read_text())
    return found


def modes(directory: Path) -> set[int]:
    return {path.stat().st_mode for path in directory.iterdir()}


def test_a_merged_model_has_the_engines_log_probabilities_of_every_architecture(
    any_model_directory: Path, tmp_path: Path
) -> None:
    driver, spec = train(any_model_directory)
    out = tmp_path / "merged"
    export(checkpoint_files(driver, spec), out, format="merged", base_model=str(any_model_directory))
    assert difference(load(out), engine_logprobs(driver)) < 1e-4
    check = facts(out)["check"]
    assert check["difference"] <= check["tolerance"] < check["adapter_effect"]
    is_tied = driver.engine.info.has_tied_unembedding
    assert is_tied == json.loads((any_model_directory / "config.json").read_text())["tie_word_embeddings"]
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    text = AutoTokenizer.from_pretrained(any_model_directory)("In the beginning")
    assert AutoTokenizer.from_pretrained(out)("In the beginning")["input_ids"] == text["input_ids"]


@pytest.fixture(scope="module")
def trained(model_directories: dict[str, Path]) -> tuple[Path, Files, list[torch.Tensor]]:
    """A tied base model, an adapter of all its modules, and what the engine computes with it."""
    driver, spec = train(model_directories["qwen3"])
    return model_directories["qwen3"], checkpoint_files(driver, spec), engine_logprobs(driver)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_merged_model_keeps_dtype_and_shards_of_the_base_model(
    trained: tuple[Path, Files, list[torch.Tensor]], tmp_path: Path, dtype: torch.dtype
) -> None:
    directory, files, expected = trained
    base = tmp_path / "base"
    load(directory, dtype=dtype).save_pretrained(base, max_shard_size="100KB")
    num_shards = len(list(base.glob("*.safetensors")))
    assert num_shards > 1
    export(files, tmp_path / "merged", format="merged", base_model=str(base))
    shards = sorted((tmp_path / "merged").glob("*.safetensors"))
    assert len(shards) == num_shards + 1, "the untied unembedding has a file of its own"
    assert len(modes(tmp_path / "merged")) == 1
    tensors = [tensor for shard in shards for tensor in safetensors.torch.load_file(shard).values()]
    assert {tensor.dtype for tensor in tensors} == {dtype}
    assert difference(load(tmp_path / "merged", dtype="auto"), expected) < 0.3
    assert facts(tmp_path / "merged")["check"]["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(("architecture", "seed"), [("gpt-oss", 1), ("qwen3-moe", 0), ("qwen3-moe", 4)])
def test_a_mixture_in_bf16_is_merged_though_rounding_sends_a_token_elsewhere(
    tmp_path: Path, architecture: Architecture, seed: int
) -> None:
    directory = build_mini_model(tmp_path / "fp32", architecture, seed)
    driver, spec = train(directory)
    base, out = shutil.copytree(directory, tmp_path / "base"), tmp_path / "merged"
    load(directory, dtype=torch.bfloat16).save_pretrained(base)
    export(checkpoint_files(driver, spec), out, format="merged", base_model=str(base))
    check = facts(out)["check"]
    assert check["difference"] <= check["tolerance"] < 0.1 * check["adapter_effect"]


def test_an_unembedding_that_is_stored_although_it_is_tied_is_merged_in_its_place(
    trained: tuple[Path, Files, list[torch.Tensor]], tmp_path: Path
) -> None:
    directory, files, expected = trained
    base = tmp_path / "base"
    shutil.copytree(directory, base)
    tensors = safetensors.torch.load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(tensors, base / "model.safetensors", {"format": "pt"})
    export(files, tmp_path / "merged", format="merged", base_model=str(base))
    assert [path.name for path in (tmp_path / "merged").glob("*.safetensors")] == ["model.safetensors"]
    assert difference(load(tmp_path / "merged"), expected) < 1e-4


def test_a_model_whose_unembedding_was_not_trained_stays_tied(
    model_directories: dict[str, Path], tmp_path: Path
) -> None:
    driver, spec = train(model_directories["smollm2"], train_unembed=False)
    out = tmp_path / "merged"
    export(checkpoint_files(driver, spec), out, format="merged", base_model=str(model_directories["smollm2"]))
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in safetensors.torch.load_file(out / "model.safetensors")
    assert difference(load(out), engine_logprobs(driver)) < 1e-4


def test_a_merged_model_that_computes_something_else_leaves_no_directory(
    trained: tuple[Path, Files, list[torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, files, _ = trained
    add = ExportedAdapter.add_to

    def add_twice(self: ExportedAdapter, module: str, weight: torch.Tensor) -> None:  # no input makes a merge wrong
        add(self, module, weight)
        add(self, module, weight)

    monkeypatch.setattr(ExportedAdapter, "add_to", add_twice)
    with pytest.raises(ExportError, match=r"log-probabilities of 48 tokens differ by .* explains 0\.0001"):
        export(files, tmp_path / "out" / "merged", format="merged", base_model=str(directory))
    assert list((tmp_path / "out").iterdir()) == []


def test_an_adapter_of_another_base_model_and_a_quantized_one_are_refused(
    trained: tuple[Path, Files, list[torch.Tensor]], model_directories: dict[str, Path], tmp_path: Path
) -> None:
    directory, files, _ = trained
    with pytest.raises(ExportError, match="of another base model"):
        export(files, tmp_path / "merged", format="merged", base_model=str(model_directories["smollm2"]))
    base = tmp_path / "base"
    shutil.copytree(directory, base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ExportError, match="is quantized"):
        export(files, tmp_path / "merged", format="merged", base_model=str(base))
    assert not (tmp_path / "merged").exists()


def truncate(base: Path, num_bytes: int) -> None:
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:num_bytes])


def reconfigure(base: Path, **values: object) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | values))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "end": (lambda base: truncate(base, -4), r"model\.safetensors has \d+ bytes, and \d+ by its header"),
    "header": (lambda base: truncate(base, 100), "is not a safetensors file"),
    "config": (lambda base: (base / "config.json").write_text("[]"), "config.json is no object"),
    "index": (
        lambda base: (base / "model.safetensors").rename(base / "model.safetensors.index.json"),
        "UnicodeDecodeError",
    ),
    "heads": (lambda base: reconfigure(base, num_attention_heads=8, num_key_value_heads=4, head_dim=8), "RuntimeError"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_base_model_is_named_and_leaves_no_directory(
    trained: tuple[Path, Files, list[torch.Tensor]], tmp_path: Path, name: str
) -> None:
    directory, files, _ = trained
    damage, what = DAMAGES[name]
    base = tmp_path / "base"
    shutil.copytree(directory, base)
    damage(base)
    for options in ({"format": "merged"}, {"whole_unembedding": True}):
        if name == "heads" and "format" not in options:
            continue  # it reads the unembedding alone
        with pytest.raises(ExportError, match=rf"(?s)base model in .*base cannot be loaded .*{what}.*save it again"):
            export(files, tmp_path / "out", base_model=str(base), **options)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_single_file_of_weights_is_merged_although_an_index_names_others(
    trained: tuple[Path, Files, list[torch.Tensor]], tmp_path: Path
) -> None:
    directory, files, expected = trained
    base = tmp_path / "base"
    load(directory).save_pretrained(base, max_shard_size="100kB")
    shutil.copyfile(directory / "model.safetensors", base / "model.safetensors")
    for shard in base.glob("model-*"):
        shard.write_bytes(b"of another version")
    export(files, tmp_path / "merged", format="merged", base_model=str(base))
    assert difference(load(tmp_path / "merged"), expected) < 1e-4


def test_a_peft_export_names_its_base_model_and_says_what_merging_a_tied_one_does(
    trained: tuple[Path, Files, list[torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, files, expected = trained
    name = json.loads(files["adapter_config.json"])["base_model_name_or_path"]
    monkeypatch.chdir(directory.parent)  # a relative path is written as one that resolves from everywhere
    exporter = export(files, tmp_path / "peft", pool_of(name, is_tied=True), base_model=directory.name)
    monkeypatch.chdir(tmp_path)
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft")
    assert difference(model, expected) < 1e-4
    [note] = exporter.notes
    assert "merge_and_unload() does not" in note
    assert facts(tmp_path / "peft")["notes"] == [note]
    with pytest.warns(UserWarning, match="tie_word_embeddings=True"):
        merged = model.merge_and_unload()
    assert difference(merged, expected) > 0.1, "the note is needed: PEFT changes the embedding too"


@pytest.mark.filterwarnings(UNTIED, MERGES_TIED)
def test_peft_merges_an_adapter_with_a_whole_unembedding_right_and_saves_it(
    trained: tuple[Path, Files, list[torch.Tensor]], tmp_path: Path
) -> None:
    directory, files, expected = trained
    exporter = export(files, tmp_path / "peft", base_model=str(directory), whole_unembedding=True)
    [note] = exporter.notes
    assert "the pool does not say" in note, "which weights were trained"
    assert len(modes(tmp_path / "peft")) == 1
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft")
    assert difference(model, expected) < 1e-4
    merged = model.merge_and_unload()
    assert difference(merged, expected) < 1e-4
    merged.save_pretrained(tmp_path / "merged")
    assert difference(load(tmp_path / "merged"), expected) < 1e-4


def test_peft_merges_an_adapter_of_an_untied_base_model_right(tmp_path: Path) -> None:
    directory = build_mini_model(tmp_path / "base", "llama")
    driver, spec = train(directory)
    files = checkpoint_files(driver, spec)
    name = json.loads(files["adapter_config.json"])["base_model_name_or_path"]
    exporter = export(files, tmp_path / "peft", pool_of(name, is_tied=False), base_model=str(directory))
    assert exporter.notes == []
    merged = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft").merge_and_unload()
    assert difference(merged, engine_logprobs(driver)) < 1e-4


def is_hybrid(directory: Path) -> bool:
    return "linear_attention" in json.loads((directory / "config.json").read_text()).get("layer_types", ())


def test_an_export_for_vllm_is_within_its_rules_and_has_the_same_weights_in_every_architecture(
    any_model_directory: Path, tmp_path: Path
) -> None:
    is_mixture = any_model_directory.name in {"qwen3-moe", "qwen3.5-moe", "gpt-oss"}
    flags = {"train_attn": not is_hybrid(any_model_directory), "train_mlp": not is_mixture}
    if not any(flags.values()):
        pytest.skip("vLLM takes neither linear attention nor experts in an adapter")
    driver, spec = train(any_model_directory, train_unembed=False, **flags)
    out = tmp_path / "vllm"
    export(checkpoint_files(driver, spec), out, format="vllm", base_model=str(any_model_directory))
    assert vllm_refuses(out, facts(out)["max_lora_rank"]) == []
    if flags_for(any_model_directory).get("train_mlp", True):
        assert difference(peft.AutoPeftModelForCausalLM.from_pretrained(out), engine_logprobs(driver)) < 1e-4


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next"])
def test_linear_attention_is_exported_as_peft_adapts_it(
    model_directories: dict[str, Path], tmp_path: Path, name: str
) -> None:
    base = model_directories[name]
    driver, spec = train(base, train_unembed=False, **flags_for(base))
    expected = engine_logprobs(driver)
    files = checkpoint_files(driver, spec)
    export(files, tmp_path / "peft", base_model=str(base))
    assert difference(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft"), expected) < 1e-4
    with pytest.raises(ExportError, match="which vLLM may not take in an adapter: export with --format merged"):
        export(files, tmp_path / "vllm", format="vllm", base_model=str(base))
    as_tinkers = checkpoint_files(driver, spec, for_tinker=True)
    export(as_tinkers, tmp_path / "split", base_model=str(base))
    split = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "split")
    assert difference(split, expected) > 0.1, "the other names are needed: PEFT ignores the service's"


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_merged_checkpoint_that_can_see_has_all_its_other_tensors_as_they_were(tmp_path: Path, is_tied: bool) -> None:
    base = build_mini_vision_model(tmp_path / "base", is_tied=is_tied)
    (base / "preprocessor_config.json").write_text("{}")
    driver, spec = train(base)
    out = tmp_path / "merged"
    export(checkpoint_files(driver, spec), out, format="merged", base_model=str(base))
    before = safetensors.torch.load_file(base / "model.safetensors")
    after = {name: t for file in out.glob("*.safetensors") for name, t in safetensors.torch.load_file(file).items()}
    assert after.keys() == before.keys() | {"lm_head.weight"}
    prefix = "model.language_model."
    adapted = {module.linear_name for module in driver.engine.info.modules}
    changed = {f"{name.replace('model.', prefix, 1)}.weight" for name in adapted} - {"lm_head.weight"}
    assert "mtp.fc.weight" in before
    assert any(name.startswith("model.visual.") for name in before)
    for name in before.keys() - {"lm_head.weight"}:
        assert torch.equal(before[name], after[name]) == (name not in changed), name
    expected = engine_logprobs(driver)
    assert difference(load(out), expected) < 1e-4
    assert difference(Qwen3_5ForConditionalGeneration.from_pretrained(out), expected) < 1e-4
    assert (out / "preprocessor_config.json").is_file()
