"""The neighbour: a tenant that steps, saves and samples as an ordinary client, and opens connections at both doors.

Each kind of work has a thread and repeats one call with a short pause. A call counts for the phase in which it began.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import grpc
import numpy as np

import tinkerpool
from scripts.attack.pool import AttackedPool
from scripts.clients.steps import TOKENS, WEIGHTS
from tinkerpool.v1 import sessions_pb2, sessions_pb2_grpc

STEP, SAVE, SAMPLE, NEW_HTTP, NEW_GRPC = "step", "save", "sample", "new HTTP", "new gRPC"
KINDS = (STEP, SAVE, SAMPLE, NEW_HTTP, NEW_GRPC)
RANK = 8
NUM_DRAWN = 8
PAUSE_S = 0.02
CONNECT_PAUSE_S = 0.25
CALL_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Phase:
    """The neighbour's calls of one phase."""

    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Of each call, by kind; a call that failed counts with the time until it failed."""
    failures: Counter[str] = field(default_factory=Counter)
    """Calls that failed or were refused, by kind."""
    reasons: Counter[str] = field(default_factory=Counter)

    def percentile_ms(self, kind: str, percent: float) -> float | None:
        """Return a percentile of the calls' times in milliseconds; None without a call."""
        times = self.seconds.get(kind)
        return float(np.percentile(times, percent)) * 1e3 if times else None


class Neighbour:
    """Works until the block ends; `begin` starts a new phase."""

    def __init__(self, pool: AttackedPool, key: str) -> None:
        self._pool, self._key = pool, key
        self._phase = Phase()
        self._under_way: dict[str, tuple[Phase, float]] = {}
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._service = tinkerpool.ServiceClient(pool.url, key, root_certificates=pool.certificate)
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        model = self._pool.model
        make = self._service.create_lora_training_client
        stepping, saving = (make(model, rank=RANK).result(START_TIMEOUT_S) for _ in range(2))
        sampling = self._service.create_sampling_client(base_model=model)
        prompt = tinkerpool.ModelInput.from_ints(TOKENS)
        params = tinkerpool.SamplingParams(max_tokens=NUM_DRAWN, seed=1)
        datum = tinkerpool.Datum(TOKENS[:-1], {"target_tokens": TOKENS[1:], "weights": WEIGHTS})
        adam = tinkerpool.AdamParams(learning_rate=1e-4)

        def step() -> None:
            stepping.train_step([datum], "cross_entropy", adam).result(CALL_TIMEOUT_S)

        def save() -> None:
            saving.save_state("kept", overwrite=True).result(CALL_TIMEOUT_S)

        def sample() -> None:
            sampling.sample(prompt, 1, params).result(CALL_TIMEOUT_S)

        actions: dict[str, tuple[Callable[[], None], float]] = {
            STEP: (step, PAUSE_S),
            SAVE: (save, PAUSE_S),
            SAMPLE: (sample, PAUSE_S),
            NEW_HTTP: (self._connect_http, CONNECT_PAUSE_S),
            NEW_GRPC: (self._connect_grpc, CONNECT_PAUSE_S),
        }
        for kind, (action, pause_s) in actions.items():
            action()  # warm, and a failure here is the harness's
            thread = threading.Thread(target=self._repeat, args=(kind, action, pause_s), name=kind, daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *exception: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(CONNECT_TIMEOUT_S)
        with contextlib.suppress(Exception):
            self._service.close()

    def begin(self) -> Phase:
        """Begin a phase."""
        self._phase = Phase()
        return self._phase

    def finish(self, phase: Phase, timeout_s: float) -> None:
        """End a phase: wait for the calls that began in it. Those still under way after the timeout count as failed."""
        self._phase = Phase()
        deadline = time.monotonic() + timeout_s
        while self._unfinished(phase) and time.monotonic() < deadline:
            time.sleep(0.02)
        for kind, began in self._unfinished(phase).items():
            self._end(phase, kind, began, f"no reply after {time.monotonic() - began:.0f} s")

    def _unfinished(self, phase: Phase) -> dict[str, float]:
        with self._lock:
            return {kind: began for kind, (of, began) in self._under_way.items() if of is phase}

    def _repeat(self, kind: str, action: Callable[[], None], pause_s: float) -> None:
        while not self._ending.wait(pause_s):
            phase, began = self._phase, time.monotonic()
            with self._lock:
                self._under_way[kind] = (phase, began)
            reason = ""
            try:
                action()
            except Exception as error:  # noqa: BLE001  # every failure is a figure
                reason = _reason(error)
            self._end(phase, kind, began, reason)

    def _end(self, phase: Phase, kind: str, began: float, reason: str) -> None:
        with self._lock:
            if self._under_way.get(kind) != (phase, began):
                return  # counted as failed already
            del self._under_way[kind]
            phase.seconds[kind].append(time.monotonic() - began)
            if reason:
                phase.failures[kind] += 1
                phase.reasons[f"{kind}: {reason}"] += 1

    def _connect_http(self) -> None:
        connection = self._pool.http_connection(CONNECT_TIMEOUT_S)
        try:
            connection.request("GET", "/api/v1/get_server_capabilities", headers={"X-API-Key": self._key})
            response = connection.getresponse()
            response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}")

    def _connect_grpc(self) -> None:
        with self._pool.new_channel() as channel:
            sessions_pb2_grpc.SessionServiceStub(channel).GetCapabilities(
                sessions_pb2.GetCapabilitiesRequest(),
                metadata=(("authorization", f"Bearer {self._key}"),),
                timeout=CONNECT_TIMEOUT_S,
                wait_for_ready=True,
            )


def _reason(error: Exception) -> str:
    """Return a failure as one short line."""
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"[:120]
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]
