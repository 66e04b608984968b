"""Settings of every test run: no network, no foreign Ray, reproducible examples; groups of tests for each process."""

import gc
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Set before anything imports a library that reads them; child processes inherit them.
os.environ |= {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # tests run side by side; a second thread of each would mostly wait for a core
    "OMP_WAIT_POLICY": "passive",  # spinning threads are up to ten times slower where other processes want the cores
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # or Ray would write one into the home directory
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a call to a Ray that has ended fails, as in a pool, and starts no other one
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_INTERPRET": "1",  # kernels for a GPU run on a CPU; `tests/gpu` undoes it
}
# A Ray address in the environment would make tests join that cluster.
os.environ.pop("RAY_ADDRESS", None)
# The width of a terminal in the environment would change tables.
os.environ.pop("COLUMNS", None)

# The tests' pools sync their files thousands of times, 5 to 20 ms each on a disk. No test here cuts the power.
IN_MEMORY, IN_MEMORY_BYTES = Path("/dev/shm"), 2 << 30
"""Linux's file system in memory, and the least free room with which the tests' folders are there."""
if IN_MEMORY.is_dir() and os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free >= IN_MEMORY_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))

# A session of the SDK whose pool a test has killed keeps sending heartbeats in its thread and logs each failure until
# the process ends, also after pytest's last line. Without a handler Python would write that to stderr.
logging.getLogger("tinker").addHandler(logging.NullHandler())

# Deadlines fail on a busy machine without a bug. The examples are the same in every run;
# look for new ones with `make test ARGS="--hypothesis-profile=search"`.
hypothesis.settings.register_profile("tinkerpool", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("tinkerpool")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave modules and tests out of garbage collections.

    They stay until the end, and a full collection, which many tests request, takes 0.4 s to walk over them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Group and sort the tests for `--dist loadgroup`, which hands groups to processes in this order.

    Tests that start Ray are one group, those of scripts another: many Rays at once would starve each other. Tests of a
    module in `integration` or `simulation` are one group: they share an expensive fixture. A group that a test names
    itself wins. Other tests are scheduled one by one, the short ones last, so that no process ends long before the
    other.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    for item in items:
        if item.get_closest_marker("xdist_group"):
            continue
        if item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.xdist_group("ray"))
        elif {"integration", "simulation"} & set(item.path.parts):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=_rank)
    yield  # xdist adds the group to the name of each test
    ungrouped = [item for item in items if item.get_closest_marker("xdist_group") and "@" not in item.nodeid]
    if ungrouped:
        raise pytest.UsageError("pytest-xdist did not group the tests: install the versions in constraints.txt")


def _rank(item: pytest.Item) -> int:
    if item.get_closest_marker("tracemalloc"):
        return -1  # before Ray has started threads: with them, Python's tracemalloc can crash the process
    if item.get_closest_marker("ray"):
        return 0
    if item.get_closest_marker("slow") or item.get_closest_marker("long"):
        return 1
    return 3 if "unit" in item.path.parts else 2
