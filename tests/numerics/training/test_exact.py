"""Exact mode: a tenant's bits in training depend on no neighbour, even where a library's kernels depend on the rows."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.numerics.cases import long
from tests.support.numerics.harness import RARER_ARCHITECTURES, Driver, Trace, make_spec
from tests.support.numerics.tenants import TENANTS, assert_same, train
from workers.model.frozen_products import multiply_in_blocks, sum_in_blocks
from workers.model.segments import Segment

pytestmark = pytest.mark.slow

FEW = TENANTS[:3]
CASES = [
    ("qwen3", "float32"),
    ("qwen3.5-moe", "bfloat16"),
    *long(("qwen3", "bfloat16"), ("qwen3.5-moe", "float32")),
    *long(*product(("gemma3", "gpt-oss", *RARER_ARCHITECTURES), ("float32", "bfloat16"))),
]


def solo(model: Path, **config: Any) -> dict[str, Trace]:
    return {tenant.key: train(Driver(model, **config), [tenant], num_steps=2)[tenant.key] for tenant in FEW}


@pytest.mark.parametrize(("model_directory", "dtype"), CASES, indirect=["model_directory"])
def test_co_batched_tenant_has_the_bits_of_solo_in_exact_mode(model_directory: Path, dtype: str) -> None:
    config: dict[str, Any] = {"dtype": dtype, "exact": True}
    expected = solo(model_directory, **config)
    together = train(Driver(model_directory, **config), TENANTS, num_steps=2)
    assert_same(together, expected)


@pytest.fixture
def rows_decide(monkeypatch: pytest.MonkeyPatch, own_base_models: None) -> None:
    """Patch torch: sums are split by the number of rows, as in libraries for GPUs, and rarely in those for CPUs."""

    def product(left: Tensor, right: Tensor) -> Tensor:
        num_splits = 1 + len(left) % 5
        parts = zip(left.tensor_split(num_splits, dim=1), right.tensor_split(num_splits, dim=0), strict=True)
        total = left.new_zeros(len(left), right.shape[1])
        for part, other in parts:
            total = total + part @ other
        return total

    def mm(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
        result = product(left, right)
        return result if out is None else out.copy_(result)

    def addmm_(self: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return self.add_(product(left, right))

    def addmm(
        base: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
    ) -> Tensor:
        result = alpha * product(left, right)
        result = base + result if beta else result
        return result if out is None else out.copy_(result)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(torch.Tensor, "addmm_", addmm_)


@pytest.mark.usefixtures("rows_decide")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_mode_keeps_the_bits_with_a_library_whose_sums_depend_on_the_rows(qwen3: Path, dtype: str) -> None:
    expected = solo(qwen3, dtype=dtype, exact=True)
    assert_same(train(Driver(qwen3, dtype=dtype, exact=True), TENANTS, num_steps=2), expected)


@pytest.mark.usefixtures("rows_decide")
def test_without_exact_mode_such_a_library_makes_bits_depend_on_neighbours(qwen3: Path) -> None:
    expected = solo(qwen3, dtype="bfloat16")
    with pytest.raises(AssertionError):
        assert_same(train(Driver(qwen3, dtype="bfloat16"), TENANTS, num_steps=2), expected)


@pytest.mark.parametrize("num_rows", [1, 63, 64, 65, 200])
def test_products_by_blocks_are_the_products(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x, weight, other, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((num_rows, 24), (40, 24), (40, 24), (40,))
    )
    y = multiply_in_blocks(x, weight.t(), bias, None, 64)
    torch.testing.assert_close(y, x @ weight.t() + bias)
    out = torch.empty(num_rows, 48, dtype=torch.float64)[:, :40]
    assert multiply_in_blocks(x, weight.t(), None, out, 64) is out
    torch.testing.assert_close(out, x @ weight.t())
    dx = sum_in_blocks([y, out], [weight, other], 64)
    torch.testing.assert_close(dx, y @ weight + out @ other)


@pytest.mark.usefixtures("own_base_models")
def test_segments_of_equal_length_are_not_computed_as_one_batch(qwen3: Path) -> None:
    """The bits of a batched product may depend on the size of the batch, and so on co-batched tenants."""
    driver = Driver(qwen3, exact=True)
    driver.install(make_spec("a"), make_spec("b"))
    acquired = driver.engine.bank.acquire(["a", "b"])
    segments = [Segment(0, 32, acquired[0].groups), Segment(32, 64, acquired[1].groups)]
    assert len(driver.engine.base_model.current.route(segments).runs) == 2
    driver.engine.base_model.current.can_batch = True
    assert len(driver.engine.base_model.current.route(segments).runs) == 1
