"""The next sample is that of the tenant with the lowest virtual counter."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from coordinator.sampling.fair_queue import FairQueue
from coordinator.scheduling.virtual_counters import Share


def any_sample(_name: str) -> bool:
    return True


class Served:
    """A queue of requests named `<tenant><number>`, which run one at a time."""

    def __init__(self, **weights: float) -> None:
        self.queue = FairQueue({tenant: Share(weight=weight) for tenant, weight in weights.items()})
        self.tokens: dict[str, int] = {}
        self.num_drawn: Counter[str] = Counter()

    def add(self, tenant: str, *tokens: int) -> None:
        for num_tokens in tokens:
            name = f"{tenant}{sum(key.startswith(tenant) for key in self.tokens)}"
            self.tokens[name] = num_tokens
            self.queue.add(name, tenant, num_tokens)

    def serve(self, count: int, part_drawn: float = 1.0) -> list[str]:
        served = []
        for _ in range(count):
            name = self.queue.peek(any_sample)
            assert name is not None
            self.queue.start(name)
            num_drawn = round(self.tokens[name] * part_drawn)
            self.queue.finish(name, num_drawn)
            self.num_drawn[name[0]] += num_drawn
            served.append(name)
        return served


def test_requests_of_a_lone_tenant_run_in_their_order() -> None:
    served = Served()
    assert served.queue.peek(any_sample) is None
    served.add("a", 5, 50, 1)
    assert served.serve(3) == ["a0", "a1", "a2"]
    assert served.queue.peek(any_sample) is None


def test_turns_are_shared_by_tokens_and_not_by_requests() -> None:
    served = Served()
    served.add("h", *[1000] * 5)
    served.add("s", *[10] * 50)
    order = served.serve(52)
    assert order[0] == "h0"
    assert order[1:51] == [f"s{i}" for i in range(50)]


def test_shares_follow_weights_within_ten_percent() -> None:
    served = Served(h=3.0, l=1.0)
    served.add("h", *[7] * 2000)
    served.add("l", *[40] * 400)
    served.serve(600)
    assert abs(served.num_drawn["h"] / served.num_drawn["l"] - 3.0) < 0.3


def test_a_running_request_counts_with_the_most_that_it_may_draw() -> None:
    queue = FairQueue({})
    for tenant in "ab":
        for number in range(9):
            queue.add(f"{tenant}{number}", tenant, 100 if tenant == "a" else 25)
    running = []
    for _ in range(10):
        name = queue.peek(any_sample)
        assert name is not None
        queue.start(name)
        running.append(name)
    assert Counter(name[0] for name in running) == {"a": 2, "b": 8}
    for name in running:
        queue.finish(name, 1)
    assert queue.peek(any_sample) == "a2"  # a finished request counts with its drawn tokens: a had 2, b 8


def test_an_idle_tenant_accumulates_no_credit() -> None:
    served = Served()
    served.add("a", *[10] * 100)
    served.serve(50)
    served.add("b", *[10] * 100)
    assert Counter(name[0] for name in served.serve(40)) == {"a": 20, "b": 20}


def test_tokens_that_are_never_drawn_do_not_lift_a_tenant_that_arrived_meanwhile() -> None:
    """Of a million tokens ten are drawn. A tenant that arrives meanwhile does not wait for the others."""
    served = Served()
    served.add("a", *[1_000_000] * 8, *[10] * 100)
    for number in range(8):
        served.queue.start(f"a{number}")
    served.add("b", *[10] * 100)
    for number in range(8):
        served.queue.finish(f"a{number}", 10)
    assert Counter(name[0] for name in served.serve(20)) == {"a": 6, "b": 14}  # a had 80 tokens, b none


def test_a_request_that_is_queued_again_is_charged_once() -> None:
    queue = FairQueue({})
    queue.add("a0", "a", 100)
    for _ in range(3):
        queue.start("a0")
        queue.requeue("a0")
    queue.add("a1", "a", 10)
    queue.add("b0", "b", 10)
    queue.start("b0")
    queue.finish("b0", 10)
    queue.add("b1", "b", 10)
    assert queue.peek(any_sample) == "a0"
    queue.start("a0")
    queue.finish("a0", 5)
    assert queue.peek(any_sample) == "a1"


def test_a_tenant_that_must_wait_is_asked_for_its_first_request_only_and_holds_nobody_up() -> None:
    served, asked = Served(), []
    served.add("a", *[10] * 100)
    served.add("b", 10)

    def may_start(tenant_id: str, name: str) -> bool:
        asked.append(name)
        return tenant_id != "a"

    assert served.queue.peek(any_sample, may_start) == "b0"
    assert set(asked) == {"a0", "b0"}
    served.queue.start("b0")
    assert served.queue.peek(any_sample, may_start) is None
    assert [served.queue.is_queued(name) for name in ("a0", "b0", "c0")] == [True, False, False]


def test_a_quarantined_request_is_passed_over_and_keeps_its_position() -> None:
    served = Served()
    served.add("a", 10, 10)
    served.add("b", 10)
    assert served.queue.peek(lambda name: name == "a1") == "a1"
    assert served.queue.peek(lambda name: name[0] == "b") == "b0"
    assert served.queue.peek(lambda _: False) is None
    assert served.queue.peek(any_sample) == "a0"


def test_a_queued_request_can_finish_and_an_unknown_one_is_ignored() -> None:
    served = Served()
    served.add("a", 10, 10)
    served.queue.finish("a0", 0)
    served.queue.finish("unknown", 0)
    assert served.serve(1) == ["a1"]
    assert served.queue.peek(any_sample) is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=60), st.integers(1, 5))
def test_the_next_request_is_always_from_the_tenant_with_the_fewest_tokens(
    requests: list[tuple[str, int]], num_at_once: int
) -> None:
    queue, tokens = FairQueue({}), {}
    for number, (tenant, num_tokens) in enumerate(requests):
        tokens[f"{tenant}{number}"] = num_tokens
        queue.add(f"{tenant}{number}", tenant, num_tokens)
    queued, begun = Counter(tenant for tenant, _ in requests), Counter[str]()
    running: list[str] = []
    for _ in requests:
        if len(running) == num_at_once:
            queue.finish(name := running.pop(0), tokens[name])
        name = queue.peek(any_sample)  # type: ignore[assignment]
        assert all(begun[name[0]] <= begun[tenant] for tenant, count in queued.items() if count)
        queue.start(name)
        running.append(name)
        queued[name[0]] -= 1
        begun[name[0]] += tokens[name]
    assert queue.peek(any_sample) is None
