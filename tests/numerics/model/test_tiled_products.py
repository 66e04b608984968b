"""Products in tiles of one size, in Triton's interpreter; training in exact mode by kernels of our own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.numerics.interpreted import interpret, metered, sums_in_order
from workers.model.frozen_products import PlainProducts, TiledProducts
from workers.selftest.row_invariance import are_tiles_invariant

D_IN, D_OUTS = 200, (150, 40)


def products(dtype: torch.dtype, *, has_biases: bool = True) -> tuple[TiledProducts, PlainProducts]:
    """Return the products of two linears, and the same in fp32 by the library."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(d_out, D_IN, generator=generator).to(dtype) for d_out in D_OUTS]
    biases = [torch.randn(D_OUTS[0], generator=generator).to(dtype) if has_biases else None, None]
    wide = [None if bias is None else bias.float() for bias in biases]
    return TiledProducts(weights, biases), PlainProducts([weight.float() for weight in weights], wide)


def rows(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return rows with gaps between them."""
    return torch.randn(num_rows, width + 8, generator=torch.Generator().manual_seed(width)).to(dtype)[:, :width]


@pytest.mark.parametrize("num_rows", [1, 130, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_their_sum_are_those_of_the_library(num_rows: int, dtype: torch.dtype) -> None:
    interpret()
    tiled, plain = products(dtype)
    x, dys = rows(num_rows, D_IN, dtype), [rows(num_rows, width, dtype) for width in D_OUTS]
    actual = [*tiled.forward(x, [None, None]), tiled.backward(dys)]
    expected = [*plain.forward(x.float(), [None, None]), plain.backward([dy.float() for dy in dys])]
    rtol = 1e-5 if dtype == torch.float32 else 2.0**-6  # the interpreter cuts values off, and a sum of two is cut twice
    for mine, right in zip(actual, expected, strict=True):
        assert float((mine.float() - right).abs().max()) <= rtol * float(right.abs().max())


def test_a_row_has_the_same_bits_at_every_place_and_in_any_company() -> None:
    interpret()
    weight = torch.randn(150, D_IN, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    with sums_in_order():
        assert are_tiles_invariant([weight])


def test_a_row_that_is_not_finite_reaches_no_other() -> None:
    interpret()
    tiled, _ = products(torch.float32)
    x = rows(130, D_IN, torch.float32)
    clean, _ = tiled.forward(x, [None, None])
    x[3] = math.nan
    out = torch.empty(130, 2 * D_OUTS[0])[:, : D_OUTS[0]]
    spoiled, _ = tiled.forward(x, [out, None])
    assert spoiled is out
    assert spoiled[3].isnan().all()
    assert torch.equal(spoiled[:3], clean[:3])
    assert torch.equal(spoiled[4:], clean[4:])


def test_a_product_takes_a_launch_and_the_bytes_that_the_fake_device_counts() -> None:
    interpret()
    tiled, _ = products(torch.bfloat16)
    with metered() as moved:
        tiled.forward(rows(300, D_IN, torch.bfloat16), [None, None])
        tiled.backward([rows(300, width, torch.bfloat16) for width in D_OUTS])
    assert moved.num_launches == moved.num_counted == 4
    assert moved.num_bytes == pytest.approx(moved.num_counted_bytes, rel=0.01)
