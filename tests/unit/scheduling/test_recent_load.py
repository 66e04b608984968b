"""The load of adapters that ran lately."""

from coordinator.scheduling.recent_load import ACTIVE_S, RecentLoad


def test_an_adapter_counts_by_the_average_of_its_passes_until_it_has_been_idle_for_long() -> None:
    load = RecentLoad()
    load.add({"a": 100.0, "b": 10.0}, 0.0)
    load.add({"a": 200.0}, 50.0)
    assert dict(load.active(50.0)) == {"a": 130.0, "b": 10.0}
    assert dict(load.active(ACTIVE_S + 1)) == {"a": 130.0}
    load.add({}, ACTIVE_S + 51.0)
    assert not load._loads
