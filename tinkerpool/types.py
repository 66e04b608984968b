"""What a user hands to the client and gets from it. Names and fields are those of the `tinker` SDK.

Everything is immutable. Where numbers are expected, lists, numpy arrays and torch tensors all do; torch is never
imported here unless `to_torch` is called. Nothing in this file talks to a pool.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

TensorDtype = Literal["int64", "float32"]
StopReason = Literal["stop", "length"]
LossFnType = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]
SamplerKind = Literal["snapshot", "inflight"]

_INT32_MAX = 2**31 - 1


def as_array(values: Any) -> NDArray[Any]:
    """A new numpy array of a list, an array or a torch tensor (moved to the CPU; half precision becomes float32)."""
    if hasattr(values, "detach") and hasattr(values, "cpu"):
        values = values.detach().cpu()
        if str(values.dtype) in {"torch.bfloat16", "torch.float16"}:
            values = values.float()
        values = values.numpy()
    return np.array(values)


def as_tokens(values: Any, what: str) -> NDArray[np.int32]:
    """Token ids as a read-only int32 array. Raises ValueError if they are not whole numbers from 0 to 2^31 - 1."""
    array = as_array(values)
    if array.size == 0:
        array = array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{what} must be whole numbers, got {array.dtype}")
    if array.size and (array.min() < 0 or array.max() > _INT32_MAX):
        raise ValueError(f"{what} must be token ids from 0 to {_INT32_MAX}, got {array.min()} to {array.max()}")
    tokens = array.astype(np.int32, copy=False)
    tokens.flags.writeable = False
    return tokens


@dataclass(frozen=True, slots=True, eq=False, init=False)
class TensorData:
    """A dense array of int64 or float32."""

    data: NDArray[Any]
    """The elements in row-major order, shape (size,), read-only."""
    dtype: TensorDtype
    """Type of the elements."""
    shape: tuple[int, ...]
    """Sizes of the dimensions, outermost first."""

    def __init__(self, data: Any, dtype: str | None = None, shape: Sequence[int] | None = None) -> None:
        array = as_array(data)
        if dtype is None:
            dtype = _dtype_of(array)
        if dtype not in {"int64", "float32"}:
            raise ValueError(f"a tensor's dtype is 'int64' or 'float32', got {dtype!r}")
        if array.dtype.kind not in "biuf":
            raise ValueError(f"a tensor holds numbers, got an array of {array.dtype}")
        if dtype == "int64" and array.dtype.kind == "f" and not np.array_equal(array, np.trunc(array)):
            raise ValueError("the tensor holds fractions where whole numbers (int64) are expected")
        shape = array.shape if shape is None else tuple(int(size) for size in shape)
        if math.prod(shape) != array.size:
            raise ValueError(f"{array.size} elements do not fill the shape {shape}")
        flat = np.ascontiguousarray(array, dtype=dtype).reshape(-1)
        flat.flags.writeable = False
        object.__setattr__(self, "data", flat)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", shape)

    @classmethod
    def from_numpy(cls, array: NDArray[Any]) -> TensorData:
        """The tensor of a numpy array; integers become int64, floats float32."""
        return cls(array)

    @classmethod
    def from_torch(cls, tensor: Any) -> TensorData:
        """The tensor of a torch tensor on any device; integers become int64, floats float32."""
        return cls(tensor)

    def to_numpy(self) -> NDArray[Any]:
        """A new numpy array in this tensor's shape."""
        return self.data.reshape(self.shape).copy()

    def to_torch(self) -> Any:
        """A new torch tensor in this tensor's shape. Raises ImportError without torch."""
        return importlib.import_module("torch").from_numpy(self.to_numpy())

    def tolist(self) -> list[Any]:
        """The elements as nested lists."""
        values: list[Any] = self.data.reshape(self.shape).tolist()
        return values

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        same_kind = self.dtype == other.dtype and self.shape == other.shape
        return same_kind and np.array_equal(self.data, other.data, equal_nan=self.dtype == "float32")


def _dtype_of(array: NDArray[Any]) -> TensorDtype:
    return "float32" if array.dtype.kind == "f" or array.size == 0 else "int64"


@dataclass(frozen=True, slots=True, eq=False, init=False)
class EncodedTextChunk:
    """A run of token ids."""

    tokens: NDArray[np.int32]
    """Shape (n,), read-only."""

    def __init__(self, tokens: Any) -> None:
        array = as_tokens(tokens, "the tokens of a chunk")
        if array.ndim != 1:
            raise ValueError(f"the tokens of a chunk are one sequence, got shape {array.shape}")
        object.__setattr__(self, "tokens", array)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EncodedTextChunk) and np.array_equal(self.tokens, other.tokens)


@dataclass(frozen=True, slots=True, init=False)
class ModelInput:
    """What the model reads: a sequence of chunks."""

    chunks: tuple[EncodedTextChunk, ...]
    """In order."""

    def __init__(self, chunks: Iterable[EncodedTextChunk] = ()) -> None:
        object.__setattr__(self, "chunks", tuple(chunks))

    @classmethod
    def from_ints(cls, tokens: Any) -> ModelInput:
        """The input of a sequence of token ids. Raises ValueError for anything that is not a token id."""
        return cls([EncodedTextChunk(tokens)])

    @classmethod
    def empty(cls) -> ModelInput:
        """An input without tokens, to append to."""
        return cls()

    @property
    def length(self) -> int:
        """Number of tokens."""
        return sum(chunk.length for chunk in self.chunks)

    def append(self, chunk: EncodedTextChunk) -> ModelInput:
        """This input and then a chunk; this one stays as it is."""
        return ModelInput((*self.chunks, chunk))

    def append_int(self, token: int) -> ModelInput:
        """This input and then a token; this one stays as it is."""
        return self.append(EncodedTextChunk([token]))

    def to_numpy(self) -> NDArray[np.int32]:
        """All token ids, shape (n,)."""
        return np.concatenate([chunk.tokens for chunk in self.chunks] or [np.empty(0, np.int32)])

    def to_ints(self) -> list[int]:
        """All token ids."""
        tokens: list[int] = self.to_numpy().tolist()
        return tokens


INPUT_DTYPES: Mapping[str, TensorDtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}
"""The type that each loss input is converted to; any other keeps the type of its array."""


@dataclass(frozen=True, slots=True, init=False)
class Datum:
    """One training sequence."""

    model_input: ModelInput
    """Token ids, n of them. Targets are shifted by the caller: input `x[:-1]`, target `x[1:]`."""
    loss_fn_inputs: Mapping[str, TensorData]
    """Inputs of the loss by name; the first dimension is n."""

    def __init__(self, model_input: ModelInput | Any, loss_fn_inputs: Mapping[str, Any]) -> None:
        if not isinstance(model_input, ModelInput):
            model_input = ModelInput.from_ints(model_input)
        inputs = {name: _loss_input(name, value) for name, value in loss_fn_inputs.items()}
        object.__setattr__(self, "model_input", model_input)
        object.__setattr__(self, "loss_fn_inputs", inputs)


def _loss_input(name: str, value: Any) -> TensorData:
    dtype = INPUT_DTYPES.get(name)
    try:
        if not isinstance(value, TensorData):
            return TensorData(value, dtype)
        return value if dtype in {None, value.dtype} else TensorData(value.data, dtype, value.shape)
    except ValueError as error:
        raise ValueError(f"loss_fn_inputs[{name!r}]: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """AdamW (decoupled weight decay) for one step. The service checks the ranges."""

    learning_rate: float = 1e-4
    """Step size, >= 0."""
    beta1: float = 0.9
    """Decay of the first moment, in [0, 1)."""
    beta2: float = 0.95
    """Decay of the second moment, in [0, 1)."""
    eps: float = 1e-12
    """Added to the root of the second moment, > 0."""
    weight_decay: float = 0.0
    """Decoupled weight decay, >= 0."""
    grad_clip_norm: float = 0.0
    """Clips the global norm of this adapter's gradient; 0 clips nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens."""

    max_tokens: int | None = None
    """Most tokens per sequence, at least 1. None: up to the model's longest sequence."""
    seed: int | None = None
    """The same seed gives the same tokens. None: the service draws one and logs it."""
    stop: str | Sequence[str] | Sequence[int] | None = None
    """Strings or token ids that end a sequence. None: the model's end-of-text tokens. `[]`: nothing but the length."""
    temperature: float = 1.0
    """Divides the logits, >= 0; 0 is greedy."""
    top_k: int = -1
    """Keep the k likeliest tokens; -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens with at least this probability, in (0, 1]."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, or None for no limit of your own; got {self.max_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if self.top_k < 1 and self.top_k != -1:
            raise ValueError(f"top_k must be at least 1, or -1 for all, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        stops = [] if self.stop is None or isinstance(self.stop, str) else list(self.stop)
        if not (all(isinstance(s, str) for s in stops) or all(isinstance(s, int | np.integer) for s in stops)):
            raise ValueError("stop must be a string, a list of strings or a list of token ids, not a mixture")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """Result of forward and forward_backward."""

    loss_fn_output_type: str
    """Always `TorchLossReturn`, as in the SDK."""
    loss_fn_outputs: list[dict[str, TensorData]]
    """Per datum, in the order of the request: `logprobs`, float32 in the shape of `target_tokens`."""
    metrics: dict[str, float]
    """`loss:sum`, `clock_cycle:unique` and others, by `name:reduction`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepResponse:
    """Result of optim_step."""

    metrics: dict[str, float]
    """`grad_norm:last` (before clipping), `update_norm:last`, `clock_cycle:unique` and others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStepResponse:
    """Result of train_step."""

    forward_backward: ForwardBackwardOutput
    """Of the pass."""
    optim_step: OptimStepResponse
    """Of the step behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeightsResponse:
    """Result of save_state."""

    path: str
    """`tinker://<adapter id>/weights/<name>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeightsForSamplerResponse:
    """Result of save_weights_for_sampler."""

    path: str
    """`tinker://<adapter id>/sampler_weights/<name>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeightsResponse:
    """Result of load_state."""

    path: str
    """The checkpoint that was loaded."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopkLogprobs:
    """The likeliest tokens at each of n positions, the likeliest first."""

    token_ids: NDArray[np.int32]
    """Shape (n, k); k is at most the vocabulary's size."""
    logprobs: NDArray[np.float32]
    """Shape (n, k); NaN at positions for which nothing was computed."""

    def tolist(self) -> list[list[tuple[int, float]] | None]:
        """Per position, (token id, log-probability); None where nothing was computed."""
        rows = zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True)
        return [None if math.isnan(logprobs[0]) else list(zip(ids, logprobs, strict=True)) for ids, logprobs in rows]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TopkLogprobs):
            return NotImplemented
        same_tokens = np.array_equal(self.token_ids, other.token_ids)
        return same_tokens and np.array_equal(self.logprobs, other.logprobs, equal_nan=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAltTokens:
    """Draws of what could stand at prompt position i + 1, in row i."""

    tokens: TensorData
    """int64 token ids, shape (p - 1, k)."""
    logprobs: TensorData
    """float32, shape (p - 1, k)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One sampled continuation."""

    stop_reason: StopReason
    """`stop`: a stop token or string, which is part of `tokens`; `length`: the limit."""
    tokens: list[int]
    """Token ids, n of them."""
    logprobs: list[float] | None
    """Of each token under the model at temperature 1, before top-k and top-p; n of them."""
    topk_logprobs_np: TopkLogprobs | None = None
    """If asked for: the likeliest tokens at each position, as arrays."""

    @property
    def topk_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        """If asked for: the likeliest tokens at each position, as (token id, log-probability), the likeliest first."""
        return None if self.topk_logprobs_np is None else self.topk_logprobs_np.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResponse:
    """Result of sample."""

    sequences: list[SampledSequence]
    """`num_samples` of them."""
    prompt_logprobs: list[float | None] | None = None
    """If asked for: of each prompt token; None at position 0, which nothing precedes, and where none was wanted."""
    topk_prompt_logprobs_np: TopkLogprobs | None = None
    """If asked for: the likeliest tokens at each prompt position, as arrays; NaN where `prompt_logprobs` has None."""
    target_prompt_logprobs: TensorData | None = None
    """If asked for: of the targets, float32 in their shape; 0 where they had -1."""
    prompt_cache_hit_tokens: int = 0
    """Prompt tokens that an earlier request with the same weights had computed."""
    prompt_alt_tokens: PromptAltTokens | None = None
    """If asked for: draws of what could stand in the prompt."""

    @property
    def topk_prompt_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        """If asked for: the likeliest tokens at each prompt position, as (token id, log-probability)."""
        return None if self.topk_prompt_logprobs_np is None else self.topk_prompt_logprobs_np.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """One token of a streamed sample."""

    sequence_index: int
    """Which of the `num_samples` sequences."""
    token: int
    """Its id."""
    logprob: float
    """As in SampledSequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportedModel:
    """A base model that the pool keeps warm."""

    model_name: str
    """The name to ask for."""
    max_context_length: int
    """Longest sequence in tokens: training, or prompt plus samples."""
    trainable: bool = True
    """Whether adapters can be trained on it."""
    sampleable: bool = True
    """Whether it can be sampled from."""
    vocab_size: int
    """Valid token ids are 0 .. vocab_size - 1."""
    max_rank: int
    """Largest LoRA rank."""
    num_params: int
    """Parameters of the frozen model."""
    num_workers: int
    """Live workers that serve it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetServerCapabilitiesResponse:
    """What a pool can do."""

    supported_models: list[SupportedModel]
    """In the order they were configured."""
    version: str
    """Of the server."""
    loss_functions: list[str]
    """By name."""
    max_datums: int
    """Most datums in one request; the client cuts larger batches itself."""
    max_message_bytes: int
    """Largest request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelData:
    """The base model of an adapter."""

    model_name: str
    """Its name in the pool."""
    arch: str | None = None
    """Not told by tinkerpool."""
    tokenizer_id: str | None = None
    """Not told by tinkerpool: `get_tokenizer` fetches the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetInfoResponse:
    """What an adapter is."""

    model_id: str
    """`<session id>:train:<index>`."""
    model_data: ModelData
    """Its base model."""
    is_lora: bool = True
    """Always."""
    lora_rank: int
    """LoRA rank."""
    lora_alpha: float
    """LoRA scaling numerator."""
    model_name: str
    """Its base model's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A user's named, immutable state."""

    checkpoint_id: str
    """`weights/<name>` or `sampler_weights/<name>`."""
    checkpoint_type: Literal["training", "sampler"]
    """`training`: weights, moments and step count; `sampler`: weights."""
    time: datetime
    """When it was saved, UTC."""
    tinker_path: str
    """`tinker://<adapter id>/<checkpoint id>`."""
    size_bytes: int
    """On disk; of the weights alone while the file of a checkpoint for sampling is being written."""
    base_model: str
    """Its base model's name."""
    lora_rank: int
    """LoRA rank."""
    sha256: str
    """Over its contents, in hex; empty while its file is being written."""
    expires_at: datetime | None = None
    """When the pool will delete it, UTC; None: never."""
    public: bool = False
    """Whether every tenant may load, sample from and export it."""
    user_metadata: dict[str, str] = field(default_factory=dict)
    """As given when saving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """An adapter, as listings show it."""

    training_run_id: str
    """The adapter's id, `<session id>:train:<index>`."""
    base_model: str
    """Its base model's name."""
    is_lora: bool = True
    """Always."""
    lora_rank: int
    """LoRA rank."""
    create_time: datetime
    """UTC."""
    num_operations: int
    """The last place in its order that is done."""
    user_metadata: dict[str, str] = field(default_factory=dict)
    """As given at creation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRunsResponse:
    """A listing of adapters."""

    training_runs: list[TrainingRun]
    """Newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsListResponse:
    """A listing of checkpoints."""

    checkpoints: list[Checkpoint]
    """Newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSessionsResponse:
    """A listing of sessions."""

    sessions: list[str]
    """Their ids, newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """A client process's lifetime."""

    session_id: str
    """Opaque."""
    training_run_ids: list[str]
    """Adapters created in it."""
    sampler_ids: list[str]
    """Samplers created in it."""
    create_time: datetime
    """UTC."""
    is_live: bool
    """Whether heartbeats still count."""
    user_metadata: dict[str, str] = field(default_factory=dict)
    """As given at creation."""
