"""Products with frozen weights: packed ones equal plain ones to rounding, and rows are independent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.numerics.harness import Driver, make_data, make_spec
from workers.contract.settings import EngineSettings
from workers.model import frozen_products
from workers.model.frozen_products import PackedProducts, PlainProducts, can_pack, joined, kernel_rows
from workers.selftest import row_invariance
from workers.selftest.loading import load_base_model

SHAPES = ((768, 256), (256, 768), (200, 97), (64, 64), (258, 48))
"""(F, D); some that no vector length divides."""

pytestmark = pytest.mark.skipif(
    not can_pack([[torch.ones(32, 32)]]), reason="this build of torch has no packed products for this processor"
)


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_packed_products_are_the_plain_ones(num_outputs: int, num_inputs: int) -> None:
    weights = [values(num_outputs, num_inputs), values(num_outputs + 16, num_inputs)]
    biases = [values(num_outputs), None]
    packed, plain = PackedProducts(weights, biases), PlainProducts(weights, biases)
    x = values(37, num_inputs)
    out = torch.empty(37, num_outputs + 32)[:, : num_outputs + 16]  # rows have gaps between them
    ys = packed.forward(x, [None, out])
    assert ys[1] is out
    for y, expected in zip(ys, plain.forward(x, [None, None]), strict=True):
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(packed.backward(ys), plain.backward(ys), rtol=1e-5, atol=1e-2)


def test_only_neighbours_in_one_tensor_are_joined_without_a_copy() -> None:
    left, middle, right = values(5, 12).split((3, 4, 5), 1)
    assert joined([left]) is left
    assert joined([left, middle, right]).data_ptr() == left.data_ptr()
    for parts in (
        [left, middle],
        [left, right],
        [middle, right],
        [left, right, middle],
        [left.clone(), middle.clone()],
    ):
        both = joined(parts)
        assert both.data_ptr() not in {part.data_ptr() for part in parts}
        assert torch.equal(both, torch.cat(parts, 1))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 700), st.integers(0, 300), st.sampled_from(SHAPES), st.booleans())
def test_bits_of_a_row_do_not_depend_on_the_others_or_on_threads(
    num_rows: int, start: int, shape: tuple[int, int], is_one_thread: bool
) -> None:
    weight = values(*shape)
    packed = PackedProducts([weight, weight], [None, None])
    x, dy = values(1000, shape[1]), values(1000, shape[0])
    rows = slice(start, start + num_rows)
    y, dx = packed.forward(x, [None, None])[1][rows], packed.backward([dy, dy])[rows]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1 if is_one_thread else num_threads)
    try:
        assert torch.equal(packed.forward(x[rows], [None, None])[1], y)
        assert torch.equal(packed.backward([dy[rows], dy[rows]]), dx)
    finally:
        torch.set_num_threads(num_threads)


@given(st.integers(1, 100_000), st.sampled_from((16, 32, 48, 240)))
def test_numbers_of_rows_are_few_and_little_is_padding(num_rows: int, rows_min: int) -> None:
    padded = kernel_rows(num_rows, rows_min)
    assert padded % rows_min == 0
    assert num_rows <= padded < num_rows + max(rows_min, num_rows / 16 + 1)
    assert kernel_rows(padded, rows_min) == padded


def test_all_passes_up_to_8192_rows_need_few_kernels() -> None:
    assert len({kernel_rows(num_rows, 16) for num_rows in range(1, 8193)}) == 96


@pytest.mark.usefixtures("own_base_models")
def test_engine_packs_and_its_fingerprint_names_it(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the operation torch's matmul is used, which differs by rounding. Patched: this torch has it."""
    packed = Driver(qwen3)
    assert all(isinstance(group.products, PackedProducts) for group in packed.engine.base_model.groups)
    assert "packed groups" in packed.engine.info.fingerprint

    def no_such_operation(*_: Any) -> Any:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")

    monkeypatch.setattr(frozen_products, "_packed", no_such_operation)
    plain = Driver(qwen3)
    assert all(isinstance(group.products, PlainProducts) for group in plain.engine.base_model.groups)
    assert "packed groups" not in plain.engine.info.fingerprint
    for driver in (packed, plain):
        driver.install(make_spec("a"))
        driver.train(driver.backward("a", make_data("cross_entropy", [40, 3])))
    torch.testing.assert_close(packed.gradient("a"), plain.gradient("a"), rtol=1e-4, atol=1e-5)


def test_engine_does_not_pack_if_packed_rows_depend_on_others(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PackedProducts._multiply  # private: the kernel has no other seam, and this processor's has independent rows

    def uneven(self: PackedProducts, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        return real(self, x, weight, bias) * (1 + 2.0**-20 * len(x))

    monkeypatch.setattr(PackedProducts, "_multiply", uneven)
    row_invariance._has_independent_products.cache_clear()  # trials are cached in the process
    try:
        model = load_base_model(EngineSettings(model_path=str(qwen3)))
    finally:
        row_invariance._has_independent_products.cache_clear()
    assert not model.numerics.is_packed
    assert model.numerics.rows_min is not None


def test_wrong_products_large_models_and_other_types_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = values(64, 32)
    assert can_pack([[weight]])
    assert not can_pack([[weight.bfloat16()]])
    monkeypatch.setattr(frozen_products, "PACKED_PARAMS_MAX", weight.numel() - 1)  # instead of gigabytes
    assert not can_pack([[weight]])
    monkeypatch.undo()
    # private: a kernel with wrong products
    monkeypatch.setattr(PackedProducts, "_multiply", lambda self, x, weight, bias: x.new_zeros(len(x), 64))
    assert not can_pack([[weight]])
