"""The order of batches, and learning rates."""

import itertools
import math

import pytest

from tinkerpool.data import Batches, Schedule


def test_every_epoch_has_each_item_once_in_an_order_of_its_own() -> None:
    batches = Batches(list("abcdefg"), 3, seed=4)
    items = [item for step in range(7) for item in batches.at(step)]
    epochs = [items[:7], items[7:14], items[14:]]
    assert all(sorted(epoch) == list("abcdefg") for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [Batches(list("abcdefg"), 3, seed=5).at(step) for step in range(2)] != [batches.at(0), batches.at(1)]
    unshuffled = Batches(list("abcdefg"), 3, shuffle=False)
    assert [unshuffled.at(step) for step in (0, 2)] == [list("abc"), list("gab")]


def test_a_step_has_the_same_batch_wherever_a_run_begins_and_in_all_versions() -> None:
    data = list(range(10))
    from_start = [Batches(data, 4, seed=7).at(step) for step in range(9)]
    one = Batches(data, 4, seed=7)
    assert [one.at(step) for step in reversed(range(9))] == from_start[::-1]
    assert Batches(data, 4, seed=7).at(6) == from_start[6]
    assert from_start[:2] == EXPECTED


EXPECTED = [[6, 3, 4, 9], [0, 2, 8, 7]]
"""Runs that continue after an upgrade depend on it."""


def test_the_number_of_steps_covers_the_epochs() -> None:
    batches = Batches(list(range(10)), 4)
    assert [batches.num_steps(epochs) for epochs in (0.1, 0.5, 1, 2)] == [1, 2, 3, 5]


@pytest.mark.parametrize("epochs", [0, -1, math.nan, math.inf])
def test_a_number_of_epochs_that_has_no_steps_or_no_end_is_refused(epochs: float) -> None:
    with pytest.raises(ValueError, match="epochs must be above 0 and finite"):
        Batches([1, 2], 1).num_steps(epochs)


@pytest.mark.parametrize(
    ("data", "batch_size", "seed", "said"), [([], 1, 0, "empty"), ([1], 0, 0, "batch_size"), ([1], 1, -1, "seed")]
)
def test_batches_that_cannot_be_are_refused(data: list[int], batch_size: int, seed: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Batches(data, batch_size, seed=seed)


def test_schedules_warm_up_and_decay_as_those_of_transformers() -> None:
    import torch
    import transformers

    theirs = {
        "linear": transformers.get_linear_schedule_with_warmup,
        "cosine": transformers.get_cosine_schedule_with_warmup,
    }
    for kind, make in theirs.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
        scheduler = make(optimizer, 4, 20)
        expected = []
        for _ in range(20):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        schedule = Schedule(learning_rate=3e-4, num_steps=20, kind=kind, warmup_steps=4)  # type: ignore[arg-type]
        assert [schedule.at(step) for step in range(4, 20)] == pytest.approx(expected[4:])
        # Theirs wastes the first step on a learning rate of 0.
        assert [schedule.at(step) for step in range(4)] == pytest.approx(expected[1:5])


def test_a_decay_ends_at_its_final_fraction_and_a_constant_schedule_has_none() -> None:
    for kind in ("linear", "cosine"):
        schedule = Schedule(learning_rate=1.0, num_steps=10, kind=kind, final_fraction=0.1)
        rates = [schedule.at(step) for step in range(12)]
        assert all(earlier >= later for earlier, later in itertools.pairwise(rates))
        assert [rates[0], rates[10], rates[11]] == pytest.approx([1.0, 0.1, 0.1])
    constant = Schedule(learning_rate=1.0, num_steps=10, kind="constant", warmup_steps=2)
    assert [constant.at(step) for step in (0, 1, 2, 9, 20)] == [0.5, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kind": "step"}, "kind is 'step'"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"num_steps": 0}, "num_steps"),
        ({"warmup_steps": 11}, "warmup_steps must be 0 to num_steps"),
        ({"final_fraction": 2.0}, "final_fraction"),
    ],
)
def test_schedules_that_cannot_be_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Schedule(**{"learning_rate": 1.0, "num_steps": 10, **wrong})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="count from 0"):
        Schedule(learning_rate=1.0, num_steps=10).at(-1)
