"""Ray's notices of nodes that it drains, as the pool reads them."""

import math
import time

import pytest
import ray

from workers.pool.ray_nodes import _Lister  # private: it runs in an actor of the pool


def test_a_notice_becomes_the_seconds_that_are_left_and_one_without_a_time_is_never_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deadlines_ms = {"soon": int((time.time() + 30) * 1000), "some time": 0}
    monkeypatch.setattr(ray._private.state.state, "get_draining_nodes", lambda: deadlines_ms)  # needs a cluster
    left_s = _Lister().draining()
    assert 29 < left_s["soon"] <= 30
    assert left_s["some time"] == math.inf
