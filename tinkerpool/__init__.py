"""tinkerpool: train LoRA adapters on a shared pool of warm base models, from an ordinary training loop.

    import tinkerpool

    service = tinkerpool.ServiceClient()
    client = service.create_lora_training_client(rank=8)
    tokens = client.get_tokenizer().encode("In the beginning")
    datum = tinkerpool.Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)})
    step = client.train_step([datum], "cross_entropy", tinkerpool.AdamParams(learning_rate=1e-3))
    print(step.result().forward_backward.metrics)

Needs numpy, grpcio and protobuf; accepts torch tensors.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from tinkerpool import errors, types
from tinkerpool.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    OperationFailed,
    PermissionDeniedError,
    RateLimitError,
    RequestFailedError,
    TinkerError,
    TinkerpoolError,
    UnprocessableEntityError,
)
from tinkerpool.foreign_names import no_attribute
from tinkerpool.types import (
    AdamOptimizerConfig,
    AdamParams,
    Checkpoint,
    CheckpointType,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ModelID,
    ModelInput,
    ModelInputChunk,
    OptimParams,
    OptimStepResponse,
    ParsedCheckpointTinkerPath,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    StopReason,
    TensorData,
    TensorDtype,
    TrainingRun,
)

if TYPE_CHECKING:
    from tinkerpool.client.calls.futures import APIFuture
    from tinkerpool.client.rest_client import RestClient
    from tinkerpool.client.sampling_client import SamplingClient
    from tinkerpool.client.service_client import ServiceClient
    from tinkerpool.client.training_client import TrainingClient

__version__ = version("tinkerpool")

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIFuture",
    "APIStatusError",
    "APITimeoutError",
    "AdamOptimizerConfig",
    "AdamParams",
    "AuthenticationError",
    "BadRequestError",
    "Checkpoint",
    "CheckpointType",
    "ConflictError",
    "Datum",
    "EncodedTextChunk",
    "ForwardBackwardOutput",
    "InternalServerError",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "NotFoundError",
    "OperationFailed",
    "OptimParams",
    "OptimStepResponse",
    "ParsedCheckpointTinkerPath",
    "PermissionDeniedError",
    "PromptProvenanceSpan",
    "RateLimitError",
    "RequestFailedError",
    "RestClient",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "StopReason",
    "TensorData",
    "TensorDtype",
    "TinkerError",
    "TinkerpoolError",
    "TrainingClient",
    "TrainingRun",
    "UnprocessableEntityError",
    "errors",
    "types",
]

# Imported on first use: workers import `tinkerpool.convert` and other modules, and do not need grpc.
_CLIENTS = {
    "APIFuture": "tinkerpool.client.calls.futures",
    "RestClient": "tinkerpool.client.rest_client",
    "SamplingClient": "tinkerpool.client.sampling_client",
    "ServiceClient": "tinkerpool.client.service_client",
    "TrainingClient": "tinkerpool.client.training_client",
}

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in _CLIENTS:
            return getattr(importlib.import_module(_CLIENTS[name]), name)
        raise no_attribute(__name__, name)

    def __dir__() -> list[str]:
        return __all__
