"""The scenario of the programs in `scripts/clients/`, in Python: generated stubs, and no client library of ours.

    TINKERPOOL_BASE_URL=... TINKERPOOL_API_KEY=... .venv/bin/python -m scripts.clients.languages.reference

The standard output has the same lines in every language: floats also as the bits that the contract carries. The
standard error says what was repeated, and why. The program does not know when, or whether, its pool restarts.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import grpc
import numpy as np
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tinkerpool.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    checkpoints_pb2,
    checkpoints_pb2_grpc,
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

T = TypeVar("T")

TOKENS = [459, 342, 343, 386, 505, 351, 77, 260]
WEIGHTS = [1.0, 0.5, 0.25, 1.0, 0.5, 0.25, 1.0]
NUM_STEPS, NUM_EARLY = 10, 6
LOST = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
)
"""Codes of a call that the network or a stop of the pool ended: without a reason of the pool's."""
CALL_S = 30.0


def connect() -> grpc.Channel:
    """Return a channel to the pool that the environment names; it has TLS if the address begins with `https`."""
    scheme, _, address = os.environ["TINKERPOOL_BASE_URL"].partition("://")
    options = [
        ("grpc.max_receive_message_length", 64 << 20),
        ("grpc.keepalive_time_ms", 30_000),  # a wait ends when its connection is dead
        ("grpc.max_reconnect_backoff_ms", 2000),  # otherwise up to two minutes between two attempts
        ("grpc.enable_retries", 0),  # the program itself repeats calls
    ]
    if scheme == "https":
        trusted = os.environ.get("TINKERPOOL_CERTIFICATE")
        roots = Path(trusted).read_bytes() if trusted else None
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(roots), options=options)
    return grpc.insecure_channel(address, options=options)


channel = connect()
sessions = sessions_pb2_grpc.SessionServiceStub(channel)
adapters = adapters_pb2_grpc.AdapterServiceStub(channel)
training = training_pb2_grpc.TrainingServiceStub(channel)
operations = operations_pb2_grpc.OperationServiceStub(channel)
checkpoints = checkpoints_pb2_grpc.CheckpointServiceStub(channel)
sampling = sampling_pb2_grpc.SamplingServiceStub(channel)
key = (("authorization", f"Bearer {os.environ['TINKERPOOL_API_KEY']}"),)


def error_details(error: grpc.RpcError) -> tuple[error_details_pb2.ErrorInfo, float | None]:
    """Return the reason of a refusal, and the delay in seconds after which the call may succeed; None: it will not."""
    info, retry, delay_s = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), None
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # an error of a call is a call, too
    for detail in status.details if status is not None else ():
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            delay_s = retry.retry_delay.ToNanoseconds() / 1e9
    return info, delay_s


def repeated(name: str, attempt: Callable[[], T]) -> T:
    """Attempt until it succeeds: after the delay that a refusal tells, or growing pauses without a connection."""
    pause_s = 0.2
    while True:
        try:
            return attempt()
        except grpc.RpcError as error:
            code = error.code()
            info, delay_s = error_details(error)
            if delay_s is None and (info.reason or code not in LOST):
                raise
            wait_s = (pause_s if delay_s is None else delay_s) * random.uniform(1, 1.25)
            print(f"{name}: {info.reason or code.name}; again in {wait_s:.1f} s", file=sys.stderr, flush=True)
            time.sleep(wait_s)
            pause_s = min(2 * pause_s, 2.0)


def call(method: Callable[..., T], request: Message) -> T:
    """Make a call; the same request again is safe, for it has a seq or a request_id, or changes nothing."""
    name = request.DESCRIPTOR.name.removesuffix("Request")
    return repeated(name, lambda: method(request, metadata=key, timeout=CALL_S))


def finished(names: Iterable[str]) -> dict[str, operations_pb2.Operation]:
    """Wait for operations over a stream; after a broken one ask for those that are missing."""
    found: dict[str, operations_pb2.Operation] = {}
    missing = list(names)

    def wait() -> None:
        request = operations_pb2.WaitOperationsRequest(names=[name for name in missing if name not in found])
        for response in operations.WaitOperations(request, metadata=key):
            operation = response.operation
            if operation.state == operations_pb2.OPERATION_STATE_FAILED:
                raise RuntimeError(f"{operation.name}: {operation.error.reason}: {operation.error.message}")
            found[operation.name] = operation

    repeated("WaitOperations", wait)
    return found


def in_background(work: Callable[[], T]) -> Future[T]:
    """Start work on a thread that does not keep a program from ending after an error."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001  # it is raised where the result is taken
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def int32(values: Sequence[int]) -> types_pb2.Tensor:
    """Return token ids as a tensor."""
    return types_pb2.Tensor(
        data=np.asarray(values, "<i4").tobytes(), dtype=types_pb2.DATA_TYPE_INT32, shape=[len(values)]
    )


def float32(values: Sequence[float]) -> types_pb2.Tensor:
    """Return numbers as a tensor."""
    return types_pb2.Tensor(
        data=np.asarray(values, "<f4").tobytes(), dtype=types_pb2.DATA_TYPE_FLOAT32, shape=[len(values)]
    )


def bits32(tensor: types_pb2.Tensor) -> str:
    """Return the bits of a float32 tensor, in hexadecimal."""
    return " ".join(f"{bits:08x}" for bits in np.frombuffer(tensor.data, "<u4"))


def bits64(value: float) -> str:
    """Return the bits of a float64, in hexadecimal."""
    return f"{np.float64(value).view(np.uint64):016x}"


def train(adapter_id: str) -> None:
    """Take the steps, all of them in flight at a time, and print what they gave."""
    datum = types_pb2.Datum(
        tokens=int32(TOKENS[:-1]), loss_inputs={"target_tokens": int32(TOKENS[1:]), "weights": float32(WEIGHTS)}
    )

    def send(step: int) -> list[str]:
        request = training_pb2.TrainStepRequest(
            adapter_id=adapter_id,
            seq=2 * step - 1,
            data=[datum],
            loss_function=types_pb2.LOSS_FUNCTION_CROSS_ENTROPY,
            adam=types_pb2.AdamParams(learning_rate=2e-3),
        )
        sent = call(training.TrainStep, request)
        return [sent.forward_backward.name, sent.optim_step.name]

    # The pool takes steps in any order and runs them by seq: sent last first, none can finish before the first is sent.
    order = range(NUM_STEPS, 0, -1)
    early = [name for step in order[:NUM_EARLY] for name in send(step)]
    waiting = in_background(lambda: finished(early))
    print(f"sent {NUM_EARLY} steps", flush=True)
    late = [name for step in order[NUM_EARLY:] for name in send(step)]
    results = waiting.result() | finished(late)
    if send(NUM_STEPS) != early[:2]:
        raise RuntimeError("the same seq again gave another operation")
    for step in range(1, NUM_STEPS + 1):
        forward = results[f"{adapter_id}:{2 * step - 1}"].forward_backward
        norm = results[f"{adapter_id}:{2 * step}"].optim_step.metrics["grad_norm:last"]
        loss = forward.metrics["loss:sum"]
        print(f"step {step} loss {loss:.4f} {bits64(loss)} grad_norm {bits64(norm)}")
        print(f"step {step} logprobs {bits32(forward.logprobs[0])}")


def sample(sampler_id: str) -> None:
    """Sample with a stream, and print the sequences."""
    request = sampling_pb2.SampleRequest(
        sampler_id=sampler_id,
        seq=1,
        prompt=int32(TOKENS[:3]),
        num_samples=2,
        params=sampling_pb2.SamplingParams(max_tokens=8, temperature=0.75, seed=11, stop=sampling_pb2.StopCondition()),
    )

    def stream() -> tuple[list[list[int]], operations_pb2.Operation]:
        streamed: list[list[int]] = [[], []]
        for event in sampling.StreamSample(sampling_pb2.StreamSampleRequest(request=request), metadata=key):
            if event.HasField("token"):
                streamed[event.token.sequence_index].append(event.token.token)
        return streamed, event.operation

    streamed, operation = repeated("StreamSample", stream)
    for index, sequence in enumerate(operation.sample.sequences):
        tokens = [int(token) for token in np.frombuffer(sequence.tokens.data, "<i4")]
        if streamed[index] != tokens:
            raise RuntimeError(f"{streamed[index]} was streamed, and {tokens} is the result")
        print(f"sample {index} tokens {' '.join(map(str, tokens))}")
        print(f"sample {index} logprobs {bits32(sequence.logprobs)}")


def main() -> None:
    """Go through the scenario."""
    base_model = call(sessions.GetCapabilities, sessions_pb2.GetCapabilitiesRequest()).base_models[0].name
    print(f"model {base_model}")
    new_session = sessions_pb2.CreateSessionRequest(request_id=uuid.uuid4().hex)
    session_id = call(sessions.CreateSession, new_session).session.session_id
    new_adapter = adapters_pb2.CreateAdapterRequest(
        session_id=session_id, request_id=uuid.uuid4().hex, base_model=base_model, rank=3, seed=7
    )
    try:
        call(adapters.CreateAdapter, new_adapter)
    except grpc.RpcError as error:
        info, _ = error_details(error)
        print(f"refused {error.code().name} {info.reason} {info.domain}")
    new_adapter.rank = 8
    adapter_id = call(adapters.CreateAdapter, new_adapter).adapter.adapter_id

    train(adapter_id)

    seq = 2 * NUM_STEPS + 1
    state = checkpoints_pb2.SaveStateRequest(adapter_id=adapter_id, seq=seq, name="state")
    weights = checkpoints_pb2.SaveWeightsForSamplerRequest(adapter_id=adapter_id, seq=seq + 1, name="final")
    state_saved = call(checkpoints.SaveState, state).operation.name
    weights_saved = call(checkpoints.SaveWeightsForSampler, weights).operation.name
    path = finished([state_saved, weights_saved])[weights_saved].save_weights_for_sampler.path
    new_sampler = sampling_pb2.CreateSamplerRequest(session_id=session_id, request_id=uuid.uuid4().hex, model_path=path)
    sample(call(sampling.CreateSampler, new_sampler).sampler.sampler_id)

    def export() -> bytes:
        pieces = checkpoints.ExportCheckpoint(checkpoints_pb2.ExportCheckpointRequest(path=path), metadata=key)
        return b"".join(piece.data for piece in pieces)

    archive = repeated("ExportCheckpoint", export)
    print(f"export {len(archive)} bytes sha256 {hashlib.sha256(archive).hexdigest()}")
    listing = checkpoints_pb2.ListCheckpointsRequest(adapter_id=adapter_id)
    for found in call(checkpoints.ListCheckpoints, listing).checkpoints:
        name = found.path.removeprefix(f"tinker://{adapter_id}/")
        print(f"checkpoint {name} seq {found.seq} rank {found.rank} sha256 {found.sha256}")
    call(sessions.FinishSession, sessions_pb2.FinishSessionRequest(session_id=session_id))
    print("done")


if __name__ == "__main__":
    main()
