"""The tenants of `chaos.py`: each runs its steps as an ordinary client would, in its own thread, and keeps a journal.

After an interruption of the whole program, the steps that are not in the journal are submitted again, at the same
places: where the service has them already, they are the same operations.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scripts.reliability.chaos import steps
from scripts.reliability.chaos.journal import Journal, Line
from scripts.reliability.chaos.steps import ROUND, Action, Profile
from tinkerpool import SamplingClient, ServiceClient, TrainingClient, types
from tinkerpool.client.calls import encoding, methods
from tinkerpool.client.calls.futures import APIFuture
from tinkerpool.names import operation_name
from tinkerpool.v1 import adapters_pb2, operations_pb2


class Progress:
    """When operations finish, as the clients see it. For any thread."""

    def __init__(self, tenants: Iterable[str]) -> None:
        self._changed = threading.Condition()
        self._last = dict.fromkeys(tenants, 0.0)

    def finished(self, tenant: str) -> None:
        """An operation of the tenant's has finished."""
        with self._changed:
            self._last[tenant] = time.monotonic()
            self._changed.notify_all()

    def last(self, tenant: str) -> float:
        """The moment of its last finished operation; 0.0 if there was none."""
        with self._changed:
            return self._last[tenant]

    def wait_after(self, moment: float, timeout_s: float, *, of_all: bool = False) -> float | None:
        """When some tenant, or every one, has had an operation finished after `moment`; None if that is not in time."""
        choose = min if of_all else max
        with self._changed:
            self._changed.wait_for(lambda: choose(self._last.values()) > moment, timeout_s)
            return time.monotonic() if choose(self._last.values()) > moment else None

    def without(self, moment: float) -> str:
        """Who has had nothing finished since."""
        with self._changed:
            return ", ".join(tenant for tenant, last in self._last.items() if last <= moment)


class PlacedServiceClient(ServiceClient):
    """A ServiceClient that can go back to an earlier place in an adapter's order."""

    def training_client_at(self, adapter_id: str, seq: int) -> tuple[TrainingClient, int]:
        """`get_training_client` whose first request has the place `seq`, and the place after all that there is."""
        request = adapters_pb2.GetAdapterRequest(adapter_id=adapter_id)
        adapter = self._connection.start(self._connection.call(methods.GET_ADAPTER, request)).result().adapter
        next_seq = adapter.next_seq
        adapter.next_seq = seq
        return TrainingClient(self._session, adapter), next_seq


@dataclass(slots=True)
class _Pending:
    """A step whose operations are under way."""

    step: int
    next_seq: int
    parts: list[tuple[list[str], APIFuture[Any]]] = field(default_factory=list)
    """Names of operations, and what the client waits for."""


class Tenant:
    """One tenant's program. `start` it; it ends at the end of a round, once `is_over(steps so far)` says so."""

    def __init__(
        self,
        profile: Profile,
        service: PlacedServiceClient,
        journal: Journal,
        progress: Progress,
        is_over: Callable[[int], bool],
        pause_s: float,
    ) -> None:
        """`pause_s`: how long it thinks between two steps, on average."""
        self.name = profile.name
        self.journal = journal
        self.error = ""
        self.pause_s = pause_s
        self._profile = profile
        self._service = service
        self._progress = progress
        self._is_over = is_over
        self._thread = threading.Thread(target=self._run, name=profile.name, daemon=True)
        self._pending: deque[_Pending] = deque()
        self._next_seq = journal.next_seq
        self._step = len(journal.lines)

    def start(self) -> None:
        """Begin, or go on after the last step in the journal."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether it is still running."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the session of a tenant that has ended."""
        self._service.close()

    def _run(self) -> None:
        try:
            served_seq = self._open()
            rng = random.Random(self._profile.seed)
            while not self._is_at_end(served_seq):
                self._submit_step()
                while len(self._pending) > max(0, self._profile.num_ahead) or (self._pending and self._is_round()):
                    self._settle()
                time.sleep(rng.uniform(0, 2 * self.pause_s))
        except BaseException:  # noqa: BLE001  # a thread's errors are the harness's business
            self.error = traceback.format_exc()

    def _open(self) -> int:
        """Make the adapter or take it up again; the place after all that the service has of it."""
        capabilities = self._service.get_server_capabilities()
        [model] = capabilities.supported_models
        self._vocab_size = model.vocab_size
        if not self.journal.adapter_id:
            created = self._service.create_lora_training_client(
                rank=self._profile.rank,
                seed=self._profile.seed,
                train_attn=self._profile.train_attn,
                train_mlp=self._profile.train_mlp,
            )
            self.journal.begin(created.model_id)
        self._training, next_seq = self._service.training_client_at(self.journal.adapter_id, self._next_seq)
        return next_seq

    def _is_round(self) -> bool:
        return self._step % ROUND == 0

    def _is_at_end(self, served_seq: int) -> bool:
        """Never before all that an interrupted harness had submitted is in the journal."""
        is_caught_up = self._next_seq >= served_seq
        return is_caught_up and self._step > 0 and self._is_round() and self._is_over(self._step)

    def _submit_step(self) -> None:
        pending = _Pending(self._step, self._next_seq)
        self._pending.append(pending)
        for action in steps.actions_of(self._profile, self._step, self._vocab_size):
            seqs = range(self._next_seq, self._next_seq + steps.num_places(action))
            names = [operation_name(self._training.model_id, seq) for seq in seqs]
            self._next_seq += len(names)
            for part_names, future in self._submit(action, names):
                future.future().add_done_callback(lambda _: self._progress.finished(self.name))
                pending.parts.append((part_names, future))
                if self._profile.num_ahead < 0:
                    future.result()
        pending.next_seq = self._next_seq
        self._step += 1

    def _submit(self, action: Action, names: list[str]) -> Iterator[tuple[list[str], APIFuture[Any]]]:
        training = self._training
        match action:
            case steps.Pass(method="forward"):
                yield names, training.forward(action.data, action.loss)
            case steps.Pass():
                yield names, training.forward_backward(action.data, action.loss)
            case steps.Custom():
                yield (
                    names,
                    training.forward_backward_custom(action.data, steps.custom_loss, with_gradients=True),
                )
            case steps.Optim():
                yield names, training.optim_step(action.adam)
            case steps.Train():
                yield names, training.train_step(action.data, action.loss, action.adam)
            case steps.Save():
                yield names, training.save_state(action.name, overwrite=True)
            case steps.Load():
                path = f"tinker://{training.model_id}/weights/{action.name}"
                load = training.load_state_with_optimizer if action.with_optimizer else training.load_state
                yield names, load(path)
            case steps.Sample():
                if action.name:
                    published = training.save_weights_for_sampler(action.name, steps.SAMPLER_TTL_S)
                    yield names, published
                    sampler = self._service.create_sampling_client(published.result().path)
                else:
                    sampler = training.save_weights_and_get_sampling_client()
                yield self._sample(sampler, action)

    def _sample(self, sampler: SamplingClient, action: steps.Sample) -> tuple[list[str], APIFuture[Any]]:
        future = sampler.sample(action.prompt, 2, action.params, include_prompt_logprobs=True)
        return [operation_name(sampler.sampler_id, 1)], future

    def _settle(self) -> None:
        """Wait for the oldest step and note it."""
        pending = self._pending.popleft()
        results: list[tuple[str, str]] = []
        for names, future in pending.parts:
            results += zip(names, _digests(future.result(), len(names)), strict=True)
        self.journal.add(Line(step=pending.step, next_seq=pending.next_seq, results=results))


def _digests(result: Any, num_operations: int) -> list[str]:
    """Of each operation's result. A custom loss is the client's own, and says nothing about either of its passes."""
    if isinstance(result, types.TrainStepResponse):
        return [digest(result.forward_backward), digest(result.optim_step)]
    return [digest(result)] if num_operations == 1 else [""] * num_operations


def digest(result: Any) -> str:
    """SHA-256 of all that must be the same in every run: not the cycle it fell into, nor the ids in a path."""
    hashed = hashlib.sha256(type(result).__name__.encode())
    match result:
        case types.ForwardBackwardOutput():
            for output in result.loss_fn_outputs:
                hashed.update(output["logprobs"].to_numpy().tobytes())
            hashed.update(_metrics(result.metrics))
        case types.OptimStepResponse():
            hashed.update(_metrics(result.metrics))
        case types.SampleResponse():
            hashed.update(repr((result.sequences, result.prompt_logprobs)).encode())
        case types.SaveWeightsResponse() | types.SaveWeightsForSamplerResponse() | types.LoadWeightsResponse():
            hashed.update(result.path.removeprefix("tinker://").partition("/")[2].encode())
        case _:
            raise AssertionError(f"no digest of a {type(result).__name__}")
    return hashed.hexdigest()


def operation_digest(operation: operations_pb2.Operation) -> str:
    """`digest` of what a client is given for an operation that has succeeded."""
    match operation.WhichOneof("result"):
        case "forward_backward":
            return digest(encoding.forward_backward_output(operation))
        case "optim_step":
            return digest(types.OptimStepResponse(metrics=dict(operation.optim_step.metrics)))
        case "load_state":
            return digest(types.LoadWeightsResponse(path=operation.load_state.path))
        case "save_state":
            return digest(types.SaveWeightsResponse(path=operation.save_state.path))
        case "save_weights_for_sampler":
            return digest(types.SaveWeightsForSamplerResponse(path=operation.save_weights_for_sampler.path))
        case "sample":
            return digest(encoding.sample_response(operation))
        case nothing:
            raise AssertionError(f"{operation.name} has {nothing} as its result")


def _metrics(metrics: Mapping[str, float]) -> bytes:
    return repr(sorted((name, value) for name, value in metrics.items() if name != "clock_cycle:unique")).encode()
