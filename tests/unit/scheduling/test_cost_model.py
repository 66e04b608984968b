"""The measured cost of cycles, with noise and on a changed machine; the budget of a cycle; the deadlines of batches.

The budget is the operator's number, or the knee of measured cycles, from one chunk to the latency target.
"""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from coordinator.scheduling.cost_model import (
    BYTES_PER_S,
    DEADLINE_FACTOR,
    DEADLINE_FLOOR_S,
    DEADLINE_UNKNOWN_S,
    KEPT,
    KNEE,
    MEMORY,
    SOLO_FACTOR,
    START_TOKENS,
    STEP_TOKENS,
    TOKENS_MAX,
    TRUST,
    CycleCosts,
    Deadlines,
    Line,
    TokenBudget,
)
from workers.contract.messages import AdapterInstall, AdapterSpec, Batch, Datum, PassItem

FIXED_S, TOKEN_S = 0.01, 0.0002
CHUNK_TOKENS = 128


def seconds(num_tokens: int, scale: float = 1.0) -> float:
    return scale * (FIXED_S + TOKEN_S * num_tokens)


def measured(sizes: list[int], scale: float = 1.0, costs: CycleCosts | None = None) -> CycleCosts:
    costs = costs or CycleCosts()
    for num_tokens in sizes:
        costs.observe_pass(num_tokens, 16.0, seconds(num_tokens, scale))
    return costs


def line_of(costs: CycleCosts) -> Line:
    assert costs.line is not None
    return costs.line


def test_the_line_is_found_in_noise_and_through_one_wild_measurement_in_ten() -> None:
    random, costs = Random(1), CycleCosts()
    for index in range(400):
        num_tokens = round(16 * 2 ** random.uniform(0, 7))
        noise = random.uniform(0.9, 1.1) * (random.choice((5.0, 50.0, 5000.0)) if index % 10 == 0 else 1.0)
        costs.observe_pass(num_tokens, 16.0, noise * seconds(num_tokens))
    assert line_of(costs).is_wide
    assert line_of(costs).fixed_s == pytest.approx(FIXED_S, rel=0.25)
    assert line_of(costs).token_s == pytest.approx(TOKEN_S, rel=0.15)


def test_a_class_with_too_few_measurements_is_ignored() -> None:
    costs = measured([16, 16, 16, 1024, 1024])
    assert costs.line is None
    measured([1024], costs=costs)
    assert (line_of(costs).fixed_s, line_of(costs).token_s) == pytest.approx((FIXED_S, TOKEN_S))


def test_too_similar_sizes_give_no_line_and_near_ones_no_line_for_larger_sizes() -> None:
    assert measured([100, 110, 120] * 3).line is None
    assert not line_of(measured([64, 128] * 3)).is_wide
    assert line_of(measured([64, 256] * 3)).is_wide


def test_many_large_passes_do_not_displace_a_few_small_ones() -> None:
    costs = measured([16] * 3 + [2048] * (MEMORY - 10))
    assert line_of(costs).fixed_s == pytest.approx(FIXED_S)


def test_old_measurements_are_dropped() -> None:
    costs = measured([16] * 3 + [2048] * (MEMORY + 1))
    assert costs.line is None
    assert costs.num_tokens_seen == 2048
    costs = measured([16] * 3 + [2048] * (MEMORY - 1) + [16] * 2)
    assert costs.line is None, "two new measurements are too few, and the old ones are dropped"


def test_a_slower_machine_changes_the_line_once_most_measurements_are_slower() -> None:
    costs = measured([16, 128, 1024] * KEPT)
    measured([16, 128, 1024] * (KEPT // 2), 3.0, costs)
    assert line_of(costs).token_s == pytest.approx(TOKEN_S)
    measured([16, 128, 1024], 3.0, costs)
    assert line_of(costs).token_s == pytest.approx(3 * TOKEN_S)


def test_neither_cost_is_negative() -> None:
    costs = CycleCosts()
    for num_tokens, took in ((16, 0.001), (1024, 0.1)) * 3:
        costs.observe_pass(num_tokens, 16.0, took)
    assert line_of(costs).fixed_s == 0.0 < line_of(costs).token_s
    costs = CycleCosts()
    for num_tokens, took in ((16, 0.1), (1024, 0.09)) * 3:
        costs.observe_pass(num_tokens, 16.0, took)
    assert line_of(costs).token_s == 0.0 < line_of(costs).fixed_s
    assert costs.tokens_within(2.0) == float("inf")


def test_a_pass_with_other_work_counts_only_while_there_is_no_other_measurement() -> None:
    costs = CycleCosts()
    costs.observe_pass(100, 100.0, 60.0, is_pure=False)
    assert costs.predicted_s(100, 100.0) == 60.0
    assert costs.line is None
    assert costs.num_tokens_seen == 0
    costs.observe_pass(100, 100.0, 1.0)
    costs.observe_pass(100, 100.0, 60.0, is_pure=False)
    assert costs.predicted_s(100, 100.0) == 1.0


def test_a_prediction_is_never_below_its_line() -> None:
    costs = measured([16, 128, 1024] * 3)
    for num_tokens in (64, 100, 128, 500, 1024, 5000):
        predicted = costs.predicted_s(num_tokens, 16.0)
        assert predicted is not None
        assert predicted >= seconds(num_tokens) * 0.999


def test_the_fixed_cost_includes_the_commit_and_is_at_most_the_smallest_pass_while_unknown() -> None:
    costs = CycleCosts()
    assert costs.fixed_s is None
    measured([64], costs=costs)
    assert costs.fixed_s == seconds(64)
    costs.observe_end(0.0, 0.004)
    assert costs.fixed_s == pytest.approx(seconds(64) + 0.004)
    measured([64, 64, 1024, 1024, 1024], costs=costs)
    assert costs.fixed_s == pytest.approx(FIXED_S + 0.004)


def test_the_tokens_for_a_time_are_at_most_those_of_the_line() -> None:
    assert CycleCosts().tokens_within(1.0) == float("inf")
    assert measured([64, 1024] * 3).tokens_within(1.0) == pytest.approx((1.0 - FIXED_S) / TOKEN_S)
    few = measured([64] * 3).tokens_within(1.0)
    assert few == pytest.approx(64 / seconds(64))
    assert few < (1.0 - FIXED_S) / TOKEN_S


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


def beyond_waiting(deadlines: Deadlines, planned: Batch) -> float:
    """Return the part of a batch's deadline that is for its own work, without waits."""
    return deadlines.allowed_s(planned, "w0") - deadlines.allowed_s(EMPTY, "w0")


def test_an_incarnation_without_a_completed_batch_has_the_deadline_of_loading() -> None:
    deadlines = Deadlines(CycleCosts())
    assert deadlines.allowed_s(batch(100), "w0-a") == DEADLINE_UNKNOWN_S
    deadlines.observe(batch(100), "w0-a", 1.0)
    assert deadlines.allowed_s(batch(100), "w0-a") < DEADLINE_UNKNOWN_S
    assert deadlines.allowed_s(batch(100), "w0-b") == DEADLINE_UNKNOWN_S
    deadlines.forget("w0-a")
    assert deadlines.allowed_s(batch(100), "w0-a") == DEADLINE_UNKNOWN_S


def test_the_deadline_is_a_multiple_of_the_time_of_a_like_batch() -> None:
    deadlines = Deadlines(CycleCosts())
    deadlines.observe(batch(100), "w0", 1.0)
    assert beyond_waiting(deadlines, batch(100)) == pytest.approx(DEADLINE_FACTOR * 1.0)
    assert beyond_waiting(deadlines, batch(100, 100, 100)) == pytest.approx(DEADLINE_FACTOR * 3.0)


def test_longer_sequences_have_more_time_per_token_and_shorter_ones_no_less() -> None:
    deadlines = Deadlines(CycleCosts())
    deadlines.observe(batch(100, 100), "w0", 2.0)
    assert beyond_waiting(deadlines, batch(400)) == pytest.approx(DEADLINE_FACTOR * 4.0 * 4)
    assert beyond_waiting(deadlines, batch(*[10] * 40)) == pytest.approx(DEADLINE_FACTOR * 4.0)


def test_a_large_state_in_the_reply_has_the_time_of_the_slowest_transfer() -> None:
    deadlines = Deadlines(CycleCosts())
    deadlines.observe(batch(100), "w0", 1.0)
    saved = deadlines.allowed_s(EMPTY, "w0", saved_bytes=5 * round(BYTES_PER_S))
    assert saved - deadlines.allowed_s(EMPTY, "w0") == pytest.approx(5.0)


def test_a_solo_batch_after_a_loss_has_a_longer_deadline() -> None:
    deadlines = Deadlines(CycleCosts())
    deadlines.observe(batch(100), "w0", 1.0)
    solo = deadlines.allowed_s(batch(100), "w0", num_solo_losses=1)
    assert solo == SOLO_FACTOR * deadlines.allowed_s(batch(100), "w0")


def test_batches_of_few_tokens_count_only_while_there_is_no_larger_one() -> None:
    deadlines = Deadlines(CycleCosts())
    deadlines.observe(batch(5), "w0", 1.0)
    assert beyond_waiting(deadlines, batch(100)) == pytest.approx(DEADLINE_FACTOR * 20.0 * 20)
    deadlines.observe(batch(100), "w0", 1.0)
    assert beyond_waiting(deadlines, batch(100)) == pytest.approx(DEADLINE_FACTOR * 1.0)


@pytest.mark.parametrize(("share", "factor"), [(0.5, 1.0), (0.75, 3.0), (0.2, 0.25)])
@pytest.mark.parametrize("num_before", [0, 2])
def test_a_deadline_includes_the_decoding_owed_for_the_batch_before(
    num_before: int, share: float, factor: float
) -> None:
    deadlines = Deadlines(CycleCosts())
    for _ in range(num_before):
        deadlines.observe(batch(640), "w0", 0.1)
    deadlines.observe(replace(batch(2000), decode_share=share), "w0", 20.0)
    step = 0.1 if num_before else 20.0
    assert deadlines.allowed_s(EMPTY, "w0") == pytest.approx(DEADLINE_FLOOR_S + factor * 20.0 + DEADLINE_FACTOR * step)


def test_a_deadline_includes_the_decode_step_under_way() -> None:
    deadlines = Deadlines(CycleCosts())
    deadlines.observe(batch(STEP_TOKENS // 2), "w0", 1.0)
    assert deadlines.allowed_s(EMPTY, "w0") == DEADLINE_FLOOR_S + 1.0 + DEADLINE_FACTOR * 2.0
    deadlines.observe(batch(STEP_TOKENS // 2), "w0", 100.0)
    deadlines.observe(batch(STEP_TOKENS // 2), "w0", 100.0)
    assert deadlines.allowed_s(EMPTY, "w0") == DEADLINE_FLOOR_S + 100.0 + DEADLINE_UNKNOWN_S, (
        "at most the deadline without measurements"
    )


def test_a_batch_without_tokens_has_the_longest_deadline_until_a_decode_step_is_measured() -> None:
    deadlines = Deadlines(CycleCosts())
    deadlines.observe(EMPTY, "w0", 1.0)
    assert deadlines.allowed_s(EMPTY, "w0") == DEADLINE_UNKNOWN_S


def test_first_batches_of_later_incarnations_and_tiny_ones_do_not_count_for_the_cost_of_a_token() -> None:
    deadlines = Deadlines(CycleCosts())
    deadlines.observe(batch(100), "w0-a", 1.0)
    deadlines.observe(EMPTY, "w0-a", 0.0)
    before = deadlines.allowed_s(batch(100), "w0-a")
    deadlines.observe(batch(100), "w0-b", 60.0)
    deadlines.observe(batch(3), "w0-a", 60.0)
    deadlines.observe(EMPTY, "w0-a", 0.0)
    assert deadlines.allowed_s(batch(100), "w0-a") == before


def test_a_batch_with_installs_does_not_count_once_there_are_others() -> None:
    deadlines = Deadlines(CycleCosts())
    deadlines.observe(batch(100), "w0", 1.0)
    deadlines.observe(batch(100), "w0", 1.0)
    spec = AdapterSpec(adapter_id="a", rank=8, alpha=1.0, seed=0, train_attn=True, train_mlp=True, train_unembed=True)
    for _ in range(20):
        deadlines.observe(replace(batch(100), installs=(AdapterInstall(spec=spec, state=None),)), "w0", 30.0)
    assert beyond_waiting(deadlines, batch(100)) == pytest.approx(DEADLINE_FACTOR * 1.0)


def costs_of(fixed_s: float, token_s: float, *sizes: int) -> CycleCosts:
    costs = CycleCosts()
    for num_tokens in sizes * 3:
        costs.observe_pass(num_tokens, 16.0, fixed_s + token_s * num_tokens)
    return costs


def budget_of(costs: CycleCosts, tokens: int | None = None, cycle_s_max: float = 2.0) -> int:
    budget = TokenBudget(costs, base_model="m", chunk_tokens=CHUNK_TOKENS, tokens=tokens, cycle_s_max=cycle_s_max)
    budget.update()
    return budget.tokens


def test_the_operators_number_is_used_unchanged() -> None:
    assert budget_of(costs_of(0.01, 1e-4, 16, 1024), tokens=1) == 1
    assert budget_of(costs_of(0.01, 1e-4, 16, 1024), tokens=1_000_000) == 1_000_000


def test_the_budget_keeps_its_start_value_while_measured_sizes_are_too_similar() -> None:
    assert budget_of(CycleCosts()) == START_TOKENS
    assert budget_of(costs_of(0.0001, 1e-4, 64, 128)) == START_TOKENS


def test_the_budget_is_the_knee_of_pass_and_commit() -> None:
    costs = costs_of(0.01, 2e-4, 16, 128, 1024)
    assert budget_of(costs) == pytest.approx(KNEE * 0.01 / 2e-4, abs=1)
    costs.observe_end(0.0, 0.002)
    assert budget_of(costs) == pytest.approx(KNEE * 0.012 / 2e-4, abs=1)


def test_the_budget_is_never_less_than_a_chunk() -> None:
    assert budget_of(costs_of(0.0, 1e-3, 16, 1024)) == CHUNK_TOKENS
    assert budget_of(costs_of(10.0, 1.0, 16, 1024)) == CHUNK_TOKENS, "also if the latency target cannot be met"


def test_a_pass_takes_no_longer_than_the_latency_target() -> None:
    tokens = budget_of(costs_of(0.5, 0.002, 16, 128, 1024))
    assert 0.5 + 0.002 * tokens == pytest.approx(2.0, abs=0.002)
    tokens = budget_of(costs_of(0.5, 0.002, 16, 128, 1024), cycle_s_max=1.0)
    assert 0.5 + 0.002 * tokens == pytest.approx(1.0, abs=0.002)


def test_a_pass_takes_no_longer_than_its_part_of_the_latency_target() -> None:
    costs = costs_of(0.1, 0.002, 16, 128, 1024)
    budget = TokenBudget(costs, base_model="m", chunk_tokens=CHUNK_TOKENS, tokens=None, cycle_s_max=2.0)
    budget.update(0.4)
    assert 0.1 + 0.002 * budget.tokens == pytest.approx(0.8, abs=0.002)
    budget.update()
    assert budget.tokens == pytest.approx(1.9 / 0.002, abs=1)
    costs.observe_end(0.3, 0.1)
    budget.update()
    assert budget.tokens == pytest.approx(1.5 / 0.002, abs=1), "steps and commit are in the target, too"


def test_slow_passes_limit_the_budget_before_the_line_is_known() -> None:
    assert budget_of(costs_of(0.0, 0.01, 256), cycle_s_max=2.0) == 200


def test_the_budget_exceeds_the_measured_sizes_by_a_bounded_factor() -> None:
    flat = costs_of(0.1, 1e-9, 16, 4096)
    assert budget_of(flat) == TRUST * 4096
    assert budget_of(costs_of(0.1, 1e-9, 16, 1_000_000)) == TOKENS_MAX


def test_the_budget_recovers_after_a_machine_became_faster() -> None:
    """Old large passes and new small ones give a line without a fixed cost: the budget falls to a chunk."""
    costs = costs_of(0.01, 2e-3, 256, 2048)
    for _ in range(9):
        costs.observe_pass(256, 16.0, 0.005 + 1e-4 * 256)
    budget = TokenBudget(costs, base_model="m", chunk_tokens=CHUNK_TOKENS, tokens=None, cycle_s_max=2.0)
    budget.update()
    assert budget.tokens == CHUNK_TOKENS
    for _ in range(MEMORY + 10):  # under load each cycle fills the budget
        costs.observe_pass(budget.tokens, 16.0, 0.005 + 1e-4 * budget.tokens)
        budget.update()
    assert budget.tokens == pytest.approx(KNEE * 0.005 / 1e-4, rel=0.05)


def test_a_batch_whose_chunks_were_lost_before_it_was_sent_is_no_pass() -> None:
    costs = CycleCosts()
    deadlines = Deadlines(costs)
    for _ in range(2):
        deadlines.observe(EMPTY, "w0", 1.0, extra_tokens=100.0)
    assert costs.predicted_s(100, 0.0) is None
