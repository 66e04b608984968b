"""Names, shapes, types and places of an adapter's tensors are checked before a value is read; values are exact."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from coordinator.base.errors import ServiceError
from coordinator.payloads.peft_config import read_config
from coordinator.payloads.peft_weights import ImportPlan, plan_import, state_weights
from tests.support.adapters import PREFIX, AdapterFiles, adapter_files, random_tensors, with_header
from tests.support.joined_modules import D_IN, EXPERTS, ROWS, expert_modules, experts_in_peft, hybrid_modules
from tests.support.toy_engine import toy_model_info
from workers.contract.adapted_modules import AdaptedModule, ModuleKind, initial_A
from workers.contract.messages import ModelInfo

SHAPES: dict[str, tuple[ModuleKind, int, int]] = {
    "self_attn.q_proj": ("attn", 6, 8),
    "self_attn.k_proj": ("attn", 6, 4),
    "mlp.up_proj": ("mlp", 6, 10),
}
MODULES = (
    *(
        AdaptedModule(name=f"model.layers.{layer}.{name}", kind=kind, d_in=d_in, d_out=d_out)
        for layer in range(2)
        for name, (kind, d_in, d_out) in SHAPES.items()
    ),
    AdaptedModule(name="lm_head", kind="unembed", d_in=6, d_out=20),
)
MODEL = replace(toy_model_info(), modules=MODULES)
QUERIES = [module for module in MODULES if module.leaf_name == "q_proj"]
FIRST_A, FIRST_B = PREFIX + QUERIES[0].A_name, PREFIX + QUERIES[0].B_name


def plan(files: AdapterFiles, header: str | None = None, model: ModelInfo = MODEL) -> ImportPlan:
    return plan_import(read_config(json.dumps(files.config)), files.header if header is None else header, model)


def state_of(files: AdapterFiles, seed: int = 0, model: ModelInfo = MODEL) -> dict[str, np.ndarray[Any, Any]]:
    data = files.data
    weights = b"".join(
        state_weights(plan(files, model=model), seed, lambda start, num_bytes: data[start : start + num_bytes])
    )
    found: dict[str, np.ndarray[Any, Any]] = safetensors.numpy.load(weights)
    return found


def refusal(files: AdapterFiles, header: str | None = None, model: ModelInfo = MODEL) -> str:
    with pytest.raises(ServiceError) as refused:
        plan(files, header, model)
    assert refused.value.reason == "NOT_IMPORTABLE"
    return refused.value.message


def test_a_whole_adapter_keeps_every_value_and_rank_and_alpha() -> None:
    files = adapter_files(MODULES, rank=5, alpha=7)
    planned = plan(files)
    assert (planned.rank, planned.alpha, planned.kinds) == (5, 7.0, ("attn", "mlp", "unembed"))
    assert planned.num_bytes == len(files.data)
    assert planned.notes == ()
    state, expected = state_of(files), safetensors.numpy.load(files.weights)
    assert state.keys() == expected.keys()
    for name, values in expected.items():
        assert state[name].dtype == np.float32
        np.testing.assert_array_equal(state[name], values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_fp32_without_rounding(dtype: torch.dtype) -> None:
    tensors = {name: torch.from_numpy(values).to(dtype) for name, values in random_tensors(MODULES, 4).items()}
    files = AdapterFiles(adapter_files(MODULES).config, safetensors.torch.save(tensors))
    state = state_of(files)
    for name, values in tensors.items():
        np.testing.assert_array_equal(state[name], values.float().numpy())


def test_modules_that_the_adapter_lacks_begin_as_in_a_new_adapter_and_add_nothing() -> None:
    files = adapter_files(QUERIES, rank=4)
    planned, state = plan(files), state_of(files, seed=3)
    assert planned.kinds == ("attn",)
    assert set(state) == {PREFIX + name for m in MODULES if m.kind == "attn" for name in (m.A_name, m.B_name)}
    for module in MODULES:
        if module.leaf_name == "k_proj":
            np.testing.assert_array_equal(state[PREFIX + module.A_name], initial_A(3, module.A_name, 4, module.d_in))
            assert not state[PREFIX + module.B_name].any()
    [note] = planned.notes
    assert "k_proj" in note
    assert "train_attn" in note


def test_layers_that_the_adapter_lacks_begin_so_too_and_the_note_says_it() -> None:
    files = adapter_files(QUERIES[:1], target_modules=[QUERIES[0].name])
    assert not state_of(files)[PREFIX + QUERIES[1].B_name].any()
    assert "lacks k_proj, q_proj (in some layers), which" in plan(files).notes[0]


def test_dropout_and_another_name_of_the_base_model_are_noted() -> None:
    files = adapter_files(MODULES, lora_dropout=0.1, base_model_name_or_path="organisation/other")
    other, dropout = plan(files).notes
    assert "organisation/other" in other
    assert "0.1" in dropout
    assert plan(adapter_files(MODULES, base_model_name_or_path="/models/Toy/")).notes == ()


def test_the_first_tensor_that_is_missing_is_named() -> None:
    files = adapter_files(QUERIES)
    message = refusal(files, with_header(files, **{FIRST_B: None}))
    assert f"lacks {FIRST_B}" in message
    assert "save_pretrained" in message
    names = json.dumps({name.replace(".weight", ".default.weight"): e for name, e in json.loads(files.header).items()})
    assert f"lacks {FIRST_A}" in refusal(files, names)


def test_a_module_that_the_pool_does_not_adapt_is_named() -> None:
    files = adapter_files(QUERIES, target_modules=["q_proj", "embed_tokens"])
    message = refusal(files)
    assert "'embed_tokens'" in message
    assert "q_proj, k_proj, up_proj, lm_head" in message


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (f"{PREFIX}lm_head.base_layer.weight", "save_embedding_layers=False"),
        (f"{PREFIX}model.embed_tokens.weight", "save_embedding_layers=False"),
        (f"{PREFIX}model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
        (f"{PREFIX}{MODULES[1].name}.lora_A.weight", "target_modules does not name"),
    ],
)
def test_a_tensor_that_is_not_expected_is_named(name: str, says: str) -> None:
    files = adapter_files(QUERIES)
    message = refusal(files, with_header(files, **{name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}))
    assert name in message
    assert says in message


def test_another_shape_is_named_with_the_expected_one_and_the_base_model_that_the_adapter_names() -> None:
    files = adapter_files(QUERIES, base_model_name_or_path="organisation/other")
    entry = {"dtype": "F32", "shape": [4, 7], "data_offsets": [0, 112]}
    message = refusal(files, with_header(files, **{FIRST_A: entry}))
    assert f"{FIRST_A} has the shape [4, 7], expected [4, 6]" in message
    assert "organisation/other" in message
    assert "r = 8" in refusal(adapter_files(QUERIES, r=8))
    assert "takes ranks up to 32" in refusal(adapter_files(QUERIES, rank=33))


@pytest.mark.parametrize("dtype", ["F64", "I8", "F8_E4M3", "f32", None, ["F32"]])
def test_another_type_is_named(dtype: Any) -> None:
    files = adapter_files(QUERIES)
    entry = json.loads(files.header)[FIRST_A] | {"dtype": dtype}
    assert FIRST_A in refusal(files, with_header(files, **{FIRST_A: entry}))


@pytest.mark.parametrize(
    "offsets", [[0, 95], [0, 97], [-96, 0], [4, 100], [0.0, 96.0], [10**30, 10**30 + 96], [96, 0], [0], "ab", None]
)
def test_places_that_overlap_leave_gaps_or_do_not_fit_the_shape_are_refused(offsets: Any) -> None:
    files = adapter_files(QUERIES)
    header = json.loads(files.header)
    [name] = [each for each, entry in header.items() if entry.get("data_offsets") == [0, 96]]  # (4, 6) fp32
    assert refusal(files, with_header(files, **{name: header[name] | {"data_offsets": offsets}}))


def test_two_tensors_at_one_place_are_refused() -> None:
    files = adapter_files(QUERIES)
    header = json.loads(files.header)
    second = PREFIX + QUERIES[1].A_name
    assert "damaged" in refusal(files, with_header(files, **{second: header[FIRST_A]}))


def test_a_tensor_that_is_given_twice_is_refused() -> None:
    files = adapter_files(QUERIES)
    twice = files.header.replace("{", "{" + json.dumps({FIRST_A: json.loads(files.header)[FIRST_A]})[1:-1] + ",", 1)
    assert "twice" in refusal(files, twice)


def test_a_header_that_is_longer_than_that_of_any_adapter_is_refused_unread() -> None:
    files = adapter_files(MODULES)
    metadata = {"format": "pt", "note": "x" * 60_000}
    plan(files, with_header(files, __metadata__=metadata))
    refused = refusal(files, with_header(files, __metadata__={"note": "x" * 80_000}))
    assert "save the adapter alone" in refused


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "{}"])
def test_what_is_no_header_is_refused(text: str) -> None:
    refusal(adapter_files(QUERIES), text)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_with_the_name_of_its_matrix(value: float) -> None:
    tensors = random_tensors(QUERIES, 4)
    tensors[FIRST_B][-1, -1] = value
    files = AdapterFiles(adapter_files(QUERIES).config, safetensors.numpy.save(tensors))
    with pytest.raises(ServiceError, match="lora_B") as refused:
        state_of(files)
    assert FIRST_B in refused.value.message


def test_damaged_headers_are_planned_or_refused_and_nothing_else() -> None:
    files, rng = adapter_files(QUERIES), random.Random(1)
    text = files.header
    for _ in range(3000):
        at, num = rng.randrange(len(text)), rng.randrange(1, 6)
        damaged = text[:at] + "".join(rng.choices('{}[]",:0123456789.-eF', k=num)) + text[at + rng.randrange(6) :]
        with suppress(ServiceError):
            plan(files, damaged)


def hybrid(linear: str) -> ModelInfo:
    return replace(toy_model_info(), modules=hybrid_modules(linear))


def joined_files(linear: str, rank: int, **config: Any) -> tuple[AdapterFiles, dict[str, np.ndarray[Any, Any]]]:
    """Return a random adapter of a linear that joins modules, of rank 2 elsewhere, and its tensors."""
    modules = [
        AdaptedModule(
            name=f"model.layers.{layer}.linear_attn.{linear}",
            kind="attn",
            d_in=D_IN,
            d_out=sum(map(len, ROWS[linear].values())),
        )
        for layer in range(2)
    ]
    tensors = random_tensors(modules, rank)
    settings = adapter_files(modules, 2, alpha=3, **config).config
    return AdapterFiles(settings, safetensors.numpy.save(tensors)), tensors


@pytest.mark.parametrize("linear", ROWS)
def test_an_adapter_of_joined_modules_is_each_modules_rows_of_b_with_the_same_a(linear: str) -> None:
    files, tensors = joined_files(linear, 2)
    state, planned = state_of(files, model=hybrid(linear)), plan(files, model=hybrid(linear))
    for layer in range(2):
        parent = f"{PREFIX}model.layers.{layer}.linear_attn."
        for leaf, rows in ROWS[linear].items():
            np.testing.assert_array_equal(
                state[f"{parent}{leaf}.lora_A.weight"], tensors[f"{parent}{linear}.lora_A.weight"]
            )
            np.testing.assert_array_equal(
                state[f"{parent}{leaf}.lora_B.weight"], tensors[f"{parent}{linear}.lora_B.weight"][rows]
            )
        assert not state[f"{parent}out_proj.lora_B.weight"].any()
    lacks, shared = planned.notes
    assert "lacks out_proj, which" in lacks
    assert f"one A for {linear}; the pool adapts {', '.join(ROWS[linear])} in its place" in shared


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("linear", ROWS)
def test_matrices_in_blocks_are_taken_apart(linear: str, dtype: torch.dtype) -> None:
    num_parts = len(ROWS[linear])
    patterns = {"rank_pattern": {linear: 2 * num_parts}, "alpha_pattern": {linear: 3 * num_parts}}
    files, tensors = joined_files(linear, 2 * num_parts, **patterns)
    for name, values in tensors.items():
        if name.endswith(".lora_B.weight"):
            for number, rows in enumerate(ROWS[linear].values()):
                values[rows, : 2 * number] = values[rows, 2 * (number + 1) :] = 0
    rounded = {name: torch.from_numpy(values).to(dtype) for name, values in tensors.items()}
    files = AdapterFiles(files.config, safetensors.torch.save(rounded))
    model = replace(hybrid(linear), modules=hybrid(linear).modules[::-1])  # the rows give the order of the blocks
    state = state_of(files, model=model)
    for layer in range(2):
        parent = f"{PREFIX}model.layers.{layer}.linear_attn."
        A, B = (rounded[f"{parent}{linear}.lora_{matrix}.weight"].float().numpy() for matrix in "AB")
        for number, (leaf, rows) in enumerate(ROWS[linear].items()):
            own = slice(2 * number, 2 * (number + 1))
            np.testing.assert_array_equal(state[f"{parent}{leaf}.lora_A.weight"], A[own])
            np.testing.assert_array_equal(state[f"{parent}{leaf}.lora_B.weight"], B[rows, own])
    [lacks] = plan(files, model=hybrid(linear)).notes
    assert "out_proj" in lacks


@pytest.mark.parametrize("read_bytes", [4, 600, 4 << 20])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_matrices_of_all_experts_are_taken_apart(
    monkeypatch: pytest.MonkeyPatch, read_bytes: int, *, is_interleaved: bool
) -> None:
    monkeypatch.setattr("coordinator.payloads.peft_weights.READ_BYTES", read_bytes)
    modules = expert_modules(is_interleaved=is_interleaved)
    stored = random_tensors(modules, 2)
    tensors = experts_in_peft(stored, 2, is_interleaved=is_interleaved)
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    patterns = {"rank_pattern": {"gate_up_proj": 4}, "alpha_pattern": {"gate_up_proj": 6}}
    config = adapter_files((), 2, alpha=3, target_parameters=parameters, **patterns).config
    model = replace(toy_model_info(), modules=modules)
    state = state_of(AdapterFiles(config, safetensors.numpy.save(tensors)), model=model)
    assert state.keys() == stored.keys()
    for name, values in stored.items():
        np.testing.assert_array_equal(state[name], values)
    name = f"{PREFIX}{EXPERTS}.base_layer.lora_B.weight"
    tensors[name][0, -1] = 1  # of a gate, in a column of the ups
    with pytest.raises(ServiceError, match="not zero in other modules' columns"):
        state_of(AdapterFiles(config, safetensors.numpy.save(tensors)), model=model)


def test_values_beside_the_blocks_are_refused() -> None:
    patterns = {"rank_pattern": {"in_proj_qkv": 6}, "alpha_pattern": {"in_proj_qkv": 9}}
    files, _ = joined_files("in_proj_qkv", 6, **patterns)
    with pytest.raises(ServiceError, match="not zero in other modules' columns") as refused:
        state_of(files, model=hybrid("in_proj_qkv"))
    assert refused.value.reason == "NOT_IMPORTABLE"
    assert "in_proj_q.lora_B" in refused.value.message


@pytest.mark.parametrize(
    ("rank", "alpha", "pattern"),
    [
        ({"in_proj_qkv": 4}, {"in_proj_qkv": 6}, "rank_pattern"),
        ({"in_proj_qkv": 6}, {}, "rank_pattern"),
        ({}, {"in_proj_qkv": 9}, "alpha_pattern"),
        ({"out_proj": 2}, {}, "rank_pattern"),
        ({}, {"q_proj": 3}, "alpha_pattern"),
    ],
)
def test_other_ranks_and_alphas_of_some_modules_are_refused(
    rank: dict[str, int], alpha: dict[str, int], pattern: str
) -> None:
    files, _ = joined_files("in_proj_qkv", 2, rank_pattern=rank, alpha_pattern=alpha)
    message = refusal(files, model=hybrid("in_proj_qkv"))
    assert pattern in message
    assert "one rank and one alpha" in message
    files = adapter_files(QUERIES, rank_pattern={"q_proj": 4})
    assert "one rank and one alpha" in refusal(files)


def test_modules_that_are_joined_elsewhere_are_imported_by_their_own_names_too() -> None:
    model = hybrid("in_proj_qkv")
    files = adapter_files([module for module in model.modules if module.kind == "attn"])
    state, expected = state_of(files, model=model), safetensors.numpy.load(files.weights)
    assert state.keys() == expected.keys()
    assert all(np.array_equal(state[name], values) for name, values in expected.items())
    assert plan(files, model=model).notes == ()


def test_an_adapter_of_the_text_model_in_a_model_that_can_see_is_imported() -> None:
    files = adapter_files(QUERIES)
    inside = {
        name.replace("model.layers", "model.language_model.layers"): values
        for name, values in safetensors.numpy.load(files.weights).items()
    }
    renamed = AdapterFiles(files.config, safetensors.numpy.save(inside))
    state, expected = state_of(renamed), state_of(files)
    assert all(np.array_equal(state[name], values) for name, values in expected.items())
    both = with_header(files, **{FIRST_A.replace("model.layers", "model.language_model.layers"): {}})
    assert "twice, once as base_model.model.model.language_model.layers" in refusal(files, both)


@pytest.mark.parametrize("target", ["lm_head", "unembed_tokens"])
def test_an_adapter_with_the_tinker_services_names_is_imported(target: str) -> None:
    """The unembedding of every model, and attention of gpt-oss; its downloads name PEFT's or its own targets."""
    adapted = [*QUERIES, MODULES[-1]]
    files = adapter_files(adapted)
    names = {"model.layers.0.self_attn.": "model.layers.0.attn.", "model.layers.1.self_attn.": "model.layers.1.attn."}
    names["model.lm_head."] = "model.model.unembed_tokens."
    services = dict[str, np.ndarray[Any, Any]]()
    for name, values in safetensors.numpy.load(files.weights).items():
        ours = next(ours for ours in names if ours in name)
        services[name.replace(ours, names[ours])] = values
    assert not services.keys() & safetensors.numpy.load(files.weights).keys()
    config = files.config | {"target_modules": ["q_proj", target]}
    state, expected = state_of(AdapterFiles(config, safetensors.numpy.save(services))), state_of(files)
    assert state.keys() == expected.keys()
    assert all(np.array_equal(state[name], values) for name, values in expected.items())


def test_a_module_that_is_named_alone_and_with_others_is_refused() -> None:
    files, _ = joined_files("in_proj_qkv", 2, target_modules=["in_proj_qkv", "in_proj_k"])
    message = refusal(files, model=hybrid("in_proj_qkv"))
    assert "linear_attn.in_proj_qkv" in message
    assert "linear_attn.in_proj_k" in message


def test_the_heads_strengths_and_decays_are_refused_with_what_the_pool_adapts() -> None:
    files, _ = joined_files("in_proj_qkv", 2, target_modules=["in_proj_qkv", "in_proj_a", "in_proj_b"])
    message = refusal(files, model=hybrid("in_proj_qkv"))
    assert "'in_proj_a', which the pool does not adapt" in message
    assert "it adapts in_proj_qkv, out_proj, up_proj, lm_head" in message
