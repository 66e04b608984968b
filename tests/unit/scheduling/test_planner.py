"""The planner: fair, bounded by the budget, deterministic, pure."""

from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.planner import MOVES_BEHIND, plan_pass
from coordinator.scheduling.ready_set import Candidate
from coordinator.scheduling.virtual_counters import FairState, Share, charged


def candidate(
    adapter: str,
    tenant: str,
    *chunks: int,
    worker: str = "",
    last: int = 0,
    item: float = 0.0,
    move: float = 0.0,
) -> Candidate:
    return Candidate(adapter, tenant, worker, chunks.__iter__, last, item, move)


def test_one_tenant_gets_the_whole_budget() -> None:
    plan, _ = plan_pass([candidate("a", "t", 10, 10, 10)], FairState(), {"w": 0}, 25)
    assert plan.num_chunks == {"a": 2}
    assert plan.tokens == {"w": 20}


def test_a_chunk_above_the_budget_runs_solo() -> None:
    plan, _ = plan_pass([candidate("a", "t", 100), candidate("b", "t", 5)], FairState(), {"w": 0}, 25)
    assert plan.num_chunks == {"a": 1}


def test_a_small_tenant_has_its_turn_in_every_cycle_of_a_tenant_with_many_requests() -> None:
    state = FairState()
    for _ in range(10):
        busy = candidate("busy", "t1", *[16] * 100)
        plan, state = plan_pass([busy, candidate("small", "t2", 16)], state, {"w": 0}, 64)
        assert plan.num_chunks["small"] == 1
        assert plan.num_chunks["busy"] == 3


def test_shares_follow_weights_within_ten_percent_over_a_hundred_cycles() -> None:
    shares = {"heavy": Share(weight=3.0), "light": Share(weight=1.0)}
    state, given_tokens = FairState(shares=shares), Counter[str]()
    for _ in range(100):
        ready = [candidate("a", "heavy", *[8] * 20), candidate("b", "light", *[8] * 20)]
        plan, state = plan_pass(ready, state, {"w": 0}, 80)
        for adapter, tenant in (("a", "heavy"), ("b", "light")):
            given_tokens[tenant] += 8 * plan.num_chunks.get(adapter, 0)
    assert abs(given_tokens["heavy"] / given_tokens["light"] - 3.0) < 0.3


def test_an_idle_tenant_accumulates_no_credit() -> None:
    state = FairState()
    for _ in range(50):
        _, state = plan_pass([candidate("a", "busy", 10)], state, {"w": 0}, 10)
    plan, state = plan_pass([candidate("a", "busy", *[1] * 50), candidate("b", "new", *[1] * 50)], state, {"w": 0}, 20)
    assert abs(plan.num_chunks["a"] - plan.num_chunks["b"]) <= 1


def test_adapters_of_a_tenant_are_served_round_robin() -> None:
    plan, state = plan_pass([candidate("a", "t", *[10] * 9), candidate("b", "t", *[10] * 9)], FairState(), {"w": 0}, 40)
    assert plan.num_chunks == {"a": 2, "b": 2}
    plan, _ = plan_pass([candidate("a", "t", 10, last=7), candidate("b", "t", 10, last=3)], state, {"w": 0}, 10)
    assert plan.num_chunks == {"b": 1}


def test_new_adapters_spread_over_workers_and_resident_ones_stay() -> None:
    candidates = [candidate(f"a{i}", f"t{i}", 10) for i in range(4)] + [candidate("home", "t9", 10, worker="w1")]
    plan, _ = plan_pass(candidates, FairState(), {"w0": 0, "w1": 1}, 100)
    assert plan.placements["home"] == "w1"
    assert Counter(plan.placements.values()) == {"w0": 3, "w1": 2}


def test_no_adapter_is_placed_on_an_avoided_worker_unless_it_is_the_only_one() -> None:
    placed, bad = [candidate(name, name, 10) for name in "abc"], candidate("bad", "bad", 10, worker="w0")
    plan, _ = plan_pass([*placed, bad], FairState(), {"w0": 0, "w1": 9}, 100, avoided="w0")
    assert plan.placements == {"a": "w1", "b": "w1", "c": "w1", "bad": "w0"}
    plan, _ = plan_pass(placed, FairState(), {"w0": 0}, 100, avoided="w0")
    assert set(plan.placements.values()) == {"w0"}


def test_an_adapter_is_placed_where_least_ran_lately_though_nothing_is_ready_there() -> None:
    new = [candidate(name, "t", 10) for name in ("a", "b", "c")]
    plan, _ = plan_pass(new, FairState(), {"w0": 1, "w1": 9}, 100, loads={"w0": 15.0})
    assert plan.placements == {"a": "w1", "b": "w1", "c": "w0"}


def test_an_adapter_waits_for_its_worker() -> None:
    plan, _ = plan_pass([candidate("a", "t", 10, worker="gone")], FairState(), {"w": 0}, 100)
    assert plan.num_chunks == {}


def test_the_planner_reads_at_most_one_chunk_of_an_adapter_beyond_those_it_takes() -> None:
    looks = Counter[str]()

    def chunks(adapter: str) -> Iterator[int]:
        for _ in range(100):
            looks[adapter] += 1
            yield 10

    candidates = [candidate(f"a{i}", f"t{i}", worker="w")._replace(chunks=partial(chunks, f"a{i}")) for i in range(50)]
    plan, _ = plan_pass(candidates, FairState(), {"w": 50}, 200)
    assert sum(plan.num_chunks.values()) == 20
    assert all(looks[each.adapter_id] == 1 + plan.num_chunks.get(each.adapter_id, 0) for each in candidates)


def test_an_item_counts_with_its_tokens_and_a_move_with_the_first_chunk_of_its_adapter() -> None:
    plan, state = plan_pass([candidate("a", "t", 2, 2, 2, 2, worker="w", item=8, move=5)], FairState(), {"w": 1}, 40)
    assert plan.num_chunks == {"a": 3}
    assert plan.tokens == {"w": 35}
    assert plan.charges == {"a": 35}
    assert (plan.floors["t"], state.shares["t"].virtual_tokens) == (0, 35)


def test_many_small_adapters_and_a_large_one_get_equal_costs() -> None:
    state, costs = FairState(), {"one": 0.0, "many": 0.0}
    for cycle in range(1, 101):
        many = [candidate(f"a{i}", "many", 2, worker="w", item=30, last=(cycle + i) % 50) for i in range(50)]
        large = candidate("b", "one", *[100] * 20, worker="w", item=30)
        plan, state = plan_pass([*many, large], state, {"w": 51}, 1000)
        for adapter_id, tokens in plan.charges.items():
            costs["one" if adapter_id == "b" else "many"] += tokens
    assert costs["many"] / costs["one"] == pytest.approx(1.0, rel=0.02)


def test_what_does_not_fit_behind_a_large_chunk_goes_to_others_until_they_are_a_budget_ahead() -> None:
    """The others are also charged outside plans: without a limit they would get more in every cycle."""
    state, most = FairState(), 0.0
    for _ in range(50):
        small, large = candidate("a", "small", *[5] * 30, worker="w"), candidate("b", "large", *[30] * 9, worker="w")
        plan, state = plan_pass([small, large], state, {"w": 2}, 50)
        assert plan.num_chunks["b"] == 1
        state = charged(state, {"small": 20.0})
        most = max(most, state.shares["small"].virtual_tokens - state.shares["large"].virtual_tokens)
    assert 50 < most <= 50 + 20 + 5


def test_a_pass_has_at_most_as_many_adapters_as_its_worker_has_slots() -> None:
    ready = [candidate(f"a{i}", f"t{i}", 1, 1, worker="w" if i < 3 else "") for i in range(5)]
    plan, _ = plan_pass(ready, FairState(), {"w": 3}, 100, slots={"w": 4})
    assert plan.num_chunks == {"a0": 2, "a1": 2, "a2": 2, "a3": 2}
    assert len(plan_pass(ready, FairState(), {"w": 3}, 100)[0].num_chunks) == 5


def test_a_tenant_whose_adapter_must_be_moved_waits_until_it_is_some_moves_behind() -> None:
    state, waited = FairState(), 0
    for _ in range(100):
        ready = [candidate("in", "t", *[10] * 9, worker="w"), candidate("out", "u", 10, worker="w", move=5)]
        plan, state = plan_pass(ready, state, {"w": 2}, 10)
        if "out" in plan.num_chunks:
            break
        waited += 1
    assert waited == MOVES_BEHIND * 5 // 10 + 1


def test_an_adapter_that_must_be_moved_waits_some_cycles_longer_for_others_of_its_tenant() -> None:
    for behind in (MOVES_BEHIND, MOVES_BEHIND + 1):
        ready = [candidate("in", "t", 9, worker="w", last=50), candidate("out", "t", 9, last=50 - behind, move=5)]
        plan, _ = plan_pass(ready, FairState(), {"w": 2}, 9)
        assert ("out" in plan.num_chunks) == (behind > MOVES_BEHIND)


CANDIDATES = st.lists(
    st.tuples(
        st.integers(0, 5), st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from(["", "w0", "w1"])
    ),
    max_size=12,
)


@given(CANDIDATES, st.integers(1, 100))
def test_every_plan_is_a_prefix_within_the_budget_and_empty_only_if_no_chunk_can_run(
    drawn: list[tuple[int, list[int], str]], budget: int
) -> None:
    candidates = [candidate(f"a{i}", f"t{t}", *chunks, worker=w) for i, (t, chunks, w) in enumerate(drawn)]
    plan, state = plan_pass(candidates, FairState(), {"w0": 0, "w1": 0}, budget)
    again, _ = plan_pass(list(reversed(candidates)), FairState(), {"w0": 0, "w1": 0}, budget)
    assert plan == again
    assert bool(plan.num_chunks) == bool(candidates)
    planned = Counter[str]()
    for c in candidates:
        taken = plan.num_chunks.get(c.adapter_id, 0)
        chunks = tuple(c.chunks())
        assert taken <= len(chunks)
        if taken:
            planned[plan.placements[c.adapter_id]] += sum(chunks[:taken])
            assert c.home in ("", plan.placements[c.adapter_id])
    for worker, tokens in planned.items():
        assert tokens == plan.tokens[worker]
        assert tokens <= budget or sum(n for a, n in plan.num_chunks.items() if plan.placements[a] == worker) == 1
    assert state.active == {c.tenant_id for c in candidates}
