"""The trial of a backward of attention of our own: one with other gradients is not used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.support.numerics.harness import Driver
from tests.support.numerics.slow_kernel import SlowKernel
from workers.model.attention import AttendPacked, PackedAttention
from workers.model.gpu_attention import VarlenAttention
from workers.selftest import training_kernels
from workers.selftest.training_kernels import check_attention

pytestmark = pytest.mark.usefixtures("own_base_models")


class Doubling(SlowKernel):
    """Has gradients of queries that are twice as large as they should be."""

    def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().backward(*args)
        return 2 * query, key, value


class OnlyByRow(SlowKernel):
    """Is wrong for queries that do not lie row by row in memory."""

    def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().backward(*args)
        return query if args[1][0].is_contiguous() else query.roll(1, 0), key, value


def by(kernel: SlowKernel) -> AttendPacked:
    return lambda lengths, _: VarlenAttention(kernel, lengths)


@pytest.mark.parametrize(("kernel", "is_right"), [(SlowKernel(), True), (Doubling(), False), (OnlyByRow(), False)])
def test_a_backward_with_other_gradients_than_the_librarys_is_not_used(
    qwen3: Path,
    kernel: SlowKernel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    is_right: bool,
) -> None:
    monkeypatch.setattr(training_kernels, "attend_packed_for", lambda *_, **__: by(SlowKernel()))
    model = Driver(qwen3).engine.base_model
    model.has_own_attention, model.attend_packed = True, by(kernel)
    check_attention(model)
    assert model.has_own_attention is is_right
    assert (model.attend_packed is PackedAttention) is not is_right, "that of a CPU"
    assert ("trains by the library's attention" in caplog.text) is not is_right
