"""Quarantine: bisection finds the poison, and no other operation fails."""

import asyncio
import random

from coordinator.scheduling.quarantine import Quarantine


def bisect(names: list[str], poisons: set[str], is_accident: random.Random | None = None) -> list[str]:
    """Run quarantined groups as a pool would, until none is left; return the poison found."""
    quarantine, found, num_runs = Quarantine(), [], 0
    quarantine.record_loss(names, names)
    left = set(poisons)
    while group := quarantine.group:
        num_runs += 1
        assert num_runs < 10 * len(names) + 100
        if group & left or (is_accident is not None and is_accident.random() < 0.3):
            poison = quarantine.record_loss(group, sorted(group))
            if poison is not None:
                found.append(poison)
                left.discard(poison)
        else:
            for name in group:
                quarantine.release(name)
    return found


def test_the_poison_is_found_by_bisection_at_every_position() -> None:
    names = [f"a{i}" for i in range(13)]
    for poison in names:
        assert bisect(names, {poison}) == [poison]


def test_several_poisons_are_all_found_and_no_other_operation() -> None:
    names = [f"a{i}" for i in range(16)]
    assert sorted(bisect(names, {"a3", "a4", "a15"})) == ["a15", "a3", "a4"]


def test_an_operation_that_ran_co_batched_or_was_lost_solo_once_is_not_the_poison() -> None:
    quarantine = Quarantine()
    assert quarantine.record_loss(["a", "b"], ["a:1", "b:1"]) is None
    assert quarantine.record_loss(["a"], ["a:1"]) is None
    quarantine.release("a")
    quarantine.release("b")
    assert not quarantine.group
    assert quarantine.record_loss(["a"], ["a:1"]) is None, "the operation was not quarantined when its worker was lost"
    assert quarantine.record_loss(["a"], ["a:1"]) is None
    assert quarantine.record_loss(["a"], ["a:1"]) == "a:1"


def test_a_loss_while_several_operations_of_an_adapter_ran_decides_no_poison() -> None:
    """A replay of earlier operations is not a solo run of the quarantined one."""
    quarantine = Quarantine()
    for _ in range(5):
        assert quarantine.record_loss(["a"], ["a:1", "a:2"]) is None
    assert quarantine.group == {"a"}


def test_only_the_first_group_may_run() -> None:
    quarantine, changed = Quarantine(), asyncio.Event()
    quarantine.changed.subscribe(changed)
    quarantine.record_loss(["a", "b"], ["a:1", "b:1"])
    assert [quarantine.may_run(name) for name in ("a", "b", "c")] == [True, False, False]
    changed.clear()
    quarantine.release("a")
    assert changed.is_set()
    assert [quarantine.may_run(name) for name in ("a", "b", "c")] == [False, True, False]
    quarantine.release("b")
    assert quarantine.may_run("c")


def test_while_one_worker_is_left_suspects_run_unless_they_have_killed_one() -> None:
    quarantine = Quarantine()
    quarantine.record_loss(["a", "b"], ["a:1", "b:1"])
    quarantine.pause(is_paused=True)
    assert [quarantine.may_run(name) for name in ("a", "b", "c")] == [True, False, False]
    quarantine.record_loss(["a"], ["a:1"])
    assert [quarantine.may_run(name) for name in ("a", "b", "c")] == [False, True, False]
    quarantine.release("b")
    assert [quarantine.may_run(name) for name in ("a", "b", "c")] == [False, True, True]
    quarantine.pause(is_paused=False)
    assert [quarantine.may_run(name) for name in ("a", "b", "c")] == [True, False, False]


def test_a_loss_during_a_pause_counts_for_the_operation_that_ran() -> None:
    quarantine = Quarantine()
    quarantine.record_loss(["a"], ["a:1"])
    assert quarantine.record_loss(["a"], ["a:1"]) is None
    quarantine.pause(is_paused=True)
    assert quarantine.record_loss(["a"], ["a:1"]) == "a:1"


def test_adapters_in_flight_at_a_first_silence_run_alone_together_and_are_suspects_at_the_second() -> None:
    quarantine = Quarantine()
    assert quarantine.record_silence({"a": "t", "b": "t", "c": "u"}, ()) == set()
    assert quarantine.group == {"a", "b", "c"}
    assert not quarantine.may_run("d")
    quarantine.release("c")
    assert quarantine.record_silence({"a": "t", "b": "t", "c": "u"}, ()) == {"a", "b"}
    quarantine.record_loss(["a", "b"], ["a:1", "b:1"])
    assert quarantine.group == {"a"}, "halved"
    quarantine.release("a")
    quarantine.release("b")
    assert quarantine.group == {"c"}, "its first silence again: it had finished"


def test_a_loss_of_a_group_that_was_not_suspected_is_no_solo_loss() -> None:
    quarantine = Quarantine()
    quarantine.record_silence({"a": "t"}, ())
    for _ in range(2):
        assert quarantine.record_loss(["a"], ["a:1"]) is None
    assert quarantine.record_loss(["a"], ["a:1"]) == "a:1"


def test_samples_in_flight_at_a_first_silence_hold_nobody_up_and_are_suspects_at_the_second() -> None:
    quarantine = Quarantine()
    assert quarantine.record_silence({}, ["s"]) == set()
    assert quarantine.may_run("a")
    assert quarantine.record_silence({}, ["s", "r"]) == {"s"}
    quarantine.release("r")
    assert quarantine.record_silence({}, ["r"]) == set()


def test_nobody_waits_for_a_group_that_cannot_run() -> None:
    quarantine, changed = Quarantine(), asyncio.Event()
    quarantine.record_loss(["a", "b"], ["a:1", "b:1"])
    quarantine.changed.subscribe(changed)
    quarantine.note_waiting({"a"})
    assert changed.is_set()
    assert [quarantine.may_run(name) for name in ("a", "b", "c")] == [False, True, False]
    quarantine.note_waiting({"a", "b"})
    assert [quarantine.may_run(name) for name in ("a", "b", "c")] == [False, False, True]
    quarantine.note_waiting(set())
    assert quarantine.group == {"a"}


def test_a_group_runs_although_one_of_its_adapters_cannot() -> None:
    quarantine = Quarantine()
    quarantine.record_loss(["a", "b", "c", "d"], ["a:1", "b:1", "c:1", "d:1"])
    quarantine.note_waiting({"a"})
    assert quarantine.group == {"a", "b"}
    quarantine.release("b")
    assert quarantine.group == {"c", "d"}


def test_workers_lost_for_other_reasons_do_not_hide_the_poison() -> None:
    for seed in range(50):
        names = [f"a{i}" for i in range(8)]
        assert "a5" in bisect(names, {"a5"}, random.Random(seed))
