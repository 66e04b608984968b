"""The clients of `make load`: raw stubs on one event loop, so that hundreds of them take little processor time.

A client has a session, a connection and an API key of its own, and either trains an adapter or samples from the base
model, with a constant number of requests in flight. It waits for as long as a refusal says, and counts it. Does not
depend on what is measured. Main invariant: whatever else a call raises, and every failed operation, is an error of the
record.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import numpy as np

from tinkerpool.client.calls.transport import refusal_of
from tinkerpool.convert import to_tensor
from tinkerpool.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    operations_pb2,
    operations_pb2_grpc,
    sampling_pb2,
    sampling_pb2_grpc,
    sessions_pb2,
    sessions_pb2_grpc,
    training_pb2,
    training_pb2_grpc,
    types_pb2,
)

CALL_S = 120.0
"""Most seconds of one call; waits for results have none."""
HEARTBEAT_S = 60.0
TOKENS_END = 60
"""The toy engine fails on some tokens above."""
ERRORS_KEPT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPlan:
    """What one client does."""

    name: str
    """Latencies are recorded under it; clients may share one."""
    key: str
    trains: bool
    """Otherwise it samples."""
    num_tokens: int
    """Tokens of a sequence, or of a prompt."""
    num_sequences: int = 1
    """Of a pass."""
    num_drawn: int = 0
    """Tokens that a sample draws."""
    in_flight: int = 1
    """Requests in flight; a step is one."""
    impatience_s: float | None = None
    """Pause after a refusal, whatever it says. None: as long as it says."""


@dataclass(slots=True)
class Record:
    """What the clients of one process saw."""

    num_done: Counter[str] = field(default_factory=Counter)
    """Finished steps and samples, by name of the clients."""
    latencies_s: dict[str, list[float]] = field(default_factory=dict)
    """From a request to its result, by name of the clients."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Refusals that waiting clears, by reason."""
    refused_s: list[float] = field(default_factory=list)
    """From a request to its refusal."""
    errors: list[str] = field(default_factory=list)
    """The first errors."""
    num_errors: int = 0

    def done(self, name: str, seconds: float) -> None:
        """Count a step or a sample."""
        self.num_done[name] += 1
        self.latencies_s.setdefault(name, []).append(seconds)

    def failed(self, what: str) -> None:
        """Count an error."""
        self.num_errors += 1
        if len(self.errors) < ERRORS_KEPT:
            self.errors.append(what)

    def add(self, other: Record) -> None:
        """Add what another process's clients saw."""
        self.num_done.update(other.num_done)
        for name, seconds in other.latencies_s.items():
            self.latencies_s.setdefault(name, []).extend(seconds)
        self.refusals.update(other.refusals)
        self.refused_s += other.refused_s
        self.errors += other.errors[: ERRORS_KEPT - len(self.errors)]
        self.num_errors += other.num_errors


class Client:
    """One client. `open`, then `run` until `stopping` is set, then `close`."""

    def __init__(self, plan: ClientPlan, target: str, model: str, record: Record, stopping: asyncio.Event) -> None:
        self._plan = plan
        self._model = model
        self._record = record
        self._stopping = stopping
        self._channel = grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])
        self._metadata = (("authorization", f"Bearer {plan.key}"),)
        self._random = random.Random(plan.key + plan.name)
        self._sessions = sessions_pb2_grpc.SessionServiceStub(self._channel)
        self._session_id = self._target_id = ""
        self._last_seq = 0

    async def open(self) -> None:
        """Create a session, and an adapter or a sampler."""
        created = await self._call(self._sessions.CreateSession, sessions_pb2.CreateSessionRequest())
        self._session_id = created.session.session_id
        if self._plan.trains:
            adapters = adapters_pb2_grpc.AdapterServiceStub(self._channel)
            adapter = adapters_pb2.CreateAdapterRequest(session_id=self._session_id, base_model=self._model, rank=8)
            self._target_id = (await self._call(adapters.CreateAdapter, adapter)).adapter.adapter_id
        else:
            sampling = sampling_pb2_grpc.SamplingServiceStub(self._channel)
            sampler = sampling_pb2.CreateSamplerRequest(session_id=self._session_id, base_model=self._model)
            self._target_id = (await self._call(sampling.CreateSampler, sampler)).sampler.sampler_id

    async def run(self) -> None:
        """Work until `stopping` is set, and finish what was begun. An error ends the client."""
        beating = asyncio.create_task(self._beat())
        try:
            if self._plan.trains:
                await self._train()
            else:
                await asyncio.gather(*(self._sample() for _ in range(self._plan.in_flight)))
        except Exception as error:  # noqa: BLE001  # any failure is a finding
            self._record.failed(f"{self._plan.name}: {error!r}"[:500])
        finally:
            beating.cancel()

    async def close(self) -> None:
        """End the session."""
        with suppress(grpc.aio.AioRpcError):
            await self._sessions.FinishSession(
                sessions_pb2.FinishSessionRequest(session_id=self._session_id), metadata=self._metadata, timeout=10.0
            )
        await self._channel.close()

    async def _train(self) -> None:
        """Submit a forward_backward with its optim_step, `in_flight` of these pairs ahead."""
        train_step = training_pb2_grpc.TrainingServiceStub(self._channel).TrainStep
        sent: deque[tuple[float, list[str]]] = deque()
        request = step_request(self._target_id, self._plan.num_tokens, self._random, self._plan.num_sequences)
        while not self._stopping.is_set():
            request.seq = request.batch.first_seq = self._last_seq + 1
            self._last_seq += 2
            began = time.monotonic()
            accepted = await self._call(train_step, request)
            sent.append((began, [accepted.forward_backward.name, accepted.optim_step.name]))
            if len(sent) == self._plan.in_flight:
                await self._wait(*sent.popleft())
        for began, names in sent:
            await self._wait(began, names)

    async def _sample(self) -> None:
        sample = sampling_pb2_grpc.SamplingServiceStub(self._channel).Sample
        while not self._stopping.is_set():
            self._last_seq += 1
            prompt = np.array(self._random.choices(range(1, TOKENS_END), k=self._plan.num_tokens), np.int32)
            request = sampling_pb2.SampleRequest(
                sampler_id=self._target_id,
                seq=self._last_seq,
                prompt=to_tensor(prompt),
                num_samples=1,
                params=sampling_pb2.SamplingParams(max_tokens=self._plan.num_drawn, stop=sampling_pb2.StopCondition()),
            )
            began = time.monotonic()
            accepted = await self._call(sample, request)
            await self._wait(began, [accepted.operation.name])

    async def _wait(self, began: float, names: list[str]) -> None:
        """Wait for operations of one request, and record it."""
        waiting, has_failed = set(names), False
        operations = operations_pb2_grpc.OperationServiceStub(self._channel)

        async def read(request: Any, **options: Any) -> None:
            nonlocal has_failed
            async for response in operations.WaitOperations(request, **options):
                operation = response.operation
                waiting.discard(operation.name)
                if operation.state != operations_pb2.OPERATION_STATE_SUCCEEDED:
                    has_failed = True
                    self._record.failed(f"{operation.name}: {operation.error.reason} {operation.error.message}")

        while waiting:
            await self._call(read, operations_pb2.WaitOperationsRequest(names=sorted(waiting)), timeout_s=None)
        if not has_failed:
            self._record.done(self._plan.name, time.monotonic() - began)

    async def _call(self, method: Callable[..., Any], request: Any, *, timeout_s: float | None = CALL_S) -> Any:
        """Call until the service accepts; wait for as long as each refusal says. Raises AioRpcError for others."""
        while True:
            began = time.monotonic()
            try:
                return await method(request, metadata=self._metadata, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                refusal = refusal_of(error)
                if refusal is None or refusal.retry_delay_s is None:
                    raise
                self._record.refusals[refusal.reason] += 1
                self._record.refused_s.append(time.monotonic() - began)
            await asyncio.sleep(refusal.retry_delay_s if self._plan.impatience_s is None else self._plan.impatience_s)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S * self._random.uniform(0.8, 1.0))
            try:
                await self._call(self._sessions.Heartbeat, sessions_pb2.HeartbeatRequest(session_id=self._session_id))
            except grpc.aio.AioRpcError as error:
                self._record.failed(f"{self._plan.name}: heartbeat: {error!r}"[:500])


def step_request(
    adapter_id: str, num_tokens: int, rng: random.Random, num_sequences: int = 1
) -> training_pb2.TrainStepRequest:
    """Return a step of equal sequences of this many tokens, without its seq."""
    tokens = np.array(rng.choices(range(1, TOKENS_END), k=num_tokens), np.int32)
    inputs = {"target_tokens": to_tensor(tokens), "weights": to_tensor(np.ones(num_tokens, np.float32))}
    return training_pb2.TrainStepRequest(
        adapter_id=adapter_id,
        data=[types_pb2.Datum(tokens=to_tensor(tokens), loss_inputs=inputs)] * num_sequences,
        loss_function=types_pb2.LOSS_FUNCTION_CROSS_ENTROPY,
        adam=types_pb2.AdamParams(learning_rate=1e-4),
        batch=training_pb2.Batch(num_requests=1),
    )
