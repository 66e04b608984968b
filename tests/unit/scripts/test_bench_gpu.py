"""The counts of the GPU benchmark, checked against the model itself. Its measurements need a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from scripts.bench.gpu import decode, pool, profiled
from scripts.bench.gpu.cases import SHAPES, Case, decode_bytes, train_flops_per_token, write_model
from scripts.bench.gpu.run import main, measure
from scripts.bench.gpu.sides import Fused, SequentialPeft
from workers.contract.settings import EngineSettings

# PEFT warns of merging an adapter of a tied unembedding; this test merges none.
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
CPU = torch.device("cpu")


@pytest.mark.long
def test_decode_steps_are_measured_for_the_base_model_and_one_and_eight_adapters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    decode.main(["--device", "cpu", "--shape", "tiny", "--rank", "4", "--rounds", "1", "--batches", "1", "3"])
    table = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[:2] for row in table[2:]] == [[num_seqs, side] for num_seqs in "13" for side in decode.SIDES]
    for row in table[2:]:
        assert len(row) == len(table[0])
        assert re.fullmatch(r"\d+\.\d\d", row[4])


@pytest.mark.slow
def test_a_profile_has_every_case_and_keeps_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A CPU has no kernels to list; there it is a smoke test."""
    smoke = ["--device", "cpu", "--shape", "tiny", "--rank", "4", "--model", str(tmp_path / "model")]
    profiled.main([*smoke, "--cases", "2x1x16", "--batches", "2"])
    heads = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("**")]
    decoded = [f"**decode 2 sequences, {number} adapters**" for number in (0, 8)]
    assert heads == ["**training 2 x 1 x 16**", *decoded]
    assert (tmp_path / "model" / "config.json").exists()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_pool_is_measured_with_swaps_a_kill_and_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINKERPOOL_HOME", "")  # the script sets it; this undoes that
    smoke = ["--device", "cpu", "--shape", "tiny", "--rank", "4", "--rounds", "1", "--pool", "local", "--threads", "1"]
    pool.main([*smoke, "--tenants", "2", "--many", "3", "--slots", "2"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    table = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert [row[:2] for row in table[1:4]] == [["2 x 4 x 64", "3"], ["3 x 4 x 64", "3"], ["3 x 4 x 64", "2"]]
    assert all(len(row) == len(table[0]) for row in table[1:4])
    first_token, *bits = (row[1] for row in table[5:])
    assert re.fullmatch(r"[\d.]+ ms, [\d.]+ ms", first_token)
    assert (bits[0], bits[2]) == ("equal", "equal")
    assert float(bits[1].removesuffix(" s")) > 1.0  # the pool was started again


def test_the_bytes_of_a_decode_step_are_the_weights_and_the_keys_and_values_of_a_cache() -> None:
    config = Qwen3Config(**SHAPES["tiny"])
    model = AutoModelForCausalLM.from_config(config)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    cache = model(torch.zeros(3, 40, dtype=torch.long)).past_key_values
    cached = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    weights = sum(linear.weight.numel() for linear in linears)
    adapter = 8 * sum(linear.in_features + linear.out_features for linear in linears)
    measured = decode_bytes(config, num_seqs=3, num_tokens=40, num_adapters=2, rank=8, width=2)
    assert measured == 2 * (weights + 2 * adapter + cached)


def run_script(capsys: pytest.CaptureFixture[str], *args: str) -> list[list[str]]:
    """Return the cells of the rows that it prints on a CPU, without the table's head."""
    main(["--device", "cpu", "--shape", "tiny", "--rank", "4", "--rounds", "1", *args])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows][2:]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # torch's compiler warns
def test_script_runs_on_a_cpu_and_prints_a_row_of_every_side(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_script(capsys, "--cases", "2x1x16", "--exact", "--compiled-peft")
    sides = ("fused", "exact", "sequential PEFT", "compiled PEFT")
    assert [row[:2] for row in rows] == [["2 x 1 x 16", side] for side in sides]
    assert all(len(row) == 8 and re.fullmatch(r"[\d.]+ \([\d.]+-[\d.]+\)", row[2]) for row in rows)


@pytest.mark.slow
def test_case_without_memory_is_left_out_and_the_next_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = SequentialPeft.step

    def short_of_memory(side: SequentialPeft) -> None:
        if len(side.keys) == 3:
            raise torch.OutOfMemoryError
        step(side)

    monkeypatch.setattr(SequentialPeft, "step", short_of_memory)  # memory does not run out on demand
    rows = run_script(capsys, "--cases", "3x1x16", "1x1x16")
    assert [row[:2] for row in rows] == [
        ["3 x 1 x 16", "out of memory, left out"],
        ["1 x 1 x 16", "fused"],
        ["1 x 1 x 16", "sequential PEFT"],
    ]


@pytest.mark.slow
def test_case_that_runs_out_of_memory_in_the_engine_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = Fused(EngineSettings(model_path=str(write_model("tiny", tmp_path, CPU))), Case.read("1x1x16"), 4)
    # memory does not run out on demand
    monkeypatch.setattr(fused.engine.bank, "acquire", lambda _: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        fused.step()


@pytest.mark.slow
def test_sides_share_the_base_weights_and_their_additions_are_measured(tmp_path: Path) -> None:
    model, case = write_model("tiny", tmp_path, CPU), Case.read("2x1x16")
    fused = Fused(EngineSettings(model_path=str(model), dtype="bfloat16", num_slots=2), case, 8)
    base = fused.engine.base_model.model
    sequential = SequentialPeft(model, case, 8, CPU, base.state_dict())
    held = [own.held_bytes for own in measure([fused, sequential], CPU, 3)]
    weights = {parameter.data_ptr(): parameter.nbytes for parameter in base.parameters()}
    linears = [m for m in sequential.model.modules() if type(m) is torch.nn.Linear and m.weight.dtype == torch.bfloat16]
    assert len(linears) == 2 * 7 + 1
    assert all(linear.weight.data_ptr() in weights for linear in linears)
    values = 8 * sum(linear.in_features + linear.out_features for linear in linears)
    for num_bytes, each in zip(held, (18, 12), strict=True):  # fp32 weights and two moments; the bank's gradient, bf16
        assert num_bytes == pytest.approx(sum(weights.values()) + 2 * values * each, rel=0.05)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # torch's compiler warns
def test_compiled_peft_has_the_gradients_of_peft_and_compiles_for_every_tenant(tmp_path: Path) -> None:
    model, case = write_model("tiny", tmp_path, CPU), Case.read("3x1x16")
    base = Fused(EngineSettings(model_path=str(model), dtype="bfloat16", num_slots=3), case, 8).engine.base_model.model
    eager, compiled = (
        SequentialPeft(model, case, 8, CPU, base.state_dict(), is_compiled=is_compiled) for is_compiled in (False, True)
    )
    theirs = dict(eager.model.named_parameters())
    for name, parameter in compiled.model.named_parameters():
        parameter.data.copy_(theirs[name].data)
    torch._dynamo.utils.counters.clear()
    eager.step()
    compiled.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * case.num_tenants
    for expected, found in zip(eager.optimizers, compiled.optimizers, strict=True):
        for left, right in zip(expected.state.values(), found.state.values(), strict=True):
            gradient = left["exp_avg"]
            assert torch.linalg.vector_norm(right["exp_avg"] - gradient) <= 0.05 * torch.linalg.vector_norm(gradient)


def test_flops_are_four_for_each_weight_of_a_linear_six_for_the_adapter_and_attention() -> None:
    config = Qwen3Config(**SHAPES["tiny"])
    model = AutoModelForCausalLM.from_config(config)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    base = sum(linear.weight.numel() for linear in linears)
    adapter = 8 * sum(linear.in_features + linear.out_features for linear in linears)
    attention = config.num_hidden_layers * 7 * 2 * 64 * 100 / 2  # 64: four heads of 16
    assert train_flops_per_token(config, 100, 8) == 4 * base + 6 * adapter + attention
