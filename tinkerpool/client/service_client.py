"""The entry point: from an address and an API key to training, sampling and rest clients."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, Self

from tinkerpool import types
from tinkerpool.client.calls import methods
from tinkerpool.client.calls.connection import Connection
from tinkerpool.client.calls.encoding import adapter_labels, checkpoint_path, text
from tinkerpool.client.calls.futures import APIFuture
from tinkerpool.client.calls.retry import RetryPolicy
from tinkerpool.client.calls.transport import Endpoint, GrpcTransport, Transport
from tinkerpool.client.rest_client import RestClient, fetch_capabilities
from tinkerpool.client.sampling_client import SamplingClient, create_sampler
from tinkerpool.client.session import Session
from tinkerpool.client.tokenizer import fetch_tokenizer
from tinkerpool.client.training_client import TrainingClient
from tinkerpool.foreign_names import refuse, with_hints
from tinkerpool.v1 import adapters_pb2

CLOSE_TIMEOUT_S = 5.0

_MakeRequest = Callable[..., adapters_pb2.CreateAdapterRequest]
"""Returns the request once base model, session and request id are known."""


@with_hints
class ServiceClient:
    """A client of one pool. The constructor makes no call: the session is created when it is first needed.

    Usable from any thread and any asyncio loop, and as a context manager. `close` ends the session. Without `close` it
    ends when this client, and all training and sampling clients made from it, are dropped; or 10 minutes after the
    process.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        *,
        root_certificates: bytes | None = None,
        client_certificate: str | os.PathLike[str] | None = None,
        client_key: str | os.PathLike[str] | None = None,
        retry_timeout_s: float | None = None,
        transport: Transport | None = None,
    ) -> None:
        """Raises ConfigurationError if there is no key, or for a malformed URL; ValueError for a negative time.

        Args:
            base_url: `http://host:port`, `https://host:port` (TLS) or `host:port`. None: `$TINKERPOOL_BASE_URL`, else
                the pool in use on this machine, which was started last or chosen by `tinkerpool use`; if it does not
                run and no key is given, another one that does, with a warning in the log; else 127.0.0.1:7600.
            api_key: None: `$TINKERPOOL_API_KEY`, else the key of this address in this machine's credentials file.
            user_metadata: labels for the session.
            root_certificates: the authorities (PEM) to trust. Implies TLS. None: the certificate of this address in
                this machine's credentials files, else the authorities of this machine.
            client_certificate: file with this client's certificate chain (PEM), for a pool that requires one. Read
                again after a renewal. None: `$TINKERPOOL_CLIENT_CERTIFICATE`, else none.
            client_key: file with the private key of that certificate (PEM, without a password). None: it is in the
                certificate's file, or in `$TINKERPOOL_CLIENT_KEY` if that certificate is from the environment.
            retry_timeout_s: how long a call is tried again while waiting may help: the queue is full, the pool restarts
                or cannot be reached. Then it raises the refusal; a training client of which a call was given up can
                submit nothing more (`get_training_client` continues). None: without end.
            transport: instead of gRPC, for tests.
        """
        policy = RetryPolicy(timeout_s=retry_timeout_s)
        if transport is None:
            transport = GrpcTransport(
                Endpoint.find(base_url, api_key, root_certificates, client_certificate, client_key)
            )
        self._connection = Connection(transport, policy)
        self._session = Session(self._connection, user_metadata)

    def __repr__(self) -> str:
        state = "closed" if self._connection.is_closed else "open"
        return f"<ServiceClient of {self._connection.address}: {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ServiceClient cannot be pickled: make a new ServiceClient in the other process")

    @with_hints
    def create_lora_training_client(
        self,
        base_model: str | None = None,
        rank: int | None = None,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
        optimizer: types.AdamOptimizerConfig | None = None,
        *,
        alpha: float | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> TrainingClient:
        """Create an adapter, and return the client that trains it.

        Args:
            base_model: name of a base model. None: the only one of the pool.
            rank: LoRA rank, a power of two. None: 32, or the model's largest where that is smaller.
            seed: of the initial weights. None: 0.
            train_mlp: adapt the MLP projections.
            train_attn: adapt the attention projections.
            train_unembed: adapt the unembedding. If the base model ties it to the embedding, merging needs care:
                `export_checkpoint` says so.
            user_metadata: the SDK's name of `labels`.
            optimizer: only AdamW, which is the default in the Tinker SDK, too.
            alpha: LoRA scaling numerator. None: 32.
            name: what people call the adapter, in every list: at most 100 printable characters, without `/`. Several
                adapters may have one name. `RestClient.rename_training_run` changes it.
            labels: keys and values to look the adapter up by: `tinkerpool adapter list --label KEY=VALUE`.

        Raises:
            NotFound: the pool does not serve that model.
            InvalidArgument: the rank or the name is not allowed, or all three `train_*` are false.
            ValueError: no `base_model`, and the pool has several; a rank below 1; `user_metadata` and `labels`;
                a value of another type.
        """
        _check_optimizer(optimizer)
        metadata = adapter_labels(user_metadata, labels)
        make_request = _new_adapter(base_model, rank, seed, train_mlp, train_attn, train_unembed, metadata, alpha, name)
        return self._connection.start(self._create_adapter(make_request, base_model)).result()

    async def create_lora_training_client_async(
        self,
        base_model: str | None = None,
        rank: int | None = None,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
        optimizer: types.AdamOptimizerConfig | None = None,
        *,
        alpha: float | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> TrainingClient:
        """`create_lora_training_client`, awaited."""
        _check_optimizer(optimizer)
        metadata = adapter_labels(user_metadata, labels)
        make_request = _new_adapter(base_model, rank, seed, train_mlp, train_attn, train_unembed, metadata, alpha, name)
        return await self._connection.start(self._create_adapter(make_request, base_model))

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: None = None,
        optimizer: types.AdamOptimizerConfig | None = None,
        *,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> TrainingClient:
        """Create an adapter with a checkpoint's weights and fresh moments; return its client.

        `name` and `labels` are those of the new adapter, as of `create_lora_training_client`; it takes over none of the
        checkpoint's adapter. `base_model` can only be the checkpoint's, as in None. Raises NotFound, InvalidArgument
        for another base model or a malformed name, and ValueError for a malformed path.
        """
        refuse(weights_access_token=weights_access_token)
        _check_optimizer(optimizer)
        return self._from_state(
            path, base_model, adapter_labels(user_metadata, labels), name, with_optimizer=False
        ).result()

    async def create_training_client_from_state_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: None = None,
        optimizer: types.AdamOptimizerConfig | None = None,
        *,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> TrainingClient:
        """`create_training_client_from_state`, awaited."""
        refuse(weights_access_token=weights_access_token)
        _check_optimizer(optimizer)
        return await self._from_state(
            path, base_model, adapter_labels(user_metadata, labels), name, with_optimizer=False
        )

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: None = None,
        *,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> TrainingClient:
        """Create an adapter with a checkpoint's weights and moments; return its client.

        Arguments and errors are those of `create_training_client_from_state`.
        """
        refuse(weights_access_token=weights_access_token)
        return self._from_state(
            path, base_model, adapter_labels(user_metadata, labels), name, with_optimizer=True
        ).result()

    async def create_training_client_from_state_with_optimizer_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: None = None,
        *,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> TrainingClient:
        """`create_training_client_from_state_with_optimizer`, awaited."""
        refuse(weights_access_token=weights_access_token)
        return await self._from_state(
            path, base_model, adapter_labels(user_metadata, labels), name, with_optimizer=True
        )

    def get_training_client(self, model_id: str) -> TrainingClient:
        """Return a client of an existing adapter, for example after a crash of its first client. Raises NotFound.

        An adapter has one writer: once this client writes, calls of the other one raise AlreadyExists.
        """
        return self._connection.start(self._attach(model_id)).result()

    async def get_training_client_async(self, model_id: str) -> TrainingClient:
        """`get_training_client`, awaited."""
        return await self._connection.start(self._attach(model_id))

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Create a sampler of a checkpoint or of a base model; of the pool's only base model if neither is given.

        record_stability_info: whether the pool keeps a record of every sampled sequence, for the loss
        `stable_reinforce`, until the session ends and for a day after its last use.

        Raises NotFound, InvalidArgument if both are given, ValueError if neither is and the pool has several models.
        """
        refuse(retry_config=retry_config)
        return self._connection.start(
            self._create_sampler(model_path, base_model, is_recording=record_stability_info)
        ).result()

    async def create_sampling_client_async(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """`create_sampling_client`, awaited."""
        refuse(retry_config=retry_config)
        return await self._connection.start(
            self._create_sampler(model_path, base_model, is_recording=record_stability_info)
        )

    def get_tokenizer(self, base_model: str | None = None) -> Any:
        """Return a base model's tokenizer: of transformers if installed, else of tokenizers. Not in the SDK.

        Raises NotFound, ImportError, and ValueError if no model is named and the pool has several.
        """
        return self._connection.start(self._tokenizer(base_model)).result()

    def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        """Return the pool's base models and limits."""
        return self._connection.start(fetch_capabilities(self._connection)).result()

    async def get_server_capabilities_async(self) -> types.GetServerCapabilitiesResponse:
        """`get_server_capabilities`, awaited."""
        return await self._connection.start(fetch_capabilities(self._connection))

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: None = None
    ) -> APIFuture[str]:
        """Copy a checkpoint, yours or a public one, to a new adapter of yours; return the path of the copy.

        Raises NotFound, and InvalidArgument for any other checkpoint.
        """
        refuse(weights_access_token=weights_access_token)
        return self._connection.start(self._copy_weights(path, ttl_seconds))

    def create_rest_client(self) -> RestClient:
        """Return a client for checkpoints, listings and the state of the pool. Makes no call."""
        return RestClient(self._connection)

    def close(self) -> None:
        """End the session and all waits. Idempotent."""
        self._connection.start(self._close()).result(CLOSE_TIMEOUT_S)

    async def close_async(self) -> None:
        """`close`, awaited."""
        await self._connection.start(self._close()).result_async(CLOSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close_async()

    def _from_state(
        self, path: str, base_model: str | None, metadata: Mapping[str, str], name: str | None, *, with_optimizer: bool
    ) -> APIFuture[TrainingClient]:
        make_request = partial(
            adapters_pb2.CreateAdapterRequest,
            from_path=checkpoint_path(path),
            with_optimizer=with_optimizer,
            user_metadata=metadata,
            name=text("name", name),
        )
        return self._connection.start(self._create_adapter(make_request, text("base_model", base_model)))

    async def _create_adapter(self, make_request: _MakeRequest, base_model: str | None) -> TrainingClient:
        request = make_request(
            base_model=await self._only_model() if base_model is None else base_model,
            session_id=await self._session.id(),
            request_id=uuid.uuid4().hex,
        )
        response = await self._connection.call(methods.CREATE_ADAPTER, request)
        return TrainingClient(self._session, response.adapter)

    async def _attach(self, model_id: str) -> TrainingClient:
        request = adapters_pb2.GetAdapterRequest(adapter_id=model_id)
        response = await self._connection.call(methods.GET_ADAPTER, request)
        return TrainingClient(self._session, response.adapter)

    async def _create_sampler(
        self, model_path: str | None, base_model: str | None, *, is_recording: bool
    ) -> SamplingClient:
        if model_path is None and base_model is None:
            base_model = await self._only_model()
        return await create_sampler(
            self._session,
            model_path=model_path or "",
            base_model=text("base_model", base_model),
            record_stability_info=is_recording,
        )

    async def _copy_weights(self, path: str, ttl_seconds: int | None) -> str:
        return (await self.create_rest_client().copy_weights(path, ttl_seconds=ttl_seconds)).tinker_path

    async def _tokenizer(self, base_model: str | None) -> Any:
        return await fetch_tokenizer(self._connection, base_model or await self._only_model())

    async def _only_model(self) -> str:
        models = [model.model_name for model in (await fetch_capabilities(self._connection)).supported_models]
        if len(models) != 1:
            raise ValueError(f"name a base_model: this pool serves {', '.join(models) or 'none'}")
        return models[0]

    async def _close(self) -> None:
        await self._session.close()
        await self._connection.close()


def _check_optimizer(optimizer: types.AdamOptimizerConfig | None) -> None:
    refuse(optimizer=None if isinstance(optimizer, types.AdamOptimizerConfig) else optimizer)


def _new_adapter(
    base_model: str | None,
    rank: int | None,
    seed: int | None,
    train_mlp: bool,
    train_attn: bool,
    train_unembed: bool,
    metadata: Mapping[str, str],
    alpha: float | None,
    name: str | None,
) -> _MakeRequest:
    if types.is_number(base_model, is_whole=True):
        raise ValueError(f"base_model must be the name of a model, got {base_model}: did you mean rank={base_model}?")
    text("base_model", base_model)
    types.check_number("seed", seed, is_whole=True, or_none=True)
    types.check_number("alpha", alpha, or_none=True)
    if rank is not None and not (types.is_number(rank, is_whole=True) and rank >= 1):
        raise ValueError(f"rank must be a power of two, at least 1, got {rank!r}; leave it out for the default of 32")
    return partial(
        adapters_pb2.CreateAdapterRequest,
        rank=rank or 0,
        seed=seed,
        train_mlp=train_mlp,
        train_attn=train_attn,
        train_unembed=train_unembed,
        user_metadata=metadata,
        alpha=alpha,
        name=text("name", name),
    )
