"""Training one adapter. Every method reserves the next sequence number, sends, and returns a future at once.

Requests carry their sequence numbers: even if they overtake each other or are sent again, the service runs each once,
in order. A request that cannot be sent raises ValueError and uses no sequence number; other errors are raised by the
future.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar, get_args, overload

from tinkerpool import types
from tinkerpool.client.calls import encoding, methods
from tinkerpool.client.calls.connection import Connection
from tinkerpool.client.calls.futures import APIFuture, Ready, submitted
from tinkerpool.client.calls.methods import RequestT
from tinkerpool.client.sampling_client import SamplingClient, create_sampler
from tinkerpool.client.session import Session
from tinkerpool.client.tokenizer import fetch_tokenizer
from tinkerpool.client.training import custom_loss, passes
from tinkerpool.client.training.sequence import AdapterSequence
from tinkerpool.foreign_names import refuse
from tinkerpool.history import HistoryEntry, entry_of
from tinkerpool.v1 import adapters_pb2, checkpoints_pb2, history_pb2, operations_pb2, training_pb2

T = TypeVar("T")


class TrainingClient(Ready):
    """Created by the `create_*` methods of ServiceClient."""

    def __init__(self, session: Session, adapter: adapters_pb2.Adapter) -> None:
        self._session = session
        self._connection: Connection = session.connection
        self._adapter = adapter
        self._sequence = AdapterSequence(self._connection, adapter.adapter_id, adapter.next_seq)

    def __repr__(self) -> str:
        adapter = self._adapter
        name = f" {adapter.name!r}" if adapter.name else ""
        what = f"{self.model_id}{name} of {adapter.base_model}, rank {adapter.rank}"
        return f"<TrainingClient {what}: {self._sequence.state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a TrainingClient cannot be pickled, because an adapter has one writer: send its model_id, and call "
            f"ServiceClient().get_training_client({self.model_id!r}) in the other process"
        )

    @property
    def model_id(self) -> str:
        """The adapter's id, `<session id>:train:<index>`."""
        return self._adapter.adapter_id

    def forward(
        self, data: Sequence[types.Datum], loss_fn: types.LossFnType, loss_fn_config: Mapping[str, float] | None = None
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Compute log-probabilities and the loss; change nothing. A large batch is sent as several requests.

        Raises ValueError for an empty batch, anything but a list of Datum, an unknown loss, or a datum that is too
        large to send.
        """
        requests = self._requests(training_pb2.ForwardRequest, passes.split(data), loss_fn, loss_fn_config)
        return self._run(methods.FORWARD, requests)

    def forward_backward(
        self, data: Sequence[types.Datum], loss_fn: types.LossFnType, loss_fn_config: Mapping[str, float] | None = None
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Run `forward`, and add the gradient of the loss to the adapter's pending gradient, until `optim_step`."""
        requests = self._requests(training_pb2.ForwardBackwardRequest, passes.split(data), loss_fn, loss_fn_config)
        return self._run(methods.FORWARD_BACKWARD, requests)

    def optim_step(
        self, optim_params: types.AdamParams | None = None, *, adam_params: types.AdamParams | None = None
    ) -> APIFuture[types.OptimStepResponse]:
        """Take one AdamW step with the pending gradient, which is zero afterwards.

        Submit it without awaiting the `forward_backward` before it: then both run in the same clock cycle.
        `adam_params` is another name of `optim_params`. Raises ValueError for both, and for anything but AdamParams.
        """
        if optim_params is not None and adam_params is not None:
            raise ValueError("optim_params and adam_params are two names of one argument: pass one of them")
        adam = encoding.adam_params(adam_params if optim_params is None else optim_params)
        request = training_pb2.OptimStepRequest(adapter_id=self.model_id, adam=adam)
        return self._submit(
            methods.OPTIM_STEP, request, lambda op: types.OptimStepResponse(metrics=dict(op.optim_step.metrics))
        )

    def train_step(
        self,
        data: Sequence[types.Datum],
        loss_fn: types.LossFnType,
        adam_params: types.AdamParams | None = None,
        loss_fn_config: Mapping[str, float] | None = None,
    ) -> APIFuture[types.TrainStepResponse]:
        """Run `forward_backward` and `optim_step` in one message, the cheapest step. Not in the SDK."""
        *first, last = passes.split(data)
        requests = self._requests(training_pb2.ForwardBackwardRequest, first, loss_fn, loss_fn_config)
        [step] = self._requests(training_pb2.TrainStepRequest, [last], loss_fn, loss_fn_config)
        step.adam.CopyFrom(encoding.adam_params(adam_params))
        return self._sequence.reserve(
            len(requests) + 2, lambda seq: passes.run_train_step(self._sequence, requests, step, seq)
        )

    @overload
    def forward_backward_custom(
        self,
        data: Sequence[types.Datum],
        loss_fn: custom_loss.TorchLoss,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        with_gradients: Literal[False] = False,
    ) -> APIFuture[types.ForwardBackwardOutput]: ...

    @overload
    def forward_backward_custom(
        self,
        data: Sequence[types.Datum],
        loss_fn: custom_loss.NumpyLoss,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        with_gradients: Literal[True],
    ) -> APIFuture[types.ForwardBackwardOutput]: ...

    def forward_backward_custom(
        self,
        data: Sequence[types.Datum],
        loss_fn: Callable[..., Any],
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        with_gradients: bool = False,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Run `forward_backward` with a loss of your own, evaluated in this process between two passes in the pool.

        `loss_fn(data, logprobs)` runs on a thread. It gets one torch tensor of log-probabilities per datum, in the
        shape of its `target_tokens`, and returns `(loss, metrics)`. With `with_gradients` it gets numpy arrays and
        returns `(loss, gradients, metrics)`, without torch. Submit `optim_step` without awaiting this: its sequence
        number follows those of both passes. If `loss_fn` raises, the future raises the same error, and the next
        `optim_step` fails, naming it, instead of stepping on a part of the gradient: the pool's log gets the error's
        type and first 500 characters. Raises ImportError without torch, unless `with_gradients`.
        """
        if loss_type_input not in (None, "logprobs"):
            raise ValueError(
                f"loss_type_input is 'logprobs' or None: a loss gets nothing else; got {loss_type_input!r}"
            )
        if not with_gradients:
            custom_loss.check_torch()
        evaluate = custom_loss.evaluate_numpy if with_gradients else custom_loss.evaluate_torch
        custom = custom_loss.CustomPass(self.model_id, data, partial(evaluate, loss_fn))
        return self._sequence.reserve(custom.num_seqs, lambda seq: custom.run(self._sequence, seq))

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> APIFuture[types.SaveWeightsResponse]:
        """Save weights, moments and step count, as they are after all earlier calls, as checkpoint `weights/<name>`.

        The pool deletes it after `ttl_seconds`; None keeps it. Without `overwrite`, the future raises OperationFailed
        (ALREADY_EXISTS) if a checkpoint of that name exists.
        """
        request = checkpoints_pb2.SaveStateRequest(
            adapter_id=self.model_id,
            name=encoding.text("name", name),
            ttl_seconds=encoding.ttl(ttl_seconds),
            overwrite=overwrite,
            user_metadata=encoding.string_map(user_metadata),
        )
        return self._submit(methods.SAVE_STATE, request, lambda op: types.SaveWeightsResponse(path=op.save_state.path))

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
        *,
        overwrite: bool = False,
    ) -> APIFuture[types.SaveWeightsForSamplerResponse]:
        """Save the weights as checkpoint `sampler_weights/<name>`, for `create_sampling_client`.

        They can be sampled from once the future is done; their file may be written later. The pool deletes the
        checkpoint after `ttl_seconds`; None keeps it. Without `overwrite`, the future raises OperationFailed
        (ALREADY_EXISTS) if a checkpoint of that name exists. With it, samplers of the replaced checkpoint end.
        """
        if not name:
            raise ValueError(
                "name is empty: for a sampler without a checkpoint use save_weights_and_get_sampling_client"
            )
        request = checkpoints_pb2.SaveWeightsForSamplerRequest(
            adapter_id=self.model_id,
            name=encoding.text("name", name),
            ttl_seconds=encoding.ttl(ttl_seconds),
            user_metadata=encoding.string_map(user_metadata),
            overwrite=overwrite,
        )
        return self._submit(
            methods.SAVE_WEIGHTS_FOR_SAMPLER,
            request,
            lambda op: types.SaveWeightsForSamplerResponse(path=op.save_weights_for_sampler.path),
        )

    def save_weights_external(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: None = None
    ) -> APIFuture[types.SaveWeightsExternalResponse]:
        """Save the weights as checkpoint `external_weights/<name>`, to be exported: nothing here samples from them.

        The pool deletes the checkpoint after `ttl_seconds`; None keeps it. Raises ValueError for an empty name; the
        future raises OperationFailed (ALREADY_EXISTS) if a checkpoint of that name exists.
        """
        refuse(age_encryption_recipients=age_encryption_recipients)
        if not name:
            raise ValueError("name is empty: weights that are saved for export need one")
        request = checkpoints_pb2.SaveWeightsForSamplerRequest(
            adapter_id=self.model_id,
            name=encoding.text("name", name),
            ttl_seconds=encoding.ttl(ttl_seconds),
            for_export=True,
        )
        return self._submit(
            methods.SAVE_WEIGHTS_FOR_SAMPLER,
            request,
            lambda op: types.SaveWeightsExternalResponse(path=op.save_weights_for_sampler.path),
        )

    def load_state(self, path: str, weights_access_token: None = None) -> APIFuture[types.LoadWeightsResponse]:
        """Replace the weights by a checkpoint's, reset the moments, and discard the pending gradient.

        Raises ValueError for a malformed path; the future raises NotFound.
        """
        refuse(weights_access_token=weights_access_token)
        return self._load(path, with_optimizer=False)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """Replace weights, moments and step count by a checkpoint's, and discard the pending gradient."""
        refuse(weights_access_token=weights_access_token)
        return self._load(path, with_optimizer=True)

    def discard_gradient(self) -> APIFuture[types.DiscardGradientResponse]:
        """Discard the pending gradient without a step; weights and moments stay. Not in the SDK.

        Also opens the gradient window after a failure has closed it, so that the next `forward_backward` counts.
        """
        request = training_pb2.DiscardGradientRequest(adapter_id=self.model_id)
        return self._submit(methods.DISCARD_GRADIENT, request, lambda _: types.DiscardGradientResponse())

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: None = None,
        record_stability_info: bool = False,
        kind: types.SamplingClientKind = "snapshot",
    ) -> SamplingClient:
        """Create a sampler of the weights as they are after all earlier calls, and wait for it.

        Without a name there is no checkpoint and no wait for a file, and the sampler lives as long as its session, also
        across restarts of the service. An "inflight" sampler has no name: each new sample uses the newest weights of
        this adapter that were saved as inflight, by this call or a later one; running samples keep their weights.

        record_stability_info: whether the pool keeps a record of every sampled sequence, for the loss
        `stable_reinforce`, until the session ends and for a day after its last use.
        """
        refuse(retry_config=retry_config)
        return self._sampling_client(name, kind, is_recording=record_stability_info).result()

    def create_sampling_client(
        self, model_path: str, retry_config: None = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """Create a sampler of a checkpoint. Raises NotFound, InvalidArgument."""
        refuse(retry_config=retry_config)
        return self._connection.start(self._sampler_of(model_path, is_recording=record_stability_info)).result()

    def get_info(self) -> types.GetInfoResponse:
        """Describe this adapter, without a call to the pool."""
        return types.GetInfoResponse(
            model_id=self.model_id,
            model_data=types.ModelData(model_name=self._adapter.base_model),
            lora_rank=self._adapter.rank,
            lora_alpha=self._adapter.alpha,
            model_name=self._adapter.base_model,
            name=self._adapter.name,
        )

    def report_metrics(self, step: int, metrics: Mapping[str, float]) -> APIFuture[None]:
        """Add metrics of your own to the adapter's history, beside those that its steps return. Not in the SDK.

        `step` is yours to count, from 0. At most 64 metrics at a time. The pool shows them with its own.
        """
        request = history_pb2.ReportMetricsRequest(adapter_id=self.model_id, step=step, metrics=metrics)
        return self._connection.start(self._report(request))

    def history(self) -> APIFuture[list[HistoryEntry]]:
        """Return the adapter's finished operations, with what they waited for and their metrics, and reported metrics.

        Oldest first, as far as the pool still has them. Not in the SDK.
        """
        return self._connection.start(self._history())

    def get_tokenizer(self) -> Any:
        """Return the base model's tokenizer: of transformers if installed, else of tokenizers. Raises ImportError."""
        return self._connection.start(fetch_tokenizer(self._connection, self._adapter.base_model)).result()

    # The SDK's older form of each call: the first await sends it and returns the future, the second one the result.

    forward_async = submitted(forward)
    forward_backward_async = submitted(forward_backward)
    optim_step_async = submitted(optim_step)
    train_step_async = submitted(train_step)
    save_state_async = submitted(save_state)
    save_weights_for_sampler_async = submitted(save_weights_for_sampler)
    save_weights_external_async = submitted(save_weights_external)
    load_state_async = submitted(load_state)
    load_state_with_optimizer_async = submitted(load_state_with_optimizer)
    discard_gradient_async = submitted(discard_gradient)
    report_metrics_async = submitted(report_metrics)
    history_async = submitted(history)

    async def forward_backward_custom_async(
        self,
        data: Sequence[types.Datum],
        loss_fn: Callable[..., Any],
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        with_gradients: bool = False,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """`forward_backward_custom`, as a future."""
        if with_gradients:
            return self.forward_backward_custom(data, loss_fn, loss_type_input=loss_type_input, with_gradients=True)
        return self.forward_backward_custom(data, loss_fn, loss_type_input=loss_type_input)

    async def save_weights_and_get_sampling_client_async(
        self,
        name: str | None = None,
        retry_config: None = None,
        record_stability_info: bool = False,
        kind: types.SamplingClientKind = "snapshot",
    ) -> SamplingClient:
        """`save_weights_and_get_sampling_client`, awaited."""
        refuse(retry_config=retry_config)
        return await self._sampling_client(name, kind, is_recording=record_stability_info)

    async def create_sampling_client_async(
        self, model_path: str, retry_config: None = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """`create_sampling_client`, awaited."""
        refuse(retry_config=retry_config)
        return await self._connection.start(self._sampler_of(model_path, is_recording=record_stability_info))

    async def get_info_async(self) -> types.GetInfoResponse:
        """`get_info`, awaited."""
        return self.get_info()

    def _requests(
        self,
        request_type: type[passes.RequestT],
        chunks: Sequence[Sequence[types.Datum]],
        loss_fn: str,
        loss_fn_config: Mapping[str, float] | None,
    ) -> list[passes.RequestT]:
        build = partial(passes.build_request, adapter_id=self.model_id, loss_fn=loss_fn, loss_fn_config=loss_fn_config)
        return [build(request_type, chunk) for chunk in chunks]

    def _run(self, method: methods.Unary[Any, Any], requests: Sequence[Any]) -> APIFuture[types.ForwardBackwardOutput]:
        return self._sequence.reserve(len(requests), lambda seq: passes.run(self._sequence, method, requests, seq))

    def _submit(
        self, method: methods.Unary[RequestT, Any], request: RequestT, convert: Callable[[operations_pb2.Operation], T]
    ) -> APIFuture[T]:
        """Run an operation with the next sequence number; the future has what `convert` makes of it."""

        async def run(seq: int) -> T:
            return convert(await self._sequence.run(method, request, seq))

        return self._sequence.reserve(1, run)

    def _load(self, path: str, *, with_optimizer: bool) -> APIFuture[types.LoadWeightsResponse]:
        request = training_pb2.LoadStateRequest(
            adapter_id=self.model_id, path=encoding.checkpoint_path(path), with_optimizer=with_optimizer
        )
        return self._submit(methods.LOAD_STATE, request, lambda op: types.LoadWeightsResponse(path=op.load_state.path))

    async def _report(self, request: history_pb2.ReportMetricsRequest) -> None:
        await self._connection.call(methods.REPORT_METRICS, request)

    async def _history(self) -> list[HistoryEntry]:
        request, entries = history_pb2.ListHistoryRequest(target_id=self.model_id), list[HistoryEntry]()
        while True:
            page = await self._connection.call(methods.LIST_HISTORY, request)
            entries += map(entry_of, page.entries)
            if not page.has_more:
                return entries
            request.page_token = page.next_page_token

    def _sampler_of(self, path: str, *, is_recording: bool) -> Coroutine[Any, Any, SamplingClient]:
        return create_sampler(self._session, model_path=path, record_stability_info=is_recording)

    def _sampling_client(
        self, name: str | None, kind: types.SamplingClientKind, *, is_recording: bool
    ) -> APIFuture[SamplingClient]:
        if kind not in get_args(types.SamplingClientKind):
            raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(get_args(types.SamplingClientKind))}")
        if name and kind == "inflight":
            raise ValueError("an inflight sampler follows its adapter and has no name; leave out name, or kind")
        request = checkpoints_pb2.SaveWeightsForSamplerRequest(
            adapter_id=self.model_id, name=encoding.text("name", name), is_inflight=kind == "inflight"
        )

        async def create(seq: int) -> SamplingClient:
            saved = (await self._sequence.run(methods.SAVE_WEIGHTS_FOR_SAMPLER, request, seq)).save_weights_for_sampler
            if saved.sampler_id:
                return SamplingClient(
                    self._connection,
                    saved.sampler_id,
                    self._adapter.base_model,
                    session=self._session,
                    record_stability_info=is_recording,
                )
            return await self._sampler_of(saved.path, is_recording=is_recording)

        return self._sequence.reserve(1, create)
