"""One run: a pool in a process of its own, a neighbour that trains and samples beside the messages, and the checks.

Every target gets a tenant of its own, with a session, an adapter, checkpoints and a sampler that are made again now and
then, because some messages delete them. Main invariant: a message is made from the seed, the target and its number
alone, up to the ids that the pool draws.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import httpx

import tinkerpool
from scripts.attack.pool import AttackedPool
from scripts.reliability.fuzz.targets import Fault, Target, make_targets
from scripts.reliability.fuzz.values import ADAPTER_CONFIG, WEIGHTS_HEADER, Known, Values
from tinkerpool.v1 import adapters_pb2, adapters_pb2_grpc, admin_pb2, sessions_pb2, sessions_pb2_grpc

AT_ONCE = 8
"""Messages to one target that are under way at a time."""
RENEW = 500
"""Messages after which a target's tenant gets new objects."""
FAULTS_SHOWN = 5
"""Faults that are kept of one target."""
MEMORY_GROWTH_MAX = 600 << 20
RESULT_S = 120.0
STEPS = 3
TOKENS = list(range(10, 26))
ADMIN = "fuzz-AdminService"
"""How the names of administrators begin."""
UNKNOWN_KEY = "tp_000000000000_" + "x" * 43


@dataclass(slots=True)
class Found:
    """What the messages to one target led to."""

    target: str
    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    num_faults: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Report:
    """What a run found."""

    found: list[Found] = field(default_factory=list)
    num_runs_of_neighbour: int = 0
    general: list[str] = field(default_factory=list)
    """Faults of the pool as a whole."""
    idle_bytes: int = 0
    most_bytes: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found."""
        return not self.general and not any(each.num_faults for each in self.found)


class Neighbour:
    """Repeats one short training and compares its results, bit by bit, with those of the first time."""

    def __init__(self, pool: AttackedPool, key: str) -> None:
        self._url, self._key = pool.url, key
        with tinkerpool.ServiceClient(pool.url, key) as service:
            first = service.create_lora_training_client(pool.model, rank=8).result(RESULT_S)
            self._start = first.save_state("start").result(RESULT_S).path
            self._expected = self._run(service)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="neighbour", daemon=True)
        self.num_runs = 0
        self.faults: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ending.set()
        self._thread.join(RESULT_S)

    def _repeat(self) -> None:
        while not self._ending.is_set() and not self.faults:
            try:
                with tinkerpool.ServiceClient(self._url, self._key) as service:  # samplers go with their session
                    found = self._run(service)
                if found != self._expected:
                    self.faults.append("the neighbour's results differ from those without the messages")
            except Exception as error:  # noqa: BLE001  # any failure is a finding
                self.faults.append(f"the neighbour failed: {error!r}")
            self.num_runs += 1

    def _run(self, service: tinkerpool.ServiceClient) -> str:
        """Train and sample; return a hash of all results."""
        digest = hashlib.sha256()
        client = service.create_training_client_from_state(self._start).result(RESULT_S)
        inputs = {"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)}
        for _ in range(STEPS):
            passed = client.forward_backward([tinkerpool.Datum(TOKENS[:-1], inputs)], "cross_entropy")
            stepped = client.optim_step(tinkerpool.AdamParams(learning_rate=1e-3))
            for datum in passed.result(RESULT_S).loss_fn_outputs:
                digest.update(datum["logprobs"].to_numpy().tobytes())
            stepped.result(RESULT_S)
        sampler = client.save_weights_and_get_sampling_client().result(RESULT_S)
        params = tinkerpool.SamplingParams(max_tokens=6, seed=3)
        drawn = sampler.sample(tinkerpool.ModelInput.from_ints(TOKENS), 2, params).result(RESULT_S)
        digest.update(repr([list(each.tokens) for each in drawn.sequences]).encode())
        # A tenant has a ceiling of adapters.
        service.create_rest_client().delete_training_run(str(client.model_id)).result(RESULT_S)
        return digest.hexdigest()


class Tenant:
    """The tenant of one target: makes the objects that messages name.

    That of an administrative RPC is an administrator, and makes other tenants.
    """

    def __init__(self, pool: AttackedPool, name: str, theirs: Known) -> None:
        self._pool, self._name = pool, name
        self._is_admin = name.startswith(ADMIN)
        self.key = pool.create_key(name, role=admin_pb2.ROLE_ADMIN if self._is_admin else admin_pb2.ROLE_MEMBER)
        self.known = Known({kind: list(names) for kind, names in theirs.names.items()})
        self.known.add("model", pool.model)
        self.known.add("upload", "u")
        self.known.add("config", ADAPTER_CONFIG)
        self.known.add("header", WEIGHTS_HEADER)
        self._services = contextlib.ExitStack()
        self._number = 0

    def renew(self) -> None:
        """Make new objects, and remember their names."""
        self._number += 1
        self.close()
        self._make_room()
        # A message may have ended the session of the last one.
        service = tinkerpool.ServiceClient(self._pool.url, self.key)
        self._services.callback(service.close)
        client = service.create_lora_training_client(self.known.newest("model"), rank=8).result(RESULT_S)
        saved = client.save_state(f"state{self._number}").result(RESULT_S).path
        weights = client.save_weights_for_sampler(f"weights{self._number}").result(RESULT_S).path
        adapter = str(client.model_id)
        sampler = service.create_sampling_client(base_model=self.known.newest("model"))
        self.known.add("session", adapter.partition(":")[0])
        self.known.add("adapter", adapter)
        self.known.add("path", str(saved), str(weights))
        self.known.add("operation", f"{adapter}:1", f"{adapter}:2")
        self.known.add("sampler", sampler.sampler_id)
        if self._is_admin:  # what its messages may suspend, limit, revoke and delete
            other = f"{self._name}-{self._number}"
            self.known.add("key", self._pool.create_key(other).split("_")[1])
            self.known.add("tenant", other)

    def _make_room(self) -> None:
        """End all sessions and delete all adapters, or messages that create some would only meet ceilings."""
        metadata = (("authorization", f"Bearer {self.key}"),)
        with grpc.insecure_channel(self._pool.grpc) as channel:
            sessions, adapters = (
                sessions_pb2_grpc.SessionServiceStub(channel),
                adapters_pb2_grpc.AdapterServiceStub(channel),
            )
            listed = sessions.ListSessions(sessions_pb2.ListSessionsRequest(page_size=1000), metadata=metadata)
            for session in listed.sessions:
                finish = sessions_pb2.FinishSessionRequest(session_id=session.session_id)
                sessions.FinishSession(finish, metadata=metadata)
            kept = adapters.ListAdapters(adapters_pb2.ListAdaptersRequest(page_size=1000), metadata=metadata)
            for adapter in kept.adapters:
                delete = adapters_pb2.DeleteAdapterRequest(adapter_id=adapter.adapter_id)
                adapters.DeleteAdapter(delete, metadata=metadata)

    def close(self) -> None:
        """End the session of its objects."""
        self._services.close()


async def fuzz(
    names: Sequence[str], num_messages: int, seed: int, serve_arguments: Sequence[str], report_one: Any = print
) -> Report:
    """Send messages to every target whose name contains one of `names`, all without names; return what was found."""
    report = Report()
    with AttackedPool(serve_arguments, None) as pool:
        neighbour = await asyncio.to_thread(Neighbour, pool, pool.create_key("neighbour"))
        report.idle_bytes = report.most_bytes = pool.memory_bytes()
        theirs = await asyncio.to_thread(_names_of_another, pool)
        async with _clients(pool) as (channel, client):
            targets = make_targets(channel, client)
            with neighbour:
                for target in targets:
                    if names and not any(name in target.name for name in names):
                        continue
                    found = await _fuzz_one(pool, target, theirs, num_messages, seed)
                    report.found.append(found)
                    report.most_bytes = max(report.most_bytes, pool.memory_bytes())
                    report_one(found)
                    if pool.exit_code is not None:
                        report.general.append(f"the pool has ended, after {target.name}: {pool.log_tail()}")
                        return report
        report.num_runs_of_neighbour = neighbour.num_runs
        report.general += neighbour.faults
        if report.most_bytes > report.idle_bytes + MEMORY_GROWTH_MAX:
            report.general.append(f"the pool's memory grew from {report.idle_bytes} to {report.most_bytes} bytes")
        if "Traceback" in (log := pool.log_text()):
            report.general.append(f"the pool's log has an exception: {log[log.index('Traceback') - 500 :][:3000]}")
    return report


@contextlib.asynccontextmanager
async def _clients(pool: AttackedPool) -> Any:
    limits = httpx.Limits(max_connections=2 * AT_ONCE)
    async with (
        grpc.aio.insecure_channel(pool.grpc) as channel,
        httpx.AsyncClient(base_url=f"http://{pool.http}", limits=limits, headers={"x-retries": "0"}) as client,
    ):
        yield channel, client


async def _fuzz_one(pool: AttackedPool, target: Target, theirs: Known, num_messages: int, seed: int) -> Found:
    """Send messages to one target, `AT_ONCE` at a time."""
    found = Found(target.name)
    began = time.monotonic()
    tenant = await asyncio.to_thread(Tenant, pool, _tenant_name(target), theirs)
    try:
        for first in range(0, num_messages, RENEW):
            await asyncio.to_thread(tenant.renew)
            numbers = iter(range(first, min(first + RENEW, num_messages)))
            await asyncio.gather(*(_send_all(target, tenant, numbers, seed, found) for _ in range(AT_ONCE)))
    finally:
        await asyncio.to_thread(tenant.close)
    found.seconds = time.monotonic() - began
    return found


async def _send_all(target: Target, tenant: Tenant, numbers: Any, seed: int, found: Found) -> None:
    for number in numbers:
        rng = random.Random(f"{seed}/{target.name}/{number}")
        message = target.message(Values(rng, tenant.known))
        key = rng.choices((tenant.key, None, UNKNOWN_KEY, "not a key"), (90, 5, 4, 1))[0]
        try:
            found.answers[await target.send(message, key)] += 1
        except Fault as fault:
            found.num_faults += 1
            if len(found.faults) < FAULTS_SHOWN:
                found.faults.append(f"seed {seed}, message {number}: {fault}\n    {str(message)[:2000]}")


def _tenant_name(target: Target) -> str:
    return "fuzz-" + re.sub(r"[^A-Za-z0-9]+", "-", target.name)[-50:].strip("-")


def _names_of_another(pool: AttackedPool) -> Known:
    """Return names of another tenant's objects: messages must not reach them."""
    tenant = Tenant(pool, "another", Known())
    tenant.renew()
    tenant.close()
    return tenant.known
