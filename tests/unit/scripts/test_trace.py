"""The tracer: which functions a recorder records, and which work counts as background."""

from __future__ import annotations

import threading

import numpy as np

from scripts.trace.path import background_of, path_of
from scripts.trace.recorder import Call, Function, Recorder
from tinkerpool.convert import to_tensor

ARRAY = np.ones(2, np.float32)
LOOP = Function("coordinator/loop.py", "Loop.run")
PING = Function("coordinator/ping.py", "ping")
STORE = Function("coordinator/store.py", "append")
DOOR = Function("coordinator/door.py", "call")


def test_a_recorder_notes_the_products_functions_on_threads_that_run_already() -> None:
    go, done = threading.Event(), threading.Event()

    def work() -> None:
        go.wait()
        to_tensor(ARRAY)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    recorder = Recorder()
    recorder.start()
    go.set()
    done.wait()
    names = {call.function.name for call in recorder.stop()}
    thread.join()
    assert "to_tensor" in names
    assert "work" not in names, "a test is not part of the product"


def test_work_of_an_idle_pool_is_background_but_not_below_another_root() -> None:
    idle = [Call(LOOP, PING, 1), Call(LOOP, STORE, 2)]
    request = {
        "client": [],
        "coordinator": [Call(DOOR, DOOR, 5_000_000), Call(LOOP, PING, 6_000_000), Call(DOOR, STORE, 8_000_000)],
    }
    path = path_of("gRPC", "sample", request, {"client": background_of([]), "coordinator": background_of(idle)})
    assert [(step.file, step.at_ms) for step in path.steps] == [(DOOR.file, 0.0), (STORE.file, 3.0)]


def test_a_file_in_two_processes_counts_once() -> None:
    request = {"client": [Call(DOOR, STORE, 1)], "worker": [Call(DOOR, STORE, 2)]}
    path = path_of("gRPC", "sample", request, {"client": background_of([]), "worker": background_of([])})
    assert len(path.steps) == 2
    assert path.files == (STORE.file,)
    assert path.table().startswith("gRPC, sample: 1 files (client 1, coordinator 0, worker 1)")
