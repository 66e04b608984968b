"""Every way through the engine on a GPU: no operation mixes devices or dtypes, and each is counted by a rule."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_cuda.processes import FakeCudaProcess

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fake_gpu")]  # one process, so that torch is imported once
PATHS = "tests.support.fake_cuda.paths"


def long(settings: dict[str, Any]) -> Any:
    return pytest.param(settings, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        long({"has_gaps": True}),
        long({"window": True, "has_triton": False}),
        long({"window": True}),
        {"exact": True},
        long({"has_triton": False}),
        long({"recompute": "on"}),
        long({"model": "tiny-hybrid"}),
        {"model": "tiny-mixture"},
        long({"model": "tiny-mixture", "has_gaps": True, "recompute": "on"}),
    ],
    ids=str,
)
def test_tenants_of_every_kind_train(fake_gpu: FakeCudaProcess, settings: dict[str, Any]) -> None:
    counts = fake_gpu.call(f"{PATHS}:train", **settings)
    assert 2 <= counts.num_waits <= 6, counts.waits


@pytest.mark.long  # the backward in fp32 of `test_exact.py` is of each run
@pytest.mark.parametrize("settings", [{}, {"exact": True}, {"window": True}], ids=str)
def test_tenants_of_every_kind_train_in_fp32(fake_gpu: FakeCudaProcess, settings: dict[str, Any]) -> None:
    assert fake_gpu.call(f"{PATHS}:train", dtype="float32", **settings) is None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        long({"window": True}),
        long({"dtype": "float32"}),
        long({"model": "tiny-hybrid"}),
        long({"model": "tiny-mixture"}),
    ],
    ids=str,
)
def test_requests_of_every_kind_sample(fake_gpu: FakeCudaProcess, settings: dict[str, Any]) -> None:
    assert fake_gpu.call(f"{PATHS}:sample", **settings) >= 70
