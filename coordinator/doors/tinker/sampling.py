"""Sampling sessions and samples. A sampling session of the protocol is a sampler of the contract."""

from __future__ import annotations

import numpy as np
from starlette.responses import JSONResponse, Response

from coordinator.base.errors import invalid
from coordinator.doors.http.calls import JSON_BYTES_MAX, Call
from coordinator.doors.tinker import schemas
from coordinator.doors.tinker.errors import unsupported
from coordinator.doors.tinker.futures import promise
from coordinator.doors.tinker.results import SPARSE
from coordinator.doors.tinker.tensors import binary_tensor, dense, shape_of, text_of
from tinkerpool.convert import to_tensor
from tinkerpool.names import sequence_id
from tinkerpool.v1 import sampling_pb2 as pb
from tinkerpool.v1 import types_pb2


async def create_sampling_session(call: Call) -> Response:
    """POST /create_sampling_session."""
    asked = await call.json(schemas.CreateSamplingSession)
    request = pb.CreateSamplerRequest(
        session_id=asked.session_id,
        index=asked.sampling_session_seq_id,
        base_model="" if asked.model_path else asked.base_model or "",  # a path determines its base model
        model_path=asked.model_path or "",
    )
    created = await call.service.create_sampler(call.principal, request)
    return JSONResponse({"type": "create_sampling_session", "sampling_session_id": created.sampler.sampler_id})


async def get_sampler(call: Call) -> Response:
    """GET /samplers/{sampler}."""
    request = pb.GetSamplerRequest(sampler_id=call.path("sampler"))
    sampler = (await call.service.get_sampler(call.principal, request)).sampler
    body = {"sampler_id": sampler.sampler_id, "base_model": sampler.base_model}
    if sampler.model_path:
        body["model_path"] = sampler.model_path
    return JSONResponse(body)


async def join_sampling_session(call: Call) -> Response:
    """POST /join_sampling_session: the number of one more client of a sampling session; the first client has 0.

    A client that was pickled, or made from a handle, numbers its samples in a range of its own.
    """
    asked = await call.json(schemas.OfSampler)
    number = await call.service.join_sampler(call.principal, asked.sampling_session_id)
    return JSONResponse({"type": "join_sampling_session", "client_counter": number})


async def asample(call: Call) -> Response:
    """POST /asample. The id of a sequence is the promise's id and the sequence's index."""
    asked = await call.json(schemas.Sample, bytes_max=JSON_BYTES_MAX)
    request = _request(asked)
    operation = (await call.service.sample(call.principal, request)).operation
    sequences = [sequence_id(operation.name, index) for index in range(request.num_samples)]
    return promise(operation.name, sample_sequence_ids=sequences)


def _request(asked: schemas.Sample) -> pb.SampleRequest:
    if asked.sampling_session_id is None or asked.seq_id is None:
        raise unsupported("sampling without a session", "send sampling_session_id and seq_id")
    prompt = _prompt(asked.prompt)
    targets = asked.target_prompt_logprobs
    return pb.SampleRequest(
        sampler_id=asked.sampling_session_id,
        seq=asked.seq_id + 1,  # the protocol counts from 0, the contract from 1
        prompt=to_tensor(prompt),
        num_samples=asked.num_samples,
        params=sampling_params(asked.sampling_params),
        include_prompt_logprobs=bool(asked.prompt_logprobs),
        prompt_logprobs_last_n=asked.prompt_logprobs_last_n or 0,
        topk_prompt_logprobs=asked.topk_prompt_logprobs or 0,
        topk_sample_logprobs=asked.topk_sample_logprobs or 0,
        prompt_targets=_targets(targets, len(prompt)) if targets is not None else None,
        prompt_alt_tokens_k=asked.prompt_alt_tokens_k or 0,
        note=SPARSE if targets is not None and targets.sparse_crow_indices is not None else "",
        record_stability_info=bool(asked.record_stability_info),
    )


def _prompt(prompt: schemas.ModelInput) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return token ids, int64 (p,)."""
    pieces: list[int] = []
    for chunk in prompt.chunks:
        pieces += text_of(chunk, "prompt")
    try:
        return np.array(pieces, np.int64)
    except OverflowError:
        raise invalid("prompt has a number beyond 64 bits: send token ids of the model") from None


def _targets(asked: schemas.JsonTensor, num_prompt_tokens: int) -> types_pb2.Tensor:
    """Return token ids, int64 (p - 1, k); -1 where a sparse tensor has no entry. Checks the shape first."""
    name = "target_prompt_logprobs"
    tensor = binary_tensor(name, asked)
    shape, num_rows = shape_of(name, tensor), num_prompt_tokens - 1
    if asked.dtype != "int64" or len(shape) != 2 or shape[0] != num_rows:
        raise invalid(
            f"{name} is {asked.dtype} of shape {shape}: send int64 token ids of shape ({num_rows}, k), a row for each "
            "token of the prompt but the first"
        )
    return dense(name, tensor, missing=-1)


def sampling_params(asked: schemas.SamplingParams) -> pb.SamplingParams:
    """Return the contract's parameters. Raises ServiceError INVALID_ARGUMENT."""
    return pb.SamplingParams(
        max_tokens=asked.max_tokens or 0,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        seed=asked.seed,
        stop=_stop(asked.stop) if asked.stop is not None else None,
    )


def _stop(stop: str | list[int] | list[str]) -> pb.StopCondition:
    """Return the stop condition: stop strings, token ids, or nothing but the length for an empty list."""
    items = [stop] if isinstance(stop, str) else stop
    try:
        return pb.StopCondition(
            strings=[item for item in items if isinstance(item, str)],
            tokens=[item for item in items if isinstance(item, int)],
        )
    except ValueError:
        raise invalid("sampling_params.stop has a number beyond 32 bits: send token ids of the model") from None
