"""Linear attention: packed sequences have the numbers of transformers' layer, and the bits that each has solo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from tests.support.numerics.harness import Driver
from workers.contract.settings import EngineSettings
from workers.model import delta_rule, packed_delta
from workers.model.delta_rule import DeltaInputs, DeltaWeights
from workers.model.frozen_products import joined
from workers.model.packed_delta import PackedDelta
from workers.model.pretrained import TOLERANCE, UnsupportedModelError
from workers.selftest.loading import load_base_model
from workers.selftest.sequence_invariance import keeps_sequences

LENGTHS = (150, 1, 70, 16, 64, 17, 2, 65, 16)


@pytest.fixture
def hybrid(model_directories: dict[str, Path]) -> Path:
    return model_directories["qwen3.5"]


def weights_of(directory: Path) -> DeltaWeights:
    return Driver(directory).engine.base_model.delta_layers[0].delta_weights


def inputs_of(weights: DeltaWeights, num_rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = weights.shape
    widths = (*shape.conv_widths, shape.conv_widths[2], shape.num_value_heads, shape.num_value_heads)
    return [torch.randn(num_rows, width, generator=generator) for width in widths]


def results(weights: DeltaWeights, lengths: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
    """Return the rule's results, and the gradients of their sum of squares by each input."""
    leaves = [tensor.clone().requires_grad_() for tensor in rows]
    out = PackedDelta(lengths, torch.device("cpu"))(0, weights, DeltaInputs.of(leaves))
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def assert_bits_of_each_solo(weights: DeltaWeights, rows: list[Tensor], skipped: Sequence[int] = ()) -> None:
    together = [part.split(LENGTHS) for part in results(weights, LENGTHS, rows)]
    inputs = [tensor.split(LENGTHS) for tensor in rows]
    for number, length in enumerate(LENGTHS):
        if number not in skipped:
            solo = results(weights, [length], [parts[number] for parts in inputs])
            for whole, own in zip(together, solo, strict=True):
                assert torch.equal(whole[number], own), length


def test_a_layer_has_the_numbers_of_transformers_for_each_sequence_alone(any_hybrid: Path) -> None:
    """Theirs ignores where packed sequences begin."""
    engine = Driver(any_hybrid).engine
    own = AutoModelForCausalLM.from_pretrained(any_hybrid, dtype=torch.float32)
    tokens = torch.arange(sum(LENGTHS)) * 7919 % 256
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    model = engine.base_model
    attend = model.attend_packed(LENGTHS, [1] * len(LENGTHS))
    with torch.no_grad():
        hidden = model.forward(tokens, positions, (), attend, PackedDelta(LENGTHS, tokens.device))
        logprobs = model.unembed(hidden, ()).log_softmax(-1).split(LENGTHS)
        for part, actual in zip(tokens.split(LENGTHS), logprobs, strict=True):
            expected = own(input_ids=part.unsqueeze(0), use_cache=False).logits[0].log_softmax(-1)
            torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)
    model.reset()


def test_gradients_of_queries_keys_and_values_reach_the_product_behind_them_without_a_copy(hybrid: Path) -> None:
    weights = weights_of(hybrid)
    _, *gradients = results(weights, LENGTHS, inputs_of(weights, sum(LENGTHS)))
    assert joined(gradients[:3]).data_ptr() == gradients[0].data_ptr()


def by_recurrence(weights: DeltaWeights, rows: Sequence[Tensor]) -> Tensor:
    """Return the results (T, V) of one sequence, token by token as the formula of the rule says, in fp64."""
    shape = weights.shape
    *qkv, gate, strength, decay = rows
    convolved = []
    for part, conv in zip(qkv, weights.conv, strict=True):
        padded = F.pad(part, (0, 0, shape.history, 0))
        terms = [padded[offset : offset + len(part)] * weight for offset, weight in enumerate(conv.double())]
        convolved.append(F.silu(torch.stack(terms).sum(0)).unflatten(1, (-1, shape.key_dim)))
    queries, keys = (
        (heads / (heads.square().sum(-1, keepdim=True) + delta_rule.UNIT_EPS).sqrt()).repeat_interleave(
            shape.heads_per_key, 1
        )
        for heads in convolved[:2]
    )
    betas = strength.sigmoid()
    decays = (-weights.decay.double() * F.softplus(decay + weights.dt_bias.double())).exp()
    state = torch.zeros(shape.num_value_heads, shape.key_dim, shape.value_dim, dtype=torch.float64)
    outs = []
    for query, key, value, beta, kept in zip(queries, keys, convolved[2], betas, decays, strict=True):
        state = state * kept[:, None, None]
        delta = beta[:, None] * (value - torch.einsum("hep,he->hp", state, key))
        state = state + key.unsqueeze(-1) * delta.unsqueeze(1)
        outs.append(torch.einsum("hep,he->hp", state, query) * shape.key_dim**-0.5)
    normal = F.rms_norm(torch.stack(outs), (shape.value_dim,), weights.norm.double(), weights.norm_eps)
    return normal.flatten(1) * F.silu(gate)


@pytest.mark.parametrize("length", [1, 16, 64, 200])
@pytest.mark.parametrize("faster", [0.01, 1.0, 10.0])
def test_chunks_have_the_numbers_of_the_recurrence_however_fast_states_decay(
    hybrid: Path, length: int, faster: float
) -> None:
    """Ten times as fast, decays between distant tokens of a chunk are too small for fp32."""
    weights = weights_of(hybrid)
    assert weights.shape.key_dim == weights.shape.value_dim
    weights = replace(weights, decay=weights.decay * faster)
    rows = inputs_of(weights, length)
    leaves = [tensor.double().requires_grad_() for tensor in rows]
    out = by_recurrence(weights, leaves)
    expected = [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
    for actual, value in zip(results(weights, [length], rows), expected, strict=True):
        torch.testing.assert_close(actual.double(), value, rtol=0, atol=2e-5 * float(value.abs().max()) + 1e-12)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("group_values", [1, 1 << 12, 1 << 20])
def test_sequences_have_the_bits_of_each_solo_in_groups_of_any_size(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch, group_values: int, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    weights = weights_of(hybrid)
    monkeypatch.setattr(packed_delta, "GROUP_VALUES", group_values)
    assert_bits_of_each_solo(weights, inputs_of(weights, sum(LENGTHS)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_stay_in_their_sequence(hybrid: Path, value: float) -> None:
    weights = weights_of(hybrid)
    rows = inputs_of(weights, sum(LENGTHS))
    bad = 4
    first = sum(LENGTHS[:bad])
    for tensor in rows:
        tensor[first : first + LENGTHS[bad]] = value
    assert_bits_of_each_solo(weights, rows, skipped=[bad])


def test_padding_rows_behind_the_last_sequence_are_finite(hybrid: Path) -> None:
    weights = weights_of(hybrid)
    rows = inputs_of(weights, 20)
    for tensor in rows:
        tensor[17:] = float("nan")
    out, *gradients = results(weights, [17], rows)
    assert torch.equal(out[17:], torch.zeros_like(out[17:]))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.usefixtures("own_base_models")
def test_a_model_whose_state_does_not_reach_its_second_chunk_is_refused(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunked = delta_rule.chunked

    def forgetful(
        inputs: DeltaInputs, weights: DeltaWeights, is_token: Tensor | None, counts: Sequence[int], state: Any
    ) -> tuple[Tensor, Tensor | None]:
        return chunked(inputs, weights, is_token, [sum(counts)], state)

    monkeypatch.setattr(packed_delta, "chunked", forgetful)
    with pytest.raises(UnsupportedModelError, match="other log-probabilities"):
        load_base_model(EngineSettings(model_path=str(hybrid)))


@pytest.mark.usefixtures("own_base_models")
def test_a_convolution_that_reads_its_neighbours_is_refused(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = packed_delta._chunks

    def joined(*arguments: Any) -> packed_delta.Chunks:
        chunks = make(*arguments)
        return replace(chunks, missing=chunks.missing[:0])

    monkeypatch.setattr(packed_delta, "_chunks", joined)
    with pytest.raises(UnsupportedModelError, match="other log-probabilities"):
        load_base_model(EngineSettings(model_path=str(hybrid)))


def test_the_trial_finds_a_library_whose_bits_depend_on_the_number_of_values(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the library's own sigmoid's do, if there are few heads."""
    weights = weights_of(hybrid)
    assert keeps_sequences(weights, torch.float32)
    coefficients = delta_rule.coefficients

    def by_the_library(inputs: DeltaInputs, *others: Any) -> tuple[Tensor, Tensor]:
        _, decay = coefficients(inputs, *others)
        return inputs.strength.sigmoid(), decay

    monkeypatch.setattr(delta_rule, "coefficients", by_the_library)
    assert not keeps_sequences(weights, torch.float32)


@pytest.mark.usefixtures("own_base_models")
@pytest.mark.parametrize("exact", [False, True])
def test_sequences_are_computed_alone_if_their_bits_depend_on_how_many_a_batch_has(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    chunked = delta_rule.chunked

    def by_number(inputs: DeltaInputs, weights: DeltaWeights, *others: Any) -> tuple[Tensor, Tensor | None]:
        results, state = chunked(inputs, weights, *others)
        num_sequences = others[1][0]
        return results * (1 + 1e-6 * num_sequences), state

    monkeypatch.setattr(packed_delta, "chunked", by_number)
    model = load_base_model(EngineSettings(model_path=str(hybrid), exact=exact))
    assert model.numerics.are_sequences_alone
    assert exact or model.numerics.rows_min is not None
    weights = model.delta_layers[0].delta_weights
    rows = DeltaInputs.of(inputs_of(weights, 12))
    with torch.no_grad():
        together = model.recur_packed([5, 7])(0, weights, rows)
        solo = model.recur_packed([5])(0, weights, DeltaInputs.of([tensor[:5] for tensor in rows.tensors()]))
    assert torch.equal(together[:5], solo)


@pytest.mark.usefixtures("own_base_models")
def test_a_model_that_fails_the_trial_says_so_in_its_fingerprint(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.selftest.row_invariance.keeps_sequences", lambda *_, **__: False)
    assert "rows depend on their neighbours" in Driver(hybrid).engine.info.fingerprint
    with pytest.raises(UnsupportedModelError, match="in linear attention a sequence's bits depend"):
        load_base_model(EngineSettings(model_path=str(hybrid), exact=True))
