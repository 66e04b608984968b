"""JSON bodies of the Tinker protocol. Fields that are not listed are ignored.

Null means the same as absent, but not for a hyperparameter: the SDK sends NaN and infinity as null.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from coordinator.doors.http.calls import Items, Named


def _not_null(value: Any) -> Any:
    if value is None:
        raise ValueError("null, NaN and infinity are refused: send a finite number, or leave the field out")
    return value


Hyperparameter = Annotated[float | None, BeforeValidator(_not_null)]
"""None if the field is absent."""
Seq = Annotated[int, Field(ge=1, lt=1 << 62)]
Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Index = Annotated[int, Field(ge=0, lt=10**9)]
Ttl = Annotated[int, Field(ge=1, lt=1 << 63)] | None
"""Time to live in seconds; None: unlimited."""
Metadata = Named[str] | None
NumTokens = Annotated[int, Field(ge=0, lt=1 << 31)]


class Nothing(BaseModel):
    """A body without fields that are read."""


class CreateSession(BaseModel):
    """POST /create_session."""

    tags: Items[str] = []
    user_metadata: Metadata = None
    display_name: str | None = None
    project_id: str | None = None


class OfSession(BaseModel):
    """POST /session_heartbeat."""

    session_id: str


class OfModel(BaseModel):
    """POST /get_info and /unload_model."""

    model_id: str


class JsonTensor(BaseModel):
    """A tensor: targets of a sample, or data of a pass of clients before 0.25."""

    data: Items[int] | Items[float]
    dtype: Literal["float32", "int64"]
    shape: Items[Annotated[int, Field(ge=0, lt=1 << 31)]] | None = None
    sparse_crow_indices: Items[int] | None = None
    sparse_col_indices: Items[int] | None = None


class Chunk(BaseModel):
    """A piece of a prompt."""

    type: str = "encoded_text"
    tokens: Items[int] | None = None


class ModelInput(BaseModel):
    """A prompt."""

    chunks: Annotated[Items[Chunk], Field(max_length=1000)]


class JsonDatum(BaseModel):
    """A sequence of a pass of clients before 0.25."""

    model_input: ModelInput
    loss_fn_inputs: Named[JsonTensor]


class JsonPassInput(BaseModel):
    """Loss and data of a pass of clients before 0.25."""

    data: Items[JsonDatum]
    loss_fn: str
    loss_fn_config: Named[float] | None = None


class JsonPass(BaseModel):
    """POST /forward_backward and /forward of clients before 0.25."""

    model_id: str
    seq_id: Annotated[int, Field(ge=1, lt=1 << 31)]
    forward_backward_input: JsonPassInput | None = None
    forward_input: JsonPassInput | None = None


class LoraConfig(BaseModel):
    """Settings of an adapter."""

    rank: Annotated[int, Field(gt=0, lt=1 << 31)]
    seed: Int64 | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


class OptimizerConfig(BaseModel):
    """The optimizer of a model."""

    type: str = "adamw"


class CreateModel(BaseModel):
    """POST /create_model."""

    session_id: str
    model_seq_id: Index
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: Metadata = None


class LoadWeights(BaseModel):
    """POST /load_weights: into the model `model_id`, or into a new model of `session_id`."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: Seq | None = None
    session_id: str | None = None
    model_seq_id: Index | None = None
    base_model: str | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: Metadata = None
    weights_access_token: str | None = None


class AdamParams(BaseModel):
    """Hyperparameters of a step."""

    learning_rate: Hyperparameter = None
    beta1: Hyperparameter = None
    beta2: Hyperparameter = None
    eps: Hyperparameter = None
    weight_decay: Hyperparameter = None
    grad_clip_norm: Hyperparameter = None


class OptimStep(BaseModel):
    """POST /optim_step."""

    model_id: str
    seq_id: Seq
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(BaseModel):
    """POST /save_weights."""

    model_id: str
    seq_id: Seq
    path: str
    ttl_seconds: Ttl = None
    overwrite: bool = False
    user_metadata: Metadata = None


class SaveWeightsForSampler(BaseModel):
    """POST /save_weights_for_sampler: a checkpoint with a name, or a sampler with an index."""

    model_id: str
    seq_id: Seq
    path: str | None = None
    sampling_session_seq_id: Index | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl = None
    user_metadata: Metadata = None


class SaveWeightsExternal(BaseModel):
    """POST /save_weights_external."""

    model_id: str
    seq_id: Seq
    path: str
    ttl_seconds: Ttl = None
    age_encryption_recipients: Items[str] | None = None


class SetTtl(BaseModel):
    """PUT of a checkpoint's /ttl."""

    ttl_seconds: Ttl


class RetrieveFuture(BaseModel):
    """POST /retrieve_future and /cancel_future."""

    request_id: str
    allow_metadata_only: bool | None = None


class FuturesTarget(BaseModel):
    """One client of a sampling session, by its number."""

    sampling_session_id: str
    cloned_sampler_id: Annotated[int, Field(ge=0, lt=1 << 32)] = 0


class RetrieveFutures(BaseModel):
    """POST /retrieve_futures. Acknowledgements of fetched results are ignored: each fetch is recorded by itself."""

    target: FuturesTarget
    prev_cursor: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    timeout: Annotated[float, Field(ge=0)] | None = None


class OfSampler(BaseModel):
    """POST /join_sampling_session."""

    sampling_session_id: str


class CreateSamplingSession(BaseModel):
    """POST /create_sampling_session."""

    session_id: str
    sampling_session_seq_id: Index
    base_model: str | None = None
    model_path: str | None = None


class SamplingParams(BaseModel):
    """Parameters of drawing tokens."""

    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    seed: Int64 | None = None
    stop: str | Items[int] | Items[str] | None = None
    temperature: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    top_p: float | None = None


class Sample(BaseModel):
    """POST /asample."""

    sampling_session_id: str | None = None
    seq_id: Annotated[int, Field(ge=0, lt=1 << 62)] | None = None
    prompt: ModelInput
    num_samples: Annotated[int, Field(ge=1, lt=1 << 31)] = 1
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    topk_prompt_logprobs: NumTokens | None = None
    topk_sample_logprobs: NumTokens | None = None
    target_prompt_logprobs: JsonTensor | None = None
    prompt_alt_tokens_k: NumTokens | None = None
    record_stability_info: bool | None = None


class CopyWeights(BaseModel):
    """POST /copy_weights."""

    source_path: str
    session_id: str | None = None
    model_seq_id: Index | None = None
    ttl_seconds: Ttl = None
    weights_access_token: str | None = None


class OfPath(BaseModel):
    """POST /weights_info."""

    tinker_path: str
