"""What cycles cost: found in noise, through pauses and swaps, and found again when the machine changes."""

from random import Random

import pytest

from coordinator.scheduling.cost_model import KEPT, MEMORY, CycleCosts

FIXED_S, TOKEN_S = 0.01, 0.0002


def seconds(num_tokens: int, scale: float = 1.0) -> float:
    return scale * (FIXED_S + TOKEN_S * num_tokens)


def measured(sizes: list[int], scale: float = 1.0, costs: CycleCosts | None = None) -> CycleCosts:
    costs = costs or CycleCosts()
    for num_tokens in sizes:
        costs.observe_pass(num_tokens, 16.0, seconds(num_tokens, scale))
    return costs


def test_the_line_is_found_in_noise_and_through_one_wild_measurement_in_ten() -> None:
    random, costs = Random(1), CycleCosts()
    for index in range(400):
        num_tokens = round(16 * 2 ** random.uniform(0, 7))
        noise = random.uniform(0.9, 1.1) * (random.choice((5.0, 50.0, 5000.0)) if index % 10 == 0 else 1.0)
        costs.observe_pass(num_tokens, 16.0, noise * seconds(num_tokens))
    assert costs.line is not None
    assert costs.line.is_wide
    assert costs.line.fixed_s == pytest.approx(FIXED_S, rel=0.25)
    assert costs.line.token_s == pytest.approx(TOKEN_S, rel=0.15)


def test_a_class_with_too_few_measurements_has_no_say() -> None:
    costs = measured([16, 16, 16, 1024, 1024])
    assert costs.line is None
    measured([1024], costs=costs)
    assert costs.line is not None
    assert (costs.line.fixed_s, costs.line.token_s) == pytest.approx((FIXED_S, TOKEN_S))


def test_sizes_too_alike_give_no_line_and_near_ones_none_to_go_beyond() -> None:
    assert measured([100, 110, 120] * 3).line is None
    near = measured([64, 128] * 3).line
    assert near is not None
    assert not near.is_wide
    wide = measured([64, 256] * 3).line
    assert wide is not None
    assert wide.is_wide


def test_many_large_passes_do_not_wash_out_what_small_ones_said() -> None:
    costs = measured([16] * 3 + [2048] * (MEMORY - 10))
    assert costs.line is not None
    assert costs.line.fixed_s == pytest.approx(FIXED_S)


def test_what_has_not_been_seen_for_long_is_forgotten() -> None:
    costs = measured([16] * 3 + [2048] * (MEMORY + 1))
    assert costs.line is None
    assert costs.num_tokens_seen == 2048
    costs = measured([16] * 3 + [2048] * (MEMORY - 1) + [16] * 2)
    assert costs.line is None, "two new measurements do not keep the old ones"


def test_a_machine_that_becomes_slower_is_found_out_as_soon_as_most_measurements_say_so() -> None:
    costs = measured([16, 128, 1024] * KEPT)
    measured([16, 128, 1024] * (KEPT // 2), 3.0, costs)
    assert costs.line is not None
    assert costs.line.token_s == pytest.approx(TOKEN_S)
    measured([16, 128, 1024], 3.0, costs)
    assert costs.line is not None
    assert costs.line.token_s == pytest.approx(3 * TOKEN_S)


def test_neither_cost_is_negative() -> None:
    costs = CycleCosts()
    for num_tokens, took in ((16, 0.001), (1024, 0.1)) * 3:
        costs.observe_pass(num_tokens, 16.0, took)
    assert costs.line is not None
    assert costs.line.fixed_s == 0.0 < costs.line.token_s
    costs = CycleCosts()
    for num_tokens, took in ((16, 0.1), (1024, 0.09)) * 3:
        costs.observe_pass(num_tokens, 16.0, took)
    assert costs.line is not None
    assert costs.line.token_s == 0.0 < costs.line.fixed_s
    assert costs.tokens_within(2.0) == float("inf")


def test_a_pass_that_did_something_else_besides_counts_only_while_nothing_is_known() -> None:
    costs = CycleCosts()
    costs.observe_pass(100, 100.0, 60.0, is_pure=False)
    assert costs.predicted_s(100, 100.0) == 60.0
    assert costs.line is None
    assert costs.num_tokens_seen == 0
    costs.observe_pass(100, 100.0, 1.0)
    costs.observe_pass(100, 100.0, 60.0, is_pure=False)
    assert costs.predicted_s(100, 100.0) == 1.0


def test_a_prediction_never_undercuts_the_line_that_it_comes_from() -> None:
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
    costs.observe_commit(0.004)
    assert costs.fixed_s == pytest.approx(seconds(64) + 0.004)
    measured([64, 64, 1024, 1024, 1024], costs=costs)
    assert costs.fixed_s == pytest.approx(FIXED_S + 0.004)


def test_the_tokens_of_a_time_are_the_lines_or_too_few() -> None:
    assert CycleCosts().tokens_within(1.0) == float("inf")
    assert measured([64, 1024] * 3).tokens_within(1.0) == pytest.approx((1.0 - FIXED_S) / TOKEN_S)
    few = measured([64] * 3).tokens_within(1.0)
    assert few == pytest.approx(64 / seconds(64))
    assert few < (1.0 - FIXED_S) / TOKEN_S
