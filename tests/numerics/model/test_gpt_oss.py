"""What only gpt-oss has: weights in MXFP4, and a gate whose clamp has no gradient."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from tests.support.exports import export
from tests.support.numerics.by_peft import logprobs
from tests.support.numerics.exports import DATA, checkpoint_files, train
from tests.support.numerics.harness import Driver, make_spec
from tinkerpool.errors import ExportError
from workers.contract.settings import EngineSettings
from workers.model.clamped_gate import ClampedGate, gate_of
from workers.model.pretrained import load_pretrained
from workers.pool.description import describe

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The values of a nibble: sign, two bits of exponent, one of mantissa."""
BLOCK = 32
"""Values with one scale."""


def quantized(generator: torch.Generator, num_experts: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks and scales of random matrices (E, rows, columns) in MXFP4, and what they stand for, (E, columns,
    rows) fp32.
    """
    nibbles = torch.randint(16, (num_experts, rows, columns // BLOCK, BLOCK), generator=generator)
    exponents = torch.randint(-6, -3, nibbles.shape[:3], generator=generator)
    blocks = (nibbles[..., ::2] | nibbles[..., 1::2] << 4).to(torch.uint8)
    values = FP4[nibbles] * torch.exp2(exponents.float()).unsqueeze(-1)
    return blocks, (exponents + 127).to(torch.uint8), values.flatten(2).transpose(1, 2).contiguous()


@pytest.fixture(scope="module")
def directories(model_directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model as gpt-oss is published, with experts in MXFP4, and the same in fp32."""
    root = tmp_path_factory.mktemp("gpt-oss")
    base = model_directories["gpt-oss"]
    tensors = safetensors.torch.load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    packed, plain = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, columns, rows = tensors[name].shape
        del packed[name]
        packed[f"{name}_blocks"], packed[f"{name}_scales"], plain[name] = quantized(
            generator, num_experts, rows, columns
        )
    config = json.loads((base / "config.json").read_text())
    of_quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    for directory, content, changes in (
        (root / "mxfp4", packed, {"quantization_config": of_quantization}),
        (root / "fp32", plain, dict[str, Any]()),
    ):
        directory.mkdir()
        for file in base.iterdir():
            if file.name not in {"config.json", "model.safetensors"}:
                (directory / file.name).write_bytes(file.read_bytes())
        (directory / "config.json").write_text(json.dumps(config | changes))
        safetensors.torch.save_file(content, directory / "model.safetensors", {"format": "pt"})
    return root / "mxfp4", root / "fp32"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_mxfp4_are_dequantized_when_they_are_loaded(
    directories: tuple[Path, Path], dtype: torch.dtype
) -> None:
    packed, plain = (load_pretrained(directory, "cpu", dtype) for directory in directories)
    assert isinstance(packed.model.layers[0].mlp.experts, GptOssExperts)
    weights = packed.state_dict()
    assert weights.keys() == plain.state_dict().keys()
    for name, weight in plain.state_dict().items():
        assert weights[name].dtype == dtype
        assert torch.equal(weights[name], weight), name


def test_transformers_is_told_to_dequantize_because_it_would_not_where_it_has_kernels_for_mxfp4(
    directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    monkeypatch.setattr(
        Mxfp4HfQuantizer, "validate_environment", lambda self, **_: told.append(self.quantization_config.dequantize)
    )
    load_pretrained(directories[0], "cpu", torch.float32)
    assert told == [True]


def test_a_model_in_mxfp4_is_served_as_the_same_in_fp32(directories: tuple[Path, Path]) -> None:
    results = []
    for directory in directories:
        driver = Driver(directory)
        driver.install(make_spec("a"))
        (result,) = driver.train(driver.backward("a", DATA))
        facts = describe(EngineSettings(model_path=str(directory))).facts
        assert facts is not None
        assert facts.num_params == driver.engine.info.num_params
        results.append((result.logprobs, driver.gradient("a")))
    (mxfp4, of_mxfp4), (fp32, of_fp32) = results
    for one, other in zip(mxfp4, fp32, strict=True):
        assert (one == other).all()
    assert torch.equal(of_mxfp4, of_fp32)


def test_the_gate_has_the_values_of_transformers_and_no_gradient_outside_its_limits() -> None:
    experts = SimpleNamespace(limit=1.5, alpha=1.702)
    gates = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).mul_(2)
    found = []
    for gate in (ClampedGate(1.5, 1.702), lambda x: GptOssExperts._apply_gate(experts, x)):
        own = gates.clone().requires_grad_()
        out = gate(own)
        (gradient,) = torch.autograd.grad(out.square().sum(), own)
        found.append((out.detach(), gradient))
    (values, gradient), (expected, expected_gradient) = found
    assert torch.equal(values, expected)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5)
    is_outside = torch.stack([gates[:, ::2] > 1.5, gates[:, 1::2].abs() > 1.5], -1).flatten(1)
    assert 200 < int(is_outside.sum()) < is_outside.numel() // 2
    assert not gradient[is_outside].any()
    assert torch.equal(ClampedGate(1.5, 1.702)(gates), values), "without a backward"


def test_experts_with_another_gate_keep_it() -> None:
    def own(gates: Tensor) -> Tensor:
        return gates[..., ::2] * gates[..., 1::2]

    assert gate_of(SimpleNamespace(limit=1.5, alpha=1.702, _apply_gate=own)) is own
    assert gate_of(SimpleNamespace(_apply_gate=own)) is own


def test_an_adapter_is_merged_into_a_dequantized_copy(directories: tuple[Path, Path], tmp_path: Path) -> None:
    """As the guide to exports says."""
    driver, spec = train(directories[0])
    copy, out = tmp_path / "copy", tmp_path / "merged"
    files = checkpoint_files(driver, spec)
    with pytest.raises(ExportError, match="or into a copy that transformers has dequantized and saved"):
        export(files, out, format="merged", base_model=str(directories[0]))
    AutoModelForCausalLM.from_pretrained(
        directories[0], dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    ).save_pretrained(copy, save_original_format=False)
    AutoTokenizer.from_pretrained(directories[0]).save_pretrained(copy)
    export(files, out, format="merged", base_model=str(copy))
    (result,) = driver.train(driver.forward(spec.adapter_id, DATA))
    with torch.no_grad():
        expected = logprobs(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), DATA)
    for actual, wanted in zip(result.logprobs, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(actual), wanted, rtol=0, atol=1e-4)
