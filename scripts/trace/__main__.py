"""Print the product files that one step and one sample execute, through both doors: `make trace`.

    python -m scripts.trace
    python -m scripts.trace --json paths.json

Starts a pool with one worker in Ray, so that client, coordinator and worker are three processes. Every request is sent
twice before it is recorded, so that work that happens once (imports, connections, caches) is not in its path.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from scripts.trace.path import RequestPath, background_of, path_of
from scripts.trace.processes import TracedPool, traced_pool
from scripts.trace.recorder import Call, Recorder, RemoteRecorder
from scripts.trace.requests import DOORS

IDLE_S = 6.0
"""Longer than the longest interval of background work that no session causes: housekeeping, every 5 s."""
NUM_WARM_UP = 2
ATTEMPTS_MAX = 10
EXPLANATION = """\
Files of coordinator/, workers/ and tinkerpool/ (generated code left out) of which a function ran between the call and
its result. Background work is left out: the pool was recorded for {idle_s:g} s without clients (pings, polls, health,
housekeeping), and a function that ran then is not counted below the same asyncio task or thread. A recording into which
a session's heartbeat fell was repeated. Constructors that dataclasses generate belong to no file."""


def record(pool: TracedPool, action: Callable[[], object]) -> dict[str, Sequence[Call]]:
    """Return what every process executed during the action."""
    own = Recorder()
    recorders: dict[str, Recorder | RemoteRecorder] = {
        "worker": pool.worker,
        "coordinator": pool.coordinator,
        "client": own,
    }
    for recorder in recorders.values():
        recorder.start()
    action()
    return {process: recorder.stop() for process, recorder in reversed(recorders.items())}


def record_undisturbed(pool: TracedPool, action: Callable[[], object]) -> dict[str, Sequence[Call]]:
    """Return what every process executed during the action, without a session's heartbeat."""
    for _ in range(ATTEMPTS_MAX):
        calls = record(pool, action)
        if not any("heartbeat" in call.function.name.lower() for recorded in calls.values() for call in recorded):
            return calls
    raise RuntimeError(f"a heartbeat fell into each of {ATTEMPTS_MAX} recordings")


def trace() -> list[RequestPath]:
    """Start a pool and return the path of each request."""
    with traced_pool() as pool:
        idle = record(pool, lambda: time.sleep(IDLE_S))
        background = {process: background_of(calls) for process, calls in idle.items()}
        paths = []
        for door, open_requests in DOORS.items():
            with open_requests(pool) as requests:
                for name, request in requests.items():
                    for _ in range(NUM_WARM_UP):
                        request()
                    paths.append(path_of(door, name, record_undisturbed(pool, request), background))
        return paths


def main() -> int:
    """Read the command line, trace and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the paths to this file")
    args = parser.parse_args()
    paths = trace()
    print(EXPLANATION.format(idle_s=IDLE_S))
    for path in paths:
        print(f"\n{path.table()}")
    print("\n" + "\n".join(path.table().partition("\n")[0] for path in paths))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(path) for path in paths], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
