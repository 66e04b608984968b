"""What a batch says is expected next is loaded while it runs, and changes no result."""

from __future__ import annotations

from pathlib import Path

from tests.numerics.harness import Driver, make_data, make_spec
from tests.unit.test_transfers import LateTransfers
from workers.bank import Bank
from workers.messages import Batch
from workers.passes import PassRunner


def test_adapters_expected_next_are_loaded_while_a_batch_runs(qwen3: Path) -> None:
    driver, plain = Driver(qwen3, num_slots=2), Driver(qwen3, num_slots=2)
    engine = driver.engine
    base_model = engine.base_model
    engine.bank = Bank(base_model.group_shapes, 2, transfers=LateTransfers())
    engine._passes = PassRunner(base_model, engine.bank, lambda: 0.0, lambda: 1 << 40)
    for each in (driver, plain):
        each.install(*(make_spec(key) for key in "abc"))
    data = make_data("cross_entropy", [20])

    def run(key: str, *expected: str) -> None:
        batch = Batch(epoch=1, cycle_id=1, items=(driver.backward(key, data),), expected=expected)
        (result,) = engine.run(batch).results
        (other,) = plain.train(plain.backward(key, data))
        assert result.error is None
        assert [part.tobytes() for part in result.logprobs] == [part.tobytes() for part in other.logprobs]

    run("a", "b", "c", "removed meanwhile")
    assert [engine.bank.entry(key).row is not None for key in "abc"] == [True, True, False]
    num_loads = engine.bank.stats.num_loads
    run("b")
    assert engine.bank.stats.num_loads == num_loads
    run("c", "a")
    run("a")
    for key in "abc":
        assert (driver.gradient(key) == plain.gradient(key)).all()
