"""How long a batch may take before its worker is given up."""

from dataclasses import replace

import numpy as np
import pytest

from coordinator.scheduling.cost_model import CycleCosts
from coordinator.scheduling.deadlines import FACTOR, FLOOR_S, SOLO_FACTOR, STEP_TOKENS, UNKNOWN_S, Deadlines
from workers.contract.messages import AdapterInstall, AdapterSpec, Batch, Datum, PassItem


def batch(*lengths: int) -> Batch:
    data = tuple(Datum(tokens=np.zeros(length, np.int32), loss_inputs={}) for length in lengths)
    item = PassItem(
        op_id="",
        adapter_id="a",
        prev_seq=0,
        seq=1,
        chunk_index=0,
        num_chunks=1,
        data=data,
        loss_fn="cross_entropy",
        loss_config={},
        backward=True,
    )
    return Batch(epoch=1, cycle_id=1, items=(item,))


EMPTY = Batch(epoch=1, cycle_id=1)


def beyond_waiting(deadlines: Deadlines, asked: Batch) -> float:
    """What a batch may take for itself, without what it may have to wait for first."""
    return deadlines.allowed_s(asked, "w0") - deadlines.allowed_s(EMPTY, "w0")


def test_a_life_that_has_answered_nothing_has_all_the_time_that_loading_may_take() -> None:
    deadlines = Deadlines(CycleCosts())
    assert deadlines.allowed_s(batch(100), "w0-a") == UNKNOWN_S
    deadlines.observe(batch(100), "w0-a", 1.0)
    assert deadlines.allowed_s(batch(100), "w0-a") < UNKNOWN_S
    assert deadlines.allowed_s(batch(100), "w0-b") == UNKNOWN_S
    deadlines.forget("w0-a")
    assert deadlines.allowed_s(batch(100), "w0-a") == UNKNOWN_S


def test_the_deadline_is_a_multiple_of_what_such_a_batch_took() -> None:
    deadlines = Deadlines(CycleCosts())
    deadlines.observe(batch(100), "w0", 1.0)
    assert beyond_waiting(deadlines, batch(100)) == pytest.approx(FACTOR * 1.0)
    assert beyond_waiting(deadlines, batch(100, 100, 100)) == pytest.approx(FACTOR * 3.0)


def test_longer_sequences_may_take_longer_per_token_and_shorter_ones_no_less() -> None:
    deadlines = Deadlines(CycleCosts())
    deadlines.observe(batch(100, 100), "w0", 2.0)
    assert beyond_waiting(deadlines, batch(400)) == pytest.approx(FACTOR * 4.0 * 4)
    assert beyond_waiting(deadlines, batch(*[10] * 40)) == pytest.approx(FACTOR * 4.0)


def test_what_a_worker_may_just_have_been_too_slow_for_gets_more_time_alone() -> None:
    deadlines = Deadlines(CycleCosts())
    deadlines.observe(batch(100), "w0", 1.0)
    solo = deadlines.allowed_s(batch(100), "w0", num_solo_losses=1)
    assert solo == SOLO_FACTOR * deadlines.allowed_s(batch(100), "w0")


def test_batches_of_few_tokens_count_only_while_there_is_nothing_better() -> None:
    deadlines = Deadlines(CycleCosts())
    deadlines.observe(batch(5), "w0", 1.0)
    assert beyond_waiting(deadlines, batch(100)) == pytest.approx(FACTOR * 20.0 * 20)
    deadlines.observe(batch(100), "w0", 1.0)
    assert beyond_waiting(deadlines, batch(100)) == pytest.approx(FACTOR * 1.0)


@pytest.mark.parametrize(("share", "factor"), [(0.5, 1.0), (0.75, 3.0), (0.2, 0.25)])
@pytest.mark.parametrize("num_before", [0, 2])
def test_a_batch_may_wait_behind_what_decoding_is_owed_for_the_one_before_be_that_the_first(
    num_before: int, share: float, factor: float
) -> None:
    deadlines = Deadlines(CycleCosts())
    for _ in range(num_before):
        deadlines.observe(batch(640), "w0", 0.1)
    deadlines.observe(replace(batch(2000), decode_share=share), "w0", 20.0)
    step = 0.1 if num_before else 20.0
    assert deadlines.allowed_s(EMPTY, "w0") == pytest.approx(FLOOR_S + factor * 20.0 + FACTOR * step)


def test_a_batch_may_wait_behind_the_decode_step_that_is_under_way() -> None:
    deadlines = Deadlines(CycleCosts())
    deadlines.observe(batch(STEP_TOKENS // 2), "w0", 1.0)
    assert deadlines.allowed_s(EMPTY, "w0") == FLOOR_S + 1.0 + FACTOR * 2.0
    deadlines.observe(batch(STEP_TOKENS // 2), "w0", 100.0)
    deadlines.observe(batch(STEP_TOKENS // 2), "w0", 100.0)
    assert deadlines.allowed_s(EMPTY, "w0") == FLOOR_S + 100.0 + UNKNOWN_S, "no longer than where nothing is known"


def test_a_batch_without_tokens_has_all_the_time_while_nobody_knows_what_a_decode_step_takes() -> None:
    deadlines = Deadlines(CycleCosts())
    deadlines.observe(EMPTY, "w0", 1.0)
    assert deadlines.allowed_s(EMPTY, "w0") == UNKNOWN_S


def test_the_first_batch_of_a_later_life_and_tiny_ones_say_nothing_about_the_price_of_a_token() -> None:
    deadlines = Deadlines(CycleCosts())
    deadlines.observe(batch(100), "w0-a", 1.0)
    deadlines.observe(EMPTY, "w0-a", 0.0)
    before = deadlines.allowed_s(batch(100), "w0-a")
    deadlines.observe(batch(100), "w0-b", 60.0)
    deadlines.observe(batch(3), "w0-a", 60.0)
    deadlines.observe(EMPTY, "w0-a", 0.0)
    assert deadlines.allowed_s(batch(100), "w0-a") == before


def test_a_batch_that_also_installs_says_nothing_once_there_are_others() -> None:
    deadlines = Deadlines(CycleCosts())
    deadlines.observe(batch(100), "w0", 1.0)
    deadlines.observe(batch(100), "w0", 1.0)
    spec = AdapterSpec(adapter_id="a", rank=8, alpha=1.0, seed=0, train_attn=True, train_mlp=True, train_unembed=True)
    for _ in range(20):
        deadlines.observe(replace(batch(100), installs=(AdapterInstall(spec=spec, state=None),)), "w0", 30.0)
    assert beyond_waiting(deadlines, batch(100)) == pytest.approx(FACTOR * 1.0)
