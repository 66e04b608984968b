"""`tinkerpool models` in this process: what it says of a model, and its exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import transformers

from tests.support.command_line import Run
from tests.support.mini_model import build_mini_model

LARGE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def test_a_model_is_described_before_it_is_served(run: Run) -> None:
    done = run("models", "kjv-2m")
    assert (done.code, done.err) == (0, "")
    assert "qwen3: Qwen 3, a tested family." in done.out
    assert "losses and gradients against plain autograd" in done.out
    for kind, leaves in (("attn", "q_proj, k_proj, v_proj, o_proj"), ("unembed", "lm_head")):
        assert f"train_{kind}" in done.out
        assert leaves in done.out
    assert "Refused: ranks above 128, sequences of more than " in done.out

    told = json.loads(run("models", "kjv-2m", "--json", "--slots", "5").out)
    facts = told["facts"]
    assert (told["family"], told["problems"], facts["dtype"]) == ("qwen3", [], "float32")
    assert [each["rank"] for each in facts["adapters"]] == [8, 16, 32, 64, 128]
    assert {each["num_slots"] for each in facts["adapters"]} == {5}, "its memory has room for more"


def test_a_large_model_is_described_from_its_config_alone_and_its_missing_files_are_named(
    run: Run, tmp_path: Path
) -> None:
    transformers.Qwen3Config(**LARGE).save_pretrained(tmp_path)
    done = run("models", tmp_path, "--json", "--dtype", "bfloat16")
    told = json.loads(done.out)
    [problem] = told["problems"]
    assert (done.code, "no tokenizer (tokenizer.json), and no file of weights" in problem) == (1, True)
    facts = told["facts"]
    assert facts["num_params"] == 8_190_735_360
    assert facts["model_bytes"] == 2 * facts["num_params"]
    rank_32 = facts["adapters"][2]
    per_layer = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288)  # q and o, k and v, the MLP
    assert rank_32["num_params"] == 32 * (36 * per_layer + 4096 + 151936)
    assert rank_32["file_bytes"] == 4 * rank_32["num_params"]
    assert rank_32["worker_bytes"] >= 18 * rank_32["num_params"], "fp32 four times, and a copy in bf16"
    slots = [each["num_slots"] for each in facts["adapters"]]
    assert slots == sorted(slots, reverse=True), "higher ranks take more"


def test_a_mixture_is_described_with_its_experts_and_what_adapters_of_them_take(run: Run, tmp_path: Path) -> None:
    build_mini_model(tmp_path, "qwen3-moe")
    done = run("models", tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "qwen3_moe: Qwen 3, mixtures, a tested family." in done.out
    for kind, leaves in (("mlp", "w1, w3, w2"), ("attn", "q_proj, k_proj, v_proj, o_proj"), ("unembed", "lm_head")):
        assert re.search(rf"train_{kind} +{leaves} ", done.out)
    facts = json.loads(run("models", tmp_path, "--json").out)["facts"]
    assert [each["rank"] for each in facts["adapters"]] == [8, 16, 32, 64]
    experts = 2 * 3 * (64 + 8 * 32)  # layers, linears; the factor that all share, and each expert's own
    attention = 2 * (2 * (64 + 64) + 2 * (64 + 32))
    for each in facts["adapters"]:
        assert each["num_params"] == each["rank"] * (experts + attention + 64 + 258)
        assert each["file_bytes"] == 4 * each["num_params"]
        assert each["worker_bytes"] >= 16 * each["num_params"], "weights, two moments, gradient"


def test_a_refused_model_is_said_to_be_with_the_reason_and_what_to_take(run: Run, tmp_path: Path) -> None:
    transformers.Gemma4TextConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    done = run("models", tmp_path)
    assert done.code == 1
    assert "REFUSED: Gemma 4 has heads of two widths" in done.out
    assert "take a text model of Gemma 3" in done.out
    assert "Traceback" not in done.out + done.err
    told = json.loads(run("models", tmp_path, "--json").out)
    assert (told["family"], told["title"], told["facts"], len(told["problems"])) == ("gemma4_text", "", None, 2)


def test_a_family_that_transformers_does_not_know_is_refused_in_one_sentence(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}))
    done = run("models", tmp_path)
    assert (done.code, done.err) == (1, "")
    assert "REFUSED: transformers has no code for the model, and a pool runs none of the model's own (" in done.out


def test_what_is_no_model_is_one_sentence(run: Run, tmp_path: Path) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("[1")
    for given, sentence in (
        (tmp_path, "there is no config.json in it"),
        (tmp_path / "damaged", "config.json is not the config of a model: "),
        ("nothing", "no model 'nothing'"),
    ):
        done = run("models", given)
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith("Error: ")
        assert sentence in done.err
        assert done.err.count("\n") == 1


def test_a_device_that_the_machine_lacks_is_one_sentence(run: Run) -> None:
    done = run("models", "kjv-2m", "--device", "cuda")
    assert done.code == 1
    assert "workers on cuda need a GPU" in done.err
