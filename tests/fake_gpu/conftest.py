"""A process with the fake CUDA device, for the tests of this folder; without a compiler all are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fake_cuda import guard
from tests.support.fake_cuda.processes import FakeCudaProcess


@pytest.fixture(scope="session")
def fake_gpu() -> Iterator[FakeCudaProcess]:
    """The process. A function runs in it by its name: `fake_gpu.call("module:function", ...)`."""
    if why := guard.problem():
        pytest.skip(why)
    process = FakeCudaProcess()
    yield process
    process.close()
