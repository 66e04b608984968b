"""Samples: from the contract's request to its payload and to a worker's request, and from a worker's result to the
contract's. Pure; depends neither on scheduling nor on workers.

`canonical_sample` returns a payload together with its decoded form, so that an admitted request is decoded once;
`decode_sample` returns the same decoded form of the payload alone.

Legend: p tokens of the prompt, n of a continuation, k tokens wanted at a position.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.base.config import Limits
from coordinator.base.errors import invalid
from coordinator.payloads.canonical import serialize
from coordinator.payloads.passes import ARRAY_BYTES, checked_array, checked_tokens, frozen_array
from tinkerpool.convert import from_tensor, to_tensor
from tinkerpool.v1 import sampling_pb2
from workers.contract.capacity import num_blocks_for, num_own_blocks, what_is_too_large
from workers.contract.messages import (
    ModelInfo,
    SampleRequest,
    SamplerVersion,
    SamplingParams,
)

NOTE_BYTES_MAX = 256
"""Largest note on a request, in UTF-8."""
SAMPLE_BYTES, STOP_TOKEN_BYTES, POINTER_BYTES = 290, 36, 8
"""Memory of the Python objects of a decoded request, of each stop token, of each reference to a string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedSample:
    """A sample request as numpy arrays and numbers. Made by `_decoded` alone, so that admission and replay agree."""

    prompt: NDArray[np.int32]
    """Token ids, (p,)."""
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool
    prompt_logprobs_last_n: int
    """0: of all prompt tokens."""
    topk_prompt_logprobs: int
    topk_sample_logprobs: int
    prompt_targets: NDArray[np.int32] | None
    """Token ids, or -1 for none, (p - 1, k)."""
    prompt_alt_tokens_k: int
    note: str
    """Returned with the result."""
    scales_logprobs: bool
    """Whether log-probabilities at sampled positions are at the request's temperature; False in requests logged before
    `LogprobsVersion`: at temperature 1."""
    is_recorded: bool
    """Whether its sequences are recorded, for losses that compare trainer and sampler."""

    @property
    def num_sampled_max(self) -> int:
        """The most tokens that are drawn for the request."""
        return self.num_samples * self.params.max_tokens

    @property
    def num_tokens_max(self) -> int:
        """The most tokens that the engine computes for the request."""
        return len(self.prompt) + self.num_sampled_max

    @property
    def logprobs_temperature(self) -> float:
        """The temperature of the log-probabilities at sampled positions."""
        return (self.params.temperature or 1.0) if self.scales_logprobs else 1.0

    @property
    def num_result_bytes_max(self) -> int:
        """The most bytes of its result: 8 for each token with its log-probability, drawn or only requested."""
        num_sampled = self.num_samples * self.params.max_tokens
        num_prompt = self.topk_prompt_logprobs + self.prompt_alt_tokens_k + self.prompt_logprobs
        num_targets = self.prompt_targets.size if self.prompt_targets is not None else 0
        return 8 * (num_sampled * (1 + self.topk_sample_logprobs) + len(self.prompt) * num_prompt + num_targets)

    @property
    def num_cache_blocks_min(self) -> int:
        """Key-value blocks that the request needs at once: its prompt's, and those of one sequence after another."""
        return num_blocks_for(len(self.prompt)) + num_own_blocks(self.params.max_tokens)

    @property
    def num_bytes(self) -> int:
        """Memory that the decoded request takes."""
        arrays = [self.prompt] if self.prompt_targets is None else [self.prompt, self.prompt_targets]
        stops = self.params.stop_strings
        return (
            SAMPLE_BYTES
            + sum(ARRAY_BYTES + array.nbytes for array in arrays)
            + STOP_TOKEN_BYTES * len(self.params.stop_tokens)
            + sum(map(sys.getsizeof, (*stops, self.note)))
            + POINTER_BYTES * len(stops)
        )

    def request(
        self, op_id: str, version: SamplerVersion, *, scope: str, stream: bool, removals: tuple[str, ...] = ()
    ) -> SampleRequest:
        """Return the request to send to a worker."""
        return SampleRequest(
            op_id=op_id,
            scope=scope,
            version=version,
            prompt=self.prompt,
            num_samples=self.num_samples,
            params=self.params,
            prompt_logprobs=self.prompt_logprobs,
            prompt_logprobs_last_n=self.prompt_logprobs_last_n,
            topk_prompt_logprobs=self.topk_prompt_logprobs,
            topk_sample_logprobs=self.topk_sample_logprobs,
            prompt_targets=self.prompt_targets,
            prompt_alt_tokens_k=self.prompt_alt_tokens_k,
            scales_logprobs=self.scales_logprobs,
            stream=stream,
            removals=removals,
        )


def canonical_sample(
    request: sampling_pb2.SampleRequest, model: ModelInfo, limits: Limits, drawn_seed: int
) -> tuple[bytes, DecodedSample]:
    """Check a sample request; return its payload, with every default and the seed filled in, and its decoded form."""
    prompt = checked_tokens("prompt", checked_array("prompt", request.prompt), model)
    num_samples = request.num_samples or 1
    if not 1 <= num_samples <= limits.num_samples_max:
        raise invalid(f"num_samples must be 1 to {limits.num_samples_max}, not {num_samples}")
    params = _canonical_params(request.params, len(prompt), model, limits, drawn_seed)
    last_n = request.prompt_logprobs_last_n
    if last_n < 0 or (last_n and not (request.include_prompt_logprobs or request.topk_prompt_logprobs)):
        raise invalid(
            f"prompt_logprobs_last_n is {last_n}: it is 0 (all) or more, and goes only with include_prompt_logprobs "
            "or topk_prompt_logprobs"
        )
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        if not 0 <= (value := getattr(request, name)) <= limits.topk_max:
            raise invalid(f"{name} must be 0 (none) to {limits.topk_max}, not {value}")
    if len(request.note.encode()) > NOTE_BYTES_MAX:
        raise invalid(f"note has {len(request.note.encode())} bytes, at most {NOTE_BYTES_MAX}: keep the rest yourself")
    payload = sampling_pb2.SampleRequest(
        sampler_id=request.sampler_id,
        prompt=to_tensor(prompt),
        num_samples=num_samples,
        include_prompt_logprobs=request.include_prompt_logprobs,
        prompt_logprobs_last_n=last_n,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
        params=params,
        note=request.note,
        logprobs_version=sampling_pb2.LOGPROBS_VERSION_SCALED,
        record_stability_info=request.record_stability_info,
    )
    num_targets = 0
    if request.HasField("prompt_targets"):
        targets = _targets(request, len(prompt), model, limits)
        payload.prompt_targets.CopyFrom(to_tensor(targets))
        num_targets = targets.size
    _check_size(payload, len(prompt), num_targets, limits)
    return serialize(payload), _decoded(payload)


def unversioned_form(payload: bytes) -> bytes:
    """Return the payload that the same request got before `LogprobsVersion`: the log may have only its hash."""
    request = sampling_pb2.SampleRequest.FromString(payload)
    request.ClearField("logprobs_version")
    return serialize(request)


def check_sample_fits(sample: DecodedSample, model: ModelInfo) -> None:
    """Refuse a request that no worker of its base model has the memory to sample."""
    if model.num_cache_blocks is None:
        return
    if too_large := what_is_too_large(len(sample.prompt), sample.params.max_tokens, model.num_cache_blocks):
        raise invalid(too_large, "NO_MEMORY")


def decode_sample(payload: bytes) -> DecodedSample:
    """Return the decoded form of a sample's payload, equal to the one that `canonical_sample` returned with it."""
    return _decoded(sampling_pb2.SampleRequest.FromString(payload))


def _decoded(request: sampling_pb2.SampleRequest) -> DecodedSample:
    params = request.params
    targets = from_tensor(request.prompt_targets) if request.HasField("prompt_targets") else None
    return DecodedSample(
        prompt=frozen_array(from_tensor(request.prompt), np.int32),
        num_samples=request.num_samples,
        params=SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=params.seed,
            stop_tokens=tuple(params.stop.tokens),
            stop_strings=tuple(params.stop.strings),
        ),
        prompt_logprobs=request.include_prompt_logprobs,
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        prompt_targets=frozen_array(targets, np.int32) if targets is not None else None,
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
        note=request.note,
        scales_logprobs=request.logprobs_version == sampling_pb2.LOGPROBS_VERSION_SCALED,
        is_recorded=request.record_stability_info,
    )


def _canonical_params(
    params: sampling_pb2.SamplingParams, num_prompt_tokens: int, model: ModelInfo, limits: Limits, drawn_seed: int
) -> sampling_pb2.SamplingParams:
    if num_prompt_tokens > model.max_seq_len:
        raise invalid(
            f"the prompt has {num_prompt_tokens} tokens, but {model.name} takes at most {model.max_seq_len}: "
            "cut the prompt"
        )
    room = max(1, model.max_seq_len - num_prompt_tokens)  # the last token is drawn, never computed with
    max_tokens = params.max_tokens or room
    if not 1 <= max_tokens <= room:
        raise invalid(
            f"params.max_tokens is {max_tokens}; after a prompt of {num_prompt_tokens} tokens it can be 1 to {room}, "
            f"since {model.name} takes {model.max_seq_len} tokens in all"
        )
    temperature = params.temperature if params.HasField("temperature") else 1.0
    top_k = params.top_k if params.HasField("top_k") else -1
    top_p = params.top_p if params.HasField("top_p") else 1.0
    if not 0 <= temperature < math.inf:
        raise invalid(f"params.temperature must be 0 (greedy) or more, not {temperature}")
    if top_k != -1 and top_k < 1:
        raise invalid(f"params.top_k must be -1 (all tokens) or at least 1, not {top_k}")
    if not 0 < top_p <= 1:
        raise invalid(f"params.top_p must be above 0 and at most 1, not {top_p}")
    if params.HasField("stop"):
        stop = params.stop
        _check_stop(stop, model, limits)
    else:
        stop = sampling_pb2.StopCondition(tokens=model.eos_token_ids)
    seed = params.seed if params.HasField("seed") else drawn_seed
    return sampling_pb2.SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop
    )


def _check_stop(stop: sampling_pb2.StopCondition, model: ModelInfo, limits: Limits) -> None:
    if len(stop.strings) > limits.stop_strings_max:
        raise invalid(
            f"params.stop.strings has {len(stop.strings)} strings, at most {limits.stop_strings_max}: each is searched "
            "for at every token; send fewer, and cut the text at the others yourself"
        )
    if any(not text for text in stop.strings):
        raise invalid("params.stop.strings has an empty string: it would stop before the first token")
    if (longest := max(map(len, stop.strings), default=0)) > limits.stop_characters_max:
        raise invalid(
            f"params.stop.strings has a string of {longest} characters, at most {limits.stop_characters_max}: send its "
            "end, or a shorter one"
        )
    if len(stop.tokens) > limits.stop_tokens_max:
        raise invalid(f"params.stop.tokens has {len(stop.tokens)} tokens, at most {limits.stop_tokens_max}")
    if any(not 0 <= token < model.vocab_size for token in stop.tokens):
        raise invalid(f"params.stop.tokens must be token ids from 0 to {model.vocab_size - 1}")


def _targets(
    request: sampling_pb2.SampleRequest, num_prompt_tokens: int, model: ModelInfo, limits: Limits
) -> NDArray[np.int32]:
    """Return the checked token ids whose log-probabilities are wanted, (p - 1, k)."""
    targets = checked_array("prompt_targets", request.prompt_targets)
    num_rows = num_prompt_tokens - 1
    if targets.ndim != 2 or len(targets) != num_rows or not 1 <= targets.shape[1] <= limits.topk_max:
        raise invalid(
            f"prompt_targets has shape {targets.shape}, but after the first token of the prompt there are {num_rows}: "
            f"give ({num_rows}, k) token ids, k at most {limits.topk_max}; row i is for prompt position i + 1"
        )
    if not (targets >= 0).any():
        raise invalid("prompt_targets names no token: -1 asks for nothing, leave it out if nothing is wanted")
    return checked_tokens("prompt_targets", targets, model, num_dims=(2,), lowest=-1)


def _check_size(payload: sampling_pb2.SampleRequest, num_prompt_tokens: int, num_targets: int, limits: Limits) -> None:
    """Refuse a request whose result would be larger than a message can be."""
    sizes = {
        "topk_prompt_logprobs": payload.topk_prompt_logprobs * num_prompt_tokens,
        "topk_sample_logprobs": payload.topk_sample_logprobs * payload.num_samples * payload.params.max_tokens,
        "prompt_targets": num_targets,
        "prompt_alt_tokens_k": payload.prompt_alt_tokens_k * (num_prompt_tokens - 1),
    }
    total = sum(sizes.values())
    if total > limits.sample_logprobs_max:
        largest = max(sizes, key=lambda name: sizes[name])
        raise invalid(
            f"the request asks for up to {total} log-probabilities in addition to those of its tokens, at most "
            f"{limits.sample_logprobs_max}: most of them by {largest}; ask for fewer at each position, fewer samples, "
            "or a smaller max_tokens"
        )
