"""The longest sequence that an engine announces is the longest that fits into its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.mini_model import build_mini_model
from tests.support.numerics.harness import make_engine
from workers.sampling.kv_cache import block_bytes
from workers.training.memory import USED_FRACTION, Load, PassMemory


@pytest.mark.parametrize("recompute", ["off", "auto", "on"])
def test_the_engine_announces_the_longest_sequence_that_its_memory_holds(qwen3: Path, recompute: Any) -> None:
    free = 6_000_000
    engine = make_engine(qwen3, recompute=recompute, free_bytes=lambda _: free)
    memory = PassMemory(engine.base_model)
    usable_bytes = USED_FRACTION * (free - block_bytes(engine.base_model))
    fitting = engine.info.fitting_tokens
    assert fitting is not None

    def fits(num_tokens: int) -> bool:
        load = Load(num_tokens=num_tokens, lengths=[num_tokens], rank=64)
        return memory.peak_bytes(load, backward=True, recompute=recompute != "off") <= usable_bytes

    assert fits(fitting)
    assert not fits(fitting + 1)


def test_with_enough_memory_there_is_no_limit_and_a_share_of_it_has_one(qwen3: Path) -> None:
    def fitting(share: float) -> int | None:
        return make_engine(qwen3, memory_share=share, free_bytes=lambda _: 40_000_000).info.fitting_tokens

    assert fitting(1.0) is None
    assert fitting(0.1) is not None


def test_running_layers_twice_makes_longer_sequences_fit(tmp_path: Path) -> None:
    model = build_mini_model(tmp_path, "qwen3")

    def fitting(recompute: Any) -> int:
        num_tokens = make_engine(model, recompute=recompute, free_bytes=lambda _: 5_000_000).info.fitting_tokens
        assert num_tokens is not None
        return num_tokens

    assert fitting("off") < fitting("auto") == fitting("on")


def test_an_engine_without_memory_for_a_pass_is_refused_at_its_start(qwen3: Path) -> None:
    with pytest.raises(ValueError, match="no memory for a pass"):
        make_engine(qwen3, free_bytes=lambda _: 1000)
