"""A tenant's client: sends its script through the use cases until every operation is acknowledged, done and fetched.

A client outlives coordinators: its state is in plain objects, and `run` continues from it in each epoch. It sends
requests several times and out of order, loses responses, sends a different request for a sequence number that is taken,
and fetches every result repeatedly. Does not depend on injected faults or on the oracle; raises ContractViolation for a
response that the service must never give.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar, cast

from coordinator.base.errors import Code, ServiceError
from coordinator.coordinator import Coordinator
from coordinator.operations.admission import storage_error
from coordinator.storage.sqlite import StorageError
from coordinator.tenants.principals import Caller, Principal, Role
from tests.simulation.script import Step, request_of, sample_request_of
from tests.simulation.standing import ContractViolation, Standings
from tests.simulation.world import World
from tinkerpool.v1 import adapters_pb2, admin_pb2, sampling_pb2, sessions_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb

T = TypeVar("T")
HEARTBEAT_S = 60.0
HELD_S = 2.0
"""Longest pause after a call that was refused because of what the client's key or tenant is now."""
HELD = ("TENANT_SUSPENDED", "TENANT_DELETED")
KEY_ENDED = ("API_KEY_INVALID", "API_KEY_EXPIRED")
LOCAL = Caller(is_local=True)
FETCHES = 3
"""How often each result is fetched at least."""
FINAL = (ops_pb.OPERATION_STATE_SUCCEEDED, ops_pb.OPERATION_STATE_FAILED)


@dataclass(slots=True)
class Sent:
    """One request, its operations and their results."""

    method: str
    build: Callable[[int], Any]
    """Makes the request of a variant."""
    variant: int = 0
    """The variant to send. A client may change it until the request is acknowledged."""
    is_bad: bool = False
    has_contents: bool = True
    """Whether its variants differ."""
    has_changed: bool = False
    names: list[str] = field(default_factory=list)
    """Its operations, once it is acknowledged."""
    is_acknowledged: bool = False
    results: dict[str, bytes] = field(default_factory=dict)
    """Operation to the outcome that was fetched first."""
    num_fetches: int = 0

    @property
    def is_done(self) -> bool:
        return self.is_acknowledged and self.num_fetches > 0

    def request(self) -> Any:
        """Return the request of the present variant."""
        return self.build(self.variant)

    def outcome(self, index: int = 0) -> ops_pb.Operation:
        """Return an operation's outcome."""
        return ops_pb.Operation.FromString(self.results[self.names[index]])


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How a client behaves."""

    window: int
    """Requests sent ahead of acknowledgements."""
    drop: float
    """Probability that a response is lost."""
    repeat: float
    """Probability that a request is sent more than once."""
    other: float
    """Probability that a different request is sent for a sequence number that is taken."""
    think_s: float
    """Mean pause before a request."""


class Client:
    """One tenant with one adapter."""

    def __init__(
        self,
        world: World,
        name: str,
        script: list[Step],
        behaviour: Behaviour,
        standings: Standings,
        role: Role = Role.MEMBER,
    ) -> None:
        self.name = name
        self.script = script
        self.adapter_id = ""
        self.session_id = ""
        self.sent: dict[int, Sent] = {}
        """By seq."""
        self.samples: dict[tuple[int, int], Sent] = {}
        """By the seq of the save and the sample's number."""
        self.samplers: dict[int, str] = {}
        """By the seq of the save."""
        self._world = world
        self._behaviour = behaviour
        self._random: Random = world.random(f"client {name}")
        self._standings = standings
        self._role = role
        self.key = ""
        """The API key that it calls with; empty before it has one."""
        self._principal: Principal | None = None
        self.is_key_in_doubt = False
        """The key is being replaced: it may have ended already."""
        self._coordinator: Coordinator
        self._changed: asyncio.Event

    @property
    def is_done(self) -> bool:
        """Whether every request is acknowledged and every result was fetched."""
        return all(step.seq in self.sent and self.sent[step.seq].is_done for step in self.script) and all(
            (step.seq, number) in self.samples and self.samples[step.seq, number].is_done
            for step in self.script
            if self._is_published(step)
            for number in range(1, step.num_samples + 1)
        )

    @property
    def principal(self) -> Principal:
        """The tenant's principal, once it has a key; for checks that no call makes."""
        assert self._principal is not None
        return self._principal

    @contextmanager
    def calling(self, *, ends_with_key: bool = True) -> Iterator[Principal]:
        """Make a call in this block as a door does: admitted by its key, and ended when the key or the tenant is.

        `ends_with_key`: not for a call that may end its own key.

        Raises ServiceError; with a delay where the client tries again though the service does not say that it helps.
        """
        keys, key = self._coordinator.authenticator, self.key
        try:
            principal = keys.admit(key, LOCAL, self._role)
            self._standings.check_admitted(self.name)
            with keys.while_valid(principal) if ends_with_key else nullcontext():
                yield principal
        except ServiceError as error:
            if error.reason in HELD:
                self._standings.check_refused(self.name, error)
            elif error.reason not in KEY_ENDED or not (
                self.is_key_in_doubt or key != self.key or self._standings.is_gone(self.name)
            ):
                raise
            raise ServiceError(error.code, error.reason, error.message, retry_delay_s=HELD_S) from error

    async def connect(self, coordinator: Coordinator) -> None:
        """Continue with another coordinator, and see to it that the tenant has a key."""
        self._coordinator = coordinator
        self._changed = asyncio.Event()
        if self._principal is None:
            await self.renew_key()
            self._change()

    async def renew_key(self) -> None:
        """Have the operator of the pool make another key."""
        await self.repeated(self._make_key)

    async def replaced_key(self, grace_seconds: int) -> str:
        """Have the service replace the client's key; return the new one. Raises ServiceError."""
        request = admin_pb2.RotateApiKeyRequest(grace_seconds=grace_seconds)
        with self.calling(ends_with_key=False) as principal:
            return str((await self._coordinator.service.rotate_api_key(principal, request)).key)

    async def call(self, method: str, request: Any, *, done: str = "") -> Any:
        """Call a use case until its response arrives.

        `done`: the reason of a repeated call's refusal that says that an earlier one had its effect; returns None then.
        """
        attempts = itertools.count()

        async def call() -> Any:
            is_repeated = next(attempts) > 0
            try:
                with self.calling() as principal:
                    return await getattr(self._coordinator.service, method)(principal, request)
            except ServiceError as error:
                if is_repeated and error.reason == done:
                    return None
                raise

        return await self.repeated(call)

    async def run(self, coordinator: Coordinator, *, is_last: bool) -> None:
        """Continue until all is done.

        In the last epoch, sample once more from all published weights, and fetch results until each was fetched
        `FETCHES` times.
        """
        await self.connect(coordinator)
        await self._set_up()
        for sent in self._all():
            self._redraw_contents(sent)
        await asyncio.gather(*(self._run_step(step) for step in self.script))
        if is_last:
            published = [step for step in self.script if self._is_published(step)]
            await asyncio.gather(*(self._sample(step, step.num_samples + 1) for step in published))
        while is_last and any(each.num_fetches < FETCHES for each in self._all()):
            await self._fetch_all([each for each in self._all() if each.num_fetches < FETCHES])

    async def until_known(self) -> None:
        """Return once the tenant has a key."""
        await self._until(lambda: self._principal is not None)

    async def until_admitted(self) -> None:
        """Return at a moment at which a call would be admitted."""
        while True:
            try:
                with self.calling():
                    return
            except ServiceError as error:
                await self._pause_after(error, "a call")

    async def keep_alive(self, coordinator: Coordinator) -> None:
        """Send heartbeats, also once all is done: other clients may need longer than a session waits."""
        while True:
            if self._principal is not None and self.session_id:
                request = sessions_pb2.HeartbeatRequest(session_id=self.session_id)
                with suppress(ServiceError), self.calling() as principal:
                    await coordinator.service.heartbeat(principal, request)
            await asyncio.sleep(HEARTBEAT_S)

    async def _set_up(self) -> None:
        if not self.session_id:
            request = sessions_pb2.CreateSessionRequest(request_id="session")
            response = await self.call("create_session", request)
            self.session_id = response.session.session_id
        if not self.adapter_id:
            creation = adapters_pb2.CreateAdapterRequest(
                session_id=self.session_id, base_model="toy", rank=8, index=0, seed=len(self.name)
            )
            response = await self.call("create_adapter", creation)
            self.adapter_id = response.adapter.adapter_id

    async def _make_key(self) -> None:
        try:
            key, _ = await self._coordinator.authenticator.create_key(self.name, role=self._role)
        except StorageError as error:
            raise storage_error(error) from None
        self.key, self._principal = key, self._coordinator.authenticator.authenticate(key)

    async def _run_step(self, step: Step) -> None:
        """Wait until the step may be sent, submit it, and sample from the weights that it saves."""
        before = [each.seq for each in self.script if each.seq < step.seq][: -self._behaviour.window or None]
        await self._until(lambda: all(seq in self.sent and self.sent[seq].is_acknowledged for seq in before))
        if step.source:
            await self._until(lambda: step.source in self.sent and self.sent[step.source].is_done)
        if step.seq not in self.sent:
            path = f"tinker://{self.adapter_id}/weights/absent"
            if step.source and not (saved := self.sent[step.source].outcome()).error.code:
                path = saved.save_state.path
            adapter_id = self.adapter_id
            self.sent[step.seq] = Sent(
                step.kind,
                lambda variant: request_of(step, adapter_id, path, variant),
                is_bad=step.is_bad or (bool(step.source) and path.endswith("/absent")),
                has_contents=step.has_contents,
            )
        sent = self.sent[step.seq]
        names = [f"{self.adapter_id}:{step.seq + index}" for index in range(step.num_seqs)]
        await self._submit(sent, names)
        if self._is_published(step):
            await self._sample(step, step.num_samples)

    async def _submit(self, sent: Sent, names: list[str]) -> None:
        """Send until the request is acknowledged, perhaps send a different one as well, then fetch the result."""
        while not sent.is_acknowledged:
            await asyncio.sleep(self._random.expovariate(1 / self._behaviour.think_s))
            num_times = self._random.randrange(2, 6) if self._random.random() < self._behaviour.repeat else 1
            await asyncio.gather(*(self._send(sent, names) for _ in range(num_times)))
        if not sent.is_bad and sent.has_contents and self._random.random() < self._behaviour.other:
            await self._send_other(sent)
        while not sent.is_done or (sent.num_fetches < FETCHES and self._random.random() < 0.3):
            await self._fetch(sent)

    async def _send(self, sent: Sent, names: list[str]) -> None:
        method = getattr(self._coordinator.service, sent.method)
        await self._delay()
        variant = sent.variant
        try:
            with self.calling() as principal:
                response = await method(principal, sent.build(variant))
        except ServiceError as error:
            await self._refused(sent, names, error, variant)
            return
        operations = [getattr(response, each.name) for each in response.DESCRIPTOR.fields]
        if [each.name for each in operations] != names or (
            sent.is_bad and operations[0].state != ops_pb.OPERATION_STATE_FAILED
        ):
            raise ContractViolation(f"{sent.method} for {names} returned {response}")
        self._acknowledge(sent, names, variant)

    async def _refused(self, sent: Sent, names: list[str], error: ServiceError, variant: int) -> None:
        self._world.trace(f"{names[0]} is refused: {error.reason}")
        if error.retry_delay_s is not None:
            self._world.work["retryable refusals"] += 1
            self._redraw_contents(sent)
            await asyncio.sleep(self._random.uniform(0, error.retry_delay_s))
        elif sent.is_bad and error.code in {Code.INVALID_ARGUMENT, Code.NOT_FOUND}:
            self._acknowledge(sent, names, variant)
        elif sent.has_changed and error.code is Code.ALREADY_EXISTS:
            if not sent.is_acknowledged:
                sent.variant = 1 - variant  # the log has the earlier variant
        else:
            raise ContractViolation(f"{names} was refused: {error.code.name} {error.reason} {error.message}") from error

    def _redraw_contents(self, sent: Sent) -> None:
        """Perhaps switch to the other variant, if the request is not acknowledged."""
        if not sent.is_acknowledged and sent.has_contents and self._random.random() < self._behaviour.other:
            self._world.faults["other contents later"] += 1
            sent.variant, sent.has_changed = 1 - sent.variant, True

    def _acknowledge(self, sent: Sent, names: list[str], variant: int) -> None:
        if self._random.random() < self._behaviour.drop:
            self._world.faults["response lost"] += 1
        elif not sent.is_acknowledged:
            self._world.trace(f"{names[0]} is acknowledged")
            sent.names, sent.is_acknowledged, sent.variant = names, True, variant
            self._change()

    async def _send_other(self, sent: Sent) -> None:
        await self._delay()
        try:
            with self.calling() as principal:
                await getattr(self._coordinator.service, sent.method)(principal, sent.build(1 - sent.variant))
        except ServiceError as error:
            if error.code is not Code.ALREADY_EXISTS and error.retry_delay_s is None:
                raise ContractViolation(
                    f"other contents for {sent.names}: {error.code.name} {error.message}"
                ) from error
            self._world.faults["other contents"] += 1
        else:
            raise ContractViolation(f"other contents for {sent.names} were accepted")

    async def _fetch(self, sent: Sent) -> None:
        await self._delay()
        if sent.method == "sample" and self._random.random() < 0.3:
            await self._stream(sent)
        elif self._random.random() < 0.3:
            await self._get(sent)
        else:
            await self._fetch_all([sent])

    async def _fetch_all(self, all_sent: list[Sent]) -> None:
        """Wait for the results of several requests, perhaps with a timeout or only for some of them."""
        owners = {name: sent for sent in all_sent for name in sent.names}
        found: dict[str, ops_pb.Operation] = {}
        request = ops_pb.WaitOperationsRequest(names=list(owners))
        stop_at = self._random.randrange(len(owners)) if self._random.random() < 0.1 else len(owners)
        timeout_s = self._random.choice((0.02, 1.0, 1e6))
        try:
            with self.calling() as principal:
                async with (
                    asyncio.timeout(timeout_s),
                    aclosing(_generator(self._coordinator.service.wait_operations(principal, request))) as responses,
                ):
                    async for response in responses:
                        found[response.operation.name] = response.operation
                        if len(found) > stop_at:
                            break
        except TimeoutError:
            pass
        except ServiceError as error:
            await self._pause_after(error, "wait_operations")
        self._record(all_sent, found)

    async def _get(self, sent: Sent) -> None:
        found: dict[str, ops_pb.Operation] = {}
        for name in sent.names:
            request = ops_pb.GetOperationRequest(name=name)
            try:
                with self.calling() as principal:
                    operation = (await self._coordinator.service.get_operation(principal, request)).operation
            except ServiceError as error:
                await self._pause_after(error, "get_operation")
                return
            if operation.state in FINAL:
                found[name] = operation
        self._record([sent], found)
        if len(found) < len(sent.names):
            await asyncio.sleep(self._random.uniform(0, 0.1))

    async def _stream(self, sent: Sent) -> None:
        request = sampling_pb2.StreamSampleRequest(request=sent.request())
        found: dict[str, ops_pb.Operation] = {}
        try:
            with self.calling() as principal:
                async with aclosing(
                    _generator(self._coordinator.service.stream_sample(principal, request))
                ) as responses:
                    async for response in responses:
                        if response.HasField("operation") and response.operation.state in FINAL:
                            found[response.operation.name] = response.operation
        except ServiceError as error:
            await self._pause_after(error, "stream_sample")
        self._record([sent], found)

    def _record(self, all_sent: list[Sent], found: dict[str, ops_pb.Operation]) -> None:
        for sent in all_sent:
            if not all(name in found for name in sent.names):
                continue
            for name in sent.names:
                result = found[name].SerializeToString(deterministic=True)
                first = sent.results.setdefault(name, result)
                if first != result:
                    raise ContractViolation(
                        f"{name} was {ops_pb.Operation.FromString(first)} and is {ops_pb.Operation.FromString(result)}"
                    )
                if not sent.num_fetches:
                    self._note_unwritten(sent)
                    self._world.trace(f"{name} is {found[name].state} {found[name].error.reason}")
            sent.num_fetches += 1
            self._change()

    def _note_unwritten(self, sent: Sent) -> None:
        """Count a sample that is done before all published weights of its adapter are in files."""
        is_unwritten = self._coordinator.core.states.publishing.is_unwritten(self.adapter_id)
        if sent.method == "sample" and is_unwritten:
            self._world.work["samples before their file"] += 1

    def _is_published(self, step: Step) -> bool:
        sent = self.sent.get(step.seq)
        return bool(step.num_samples and sent and sent.is_done and not sent.outcome().error.code)

    async def _sample(self, step: Step, num_samples: int) -> None:
        if step.seq not in self.samplers:
            saved = self.sent[step.seq].outcome().save_weights_for_sampler
            self.samplers[step.seq] = saved.sampler_id or await self._make_sampler(step, saved.path)
        sampler_id = self.samplers[step.seq]
        for number in range(1, num_samples + 1):
            sent = self.samples.setdefault(
                (step.seq, number), Sent("sample", _SampleOf(step, sampler_id, number).request)
            )
            await self._submit(sent, [f"{sampler_id}:{number}"])

    async def _make_sampler(self, step: Step, path: str) -> str:
        request = sampling_pb2.CreateSamplerRequest(
            session_id=self.session_id, model_path=path, request_id=f"sampler {step.seq}"
        )
        response = await self.call("create_sampler", request)
        return str(response.sampler.sampler_id)

    def _all(self) -> list[Sent]:
        return [*self.sent.values(), *self.samples.values()]

    async def repeated(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Repeat an idempotent call until its response arrives."""
        while True:
            await self._delay()
            try:
                response = await call()
            except ServiceError as error:
                await self._pause_after(error, "a call")
                continue
            await self._delay()
            if self._random.random() >= self._behaviour.drop:
                return response
            self._world.faults["response lost"] += 1

    async def _pause_after(self, error: ServiceError, what: str) -> None:
        if error.retry_delay_s is None:
            raise ContractViolation(f"{what}: {error.code.name} {error.reason} {error.message}") from error
        await asyncio.sleep(self._random.uniform(0, error.retry_delay_s))

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self._changed.wait()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _delay(self) -> None:
        await asyncio.sleep(self._random.expovariate(1000))


def _generator(responses: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Return a streaming use case's iterator as the generator that it is, so that it can be closed."""
    return cast("AsyncGenerator[T, None]", responses)


@dataclass(frozen=True, slots=True)
class _SampleOf:
    step: Step
    sampler_id: str
    number: int

    def request(self, variant: int) -> sampling_pb2.SampleRequest:
        """Return the request, or another for the same sequence number."""
        return sample_request_of(self.step, self.sampler_id, self.number, variant)
