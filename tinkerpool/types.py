"""Arguments and results of the client. Names and fields are those of the `tinker` SDK.

All types are immutable. Numbers are given as lists, numpy arrays or torch tensors; torch is imported only by
`to_torch`. No type here makes calls.
"""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tinkerpool import errors, names
from tinkerpool.foreign_names import no_attribute, with_hints

TensorDtype = Literal["int64", "float32"]
StopReason = Literal["stop", "length"]
LossFnType = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"]
RequestErrorCategory = errors.RequestErrorCategory
SamplingClientKind = Literal["snapshot", "inflight"]
CheckpointType = Literal["training", "sampler", "external"]
ModelID: TypeAlias = str
RequestID: TypeAlias = str

CHECKPOINT_TYPES: Mapping[str, CheckpointType] = {
    names.TRAINING: "training",
    names.SAMPLER: "sampler",
    names.EXTERNAL: "external",
}
"""By the kind in a checkpoint's path."""
_INT32_MAX = 2**31 - 1


def is_number(value: Any, *, is_whole: bool = False) -> bool:
    """Return whether a value is a real number, or a whole one: of Python, numpy or torch, but no bool and no text."""
    if isinstance(value, bool | np.bool_ | str | bytes):
        return False
    try:
        (operator.index if is_whole else float)(value)
    except (TypeError, ValueError, RuntimeError):  # torch's, of a tensor with several elements
        return False
    return True


def check_number(name: str, value: Any, *, is_whole: bool = False, or_none: bool = False) -> None:
    """Raise ValueError, which names the argument, for anything but a number, or with `or_none` None."""
    if not (or_none and value is None) and not is_number(value, is_whole=is_whole):
        expected = f"a {'whole ' if is_whole else ''}number{', or None' if or_none else ''}"
        raise ValueError(f"{name} must be {expected}, got {value!r:.80}")


def as_array(values: Any) -> NDArray[Any]:
    """Return a new numpy array of a list, an array or a torch tensor; half precision becomes float32."""
    if hasattr(values, "detach") and hasattr(values, "cpu"):
        values = values.detach().cpu()
        if str(values.dtype) in {"torch.bfloat16", "torch.float16"}:
            values = values.float()
        values = values.numpy()
    return np.array(values)


def as_tokens(values: Any, what: str) -> NDArray[np.int32]:
    """Return token ids as a read-only int32 array. Raises ValueError for anything but numbers from 0 to 2^31 - 1."""
    array = as_array(values)
    if array.size == 0:
        array = array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{what} must be whole numbers, got {array.dtype}")
    if array.size and (array.min() < 0 or array.max() > _INT32_MAX):
        wrong = array.min() if array.min() < 0 else array.max()
        raise ValueError(f"{what} must be from 0 to {_INT32_MAX}, got {wrong}")
    tokens = array.astype(np.int32, copy=False)
    tokens.flags.writeable = False
    return tokens


@dataclass(frozen=True, slots=True, eq=False, init=False)
class TensorData:
    """An array of int64 or float32, always held dense.

    A matrix may be given in compressed sparse rows (CSR): `data` has the values, `sparse_crow_indices` where each row
    begins in them and, last, their number, `sparse_col_indices` the column of each value. Elements that are not given
    are 0, and no target in `target_prompt_logprobs`.

    Attributes:
        data: The elements in row-major order, shape (size,), read-only.
        dtype: Type of the elements.
        shape: Sizes of the dimensions, outermost first.
        is_given: Of a tensor in sparse rows: which elements were given, shape (size,), read-only. None: all of them.
    """

    data: NDArray[Any]
    dtype: TensorDtype
    shape: tuple[int, ...]
    is_given: NDArray[np.bool_] | None

    def __init__(
        self,
        data: Any,
        dtype: str | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | None = None,
        sparse_col_indices: Sequence[int] | None = None,
    ) -> None:
        """Raises ValueError for anything but numbers, and for a shape or rows that do not fit them."""
        array = as_array(data)
        is_given = None
        if (sparse_crow_indices is None) != (sparse_col_indices is None):
            raise ValueError("sparse_crow_indices and sparse_col_indices belong together: give both or neither")
        if sparse_crow_indices is not None and sparse_col_indices is not None:
            array, is_given = _dense(array, shape, sparse_crow_indices, sparse_col_indices)
        if dtype is None:
            dtype = _dtype_of(array)
        if dtype not in {"int64", "float32"}:
            raise ValueError(f"a tensor's dtype is 'int64' or 'float32', got {dtype!r}")
        if array.dtype.kind not in "biuf":
            raise ValueError(f"a tensor holds numbers, {_no_numbers(array)}")
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
        object.__setattr__(self, "is_given", is_given)

    @classmethod
    def from_numpy(cls, array: NDArray[Any]) -> TensorData:
        """Return the tensor of a numpy array; integers become int64, floats float32."""
        return cls(array)

    @classmethod
    def from_torch(cls, tensor: Any) -> TensorData:
        """Return the tensor of a torch tensor on any device; integers become int64, floats float32."""
        return cls(tensor)

    @classmethod
    def from_torch_sparse(cls, tensor: Any, pad_value: int = 0) -> TensorData:
        """Return the tensor of a torch tensor; elements of a matrix that equal `pad_value` count as not given."""
        dense = cls(tensor)
        if len(dense.shape) == 2:
            is_given = dense.data != pad_value
            is_given.flags.writeable = False
            object.__setattr__(dense, "is_given", is_given)
        return dense

    def to_numpy(self) -> NDArray[Any]:
        """Return a new numpy array in this tensor's shape."""
        return self.data.reshape(self.shape).copy()

    def to_torch(self) -> Any:
        """Return a new torch tensor in this tensor's shape. Raises ImportError without torch."""
        return importlib.import_module("torch").from_numpy(self.to_numpy())

    def tolist(self) -> list[Any]:
        """Return the elements as nested lists."""
        values: list[Any] = self.data.reshape(self.shape).tolist()
        return values

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        same_kind = self.dtype == other.dtype and self.shape == other.shape
        return same_kind and np.array_equal(self.data, other.data, equal_nan=self.dtype == "float32")


def _dense(
    values: NDArray[Any], shape: Sequence[int] | None, crow_indices: Sequence[int], col_indices: Sequence[int]
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return a matrix in compressed sparse rows as a dense one, and which of its elements were given (flat)."""
    if shape is None or len(shape) != 2:
        raise ValueError(f"a tensor in sparse rows needs a shape of two dimensions, got {shape}")
    num_rows, num_columns = (int(size) for size in shape)
    starts, columns = np.asarray(crow_indices, dtype=np.int64), np.asarray(col_indices, dtype=np.int64)
    counts = np.diff(starts)
    if len(starts) != num_rows + 1 or starts[0] != 0 or (counts < 0).any() or starts[-1] != values.size:
        raise ValueError(
            f"sparse_crow_indices must have {num_rows + 1} numbers from 0 to the number of values, {values.size}, none "
            "below the one before it"
        )
    if columns.shape != (values.size,) or (columns < 0).any() or (columns >= num_columns).any():
        raise ValueError(f"sparse_col_indices must have {values.size} columns from 0 to {num_columns - 1}, one a value")
    rows = np.repeat(np.arange(num_rows), counts)
    dense = np.zeros((num_rows, num_columns), dtype=values.dtype)
    dense[rows, columns] = values.reshape(-1)
    is_given = np.zeros((num_rows, num_columns), dtype=np.bool_)
    is_given[rows, columns] = True
    is_given.flags.writeable = False
    return dense, is_given.reshape(-1)


def _no_numbers(array: NDArray[Any]) -> str:
    if array.dtype.kind in "US":
        return "got text: tokens must be encoded first, with get_tokenizer().encode(text)"
    if any(value is None for value in array.flat):
        return "but None is among them: give a number for each element, or leave the tensor out"
    return f"got an array of {array.dtype}"


def _dtype_of(array: NDArray[Any]) -> TensorDtype:
    return "float32" if array.dtype.kind == "f" or array.size == 0 else "int64"


def _input_ids(tokens: Any) -> Any:
    """Return the `input_ids` of a tokenizer's output (BatchEncoding) for one text; anything else as it is.

    Raises ValueError for text, and for the output for several texts.
    """
    if isinstance(tokens, str) or (isinstance(tokens, list | tuple) and any(isinstance(each, str) for each in tokens)):
        raise ValueError("text where token ids are expected: encode it first, with get_tokenizer().encode(text)")
    if not (isinstance(tokens, Mapping) and "input_ids" in tokens):
        return tokens
    ids = tokens["input_ids"]
    if len(ids) and np.ndim(ids[0]):  # of a list of texts, or with return_tensors
        if len(ids) != 1:
            raise ValueError(f"input_ids of {len(ids)} texts where one is expected: give one text at a time")
        ids = ids[0]
    return ids


@dataclass(frozen=True, slots=True, eq=False, init=False)
class EncodedTextChunk:
    """A run of token ids.

    Attributes:
        tokens: Shape (n,), read-only.
    """

    tokens: NDArray[np.int32]

    def __init__(self, tokens: Any) -> None:
        """Raises ValueError for anything but token ids, or the output of a tokenizer for one text."""
        array = as_tokens(_input_ids(tokens), "token ids")
        if array.ndim != 1:
            raise ValueError(f"token ids are one sequence, got shape {array.shape}: give one sequence at a time")
        object.__setattr__(self, "tokens", array)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EncodedTextChunk) and np.array_equal(self.tokens, other.tokens)


@dataclass(frozen=True, slots=True, init=False)
class ModelInput:
    """The input of the model: a sequence of chunks.

    Attributes:
        chunks: The chunks in order.
    """

    chunks: tuple[EncodedTextChunk, ...]

    def __init__(self, chunks: Iterable[EncodedTextChunk] = ()) -> None:
        object.__setattr__(self, "chunks", tuple(chunks))

    @classmethod
    def from_ints(cls, tokens: Any) -> ModelInput:
        """Return the input of a sequence of token ids, or of a tokenizer's output for one text. Raises ValueError."""
        return cls([EncodedTextChunk(tokens)])

    @classmethod
    def of(cls, tokens: ModelInput | Any) -> ModelInput:
        """Return the input itself, or that of token ids as in `from_ints`."""
        return tokens if isinstance(tokens, ModelInput) else cls.from_ints(tokens)

    @classmethod
    def empty(cls) -> ModelInput:
        """Return an input without tokens, to append to."""
        return cls()

    @property
    def length(self) -> int:
        """Number of tokens."""
        return sum(chunk.length for chunk in self.chunks)

    def append(self, chunk: EncodedTextChunk) -> ModelInput:
        """Return a new input with a chunk added at the end."""
        return ModelInput((*self.chunks, chunk))

    def append_int(self, token: int) -> ModelInput:
        """Return a new input with a token added at the end."""
        return self.append(EncodedTextChunk([token]))

    def to_numpy(self) -> NDArray[np.int32]:
        """Return all token ids, shape (n,)."""
        return np.concatenate([chunk.tokens for chunk in self.chunks] or [np.empty(0, np.int32)])

    def to_ints(self) -> list[int]:
        """Return all token ids."""
        tokens: list[int] = self.to_numpy().tolist()
        return tokens


ModelInputChunk: TypeAlias = EncodedTextChunk
LossFnInputs: TypeAlias = dict[str, TensorData]
LossFnOutput: TypeAlias = dict[str, TensorData]

IGNORED_TARGET = -100
"""A target that does not count, as in transformers and torch: `cross_entropy` gives it weight 0."""
INPUT_DTYPES: Mapping[str, TensorDtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}
"""The type that each loss input is converted to; other inputs keep the type of their array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProvenanceSpan:
    """A run of tokens of the prompt that a recorded sample continued.

    Attributes:
        sequence_id: `SampledSequence.sequence_id` of any sequence of that sample.
        offset: Position of the first token in the prompt, >= 0.
        length: Number of tokens, >= 0.
    """

    sequence_id: str
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        _check_span(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledProvenanceSpan:
    """A run of the tokens that were drawn for a recorded sequence.

    Attributes:
        sequence_id: `SampledSequence.sequence_id` of that sequence.
        offset: Position of the first token in the sequence, >= 0.
        length: Number of tokens, >= 0.
    """

    sequence_id: str
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        _check_span(self)


ProvenanceSpans: TypeAlias = Sequence[PromptProvenanceSpan | SampledProvenanceSpan]


def _check_span(span: PromptProvenanceSpan | SampledProvenanceSpan) -> None:
    kind = type(span).__name__
    if not span.sequence_id:
        raise ValueError(f"{kind}.sequence_id must be that of a sampled sequence, got {span.sequence_id!r}")
    if span.offset < 0 or span.length < 0:
        raise ValueError(f"{kind} has offset {span.offset} and length {span.length}: both must be 0 or more")


@dataclass(frozen=True, slots=True, init=False)
class Datum:
    """One training sequence.

    Attributes:
        model_input: Token ids, n of them. Targets are shifted by the caller: input `x[:-1]`, target `x[1:]`.
        loss_fn_inputs: Inputs of the loss by name; the first dimension is n. A target of -100 has weight 0 in
            `cross_entropy`.
        model_input_spans: The samples that the tokens of `model_input` come from, see `with_provenance`.
        loss_fn_input_spans: The same of the targets.
    """

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, TensorData]
    model_input_spans: ProvenanceSpans | None
    loss_fn_input_spans: ProvenanceSpans | None

    def __init__(
        self,
        model_input: ModelInput | Any,
        loss_fn_inputs: Mapping[str, Any],
        model_input_spans: ProvenanceSpans | None = None,
        loss_fn_input_spans: ProvenanceSpans | None = None,
    ) -> None:
        inputs = {name: _loss_input(name, value) for name, value in loss_fn_inputs.items()}
        object.__setattr__(self, "model_input", ModelInput.of(model_input))
        object.__setattr__(self, "loss_fn_inputs", inputs)
        object.__setattr__(self, "model_input_spans", model_input_spans)
        object.__setattr__(self, "loss_fn_input_spans", loss_fn_input_spans)

    def with_provenance(self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans) -> Datum:
        """Return a copy that says which recorded samples its tokens come from, as the loss `stable_reinforce` needs.

        Both arguments are runs in order, whose lengths add up to n: `model_input` of the tokens, `loss_fn_inputs` of
        the targets. Raises ValueError if they do not.
        """
        for name, spans in (("model_input", model_input), ("loss_fn_inputs", loss_fn_inputs)):
            if (total := sum(span.length for span in spans)) != self.model_input.length:
                raise ValueError(
                    f"the {name} spans cover {total} positions, but the datum has {self.model_input.length} tokens: "
                    "name each position once"
                )
        return Datum(self.model_input, self.loss_fn_inputs, tuple(model_input), tuple(loss_fn_inputs))


def _loss_input(name: str, value: Any) -> TensorData:
    dtype = INPUT_DTYPES.get(name)
    try:
        if not isinstance(value, TensorData):
            return TensorData(value, dtype)
        return value if dtype in {None, value.dtype} else TensorData(value.data, dtype, value.shape)
    except ValueError as error:
        raise ValueError(f"loss_fn_inputs[{name!r}]: {error}") from None


@with_hints
@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """AdamW (decoupled weight decay) for one step. The service checks the ranges.

    Attributes:
        learning_rate: Step size, >= 0.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Added to the root of the second moment, > 0.
        weight_decay: Decoupled weight decay, >= 0.
        grad_clip_norm: Limit of the global norm of this adapter's gradient. 0: no limit.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


OptimParams: TypeAlias = AdamParams


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamOptimizerConfig:
    """The optimizer of every adapter.

    Attributes:
        type: `adamw`, the only one.
    """

    type: Literal["adamw"] = "adamw"


OptimizerConfig: TypeAlias = AdamOptimizerConfig


@with_hints
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings of the draws of a sample.

    Attributes:
        max_tokens: Most tokens per sequence, at least 1. None: up to the model's longest sequence.
        seed: The same seed gives the same tokens. None: the service draws a seed and logs it.
        stop: Strings or token ids that end a sequence. None: the model's end-of-text tokens. `[]`: only the length.
        temperature: Divides the logits, >= 0. 0: greedy.
        top_k: Keep the k most likely tokens. -1: keep all.
        top_p: Keep the smallest set of most likely tokens with at least this probability, in (0, 1].
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_number("max_tokens", self.max_tokens, is_whole=True, or_none=True)
        check_number("seed", self.seed, is_whole=True, or_none=True)
        check_number("temperature", self.temperature)
        check_number("top_k", self.top_k, is_whole=True)
        check_number("top_p", self.top_p)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, or None for no limit; got {self.max_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if self.top_k < 1 and self.top_k != -1:
            raise ValueError(f"top_k must be at least 1, or -1 for all, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.stop is not None and not isinstance(self.stop, Iterable):
            raise ValueError(f"stop must be a string, a list of strings or a list of token ids, got {self.stop!r:.80}")
        stops = [] if self.stop is None or isinstance(self.stop, str) else list(self.stop)
        if not (all(isinstance(s, str) for s in stops) or all(isinstance(s, int | np.integer) for s in stops)):
            raise ValueError("stop must be a string, a list of strings or a list of token ids, not a mixture")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """Result of forward and forward_backward.

    Attributes:
        loss_fn_output_type: Always `TorchLossReturn`, as in the SDK.
        loss_fn_outputs: Per datum, in the order of the request: `logprobs`, float32 in the shape of `target_tokens`.
        metrics: `loss:sum`, `clock_cycle:unique` and others, by `name:reduction`.
    """

    loss_fn_output_type: str
    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepResponse:
    """Result of optim_step.

    Attributes:
        metrics: `grad_norm:last` (before clipping), `update_norm:last`, `clock_cycle:unique` and others.
    """

    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStepResponse:
    """Result of train_step.

    Attributes:
        forward_backward: Result of the pass.
        optim_step: Result of the optimizer step.
    """

    forward_backward: ForwardBackwardOutput
    optim_step: OptimStepResponse

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            parts = {"forward_backward": ForwardBackwardOutput, "optim_step": OptimStepResponse}
            found = [f".{part}.{name}" for part, kind in parts.items() if name in kind.__slots__]
            hint = f": use {' or '.join(found)}" if found else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeightsResponse:
    """Result of save_state.

    Attributes:
        path: `tinker://<adapter id>/weights/<name>`.
    """

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeightsForSamplerResponse:
    """Result of save_weights_for_sampler.

    Attributes:
        path: `tinker://<adapter id>/sampler_weights/<name>`.
    """

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeightsExternalResponse:
    """Result of save_weights_external.

    Attributes:
        path: `tinker://<adapter id>/external_weights/<name>`.
    """

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSamplerResponse:
    """A sampler.

    Attributes:
        sampler_id: `<session id>:sample:<index>`.
        base_model: Name of its base model.
        model_path: The checkpoint whose weights it has; None for the bare base model and for weights without a name.
    """

    sampler_id: str
    base_model: str
    model_path: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportCheckpointResponse:
    """An imported adapter. Not in the SDK.

    Attributes:
        path: Its checkpoint, `tinker://<adapter id>/weights/<name>`.
        model_id: Its adapter.
        base_model: Name of its base model in the pool.
        lora_rank: LoRA rank, as imported.
        lora_alpha: LoRA scaling numerator, as imported.
        notes: Sentences for the person who imports, about the base model's name and modules that the adapter lacks for
            example.
    """

    path: str
    model_id: str
    base_model: str
    lora_rank: int
    lora_alpha: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhoamiResponse:
    """The holder of an API key.

    Attributes:
        user_urn: `urn:tinkerpool:key:<id>`: the key, without its secret.
        org_urn: `urn:tinkerpool:tenant:<name>`: the tenant that the key belongs to.
        email: Always None: a pool knows keys and tenants, not people.
    """

    user_urn: str
    org_urn: str
    email: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeightsResponse:
    """Result of load_state.

    Attributes:
        path: The checkpoint that was loaded.
    """

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardGradientResponse:
    """Result of discard_gradient. Empty so far."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopkLogprobs:
    """The most likely tokens at each of n positions, the most likely first.

    Attributes:
        token_ids: Shape (n, k); k is at most the vocabulary's size.
        logprobs: Shape (n, k); NaN at positions without log-probabilities.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def tolist(self) -> list[list[tuple[int, float]] | None]:
        """Return (token id, log-probability) per position; None at positions without log-probabilities."""
        rows = zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True)
        return [None if math.isnan(logprobs[0]) else list(zip(ids, logprobs, strict=True)) for ids, logprobs in rows]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TopkLogprobs):
            return NotImplemented
        same_tokens = np.array_equal(self.token_ids, other.token_ids)
        return same_tokens and np.array_equal(self.logprobs, other.logprobs, equal_nan=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAltTokens:
    """Alternative tokens, drawn for prompt position i + 1 in row i.

    Attributes:
        tokens: int64 token ids, shape (p - 1, k).
        logprobs: float32, shape (p - 1, k).
    """

    tokens: TensorData
    logprobs: TensorData


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One sampled continuation.

    Attributes:
        stop_reason: `stop`: a stop token or string, which is part of `tokens`; `length`: the limit.
        tokens: Token ids, n of them.
        logprobs: Log-probability of each token, n of them, at the request's temperature (1 for greedy), before top-k
            and top-p.
        topk_logprobs_np: If asked for: the most likely tokens at each position, as arrays; log-probabilities as above.
        sequence_id: Names the sequence, for `Datum.with_provenance`. Not compared: equal draws are equal.
    """

    stop_reason: StopReason
    tokens: list[int]
    logprobs: list[float] | None
    topk_logprobs_np: TopkLogprobs | None = None
    sequence_id: str | None = field(default=None, compare=False)

    @property
    def topk_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        """If asked for: the most likely tokens at each position, as (token id, log-probability), most likely first."""
        return None if self.topk_logprobs_np is None else self.topk_logprobs_np.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResponse:
    """Result of sample.

    Attributes:
        sequences: `num_samples` of them.
        prompt_logprobs: If asked for: log-probability of each prompt token at temperature 1, whatever the samples' is;
            None at position 0, and at positions not asked for.
        topk_prompt_logprobs_np: If asked for: the most likely tokens at each prompt position; NaN where
            `prompt_logprobs` has None.
        target_prompt_logprobs: If asked for: log-probabilities of the targets, float32 in their shape; 0 where they
            have -1.
        prompt_cache_hit_tokens: Prompt tokens whose keys and values an earlier request with the same weights had
            computed.
        prompt_alt_tokens: If asked for: alternative tokens, drawn for each prompt position but the first.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs_np: TopkLogprobs | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_cache_hit_tokens: int = 0
    prompt_alt_tokens: PromptAltTokens | None = None

    @property
    def topk_prompt_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        """If asked for: the most likely tokens at each prompt position, as (token id, log-probability)."""
        return None if self.topk_prompt_logprobs_np is None else self.topk_prompt_logprobs_np.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """One token of a streamed sample.

    Attributes:
        sequence_index: Index of the sequence, below `num_samples`.
        token: Token id.
        logprob: Log-probability, as in `SampledSequence.logprobs`.
    """

    sequence_index: int
    token: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportedModel:
    """A base model that the pool keeps warm.

    Attributes:
        model_name: Name for `base_model` arguments.
        max_context_length: Longest sequence in tokens: training, or prompt plus samples.
        trainable: Whether adapters can be trained on it.
        sampleable: Whether it can be sampled from.
        vocab_size: Valid token ids are 0 .. vocab_size - 1.
        max_rank: Largest LoRA rank.
        num_params: Parameters of the frozen model.
        num_workers: Number of live workers.
        has_tied_unembedding: Whether the unembedding has the weights of the embedding, so that merging a trained
            unembedding must untie them. None: the pool does not say.
        weights_id: What tells its weights from others: a digest. Empty: the pool does not say.
    """

    model_name: str
    max_context_length: int
    trainable: bool = True
    sampleable: bool = True
    vocab_size: int
    max_rank: int
    num_params: int
    num_workers: int
    has_tied_unembedding: bool | None = None
    weights_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetServerCapabilitiesResponse:
    """Base models and limits of a pool.

    Attributes:
        supported_models: In the order of the pool's configuration.
        version: Version of the server.
        loss_functions: Names of the built-in losses.
        max_datums: Most datums in one request; the client cuts larger batches.
        max_message_bytes: Largest request, in bytes.
    """

    supported_models: list[SupportedModel]
    version: str
    loss_functions: list[str]
    max_datums: int
    max_message_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelData:
    """The base model of an adapter.

    Attributes:
        model_name: Name in the pool.
        arch: Always None in tinkerpool.
        tokenizer_id: Always None in tinkerpool: `get_tokenizer` fetches the files.
    """

    model_name: str
    arch: str | None = None
    tokenizer_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GetInfoResponse:
    """Description of an adapter.

    Attributes:
        model_id: `<session id>:train:<index>`.
        model_data: The base model.
        is_lora: Always.
        lora_rank: LoRA rank.
        lora_alpha: LoRA scaling numerator.
        model_name: Name of the base model.
        name: What people call the adapter, as of the creation of this client; empty: nothing.
    """

    model_id: str
    model_data: ModelData
    is_lora: bool = True
    lora_rank: int
    lora_alpha: float
    model_name: str
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A user's named, immutable state.

    Attributes:
        checkpoint_id: `weights/<name>`, `sampler_weights/<name>` or `external_weights/<name>`.
        checkpoint_type: `training`: weights, moments and step count; `sampler`: weights; `external`: weights that are
            there to be exported.
        time: When it was saved, UTC.
        tinker_path: `tinker://<adapter id>/<checkpoint id>`.
        size_bytes: Bytes on disk; of the weights alone while the file of a sampler checkpoint is being written.
        base_model: Name of the base model.
        lora_rank: LoRA rank.
        sha256: Hash of the contents, in hex; empty while the file is being written.
        expires_at: When the pool deletes it, UTC. None: never.
        public: Whether every tenant may load, sample from and export it.
        user_metadata: As given to the save; empty for other tenants.
    """

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int
    base_model: str
    lora_rank: int
    sha256: str
    expires_at: datetime | None = None
    public: bool = False
    user_metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCheckpointTinkerPath:
    """The parts of a checkpoint's path.

    Attributes:
        tinker_path: The path, `tinker://<adapter id>/<checkpoint id>`.
        training_run_id: The adapter's id.
        checkpoint_type: As of the checkpoint.
        checkpoint_id: `weights/<name>`, `sampler_weights/<name>` or `external_weights/<name>`.
    """

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> ParsedCheckpointTinkerPath:
        """Return the parts of a path. Raises ValueError for a malformed one."""
        path = names.CheckpointPath.parse(tinker_path)
        return cls(
            tinker_path=tinker_path,
            training_run_id=path.adapter_id,
            checkpoint_type=CHECKPOINT_TYPES[path.kind],
            checkpoint_id=f"{path.kind}/{path.name}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """An adapter, as listings show it.

    Attributes:
        training_run_id: The adapter's id, `<session id>:train:<index>`.
        base_model: Name of the base model.
        is_lora: Always.
        lora_rank: LoRA rank.
        create_time: UTC.
        num_operations: The last sequence number that is done.
        user_metadata: Its labels, as given at creation.
        name: What people call it; empty: nothing.
        last_request_time: When its last operation was accepted, or it was created, UTC; up to an hour early after a
            restart of the pool.
    """

    training_run_id: str
    base_model: str
    is_lora: bool = True
    lora_rank: int
    create_time: datetime
    num_operations: int
    user_metadata: dict[str, str] = field(default_factory=dict)
    name: str = ""
    last_request_time: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRunsResponse:
    """A listing of adapters.

    Attributes:
        training_runs: Newest first.
    """

    training_runs: list[TrainingRun]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsListResponse:
    """A listing of checkpoints.

    Attributes:
        checkpoints: Newest first.
    """

    checkpoints: list[Checkpoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSessionsResponse:
    """A listing of sessions.

    Attributes:
        sessions: Session ids, newest first.
    """

    sessions: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """A session: one client process at the service.

    Attributes:
        session_id: Opaque.
        training_run_ids: Ids of the adapters created in it.
        sampler_ids: Ids of the samplers created in it.
        create_time: UTC.
        is_live: Whether it has neither ended nor expired.
        user_metadata: As given at creation.
    """

    session_id: str
    training_run_ids: list[str]
    sampler_ids: list[str]
    create_time: datetime
    is_live: bool
    user_metadata: dict[str, str] = field(default_factory=dict)


GetSessionResponse: TypeAlias = SessionInfo

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        raise no_attribute(__name__, name)
