"""Sampling from one fixed set of weights. Requests have no order among themselves and any number may run at once."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any

from tinkerpool import types
from tinkerpool.client.calls import encoding, methods
from tinkerpool.client.calls.connection import Connection
from tinkerpool.client.calls.futures import APIFuture, BackgroundStream, Ready
from tinkerpool.client.calls.transport import Endpoint, GrpcTransport
from tinkerpool.client.discovery import find_service
from tinkerpool.client.sampler_handle import SamplerHandle, first_seq
from tinkerpool.client.session import Session
from tinkerpool.client.tokenizer import load_tokenizer
from tinkerpool.convert import to_tensor
from tinkerpool.errors import ApiError, TinkerpoolError
from tinkerpool.names import operation_name
from tinkerpool.v1 import operations_pb2, sampling_pb2, sessions_pb2

CANCEL_TIMEOUT_S = 5.0


class SamplingClient(Ready):
    """Made by `ServiceClient.create_sampling_client` and `TrainingClient.save_weights_and_get_sampling_client`.

    Can be pickled for another process, with the API key in the pickle; `get_sampler_handle` does without. A copy is a
    client of its own with a connection of its own, and works as long as the session of the first one lives.
    """

    def __init__(self, connection: Connection, sampler_id: str, base_model: str, *, is_copy: bool = False) -> None:
        self._connection = connection
        self._sampler_id = sampler_id
        self._base_model = base_model
        self._seqs = itertools.count(first_seq(is_copy=is_copy))

    @property
    def sampler_id(self) -> str:
        """`<session id>:sample:<index>`."""
        return self._sampler_id

    def sample(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | Any | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> APIFuture[types.SampleResponse]:
        """Continue a prompt `num_samples` times.

        Args:
            prompt: p token ids, at least one.
            num_samples: continuations, which share the prompt's computation.
            sampling_params: how to draw.
            include_prompt_logprobs: also the log-probability of each prompt token.
            topk_prompt_logprobs: also so many likeliest tokens at each prompt position, at most 100.
            topk_sample_logprobs: also so many likeliest tokens at each sampled position, at most 100.
            target_prompt_logprobs: also the log-probabilities of these token ids, of shape (p - 1, k): those of row i
                at prompt position i + 1, and -1 where nothing is wanted. At most 100 at each position.
            prompt_alt_tokens_k: also so many draws, at the temperature of the request, of what could stand at each
                prompt position but the first, at most 100.
            prompt_logprobs_last_n: of the last so many prompt tokens only, for the first two of these. None: of all.

        Raises:
            ValueError: a number below what makes sense, or targets that are no matrix of token ids.

        The future raises InvalidArgument for an empty or too long prompt, for token ids that the model does not have,
        and if more is asked for than an answer holds; FailedPrecondition once the session has ended. `future.cancel()`
        frees the engine.
        """
        request = self._request(prompt, num_samples, sampling_params)
        request.include_prompt_logprobs = include_prompt_logprobs
        request.prompt_logprobs_last_n = _last_n(prompt_logprobs_last_n)
        request.topk_prompt_logprobs = topk_prompt_logprobs
        request.topk_sample_logprobs = topk_sample_logprobs
        request.prompt_alt_tokens_k = prompt_alt_tokens_k
        if target_prompt_logprobs is not None:
            request.prompt_targets.CopyFrom(encoding.prompt_targets(target_prompt_logprobs))
        return self._connection.start(self._sample(request), is_cancellable=True)

    async def sample_async(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | Any | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> types.SampleResponse:
        """`sample`, awaited."""
        return await self.sample(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
        )

    def sample_stream(
        self, prompt: types.ModelInput, num_samples: int, sampling_params: types.SamplingParams
    ) -> BackgroundStream[types.SampledToken]:
        """Continue a prompt and see each token when it is drawn: `for token in ...` or `async for token in ...`.

        Raises what `sample`'s future raises. Every token comes exactly once, also if the connection breaks meanwhile.
        Who has seen enough calls `close` (or uses the stream as a context manager), which frees the engine.
        """
        request = self._request(prompt, num_samples, sampling_params)
        return self._connection.stream_of(lambda: self._tokens(request))

    def compute_logprobs(
        self, prompt: types.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """The log-probability of every prompt token, or of the last so many.

        None at position 0, which nothing precedes, and at those that were not asked for.
        """
        request = self._request(prompt, 1, types.SamplingParams(max_tokens=1))
        request.include_prompt_logprobs = True
        request.prompt_logprobs_last_n = _last_n(prompt_logprobs_last_n)
        return self._connection.start(self._prompt_logprobs(request), is_cancellable=True)

    async def compute_logprobs_async(
        self, prompt: types.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> list[float | None]:
        """`compute_logprobs`, awaited."""
        return await self.compute_logprobs(prompt, prompt_logprobs_last_n)

    def get_base_model(self) -> str:
        """Name of the base model."""
        return self._base_model

    async def get_base_model_async(self) -> str:
        """Name of the base model."""
        return self._base_model

    def get_tokenizer(self) -> Any:
        """The base model's tokenizer: of transformers if installed, else of tokenizers. Raises ImportError."""
        return self._connection.start(fetch_tokenizer(self._connection, self._base_model)).result()

    def get_sampler_handle(self) -> str:
        """A word from which other processes make clients of this sampler. It holds no key. Raises TypeError for a
        client with a transport of its own.
        """
        return SamplerHandle(
            base_url=self._connection.endpoint.base_url, sampler_id=self._sampler_id, base_model=self._base_model
        ).encode()

    @staticmethod
    def from_sampler_handle(
        handle: str, *, api_key: str | None = None, root_certificates: bytes | None = None
    ) -> SamplingClient:
        """A client of the sampler of a handle, with this process's key, found as `ServiceClient` does.

        The handle says where the key is sent: take handles from nobody but yourself.

        Raises ValueError for what is no handle, ConfigurationError if there is no key.
        """
        base_url, api_key = find_service(SamplerHandle.decode(handle).base_url, api_key)
        return _copy(handle, Endpoint(base_url, api_key, root_certificates))

    def __reduce__(self) -> tuple[Any, ...]:
        return _copy, (self.get_sampler_handle(), self._connection.endpoint)

    def _request(
        self, prompt: types.ModelInput, num_samples: int, params: types.SamplingParams
    ) -> sampling_pb2.SampleRequest:
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        return sampling_pb2.SampleRequest(
            sampler_id=self._sampler_id,
            seq=next(self._seqs),
            prompt=to_tensor(prompt.to_numpy()),
            num_samples=num_samples,
            params=encoding.sampling_params(params),
        )

    async def _sample(self, request: sampling_pb2.SampleRequest) -> types.SampleResponse:
        with self._cancelling(request):
            return encoding.sample_response(await self._outcome(request))

    async def _prompt_logprobs(self, request: sampling_pb2.SampleRequest) -> list[float | None]:
        logprobs = (await self._sample(request)).prompt_logprobs
        assert logprobs is not None
        return logprobs

    async def _tokens(self, request: sampling_pb2.SampleRequest) -> AsyncGenerator[types.SampledToken, None]:
        num_seen = [0] * request.num_samples
        operation: operations_pb2.Operation | None = None
        with self._cancelling(request):
            try:
                async with aclosing(self._events(request)) as events:
                    async for event in events:
                        if event.HasField("operation"):
                            operation = event.operation
                            break
                        num_seen[event.token.sequence_index] += 1
                        yield encoding.sampled_token(event.token)
            except ApiError as error:
                await self._connection.pause(self._connection.make_backoff(), error)
            finished = encoding.check_succeeded(operation) if operation else await self._outcome(request)
        for index, sequence in enumerate(encoding.sample_response(finished).sequences):
            for position in range(num_seen[index], len(sequence.tokens)):
                assert sequence.logprobs is not None
                yield types.SampledToken(
                    sequence_index=index, token=sequence.tokens[position], logprob=sequence.logprobs[position]
                )

    async def _outcome(self, request: sampling_pb2.SampleRequest) -> operations_pb2.Operation:
        response = await self._connection.call(methods.SAMPLE, request)
        return await self._connection.outcome(response.operation)

    @contextmanager
    def _cancelling(self, request: sampling_pb2.SampleRequest) -> Iterator[None]:
        """Let the pool know when nobody waits any more for what happens in the block; it may not even have arrived."""
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            asyncio.create_task(self._cancel(operation_name(request.sampler_id, request.seq)))  # noqa: RUF006
            raise

    async def _cancel(self, name: str) -> None:
        request = operations_pb2.CancelOperationRequest(name=name)
        with suppress(TinkerpoolError):  # it is a courtesy: the sample ends by its limit anyway
            await self._connection.call_once(methods.CANCEL_OPERATION, request, timeout_s=CANCEL_TIMEOUT_S)

    def _events(self, request: sampling_pb2.SampleRequest) -> AsyncGenerator[sampling_pb2.StreamSampleResponse, None]:
        return self._connection.stream(methods.STREAM_SAMPLE, sampling_pb2.StreamSampleRequest(request=request))


def _last_n(prompt_logprobs_last_n: int | None) -> int:
    """As the contract has it, where 0 is all. Raises ValueError."""
    if prompt_logprobs_last_n is not None and prompt_logprobs_last_n < 1:
        raise ValueError(f"prompt_logprobs_last_n must be at least 1, or None for all, got {prompt_logprobs_last_n}")
    return prompt_logprobs_last_n or 0


def _copy(handle: str, endpoint: Endpoint) -> SamplingClient:
    """A client of the same sampler, with a connection of its own."""
    sampler = SamplerHandle.decode(handle)
    transport = GrpcTransport(endpoint.base_url, endpoint.api_key, root_certificates=endpoint.root_certificates)
    return SamplingClient(Connection(transport), sampler.sampler_id, sampler.base_model, is_copy=True)


async def fetch_tokenizer(connection: Connection, base_model: str) -> Any:
    """A base model's tokenizer. Raises NotFound, ImportError."""
    request = sessions_pb2.GetTokenizerRequest(base_model=base_model)
    response = await connection.call(methods.GET_TOKENIZER, request)
    return await asyncio.to_thread(load_tokenizer, dict(response.files))


async def create_sampler(session: Session, *, model_path: str = "", base_model: str = "") -> SamplingClient:
    """A client of a new sampler. Raises NotFound, InvalidArgument."""
    request = sampling_pb2.CreateSamplerRequest(
        session_id=await session.id(), model_path=model_path, base_model=base_model, request_id=uuid.uuid4().hex
    )
    sampler = (await session.connection.call(methods.CREATE_SAMPLER, request)).sampler
    return SamplingClient(session.connection, sampler.sampler_id, sampler.base_model)
