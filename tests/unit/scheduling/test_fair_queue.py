"""Whose sample is next: who has had the least, by tokens over weight, whatever the size of the requests."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.fair_queue import SampleTurns
from coordinator.scheduling.planner import Share


def anybody(_name: str) -> bool:
    return True


class Served:
    """Requests named `<tenant><number>`, one at a time."""

    def __init__(self, **weights: float) -> None:
        self.turns = SampleTurns({tenant: Share(weight=weight) for tenant, weight in weights.items()})
        self.tokens: dict[str, int] = {}
        self.num_drawn: Counter[str] = Counter()

    def ask(self, tenant: str, *tokens: int) -> None:
        for num_tokens in tokens:
            name = f"{tenant}{sum(key.startswith(tenant) for key in self.tokens)}"
            self.tokens[name] = num_tokens
            self.turns.add(name, tenant, num_tokens)

    def serve(self, count: int, part_drawn: float = 1.0) -> list[str]:
        served = []
        for _ in range(count):
            name = self.turns.first(anybody)
            assert name is not None
            self.turns.begin(name)
            num_drawn = round(self.tokens[name] * part_drawn)
            self.turns.end(name, num_drawn)
            self.num_drawn[name[0]] += num_drawn
            served.append(name)
        return served


def test_requests_of_one_tenant_run_in_their_order_and_nobody_waits_when_nobody_is_there() -> None:
    served = Served()
    assert served.turns.first(anybody) is None
    served.ask("a", 5, 50, 1)
    assert served.serve(3) == ["a0", "a1", "a2"]
    assert served.turns.first(anybody) is None


def test_who_asks_for_much_gets_turns_by_tokens_and_not_by_requests() -> None:
    served = Served()
    served.ask("h", *[1000] * 5)
    served.ask("s", *[10] * 50)
    order = served.serve(52)
    assert order[0] == "h0"
    assert order[1:51] == [f"s{i}" for i in range(50)]


def test_shares_follow_weights_within_ten_percent() -> None:
    served = Served(h=3.0, l=1.0)
    served.ask("h", *[7] * 2000)
    served.ask("l", *[40] * 400)
    served.serve(600)
    assert abs(served.num_drawn["h"] / served.num_drawn["l"] - 3.0) < 0.3


def test_what_runs_counts_with_the_most_that_it_may_draw() -> None:
    turns = SampleTurns({})
    for tenant in "ab":
        for number in range(9):
            turns.add(f"{tenant}{number}", tenant, 100 if tenant == "a" else 25)
    running = []
    for _ in range(10):
        name = turns.first(anybody)
        assert name is not None
        turns.begin(name)
        running.append(name)
    assert Counter(name[0] for name in running) == {"a": 2, "b": 8}
    for name in running:
        turns.end(name, 1)
    assert turns.first(anybody) == "a2"  # and afterwards with what it drew: a has had 2, b 8


def test_idleness_saves_nothing_up() -> None:
    served = Served()
    served.ask("a", *[10] * 100)
    served.serve(50)
    served.ask("b", *[10] * 100)
    assert Counter(name[0] for name in served.serve(40)) == {"a": 20, "b": 20}


def test_what_was_never_drawn_puts_nobody_behind_who_came_meanwhile() -> None:
    """Of a million tokens asked for ten are drawn: whoever came while they ran must not wait for the rest."""
    served = Served()
    served.ask("a", *[1_000_000] * 8, *[10] * 100)
    for number in range(8):
        served.turns.begin(f"a{number}")
    served.ask("b", *[10] * 100)
    for number in range(8):
        served.turns.end(f"a{number}", 10)
    assert Counter(name[0] for name in served.serve(20)) == {"a": 6, "b": 14}  # a has had 80 tokens, b none


def test_a_request_that_begins_anew_is_charged_once() -> None:
    turns = SampleTurns({})
    turns.add("a0", "a", 100)
    for _ in range(3):
        turns.begin("a0")
        turns.again("a0")
    turns.add("a1", "a", 10)
    turns.add("b0", "b", 10)
    turns.begin("b0")
    turns.end("b0", 10)
    turns.add("b1", "b", 10)
    assert turns.first(anybody) == "a0"
    turns.begin("a0")
    turns.end("a0", 5)
    assert turns.first(anybody) == "a1"


def test_who_may_not_run_now_is_passed_over_with_its_place_kept() -> None:
    served = Served()
    served.ask("a", 10, 10)
    served.ask("b", 10)
    assert served.turns.first(lambda name: name == "a1") == "a1"
    assert served.turns.first(lambda name: name[0] == "b") == "b0"
    assert served.turns.first(lambda _: False) is None
    assert served.turns.first(anybody) == "a0"


def test_a_waiting_request_can_end_and_one_that_never_waited_may() -> None:
    served = Served()
    served.ask("a", 10, 10)
    served.turns.end("a0", 0)
    served.turns.end("nobody's", 0)
    assert served.serve(1) == ["a1"]
    assert served.turns.first(anybody) is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=60), st.integers(1, 5))
def test_the_turn_is_always_the_tenants_who_has_had_the_least(
    requests: list[tuple[str, int]], num_at_once: int
) -> None:
    turns, tokens = SampleTurns({}), {}
    for number, (tenant, num_tokens) in enumerate(requests):
        tokens[f"{tenant}{number}"] = num_tokens
        turns.add(f"{tenant}{number}", tenant, num_tokens)
    waiting, begun = Counter(tenant for tenant, _ in requests), Counter[str]()
    running: list[str] = []
    for _ in requests:
        if len(running) == num_at_once:
            turns.end(name := running.pop(0), tokens[name])
        name = turns.first(anybody)  # type: ignore[assignment]
        assert all(begun[name[0]] <= begun[tenant] for tenant, count in waiting.items() if count)
        turns.begin(name)
        running.append(name)
        waiting[name[0]] -= 1
        begun[name[0]] += tokens[name]
    assert turns.first(anybody) is None
