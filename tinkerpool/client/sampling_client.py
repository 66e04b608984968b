"""Sampling from one sampler. Requests run in no particular order, and any number at once, from several processes.

Main invariant: no two clients of a sampler use the same sequence number, though they do not communicate.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import secrets
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from tinkerpool import types
from tinkerpool.client.calls import encoding, methods
from tinkerpool.client.calls.connection import Connection
from tinkerpool.client.calls.futures import APIFuture, BackgroundStream, Ready, awaited
from tinkerpool.client.calls.transport import Endpoint, GrpcTransport
from tinkerpool.client.session import Session
from tinkerpool.client.tokenizer import fetch_tokenizer
from tinkerpool.convert import to_tensor
from tinkerpool.errors import ApiError, TinkerpoolError
from tinkerpool.foreign_names import with_hints
from tinkerpool.names import operation_name
from tinkerpool.v1 import operations_pb2, sampling_pb2

SEQS_PER_CLIENT = 10**9
"""Sequence numbers in a client's block. The first block belongs to the client that created the sampler."""
BLOCKS = 4 * 10**9
"""Number of blocks; the service accepts seqs up to 4e18. Of 1,000 copies, two draw the same block with odds 1:8,000."""


def first_seq(*, is_copy: bool) -> int:
    """Return the seq of a client's first request. A copy draws a block of its own."""
    return (1 + secrets.randbelow(BLOCKS - 1) if is_copy else 0) * SEQS_PER_CLIENT + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerHandle:
    """Address and id of a sampler, without credentials."""

    base_url: str
    """Address of the pool, as given to the client."""
    sampler_id: str
    base_model: str
    record_stability_info: bool = False

    def encode(self) -> str:
        """Return the handle as one word, for another process."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def decode(cls, handle: str) -> SamplerHandle:
        """Return the handle of such a word. Raises ValueError for any other."""
        try:
            return cls(**json.loads(base64.urlsafe_b64decode(handle)))
        except (ValueError, TypeError):
            raise ValueError("this is no sampler handle: take one from SamplingClient.get_sampler_handle()") from None


CANCEL_TIMEOUT_S = 5.0
_of_handles: set[Session] = set()
"""The sessions of samplers that other processes may have clients of: each lives as long as this process."""


class SamplingClient(Ready):
    """Created by `ServiceClient.create_sampling_client` and `TrainingClient.save_weights_and_get_sampling_client`.

    Can be pickled for another process, which was spawned and not forked; the pickle contains the API key.
    `get_sampler_handle` returns a handle without a key. A copy has its own connection, and works as long as the session
    of the original: until its ServiceClient is closed, or its process ends.
    """

    def __init__(
        self,
        connection: Connection,
        sampler_id: str,
        base_model: str,
        *,
        session: Session | None,
        record_stability_info: bool = False,
    ) -> None:
        """`session`: the sampler's, which lives as long as this client; None: this is a copy, for another process."""
        self._connection = connection
        self._session = session
        self._sampler_id = sampler_id
        self._base_model = base_model
        self._is_recording = record_stability_info
        self._seqs = itertools.count(first_seq(is_copy=session is None))

    def __repr__(self) -> str:
        state = "closed" if self._connection.is_closed else "open"
        return f"<SamplingClient {self._sampler_id} of {self._base_model}: {state}>"

    @property
    def sampler_id(self) -> str:
        """`<session id>:sample:<index>`."""
        return self._sampler_id

    @with_hints
    def sample(
        self,
        prompt: types.ModelInput | Any,
        num_samples: int = 1,
        sampling_params: types.SamplingParams | None = None,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | Any | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> APIFuture[types.SampleResponse]:
        """Continue a prompt `num_samples` times.

        Args:
            prompt: p token ids, at least one: a ModelInput, a list or array, or a tokenizer's output for one text.
            num_samples: number of continuations, which share the prompt's computation.
            sampling_params: lengths, temperature and limits of the draws. None: `SamplingParams()`.
            include_prompt_logprobs: whether to return the log-probability of each prompt token.
            topk_prompt_logprobs: number of most likely tokens to return per prompt position, at most 100.
            topk_sample_logprobs: number of most likely tokens to return per sampled position, at most 100.
            target_prompt_logprobs: token ids of shape (p - 1, k), k at most 100, to return log-probabilities for: those
                of row i at prompt position i + 1. -1 stands for no token.
            prompt_alt_tokens_k: number of alternative tokens to draw per prompt position but the first, at the
                request's temperature, at most 100.
            prompt_logprobs_last_n: number of last prompt tokens that `include_prompt_logprobs` and
                `topk_prompt_logprobs` cover. None: all.

        Raises:
            ValueError: a number out of range, a prompt of text, or targets that are no matrix of token ids.

        The future raises InvalidArgument for an empty or too long prompt, for token ids outside the vocabulary, and for
        a result that would be too large; FailedPrecondition once the session has ended. `future.cancel()` frees the
        worker.
        """
        targets = None if target_prompt_logprobs is None else encoding.prompt_targets(target_prompt_logprobs)
        request = self._request(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs=include_prompt_logprobs,
            prompt_logprobs_last_n=_last_n(prompt_logprobs_last_n),
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k,
            prompt_targets=targets,
            record_stability_info=self._is_recording,
        )
        label = operation_name(request.sampler_id, request.seq)
        return self._connection.start(self._sample(request), is_cancellable=True, label=label, operation=label)

    sample_async = awaited(sample)

    def sample_stream(
        self,
        prompt: types.ModelInput | Any,
        num_samples: int = 1,
        sampling_params: types.SamplingParams | None = None,
    ) -> BackgroundStream[types.SampledToken]:
        """Continue a prompt and yield each token when it is drawn: `for token in ...` or `async for token in ...`.

        Its sequences are not recorded: a stream does not name them.

        Raises the errors of `sample`'s future. Yields every token exactly once, also if the connection breaks
        meanwhile. To stop early, call `close` or use the stream as a context manager: that frees the worker.
        """
        request = self._request(prompt, num_samples, sampling_params)
        return self._connection.stream_of(lambda: self._tokens(request))

    def compute_logprobs(
        self, prompt: types.ModelInput | Any, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """Return the log-probability of each prompt token, or of the last `prompt_logprobs_last_n`.

        None at position 0, which has no context, and at positions not asked for.
        """
        request = self._request(
            prompt,
            1,
            types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            prompt_logprobs_last_n=_last_n(prompt_logprobs_last_n),
        )
        return self._connection.start(self._prompt_logprobs(request), is_cancellable=True)

    compute_logprobs_async = awaited(compute_logprobs)

    def get_base_model(self) -> str:
        """Return the name of the base model."""
        return self._base_model

    async def get_base_model_async(self) -> str:
        """`get_base_model`, awaited."""
        return self._base_model

    def get_tokenizer(self) -> Any:
        """Return the base model's tokenizer: of transformers if installed, else of tokenizers. Raises ImportError."""
        return self._connection.start(fetch_tokenizer(self._connection, self._base_model)).result()

    def get_sampler_handle(self) -> str:
        """Return a handle from which other processes create clients of this sampler. It contains no API key.

        Raises TypeError for a client with a transport of its own.
        """
        handle = SamplerHandle(
            base_url=self._connection.endpoint.base_url,
            sampler_id=self._sampler_id,
            base_model=self._base_model,
            record_stability_info=self._is_recording,
        )
        if self._session is not None:
            _of_handles.add(self._session)
        return handle.encode()

    @staticmethod
    def from_sampler_handle(
        handle: str,
        *,
        api_key: str | None = None,
        root_certificates: bytes | None = None,
        client_certificate: str | os.PathLike[str] | None = None,
        client_key: str | os.PathLike[str] | None = None,
    ) -> SamplingClient:
        """Return a client of a handle's sampler, with this process's API key and certificates, as `ServiceClient` does.

        The key is sent to the address in the handle: use only handles of your own.

        Raises ValueError for a malformed handle, ConfigurationError if there is no key.
        """
        url = SamplerHandle.decode(handle).base_url
        return _copy(handle, Endpoint.find(url, api_key, root_certificates, client_certificate, client_key))

    def __reduce__(self) -> tuple[Any, ...]:
        return _copy, (self.get_sampler_handle(), self._connection.endpoint)

    def _request(
        self, prompt: types.ModelInput | Any, num_samples: int, params: types.SamplingParams | None, **details: Any
    ) -> sampling_pb2.SampleRequest:
        """Return a request with the next seq. `details`: the fields about log-probabilities."""
        if isinstance(num_samples, types.SamplingParams):
            raise ValueError(
                "num_samples must be a whole number, got a SamplingParams: write sample(prompt, num_samples, "
                "sampling_params), or sampling_params=... for one sample"
            )
        types.check_number("num_samples", num_samples, is_whole=True)
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        return sampling_pb2.SampleRequest(
            sampler_id=self._sampler_id,
            seq=next(self._seqs),
            prompt=to_tensor(types.ModelInput.of(prompt).to_numpy()),
            num_samples=num_samples,
            params=encoding.sampling_params(types.SamplingParams() if params is None else params),
            **details,
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
                await self._connection.pause(self._connection.start_retries(), error)
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
        """Cancel the sample at the pool if the block is cancelled, even if the request may not have arrived."""
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            asyncio.create_task(self._cancel(operation_name(request.sampler_id, request.seq)))  # noqa: RUF006
            raise

    async def _cancel(self, name: str) -> None:
        request = operations_pb2.CancelOperationRequest(name=name)
        with suppress(TinkerpoolError):  # best effort: the sample ends by its limit anyway
            await self._connection.call_once(methods.CANCEL_OPERATION, request, timeout_s=CANCEL_TIMEOUT_S)

    def _events(self, request: sampling_pb2.SampleRequest) -> AsyncGenerator[sampling_pb2.StreamSampleResponse, None]:
        return self._connection.stream(methods.STREAM_SAMPLE, sampling_pb2.StreamSampleRequest(request=request))


def _last_n(prompt_logprobs_last_n: int | None) -> int:
    return encoding.positive("prompt_logprobs_last_n", prompt_logprobs_last_n, "for all")


def _copy(handle: str, endpoint: Endpoint) -> SamplingClient:
    """Return a client of the same sampler, with a connection of its own."""
    sampler = SamplerHandle.decode(handle)
    return SamplingClient(
        Connection(GrpcTransport(endpoint)),
        sampler.sampler_id,
        sampler.base_model,
        session=None,
        record_stability_info=sampler.record_stability_info,
    )


async def create_sampler(
    session: Session, *, model_path: str = "", base_model: str = "", record_stability_info: bool = False
) -> SamplingClient:
    """Create a sampler, and return its client. Raises NotFound, InvalidArgument, ValueError for a malformed path."""
    if model_path:
        model_path = encoding.checkpoint_path(model_path)
    request = sampling_pb2.CreateSamplerRequest(
        session_id=await session.id(), model_path=model_path, base_model=base_model, request_id=uuid.uuid4().hex
    )
    sampler = (await session.connection.call(methods.CREATE_SAMPLER, request)).sampler
    return SamplingClient(
        session.connection,
        sampler.sampler_id,
        sampler.base_model,
        session=session,
        record_stability_info=record_stability_info,
    )
