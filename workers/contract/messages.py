"""The messages between coordinator and workers: frozen data without behaviour.

Depends on neither torch, ray, SQL, gRPC nor tenants. Arrays are numpy and never written to after construction.

Main invariant: an item names the sequence number directly before it on its adapter (`prev_seq`). A worker whose copy is
at another one refuses the item, so no item is applied twice or skipped, whatever the network or a restart does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.contract.adapted_modules import AdaptedModule, ModuleKind
from workers.contract.capacity import SEQUENCE_SLOTS
from workers.contract.contents import Content


class ErrorCode(Enum):
    """The kind of an item's failure; the coordinator maps it to a canonical status code."""

    INVALID_ARGUMENT = "invalid_argument"
    """The request is wrong in a way that only the engine can detect."""
    NON_FINITE = "non_finite"
    """The loss or the gradient overflowed or became NaN; the adapter's weights are unchanged."""
    OUT_OF_MEMORY = "out_of_memory"
    """The item alone does not fit on the device."""
    DATA_LOSS = "data_loss"
    """A state to load does not match its own description."""
    OUT_OF_ORDER = "out_of_order"
    """The worker's copy of the adapter is not at `prev_seq`, or the worker does not hold a sample's version that came
    without a state. Nothing was applied; the coordinator sends the missing state."""
    CANCELLED = "cancelled"
    """A sample that was cancelled."""
    INTERNAL = "internal"
    """A fault of the worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemError:
    """One item's failure. `message` tells the user the cause and the remedy, without paths or a stack."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """The requests of one call of a client, at consecutive sequence numbers."""

    first_seq: int
    last_seq: int


UNMARKED = RequestBatch(0, (1 << 63) - 1)
"""The batch of a request without a mark: nobody knows where it ends. Compare it by value: workers get copies."""


ALPHA_MAX = 1e6
"""Of an adapter. Libraries take alpha / rank in fp32, and far smaller ones already make every logit infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """Everything that a worker of the base model needs to make a fresh adapter, bit for bit."""

    adapter_id: str
    rank: int
    """LoRA rank: a power of two, or the rank of an imported adapter."""
    alpha: float
    """LoRA scaling numerator: y = x W^T + alpha / rank * (x A^T) B^T."""
    seed: int
    """Seeds A; B starts at zero."""
    train_attn: bool
    train_mlp: bool
    train_unembed: bool

    @property
    def kinds(self) -> tuple[ModuleKind, ...]:
        """The kinds of modules that it adapts."""
        flags: tuple[tuple[ModuleKind, bool], ...] = (
            ("attn", self.train_attn),
            ("mlp", self.train_mlp),
            ("unembed", self.train_unembed),
        )
        return tuple(kind for kind, is_trained in flags if is_trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterState:
    """An adapter's durable state between two operations. Contents are whole safetensors files.

    Only a snapshot for recovery holds a gradient; a user's checkpoint never does.
    """

    weights: Content
    """`base_model.model.<module>.lora_A.weight` (rank, d_in) and `.lora_B.weight` (d_out, rank), fp32, as in PEFT."""
    optimizer: Content | None
    """First and second moments, the same names with `exp_avg.` / `exp_avg_sq.` before them; None: fresh moments."""
    num_steps: int
    """Optimizer steps taken so far (AdamW's bias correction)."""
    applied_seq: int
    """The last seq this state contains."""
    fingerprint: str
    """The numerics (torch build, CPU kind, threads) that computed it; bits are promised for equal fingerprints."""
    gradient: Content | None = None
    """The pending gradient, fp32, the names of `weights` with `grad.` before them; None: none is pending."""
    num_datums: int = 0
    """Sequences whose gradients are in the window, the next optim_step's `num_datums:sum`; 0 without a gradient."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its files."""
        return len(self.weights) + len(self.optimizer or b"") + len(self.gradient or b"")


class StateReference(Protocol):
    """A state that another process holds; the worker that needs it fetches it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its files."""

    def fetch(self) -> AdapterState:
        """Return the state. Raises LookupError if it cannot be had any more: its holder has ended or dropped it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInstall:
    """Put a copy of an adapter on a worker, replacing an older one. `state` None: a fresh one, from the seed, at seq 0.

    A gradient in the state is pending again, so later items give the same bits as if the copy had never been lost. If a
    reference cannot be fetched, the worker has no copy: its items are out of order, and it is installed again.
    """

    spec: AdapterSpec
    state: AdapterState | StateReference | None
    batch: RequestBatch | None = None
    """The batch of the pending gradient, as in `GradientWindow.batch`; None: none is pending."""

    def fetch(self) -> AdapterState | None:
        """Return the state itself. Raises LookupError, as `StateReference.fetch` does, if it is a reference."""
        state = self.state
        return state if state is None or isinstance(state, AdapterState) else state.fetch()


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One training sequence."""

    tokens: NDArray[np.int32]
    """Token ids, shape (n,)."""
    loss_inputs: Mapping[str, NDArray[np.float32] | NDArray[np.int32]]
    """By name; first dimension n: `target_tokens` int32 (n,) or (n, k), `weights`, `advantages`, `logprobs`, ...

    fp32.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """AdamW hyperparameters of one step (torch's definition, decoupled weight decay)."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Global norm over this adapter's gradient; 0 clips nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One operation's part in a batch: on one adapter, at one place in its order."""

    op_id: str
    adapter_id: str
    prev_seq: int
    """The `applied_seq` that the worker's copy must have; otherwise the item fails with OUT_OF_ORDER."""
    seq: int
    """`applied_seq` after the item (for a chunked pass: after its last chunk), whether it succeeds or fails."""
    drop_gradient: bool = False
    """Drop the pending gradient first: an operation between `prev_seq` and `seq` failed and closed its window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassItem(Item):
    """One canonical chunk of a forward or forward_backward."""

    chunk_index: int
    num_chunks: int
    data: tuple[Datum, ...]
    loss_fn: str
    loss_config: Mapping[str, float]
    backward: bool
    """Accumulate the gradient of the summed loss; False for a forward."""
    batch: RequestBatch = UNMARKED
    """The batch that its operation is part of: it decides how long a failure closes the gradient window."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(datum.tokens) for datum in self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepItem(Item):
    """One AdamW step on the accumulated gradient, which the step makes zero."""

    params: AdamParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveItem(Item):
    """Read the adapter's state; changes nothing, also if a gradient is pending."""

    with_optimizer: bool
    with_gradient: bool = False
    """Also read the pending gradient, for a snapshot; a checkpoint has none, and neither has a closed window.

    Fails with NON_FINITE if the gradient has overflowed, for no install would accept it.
    """
    publish_as: str = ""
    """If set, also publish the weights on this worker, under this version key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadItem(Item):
    """Replace weights (and moments) by a checkpoint's; drops the pending gradient.

    `state.applied_seq`, `gradient` and `num_datums` are ignored.
    """

    state: AdapterState
    with_optimizer: bool
    """False: fresh moments and step count, also if the state has others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One worker's work in one phase of a cycle: removals, installs, then items.

    Items of one adapter are in seq order. Consecutive `PassItem`s become packed passes.
    """

    epoch: int
    """The coordinator's epoch. A worker refuses batches of older epochs, and drops all adapters when a newer one
    begins."""
    cycle_id: int
    installs: tuple[AdapterInstall, ...] = ()
    removals: tuple[str, ...] = ()
    """Adapter ids and version keys to drop."""
    items: tuple[Item, ...] = ()
    decode_share: float = 0.5
    """The part of the worker's time, above 0 and below 1, that decoding gets while there are batches and samples."""
    expected: tuple[str, ...] = ()
    """Adapters that the next batch is likely to need, most likely first. A hint: a worker whose device copies while it
    computes loads them during this batch. It changes no result."""

    @property
    def states(self) -> tuple[AdapterState | StateReference, ...]:
        """The states that it brings."""
        installed = tuple(install.state for install in self.installs if install.state is not None)
        return installed + tuple(item.state for item in self.items if isinstance(item, LoadItem))


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemResult:
    """One item's outcome, in the order of the batch's items."""

    op_id: str
    error: ItemError | None = None
    logprobs: tuple[NDArray[np.float32], ...] = ()
    """PassItem: per datum, the log-probabilities of `target_tokens`, in its shape."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """`name:reduction` keys, as users see them (`loss:sum`, `grad_norm:last`, ...)."""
    state: AdapterState | None = None
    """SaveItem: the state."""
    num_tokens: int = 0
    """Tokens this item put through the base model (metering)."""
    engine_s: float = 0.0
    """Seconds of engine time charged to this item: its share of the pass by tokens, or its own step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUse:
    """What a worker takes of its machine, and what its bank did since it started."""

    resident_bytes: int = 0
    """Memory of its process."""
    device_bytes: int = 0
    """Memory of its GPU."""
    cpu_s: float = 0.0
    """Processor time of its process."""
    num_loads: int = 0
    """Adapters and versions that were moved into a slot."""
    num_prefetches: int = 0
    """Those of them whose move began before they were needed."""
    num_evictions: int = 0
    """Those that were moved out."""
    num_cache_blocks_used: int = 0
    """Key-value blocks of running samples."""


NOTHING_USED = WorkerUse()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """A worker's results of a batch."""

    epoch: int
    cycle_id: int
    incarnation: str
    results: tuple[ItemResult, ...]
    wall_s: float
    """Seconds from the start of the batch to its results, on the worker."""
    held_bytes: int = 0
    """Bytes of host memory that its copies and sampler versions take after the batch."""
    phase_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase: `pack`, `forward`, `loss`, `backward`, `step`. The rest of `wall_s` took saves, loads and
    installs."""
    use: WorkerUse = NOTHING_USED
    """At the end of the batch."""

    @property
    def states(self) -> tuple[AdapterState, ...]:
        """The states that were saved."""
        return tuple(result.state for result in self.results if result.state is not None)


LOGPROBS_TEMPERATURE_MIN = 1e-20
"""Temperatures below count as this one for log-probabilities, so that these stay finite. No two logits of a model are
so near to each other that it matters."""


class StopReason(Enum):
    """Why a sampled sequence ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens. Checked by the coordinator; the engine does not check again."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    """-1: all tokens."""
    top_p: float = 1.0
    seed: int = 0
    """A missing seed is drawn at admission, so that a rerun gives the same tokens."""
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end a sequence (they are part of its tokens)."""
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerVersion:
    """Immutable weights to sample from: an adapter's at one sequence number, or the base model alone."""

    key: str
    """Names the version; the empty string is the base model without an adapter."""
    spec: AdapterSpec | None = None
    state: AdapterState | None = None
    """Given if the worker may not hold `key` yet; only `weights` is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Sample `num_samples` continuations of one prompt."""

    op_id: str
    scope: str = ""
    """The tenant, as an opaque key. Keys and values of a prompt are shared only within a scope, because shared counts
    and times would reveal other tenants' prompts; and scopes take turns."""
    version: SamplerVersion
    prompt: NDArray[np.int32]
    """Token ids, shape (p,), p >= 1."""
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int = 0
    """With `prompt_logprobs` or `topk_prompt_logprobs`: only of the last this many prompt tokens. 0: of all."""
    topk_prompt_logprobs: int = 0
    """Number of likeliest tokens to return at every prompt position. 0: none."""
    topk_sample_logprobs: int = 0
    """Number of likeliest tokens to return at every sampled position. 0: none."""
    prompt_targets: NDArray[np.int32] | None = None
    """Token ids, shape (p - 1, k), whose log-probabilities to return: row i at prompt position i + 1. -1: of none."""
    prompt_alt_tokens_k: int = 0
    """Number of draws to return at every prompt position but the first, at the request's temperature. 0: none."""
    scales_logprobs: bool = True
    """Whether log-probabilities at sampled positions are of logits / temperature. False: at temperature 1, as they were
    promised to requests logged before there was a choice."""

    @property
    def states(self) -> tuple[AdapterState, ...]:
        """The state that it brings."""
        return () if self.version.state is None else (self.version.state,)

    stream: bool = False
    """Emit a `TokenEvent` per token; the final `SampleResult` comes either way."""
    removals: tuple[str, ...] = ()
    """As in `Batch`, dropped before this version is loaded: a worker that only samples receives no batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One token of one sequence, sent when it is drawn."""

    op_id: str
    sequence_index: int
    token: int
    logprob: float
    """Natural log-probability at the request's temperature (1 for greedy), before top-k and top-p."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Some tokens of each position, and their natural log-probabilities: of sampled positions as `TokenEvent.logprob`,
    of positions of a prompt at temperature 1."""

    token_ids: NDArray[np.int32]
    """Shape (n, k). Of likeliest tokens: the likeliest first, the lowest id first among equals."""
    logprobs: NDArray[np.float32]
    """Shape (n, k); NaN where nothing was computed, and there the id is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One finished continuation."""

    tokens: NDArray[np.int32]
    """Shape (n,), the stop token included."""
    logprobs: NDArray[np.float32]
    """Shape (n,), as in `TokenEvent.logprob`."""
    stop_reason: StopReason
    topk: TokenLogprobs | None = None
    """(n, k), if `topk_sample_logprobs` asked for it; k is at most the vocabulary's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """A finished, failed or cancelled sample request."""

    op_id: str
    sequences: tuple[SampledSequence, ...] = ()
    prompt_logprobs: NDArray[np.float32] | None = None
    """Shape (p,); NaN at the first position (it has no context) and where the request did not ask for it."""
    topk_prompt: TokenLogprobs | None = None
    """(p, k), if asked for; NaN where `prompt_logprobs` is."""
    prompt_target_logprobs: NDArray[np.float32] | None = None
    """Shape (p - 1, k), if asked for; 0 where the request had -1."""
    prompt_alt_tokens: TokenLogprobs | None = None
    """(p - 1, k), if asked for; row i are draws for prompt position i + 1."""
    error: ItemError | None = None
    num_prompt_tokens: int = 0
    """Of the prompt, counted once for all its samples; those of `num_cached_tokens` included."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were already cached."""
    num_sampled_tokens: int = 0
    engine_s: float = 0.0
    phase_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase, one after the other: `prefill`, from the first pass of the prompt to the end of the last, and
    `decode`, from there to the end of the sample. Empty: no pass ran it."""


SampleEvent = TokenEvent | SampleResult


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCosts:
    """What adapters cost a worker besides the tokens of their passes, in tokens of a large pass.

    Measured when the base model was loaded; zeros: not measured. Bytes are those of a copy: weights, moments, gradient.
    """

    item_tokens: float = 0.0
    """The fixed part of an item in a pass of several."""
    byte_tokens: float = 0.0
    """An optimizer step, for each byte of the copy; an item in a pass takes about as much besides its fixed part."""
    move_byte_tokens: float = 0.0
    """The way into a slot, with another copy's way out of it, for each byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts of a worker's base model, found when it was loaded."""

    name: str
    """The name users ask for."""
    num_params: int
    vocab_size: int
    """Valid token ids are 0 .. vocab_size - 1."""
    max_seq_len: int
    """Longest sequence (prompt plus samples), in tokens."""
    max_rank: int
    chunk_tokens: int
    """Size of a canonical chunk; a constant of the base model, never of the load."""
    eos_token_ids: tuple[int, ...]
    modules: tuple[AdaptedModule, ...]
    """The modules that adapters can adapt, in the model's order."""
    tokenizer_files: Mapping[str, bytes]
    """Contents of `tokenizer.json`, `tokenizer_config.json` and the like, so that a client needs no model hub."""
    fingerprint: str
    is_exact: bool = True
    """Whether a replay gives the same bits with any co-batched tenants, so that weights can be rematerialized."""
    fitting_tokens: int | None = None
    """Most tokens of a sequence, and of a canonical chunk, that the worker has the memory to train; None: any length
    that the model takes."""
    host_bytes_max: int | None = None
    """Most bytes of copies and sampler versions that the worker is to hold in host memory, see `BatchResult`; None:
    any number."""
    bank_bytes_max: int | None = None
    """Most bytes of a copy (weights, moments, gradient) whose row is within the limit of the bank on the worker's GPU;
    None: any number."""
    num_cache_blocks: int | None = None
    """Blocks of memory for keys and values, as in `capacity`; None: unknown."""
    num_sequence_slots: int = SEQUENCE_SLOTS
    """Most sequences that the worker decodes at a time."""
    has_tied_unembedding: bool = False
    """Whether the unembedding has the weights of the embedding, so that merging an adapter must untie them."""
    weights_id: str = ""
    """What tells its weights from others: see `tinkerpool.model_weights.weights_id`. Empty: not known."""
    costs: AdapterCosts = AdapterCosts()
    slow_because: str = ""
    """What makes it slower than others on such a device, for people; empty: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """One incarnation of a worker."""

    worker_id: str
    """The same for all incarnations."""
    incarnation: str
    """Different for each incarnation."""
    model: ModelInfo
    pid: int
    node: str
    """Address of its host in Ray's cluster; in a local pool the host's name."""
    num_slots: int
    """Bank slots: adapters and sampler versions that are resident at a time; others are in host memory."""
    device: str
    version: str = ""
    """The code that it runs, for people; empty: the coordinator's own, in whose process it is."""
    node_id: str = ""
    """Ray's id of its node; empty in a local pool."""
