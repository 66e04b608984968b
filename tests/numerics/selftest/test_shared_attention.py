"""The trial of attention that requests share in exact mode: a kernel that divides keys when it has few sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.numerics.slow_kernel import SlowKernel
from workers.model.gpu_attention import Sequences, VarlenAttention
from workers.selftest import sequence_invariance
from workers.selftest.sequence_invariance import requests_can_share

SEQUENCES_MIN = 9
"""More than the trial has."""


class DividingKernel(SlowKernel):
    """Rounds gradients of queries otherwise in calls of fewer sequences, as one does that adds up parts."""

    def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        sequences: Sequences = args[-1]
        query, key, value = super().backward(*args)
        if len(sequences.ends) - 1 < SEQUENCES_MIN:
            query = query * (1 + 2**-20)
        return query, key, value


@pytest.mark.parametrize(("sequences_min", "can_share"), [(SEQUENCES_MIN, True), (SEQUENCES_MIN - 1, False)])
def test_requests_share_calls_only_if_their_bits_are_those_that_they_have_solo(
    sequences_min: int, can_share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_invariance, "REQUESTS", ((30, 12), (7,), (50,), (1, 1, 1), (9, 4)))
    model: Any = SimpleNamespace(
        num_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        device=torch.device("cpu"),
        dtype=torch.float32,
        attend_packed=lambda lengths, counts: VarlenAttention(
            DividingKernel(), lengths, counts, sequences_min=sequences_min
        ),
    )
    assert requests_can_share(model) is can_share
