"""Who is suspected of a worker's death, and how it is found out."""

import random

from coordinator.scheduling.quarantine import Suspects


def investigate(names: list[str], culprits: set[str], is_accident: random.Random | None = None) -> list[str]:
    """Let suspects run as a pool would, until nobody is suspected; returns who was convicted."""
    suspects, convicted, num_runs = Suspects(), [], 0
    suspects.died(names, names)
    left = set(culprits)
    while group := suspects.group:
        num_runs += 1
        assert num_runs < 10 * len(names) + 100
        if group & left or (is_accident is not None and is_accident.random() < 0.3):
            guilty = suspects.died(group, sorted(group))
            if guilty is not None:
                convicted.append(guilty)
                left.discard(guilty)
        else:
            for name in group:
                suspects.clear(name)
    return convicted


def test_the_culprit_is_found_by_halving_whoever_it_is() -> None:
    names = [f"a{i}" for i in range(13)]
    for culprit in names:
        assert investigate(names, {culprit}) == [culprit]


def test_several_culprits_are_all_found_and_nobody_else() -> None:
    names = [f"a{i}" for i in range(16)]
    assert sorted(investigate(names, {"a3", "a4", "a15"})) == ["a15", "a3", "a4"]


def test_who_ran_with_others_or_died_alone_once_is_not_convicted() -> None:
    suspects = Suspects()
    assert suspects.died(["a", "b"], ["a:1", "b:1"]) is None
    assert suspects.died(["a"], ["a:1"]) is None
    suspects.clear("a")
    suspects.clear("b")
    assert not suspects.group
    assert suspects.died(["a"], ["a:1"]) is None, "it was not set apart when its worker died"
    assert suspects.died(["a"], ["a:1"]) is None
    assert suspects.died(["a"], ["a:1"]) == "a:1"


def test_a_death_while_more_than_one_operation_of_the_suspect_ran_convicts_nobody() -> None:
    """Running again what it needs is no run of the suspected operation."""
    suspects = Suspects()
    for _ in range(5):
        assert suspects.died(["a"], ["a:1", "a:2"]) is None
    assert suspects.group == {"a"}


def test_only_the_group_whose_turn_it_is_may_run_and_while_it_waits_all_the_others() -> None:
    turns: list[str] = []
    suspects = Suspects(lambda: turns.append("turn"))
    suspects.died(["a", "b"], ["a:1", "b:1"])
    assert [suspects.may_run(name) for name in ("a", "b", "c")] == [True, False, False]
    suspects.wait(is_waiting=True)
    assert [suspects.may_run(name) for name in ("a", "b", "c")] == [False, False, True]
    suspects.wait(is_waiting=False)
    turns.clear()
    suspects.clear("a")
    assert turns == ["turn"]
    assert [suspects.may_run(name) for name in ("a", "b", "c")] == [False, True, False]
    suspects.clear("b")
    assert suspects.may_run("c")


def test_accidents_do_not_hide_the_culprit() -> None:
    for seed in range(50):
        names = [f"a{i}" for i in range(8)]
        assert "a5" in investigate(names, {"a5"}, random.Random(seed))
