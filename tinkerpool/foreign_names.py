"""Names that are not here, of the Tinker SDK, of torch and of transformers, and what to use instead of each.

So a program for the SDK runs unchanged where it leaves them out, and learns what to do where it does not. Names of
arguments that mean nothing in a pool are accepted with their defaults.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])

INSTEAD = {
    "access_scope": "a key sees what its own tenant has: leave it out, or pass 'owned'",
    "age_encryption_recipients": "encrypt the files that export_checkpoint writes",
    "destination_project_id": "a pool has tenants instead of projects: a copy belongs to the tenant of the key",
    "optimizer": "every adapter trains with AdamW: pass AdamParams to optim_step",
    "project_id": "a pool has tenants instead of projects: a listing has all that the tenant of the key has",
    "retry_config": "ServiceClient(retry_timeout_s=...) says for how long calls are tried again, samples among them",
    "weights_access_token": "publish the checkpoint, or use a key of its tenant",
}
"""What to do instead of an argument of the SDK."""
_DEFAULTS = (None, False, "owned")

_MISSING = {
    "the `tinkerpool` command has what administrators do (`tinkerpool --help`)": (
        "AdminClient AuditLogEntry AuditLogResponse"
    ),
    "a pool sends no bills: `RestClient.get_usage` counts tokens; a used-up budget is a PermissionDeniedError": (
        "BillingError BillingEventInfo BillingUsageEvent BillingUsageResponse BillingUsageSession "
        "CheckpointBillingEvent GetBillingUsageRequest SamplingPrefillBillingEvent SamplingSampleBillingEvent "
        "StorageBillingEvent TrainingBillingEvent"
    ),
    "`tinkerpool usage` shows the stored bytes": (
        "CurrentCheckpointStorageUsageItem CurrentCheckpointStorageUsageResponse "
        "GetCurrentCheckpointStorageUsageRequest"
    ),
    "calls go over gRPC, without HTTP's responses and options; `ServiceClient(retry_timeout_s=...)` limits retries": (
        "APIResponse APIResponseValidationError AsyncAPIResponse RequestOptions Timeout auth lib proto resources"
    ),
    "clients are futures of themselves: use SamplingClient, TrainingClient": (
        "BackcompatSamplingClientFuture BackcompatTrainingClientFuture"
    ),
    "every adapter trains with AdamW: use AdamParams": "DimuonOptimizerConfig DimuonParams",
    "the base models take text: use EncodedTextChunk": "DmelChunk ImageAssetPointerChunk ImageChunk",
    "nothing here warns of an experiment: leave the filter out": "ExperimentalWarning",
    "pass its fields to create_lora_training_client": "LoraConfig",
    "losses of your own run in the client: forward_backward_custom": (
        "CreateCustomLossRequest CreateCustomLossResponse CustomLossGraph CustomLossInput CustomLossInputRank "
        "CustomLossNode LossHandle PerDatumLossFn"
    ),
    "`RestClient.list_sessions` and `get_session` have the live sessions, which end without a verdict": (
        "AccessibleSearchOwner ActiveSessionStatusQuery CancelledSessionStatusQuery ClientFinishedSessionStatusQuery "
        "ClientSessionFinishErrored ClientSessionFinishInterrupted ClientSessionFinishReason "
        "ClientSessionFinishReasonType ClientSessionFinishSuccess ClientSessionFinished FailedSessionStatusQuery "
        "OwnSearchOwner SearchOwner SessionActive SessionCancelled SessionFailed SessionFailedReason "
        "SessionFailedRequestReason SessionFailedSamplingSessionReason SessionFailedTrainingRunReason "
        "SessionSearchCursor SessionSearchRequest SessionSearchResponse SessionStatus SessionStatusQuery "
        "SessionSummary UserSearchOwner"
    ),
    "the client reports to nobody": (
        "EventType SessionEndEvent SessionStartEvent Severity TelemetryBatch TelemetryEvent TelemetryResponse "
        "TelemetrySendRequest UnhandledExceptionEvent"
    ),
    "`RestClient.get_checkpoint` and `copy_weights` return a Checkpoint": "CopyWeightsResponse WeightsInfoResponse",
    "`RestClient.export_checkpoint` writes the files": "ExternalWeightsUrlsResponse",
    "the methods of the clients take the arguments, send the request and return the result": (
        "AuthTokenResponse ClientConfigRequest ClientConfigResponse ClientDynamicConfigResponse CopyWeightsRequest "
        "CreateModelRequest CreateModelResponse CreateSamplingSessionRequest CreateSamplingSessionResponse "
        "CreateSessionRequest CreateSessionResponse Cursor ForwardBackwardInput ForwardBackwardRequest ForwardRequest "
        "FutureCompletion FutureFailed FutureFinished FutureRetrieveRequest FutureRetrieveResponse "
        "FuturesRetrieveRequest FuturesRetrieveResponse GetInfoRequest HealthResponse JoinSamplingSessionRequest "
        "JoinSamplingSessionResponse LoadWeightsRequest OptimStepRequest RequestFailedResponse SampleRequest "
        "SamplingSessionFuturesTarget SaveWeightsExternalRequest SaveWeightsExternalResponseInternal "
        "SaveWeightsForSamplerRequest SaveWeightsForSamplerResponseInternal SaveWeightsRequest "
        "SessionHeartbeatRequest SessionHeartbeatResponse UnloadModelRequest UnloadModelResponse UntypedAPIFuture"
    ),
}
MISSING = {name: instead for instead, names in _MISSING.items() for name in names.split()}
"""What to use instead of a name in the SDK's modules `tinker` and `tinker.types`."""

_IN_SAMPLING_PARAMS = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
_MEANT = {
    **{name: f"sampling_params=SamplingParams({name}=...)" for name in _IN_SAMPLING_PARAMS},
    "address": "base_url",
    "betas": "beta1 and beta2",
    "clip_grad_norm": "grad_clip_norm",
    "display_name": "name",
    "do_sample": "temperature (0: greedy)",
    "endpoint": "base_url",
    "epsilon": "eps",
    "host": "base_url",
    "key": "api_key",
    "lora_alpha": "alpha",
    "lora_rank": "rank",
    "lr": "learning_rate",
    "max_grad_norm": "grad_clip_norm",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_retries": "retry_timeout_s",
    "metadata": "labels",
    "model": "base_model",
    "model_name": "base_model",
    "n": "num_samples",
    "num_return_sequences": "num_samples",
    "r": "rank",
    "run_name": "name",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_token_ids": "stop",
    "tags": "labels",
    "timeout": "retry_timeout_s",
    "token": "api_key",
    "url": "base_url",
}
"""Arguments by their names in other libraries."""


def refuse(**given: Any) -> None:
    """Raise ValueError for an argument that does not have its default."""
    for name, value in given.items():
        if value not in _DEFAULTS:
            raise ValueError(f"{name} is not supported here: {INSTEAD[name]}")


def no_attribute(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module does not have."""
    instead = f": {MISSING[name]}" if name in MISSING else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{instead}", name=name)


def with_hints(target: T) -> T:
    """Let the TypeError for an unknown argument of a function, or of a class, name the argument that was meant."""
    function: Any = vars(target)["__init__"] if isinstance(target, type) else target
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            unknown = [name for name in kwargs if name not in parameters]
            if not unknown:
                raise
            owner = function.__qualname__.removesuffix(".__init__")
            raise TypeError(f"{owner} has no argument {unknown[0]!r}: {_hint(unknown[0], parameters)}") from None

    if not isinstance(target, type):
        return checked  # type: ignore[return-value]  # has the signature of what it wraps
    setattr(target, "__init__", checked)  # noqa: B010  # mypy refuses the assignment
    return target


def _hint(name: str, parameters: list[str]) -> str:
    meant = name
    while meant in _MEANT:
        meant = _MEANT[meant]
        if meant.replace("=", " ").split()[0] in parameters:
            return f"did you mean {meant}?"
    if close := difflib.get_close_matches(name, parameters, n=1):
        return f"did you mean {close[0]}?"
    return f"it takes {', '.join(parameters)}"
