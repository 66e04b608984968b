"""A request cut into canonical chunks gives the same bits wherever and whenever its chunks run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.numerics.harness import Driver, make_data, make_spec
from workers.contract.messages import Batch, Datum, PassItem

pytestmark = pytest.mark.slow

# The second and third have equal numbers of tokens: they must not be computed as segments of two adapters.
CHUNKS = [make_data("cross_entropy", lengths, seed) for seed, lengths in enumerate([[9, 9, 9, 40], [30, 12], [42]])]


def outcome(driver: Driver, batches: list[list[PassItem]], neighbours: bool) -> tuple[list[bytes], bytes, object]:
    """Run the batches and a step; return the log-probabilities, gradient and state of the adapter "it"."""
    logprobs = []
    for number, items in enumerate(batches):
        others = [driver.backward(f"other{i}", make_data("cross_entropy", [64, 30 + number], i)) for i in range(3)]
        batch = [others[0], *items, *others[1:]] if neighbours else items
        for item, result in zip(batch, driver.train(*batch), strict=True):
            if item.adapter_id == "it":
                logprobs += [values.tobytes() for values in result.logprobs]
    gradient = driver.gradient("it").numpy().tobytes()
    driver.train(driver.step("it"))
    return logprobs, gradient, driver.state("it")


def run(model: Path, cuts: list[int], *, neighbours: bool = False, num_slots: int = 8) -> tuple[object, ...]:
    driver = Driver(model, num_slots=num_slots)
    driver.install(make_spec("it"), *(make_spec(f"other{i}", 2**i) for i in range(3)))
    driver.train(driver.backward("it", make_data("cross_entropy", [50])))
    driver.train(driver.step("it"))
    items = driver.chunks("it", CHUNKS)
    bounds = [0, *cuts, len(items)]
    return outcome(driver, [items[a:b] for a, b in pairwise(bounds)], neighbours)


@pytest.mark.parametrize("neighbours", [False, True], ids=["solo", "co-batched"])
@pytest.mark.parametrize("cuts", [[], [1], [2], [1, 2]], ids=["one batch", "after 1", "after 2", "three batches"])
def test_three_chunks_give_the_same_bits_in_any_distribution_over_batches(
    each_kind: Path, cuts: list[int], neighbours: bool
) -> None:
    assert run(each_kind, cuts, neighbours=neighbours) == run(each_kind, [])


def test_three_chunks_give_the_same_bits_when_their_adapter_is_evicted_between_them(qwen3: Path) -> None:
    assert run(qwen3, [1, 2], neighbours=True, num_slots=1) == run(qwen3, [])


def test_equal_chunks_of_one_adapter_are_not_computed_as_a_batch_of_adjacent_slots(qwen3: Path) -> None:
    """Rows are c (20), a (32), a (32), c (32): the last three are at slots 0, 0 and 2, with b at slot 1."""

    def gradients(together: bool) -> list[bytes]:
        driver = Driver(qwen3)
        driver.install(make_spec("a"), make_spec("b"), make_spec("c"))
        driver.train(*(driver.step(key) for key in "abc"))
        requests = {"a": [32, 32], "c": [20, 32]}
        chunks = [
            driver.chunks(key, [make_data("cross_entropy", [n], i) for i, n in enumerate(lengths)])
            for key, lengths in requests.items()
        ]
        for items in [[*chunks[0], *chunks[1]]] if together else chunks:
            driver.train(*items)
        return [driver.gradient(key).numpy().tobytes() for key in "abc"]

    assert gradients(together=True) == gradients(together=False)


def test_a_pass_that_is_too_long_is_cut_and_changes_no_bits(each_kind: Path) -> None:
    data: list[tuple[Datum, ...]] = [make_data("cross_entropy", [40, 41], seed) for seed in range(3)]

    def gradients(tokens_max: int) -> list[bytes]:
        driver = Driver(each_kind, pass_tokens_max=tokens_max)
        keys = ["a", "b", "c"]
        driver.install(*(make_spec(key) for key in keys))
        items = [driver.backward(key, request) for key, request in zip(keys, data, strict=True)]
        assert not any(r.error for r in driver.engine.run(Batch(epoch=1, cycle_id=9, items=tuple(items))).results)
        return [driver.gradient(key).numpy().tobytes() for key in keys]

    assert gradients(100) == gradients(8192)
