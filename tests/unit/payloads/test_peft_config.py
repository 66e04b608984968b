"""Settings of PEFT under which the pool would compute something else are refused by name, with what to do."""

from __future__ import annotations

import json
import math
import random
from contextlib import suppress
from typing import Any

import peft
import pytest

from coordinator.base.errors import Code, ServiceError
from coordinator.payloads.peft_config import PeftConfig, read_config

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]}


def read(**settings: Any) -> PeftConfig:
    return read_config(json.dumps(CONFIG | settings))


def refusal(text: str) -> ServiceError:
    with pytest.raises(ServiceError) as refused:
        read_config(text)
    assert (refused.value.code, refused.value.reason) == (Code.INVALID_ARGUMENT, "NOT_IMPORTABLE")
    return refused.value


def test_a_configuration_that_peft_writes_is_read() -> None:
    written = peft.LoraConfig(
        r=12,
        lora_alpha=20,
        target_modules=["q_proj", "v_proj"],
        lora_dropout=0.1,
        task_type="CAUSAL_LM",
        base_model_name_or_path="organisation/model",
    ).to_dict()
    written["target_modules"] = sorted(written["target_modules"])
    assert read_config(json.dumps(written)) == PeftConfig(
        rank=12,
        alpha=20.0,
        targets=("q_proj", "v_proj"),
        base_model="organisation/model",
        dropout=0.1,
        rank_pattern={},
        alpha_pattern={},
    )


@pytest.mark.parametrize(
    ("setting", "value", "mend"),
    [
        ("peft_type", "IA3", "only LoRA"),
        ("task_type", "SEQ_CLS", "causal language models"),
        ("bias", "lora_only", "bias='none'"),
        ("use_dora", True, "without DoRA"),
        ("use_qalora", True, "without QALoRA"),
        ("lora_bias", True, "lora_bias=False"),
        ("rank_pattern", {"q_proj": "4"}, "must have a number"),
        ("alpha_pattern", {"q_proj": True}, "must have a number"),
        ("rank_pattern", ["q_proj"], "must have a number"),
        ("modules_to_save", ["lm_head"], "without modules_to_save"),
        ("layers_to_transform", [0, 1], "in all layers"),
        ("layers_to_transform", 0, "in all layers"),
        ("exclude_modules", ["lm_head"], "in all layers"),
        ("layer_replication", [[0, 4], [2, 5]], "another base model"),
        ("trainable_token_indices", [5], "without new token embeddings"),
        ("target_parameters", "experts.weight", "it must be a list of names"),
        ("fan_in_fan_out", True, "set it to false"),
        ("init_lora_weights", "pissa", "convert it"),
        ("init_lora_weights", "loftq", "convert it"),
        ("alora_invocation_tokens", [1], "does not know"),
        ("use_something_new", True, "does not know"),
    ],
)
def test_a_setting_that_changes_the_function_is_refused_by_name_with_what_to_do(
    setting: str, value: Any, mend: str
) -> None:
    message = refusal(json.dumps(CONFIG | {setting: value})).message
    assert setting in message
    assert mend in message


def test_rslora_is_refused_with_the_equal_alpha() -> None:
    message = refusal(json.dumps(CONFIG | {"use_rslora": True})).message
    assert "use_rslora" in message
    assert "lora_alpha to 128" in message
    assert read(lora_alpha=128).alpha / 16 == 32 / math.sqrt(16)


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 0},
        {"r": -1},
        {"r": 8.0},
        {"r": True},
        {"r": None},
        {"lora_alpha": 0},
        {"lora_alpha": "8"},
        {"lora_alpha": True},
        {"lora_alpha": float("nan")},
        {"lora_alpha": float("inf")},
        {"lora_alpha": 10**400},
        {"lora_alpha": 1e7},
        {"target_modules": []},
        {"target_modules": None},
        {"target_modules": [1]},
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.q_proj"},
    ],
)
def test_a_rank_alpha_or_list_of_modules_that_cannot_be_is_refused_by_name(settings: dict[str, Any]) -> None:
    assert next(iter(settings)) in refusal(json.dumps(CONFIG | settings)).message


def test_a_setting_that_is_given_twice_is_refused() -> None:
    twice = json.dumps(CONFIG).replace('"r": 16', '"r": 16, "r": 8')
    assert "twice" in refusal(twice).message


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, '{"r": ' + "1" * 5000 + "}", " " * 300_000])
def test_what_is_no_configuration_is_refused(text: str) -> None:
    refusal(text)


def test_damaged_configurations_are_read_or_refused_and_nothing_else() -> None:
    text, rng = json.dumps(CONFIG | {"use_dora": False, "rank_pattern": {}}), random.Random(1)
    for _ in range(3000):
        at, num = rng.randrange(len(text)), rng.randrange(1, 6)
        damaged = text[:at] + "".join(rng.choices('{}[]",:0123456789truefalsn', k=num)) + text[at + rng.randrange(6) :]
        with suppress(ServiceError):
            read_config(damaged)
