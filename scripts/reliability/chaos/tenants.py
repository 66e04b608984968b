"""The tenants of the chaos run: each takes its steps as an ordinary client, in its own thread, and keeps a journal."""

from __future__ import annotations

import hashlib
import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scripts.reliability.chaos import steps
from scripts.reliability.chaos.steps import ROUND, Action, Profile
from tinkerpool import SamplingClient, ServiceClient, types
from tinkerpool.client.calls import encoding
from tinkerpool.client.calls.futures import APIFuture
from tinkerpool.names import operation_name
from tinkerpool.v1 import operations_pb2


class Progress:
    """The times at which clients saw operations finish. Thread-safe."""

    def __init__(self, tenants: Iterable[str]) -> None:
        self._changed = threading.Condition()
        self._last = dict.fromkeys(tenants, 0.0)

    def finished(self, tenant: str) -> None:
        """Record that an operation of this tenant finished now."""
        with self._changed:
            self._last[tenant] = time.monotonic()
            self._changed.notify_all()

    def last(self, tenant: str) -> float:
        """Return when the tenant's last operation finished; 0.0 if none has."""
        with self._changed:
            return self._last[tenant]

    def wait_after(self, moment: float, timeout_s: float, *, of_all: bool = False) -> float | None:
        """Wait until an operation of some tenant, or of every tenant, finished after `moment`.

        Returns the current time, or None after the timeout.
        """
        choose = min if of_all else max
        with self._changed:
            self._changed.wait_for(lambda: choose(self._last.values()) > moment, timeout_s)
            return time.monotonic() if choose(self._last.values()) > moment else None

    def tenants_without_progress(self, moment: float) -> str:
        """Return the names of tenants without a finished operation after `moment`."""
        with self._changed:
            return ", ".join(tenant for tenant, last in self._last.items() if last <= moment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A finished step of a tenant."""

    step: int
    """From 0."""
    next_seq: int
    """The sequence number after its last operation."""
    results: list[tuple[str, str]]
    """Name of each operation, and the digest of the result that the client got; empty if the client gets none."""


@dataclass(slots=True)
class Journal:
    """A tenant's adapter and its finished steps: line number `n` is step `n`."""

    adapter_id: str = ""
    lines: list[Line] = field(default_factory=list)

    @property
    def next_seq(self) -> int:
        """The sequence number after the last finished step."""
        return self.lines[-1].next_seq if self.lines else 1

    def begin(self, adapter_id: str) -> None:
        """Set the adapter, once."""
        assert not self.adapter_id
        self.adapter_id = adapter_id

    def add(self, line: Line) -> None:
        """Add a step whose operations have all finished."""
        assert line.step == len(self.lines)
        self.lines.append(line)


@dataclass(slots=True)
class _Pending:
    """A step whose operations are in flight."""

    step: int
    next_seq: int
    parts: list[tuple[list[str], APIFuture[Any]]] = field(default_factory=list)
    """Names of operations, and the client's future for them."""


class Tenant:
    """One tenant's program. After `start` it runs until the end of the first round at which `is_over(steps)`."""

    def __init__(
        self,
        profile: Profile,
        service: ServiceClient,
        journal: Journal,
        progress: Progress,
        is_over: Callable[[int], bool],
        pause_s: float,
    ) -> None:
        """`pause_s`: average pause between two steps."""
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
        self._step = 0

    def start(self) -> None:
        """Start the program."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Return whether the program is still running."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the session."""
        self._service.close()

    def _run(self) -> None:
        try:
            self._open()
            rng = random.Random(self._profile.seed)
            while not self._is_at_end():
                self._submit_step()
                while len(self._pending) > max(0, self._profile.num_ahead) or (self._pending and self._is_new_round()):
                    self._finish_oldest()
                time.sleep(rng.uniform(0, 2 * self.pause_s))
        except BaseException:  # noqa: BLE001  # reported by the main thread
            self.error = traceback.format_exc()

    def _open(self) -> None:
        """Create the adapter."""
        [model] = self._service.get_server_capabilities().supported_models
        self._vocab_size = model.vocab_size
        self._training = self._service.create_lora_training_client(
            rank=self._profile.rank,
            seed=self._profile.seed,
            train_attn=self._profile.train_attn,
            train_mlp=self._profile.train_mlp,
        ).result()
        self.journal.begin(self._training.model_id)

    def _is_new_round(self) -> bool:
        return self._step % ROUND == 0

    def _is_at_end(self) -> bool:
        return self._step > 0 and self._is_new_round() and self._is_over(self._step)

    def _submit_step(self) -> None:
        pending = _Pending(self._step, self._next_seq)
        self._pending.append(pending)
        for action in steps.actions_of(self._profile, self._step, self._vocab_size):
            seqs = range(self._next_seq, self._next_seq + steps.num_seqs(action))
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

    def _finish_oldest(self) -> None:
        """Wait for the oldest step in flight, and add it to the journal."""
        pending = self._pending.popleft()
        results: list[tuple[str, str]] = []
        for names, future in pending.parts:
            results += zip(names, _digests(future.result(), len(names)), strict=True)
        self.journal.add(Line(step=pending.step, next_seq=pending.next_seq, results=results))


def _digests(result: Any, num_operations: int) -> list[str]:
    """Return the digest of each operation's result. A custom loss returns no results of its two passes."""
    if isinstance(result, types.TrainStepResponse):
        return [digest(result.forward_backward), digest(result.optim_step)]
    return [digest(result)] if num_operations == 1 else [""] * num_operations


def digest(result: Any) -> str:
    """Return a SHA-256 of what is equal in every run: without the cycle, and the ids of paths and sequences."""
    hashed = hashlib.sha256(type(result).__name__.encode())
    match result:
        case types.ForwardBackwardOutput():
            for output in result.loss_fn_outputs:
                hashed.update(output["logprobs"].to_numpy().tobytes())
            hashed.update(_metrics(result.metrics))
        case types.OptimStepResponse():
            hashed.update(_metrics(result.metrics))
        case types.SampleResponse():
            sequences = [replace(sequence, sequence_id=None) for sequence in result.sequences]
            hashed.update(repr((sequences, result.prompt_logprobs)).encode())
        case types.DiscardGradientResponse():
            pass
        case types.SaveWeightsResponse() | types.SaveWeightsForSamplerResponse() | types.LoadWeightsResponse():
            hashed.update(result.path.removeprefix("tinker://").partition("/")[2].encode())
        case _:
            raise AssertionError(f"no digest of a {type(result).__name__}")
    return hashed.hexdigest()


def operation_digest(operation: operations_pb2.Operation) -> str:
    """Return the `digest` of the result that a client gets from a succeeded operation."""
    match operation.WhichOneof("result"):
        case "forward_backward":
            return digest(encoding.forward_backward_output(operation))
        case "optim_step":
            return digest(types.OptimStepResponse(metrics=dict(operation.optim_step.metrics)))
        case "load_state":
            return digest(types.LoadWeightsResponse(path=operation.load_state.path))
        case "discard_gradient":
            return digest(types.DiscardGradientResponse())
        case "save_state":
            return digest(types.SaveWeightsResponse(path=operation.save_state.path))
        case "save_weights_for_sampler":
            return digest(types.SaveWeightsForSamplerResponse(path=operation.save_weights_for_sampler.path))
        case "sample":
            return digest(encoding.sample_response(operation))
        case other:
            raise AssertionError(f"{operation.name} has an unknown result: {other}")


def _metrics(metrics: Mapping[str, float]) -> bytes:
    return repr(sorted((name, value) for name, value in metrics.items() if name != "clock_cycle:unique")).encode()
