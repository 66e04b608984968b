"""Adapter states as bytes: read back with the same bits, under PEFT's names; other files are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load, save

from tests.support.numerics.bank_rows import SHAPES, make_spec, weights_of
from tests.support.numerics.late_transfers import LateTransfers
from workers.bank import state_files
from workers.bank.entries import HostRow
from workers.bank.state_files import (
    DamagedStateError,
    NonFiniteGradientError,
    OtherAdapterError,
    gradient_file,
    optimizer_file,
    read_state,
    weights_file,
)
from workers.contract.adapted_modules import rank_class
from workers.contract.contents import piece_of, pieces_of, whole
from workers.contract.messages import AdapterSpec
from workers.rows import RowLayout, trained_kinds

SPEC = make_spec("a", 4)
Tensors = dict[str, torch.Tensor]
A_NAME = "base_model.model.l.q_proj.lora_A.weight"


def layout_of(spec: AdapterSpec) -> RowLayout:
    return RowLayout(SHAPES, rank_class(spec.rank), trained_kinds(spec))


def some_row(spec: AdapterSpec) -> HostRow:
    layout = layout_of(spec)
    vectors = []
    for _ in range(4):
        flat = torch.zeros(layout.num_values)
        for _, matrix in layout.matrices(flat.numpy(), spec.rank):
            matrix[...] = torch.randn(matrix.shape)
        vectors.append(flat)
    return HostRow(*vectors)


def files(spec: AdapterSpec, row: HostRow) -> tuple[Any, Any]:
    """Return the weights and the moments: bytes, unless all files are `late`."""
    layout = layout_of(spec)
    return weights_file(layout, spec, row), optimizer_file(layout, spec, row)


def gradient_of(spec: AdapterSpec, row: HostRow) -> Any:
    return gradient_file(layout_of(spec), spec, row)


def moments_of(row: HostRow) -> list[torch.Tensor]:
    assert row.exp_avg is not None
    assert row.exp_avg_sq is not None
    return [row.exp_avg, row.exp_avg_sq]


@pytest.mark.parametrize("spec", [SPEC, make_spec("b", 16, train_mlp=False), make_spec("c", 1, train_attn=False)])
def test_state_read_back_has_the_same_bits(spec: AdapterSpec) -> None:
    row = some_row(spec)
    weights, optimizer = files(spec, row)
    gradient = gradient_of(spec, row)
    back = read_state(layout_of(spec), spec, weights, optimizer, gradient)
    for name in ("weights", "exp_avg", "exp_avg_sq", "grad"):
        assert torch.equal(getattr(back, name), getattr(row, name))
    assert files(spec, back) == (weights, optimizer)
    assert gradient_of(spec, back) == gradient
    for file in (weights, optimizer, gradient):
        assert save(load(file), {"format": "pt"}) == file, "the library would write another file"


def test_files_hold_unpadded_matrices_under_the_names_of_peft() -> None:
    row = some_row(SPEC)
    weights, optimizer = files(SPEC, row)
    tensors = load(weights)
    assert tensors[A_NAME].shape == (4, 48)
    assert tensors["base_model.model.l.k_proj.lora_B.weight"].shape == (16, 4)
    assert tensors["base_model.model.lm_head.lora_B.weight"].shape == (101, 4)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    moments = {f"{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in tensors}
    assert set(load(optimizer)) == moments
    assert set(load(gradient_of(SPEC, row))) == {f"grad.{name}" for name in tensors}


def test_state_without_optimizer_has_fresh_moments() -> None:
    weights, _ = files(SPEC, some_row(SPEC))
    row = read_state(layout_of(SPEC), SPEC, weights, None)
    assert row.exp_avg is None
    assert row.exp_avg_sq is None
    assert row.grad is None


def test_fresh_moments_are_written_as_zeros() -> None:
    _, optimizer = files(SPEC, HostRow(weights_of(some_row(SPEC))))
    assert not any(tensor.any() for tensor in load(optimizer).values())


def changed(change: Callable[[Tensors], object]) -> bytes:
    tensors = load(files(SPEC, some_row(SPEC))[0])
    change(tensors)
    return bytes(save(tensors))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (b"", "cannot be read"),
        (b"\x00" * 100, "cannot be read"),
        (files(SPEC, some_row(SPEC))[0][:-1], "cannot be read"),
        (changed(lambda t: t.update({A_NAME: t[A_NAME].double()})), "float64"),
        (changed(lambda t: t.update({A_NAME: t[A_NAME][:, :40].clone()})), r"\(4, 40\), expected float32 of shape"),
        (changed(lambda t: t.update({A_NAME: torch.full((4, 48), float("nan"))})), "not finite"),
        (changed(lambda t: t.update({A_NAME: t[A_NAME].flatten()})), r"shape \(192,\)"),
        (changed(lambda t: t.update(other=t.pop(A_NAME))), "adapt other modules"),
        (changed(lambda t: t.clear()), "adapt other modules"),
    ],
    ids=["empty", "zeros", "cut off", "dtype", "columns", "not finite", "shape", "renamed module", "no tensors"],
)
def test_damaged_weights_are_refused(weights: bytes, message: str) -> None:
    with pytest.raises(DamagedStateError, match=message):
        read_state(layout_of(SPEC), SPEC, weights, None)


def test_damaged_optimizer_state_is_refused() -> None:
    weights, optimizer = files(SPEC, some_row(SPEC))
    tensors = load(optimizer)
    stray = save({**tensors, "step": torch.zeros(1)})
    fewer = save({name: tensor for name, tensor in tensors.items() if "exp_avg_sq" not in name})
    for damaged in (optimizer[:50], stray, fewer, weights):
        with pytest.raises(DamagedStateError, match="optimizer state"):
            read_state(layout_of(SPEC), SPEC, weights, damaged)


def test_damaged_gradient_is_refused() -> None:
    row = some_row(SPEC)
    weights, _ = files(SPEC, row)
    gradient = gradient_of(SPEC, row)
    tensors, name = load(gradient), f"grad.{A_NAME}"
    changes: list[Tensors] = [
        {name: tensors[name].double()},
        {name: tensors[name][:, :40].clone()},
        {name: torch.full((4, 48), float("inf"))},
        {"step": torch.zeros(1), "grad.": torch.zeros(1)},
    ]
    fewer = bytes(save({other: tensor for other, tensor in tensors.items() if other != name}))
    for damaged in (b"", gradient[:-1], weights, fewer, *(bytes(save({**tensors, **change})) for change in changes)):
        with pytest.raises((DamagedStateError, OtherAdapterError), match="gradients"):
            read_state(layout_of(SPEC), SPEC, weights, None, damaged)
    other = make_spec("b", 8)
    with pytest.raises(OtherAdapterError, match="gradients are of rank 8"):
        read_state(layout_of(SPEC), SPEC, weights, None, gradient_of(other, some_row(other)))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_non_finite_gradient_is_not_written(value: float) -> None:
    row = some_row(SPEC)
    assert row.grad is not None
    row.grad[-1] = value
    with pytest.raises(NonFiniteGradientError, match="not finite"):
        gradient_of(SPEC, row)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (make_spec("b", 8), "of rank 8, this adapter has rank 4"),
        (make_spec("b", 4, train_unembed=False), "missing base_model.model.lm_head"),
        (make_spec("b", 4, train_mlp=False), "missing base_model.model.l.gate_proj"),
    ],
)
def test_state_of_another_kind_of_adapter_is_refused_as_such(other: AdapterSpec, message: str) -> None:
    weights, _ = files(other, some_row(other))
    with pytest.raises(OtherAdapterError, match=message):
        read_state(layout_of(SPEC), SPEC, weights, None)
    own, _ = files(SPEC, some_row(SPEC))
    with pytest.raises(OtherAdapterError):
        read_state(layout_of(other), other, own, None)


def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all files be large."""
    monkeypatch.setattr(state_files, "LARGE_BYTES", 0)


@pytest.mark.parametrize("spec", [SPEC, make_spec("c", 1, train_attn=False)])
def test_a_large_file_has_the_same_bytes_made_when_it_is_read_in_pieces(
    spec: AdapterSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = some_row(spec)
    expected = [*files(spec, row), gradient_of(spec, row)]
    late(monkeypatch)
    for file, right in zip([*files(spec, row), gradient_of(spec, row)], expected, strict=True):
        assert not isinstance(file, bytes)
        assert len(file) == len(right)
        assert whole(file) == right
        for num_bytes in (1, 7, 64, 1000, len(right)):
            assert b"".join(pieces_of(file, num_bytes)) == right
            assert piece_of(file, len(right) - 5, num_bytes) == right[-5:][:num_bytes]
    assert read_state(layout_of(spec), spec, files(spec, row)[0], None).weights is not None


def test_a_large_file_is_read_when_the_copy_of_its_vectors_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    row, transfers = some_row(SPEC), LateTransfers()
    expected = files(SPEC, row)
    late(monkeypatch)
    copies, transfer = transfers.to_host([weights_of(row), *moments_of(row)])
    found = files(SPEC, HostRow(*copies, transfer=transfer))
    assert transfers.num_waits == 0
    assert tuple(map(whole, found)) == expected


def test_a_large_file_whose_vectors_were_lost_with_a_gpu_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    late(monkeypatch)
    transfer = Mock(wait_on_host=Mock(side_effect=RuntimeError("CUDA error: unspecified launch failure")))
    file, _ = files(SPEC, replace(some_row(SPEC), transfer=transfer))
    with pytest.raises(OSError, match="a state was lost with its GPU: CUDA error"):
        whole(file)
