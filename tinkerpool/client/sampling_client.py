"""Sampling from one fixed set of weights. Requests have no order among themselves and any number may run at once."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from tinkerpool import types
from tinkerpool.client import encoding, methods
from tinkerpool.client.connection import Connection
from tinkerpool.client.futures import APIFuture, BackgroundStream, Ready
from tinkerpool.client.session import Session
from tinkerpool.client.tokenizer import load_tokenizer
from tinkerpool.convert import to_tensor
from tinkerpool.errors import ApiError, TinkerpoolError
from tinkerpool.v1 import operations_pb2, sampling_pb2, sessions_pb2

CANCEL_TIMEOUT_S = 5.0


class SamplingClient(Ready):
    """Made by `ServiceClient.create_sampling_client` and `TrainingClient.save_weights_and_get_sampling_client`."""

    def __init__(self, session: Session, sampler_id: str, base_model: str) -> None:
        self._connection: Connection = session.connection
        self._sampler_id = sampler_id
        self._base_model = base_model
        # A sampler belongs to the one client that created it, so counting is enough for new numbers.
        self._seqs = itertools.count(1)

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
    ) -> APIFuture[types.SampleResponse]:
        """Continue a prompt `num_samples` times.

        The future raises InvalidArgument for an empty or too long prompt and for token ids that the model does not
        have, FailedPrecondition once the session has ended. `future.cancel()` frees the engine.
        """
        request = self._request(prompt, num_samples, sampling_params, include_prompt_logprobs)
        return self._connection.start(self._sample(request), is_cancellable=True)

    async def sample_async(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> types.SampleResponse:
        """`sample`, awaited."""
        return await self.sample(prompt, num_samples, sampling_params, include_prompt_logprobs)

    def sample_stream(
        self, prompt: types.ModelInput, num_samples: int, sampling_params: types.SamplingParams
    ) -> BackgroundStream[types.SampledToken]:
        """Continue a prompt and see each token when it is drawn: `for token in ...` or `async for token in ...`.

        Raises what `sample`'s future raises. Every token comes exactly once, also if the connection breaks meanwhile.
        """
        request = self._request(prompt, num_samples, sampling_params, include_prompt_logprobs=False)
        return self._connection.stream_of(lambda: self._tokens(request))

    def compute_logprobs(self, prompt: types.ModelInput) -> APIFuture[list[float | None]]:
        """The log-probability of every prompt token; None at position 0, which nothing precedes."""
        one_token = types.SamplingParams(max_tokens=1)
        request = self._request(prompt, 1, one_token, include_prompt_logprobs=True)
        return self._connection.start(self._prompt_logprobs(request), is_cancellable=True)

    async def compute_logprobs_async(self, prompt: types.ModelInput) -> list[float | None]:
        """`compute_logprobs`, awaited."""
        return await self.compute_logprobs(prompt)

    def get_base_model(self) -> str:
        """Name of the base model."""
        return self._base_model

    async def get_base_model_async(self) -> str:
        """Name of the base model."""
        return self._base_model

    def get_tokenizer(self) -> Any:
        """The base model's tokenizer: of transformers if installed, else of tokenizers. Raises ImportError."""
        return self._connection.start(fetch_tokenizer(self._connection, self._base_model)).result()

    def _request(
        self, prompt: types.ModelInput, num_samples: int, params: types.SamplingParams, include_prompt_logprobs: bool
    ) -> sampling_pb2.SampleRequest:
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        return sampling_pb2.SampleRequest(
            sampler_id=self._sampler_id,
            seq=next(self._seqs),
            prompt=to_tensor(prompt.to_numpy()),
            num_samples=num_samples,
            params=encoding.sampling_params(params),
            include_prompt_logprobs=include_prompt_logprobs,
        )

    async def _sample(self, request: sampling_pb2.SampleRequest) -> types.SampleResponse:
        return encoding.sample_response(await self._outcome(request))

    async def _prompt_logprobs(self, request: sampling_pb2.SampleRequest) -> list[float | None]:
        logprobs = (await self._sample(request)).prompt_logprobs
        assert logprobs is not None
        return logprobs

    async def _outcome(self, request: sampling_pb2.SampleRequest) -> operations_pb2.Operation:
        response = await self._connection.call(methods.SAMPLE, request)
        try:
            return await self._connection.outcome(response.operation)
        except asyncio.CancelledError:
            asyncio.create_task(self._cancel(response.operation.name))  # noqa: RUF006  # ends by itself
            raise

    async def _cancel(self, name: str) -> None:
        request = operations_pb2.CancelOperationRequest(name=name)
        try:
            await self._connection.call_once(methods.CANCEL_OPERATION, request, timeout_s=CANCEL_TIMEOUT_S)
        except TinkerpoolError:
            return  # it is a courtesy: the sample ends by its limit anyway

    async def _tokens(self, request: sampling_pb2.SampleRequest) -> AsyncIterator[types.SampledToken]:
        num_seen = [0] * request.num_samples
        operation: operations_pb2.Operation | None = None
        try:
            stream = self._connection.stream(methods.STREAM_SAMPLE, sampling_pb2.StreamSampleRequest(request=request))
            async with aclosing(stream) as events:
                async for event in events:
                    if event.HasField("operation"):
                        operation = event.operation
                        break
                    token = event.token
                    num_seen[token.sequence_index] += 1
                    yield types.SampledToken(
                        sequence_index=token.sequence_index, token=token.token, logprob=token.logprob
                    )
        except ApiError as error:
            await self._connection.pause(self._connection.make_backoff(), error)
        finished = encoding.check_succeeded(operation) if operation else await self._outcome(request)
        for index, sequence in enumerate(encoding.sample_response(finished).sequences):
            for position in range(num_seen[index], len(sequence.tokens)):
                assert sequence.logprobs is not None
                yield types.SampledToken(
                    sequence_index=index, token=sequence.tokens[position], logprob=sequence.logprobs[position]
                )


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
    return SamplingClient(session, sampler.sampler_id, sampler.base_model)
