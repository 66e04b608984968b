"""One warm base model: any causal language model that transformers loads, with multi-LoRA linears put in.

Knows architectures (through transformers) and where their linears are; not adapters' storage, losses or tenants.

Main invariant: nothing passes between sequences or tenants but through the frozen weights. There is no cache and no
attention mask of transformers; attention goes through the `Attend` of the pass, and `probe` refuses, when a model is
loaded, whatever would come out differently from the model's own code.

How to run a forward (the packed pass and the sampler do exactly this)::

    with torch.no_grad():  # or not: gradients of adapters are then added by `hidden.backward(...)`
        hidden = base_model.forward(tokens, positions, segments, attend)  # (T, D)
        logits = base_model.unembed(hidden[rows], row_segments)           # (N, V)

Rows may be in any arrangement: whole sequences, one token of each of many sequences, or both. Each row has a token and
its position in its own sequence; each `Segment` says which rows go through which adapter (`Row.groups` of the bank);
rows in no segment see the base model alone. `attend` gets the queries, keys and values of all rows, layer by layer, and
may keep keys and values in a cache of its own (`attention.Attend`). For equal bits whatever else is in the pass, order
rows so that each adapter's are one segment.

Dimensions: T rows of the pass, N rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from workers.contract.messages import ModelInfo
from workers.model.attention import Attend
from workers.model.blocks import BLOCK_ROWS
from workers.model.device_attention import attend_packed_for
from workers.model.frozen import kernel_rows
from workers.model.grouped import can_group, group_segments
from workers.model.lora import CurrentPass, LinearGroup, MultiLoraLinear, Segment
from workers.model.norms import fuse_rms_norms
from workers.model.numerics import Numerics, fingerprint
from workers.model.recompute import Recomputation
from workers.model.rotary import fuse_rotary
from workers.rows import GroupShape, ModuleKind

ATTENTION_NAME = "tinkerpool"
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Leaf names of linears that read the same input and are computed together."""
KIND_OF_PARENT: Mapping[str, ModuleKind] = {"self_attn": "attn", "attention": "attn", "attn": "attn", "mlp": "mlp"}
MAX_RANK = 128
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_LOADING = threading.Lock()
"""transformers changes torch for everybody while it loads: of two threads that load at once, one may get a model whose
weights were never filled."""
PROBE_TOLERANCE = 1e-4
"""Largest difference of log-probabilities to the model's own forward, in fp32."""
ROUNDINGS_PER_LAYER = 16
"""In bf16, how often a layer rounds to 8 bits on the way from input to output: seven linears, two to four norms, rotary
embedding, attention, activation and residual sums. Two forwards may round each differently; the errors add up as those
of independent values do."""


class UnsupportedModelError(ValueError):
    """The model has something that the fused pass would silently get wrong."""


@dataclass(frozen=True, slots=True)
class _Reference:
    """Two packed sequences as the model's own code computes them, before anything in the model is replaced."""

    tokens: Tensor
    lengths: list[int]
    logprobs: list[Tensor]
    """(length, V) of each sequence."""


class BaseModel:
    """A frozen causal language model whose linears take each row through its own adapter. One thread only."""

    def __init__(
        self,
        path: Path | str,
        *,
        name: str = "",
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        exact: bool = False,
    ) -> None:
        """Load from a directory, or from the local hub cache by name. Raises UnsupportedModelError, OSError.

        `exact`: an adapter's bits in training depend on no neighbour on any device and in any dtype, at some cost; on
        a CPU in fp32 they depend on none anyway.
        """
        self.path = _directory(path)
        self.name = name or str(path)
        config = AutoConfig.from_pretrained(self.path, trust_remote_code=False, local_files_only=True)
        _check_config(config)
        with _LOADING:
            model: Any = AutoModelForCausalLM.from_pretrained(
                self.path,
                config=config,
                dtype=dtype,
                trust_remote_code=False,
                local_files_only=True,
                attn_implementation="sdpa",
            )
        model.to(device).eval().requires_grad_(requires_grad=False)
        self.model = model
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self.is_deferred = self.device.type == "cuda" or dtype != torch.float32
        """Whether results are fetched when a pass or a phase is over, instead of each when it is computed."""
        self.current = CurrentPass()
        self.num_params = sum(parameter.numel() for parameter in model.parameters())
        self.num_layers = int(config.num_hidden_layers)
        self.hidden_size = int(config.hidden_size)
        self.num_heads = int(config.num_attention_heads)
        self.num_key_value_heads = int(getattr(config, "num_key_value_heads", None) or self.num_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or self.hidden_size // self.num_heads)
        self.vocab_size = int(model.get_output_embeddings().out_features)
        self.max_seq_len = int(config.max_position_embeddings)
        self.attend_packed = attend_packed_for(self.device, dtype, self.head_dim, exact=exact)
        """Makes the `Attend` of whole sequences that stand one behind the other."""
        self._reference: _Reference | None = self._own_logprobs()
        self.groups = self._put_linears_in()
        self.group_shapes = tuple(group.shape for group in self.groups)
        self._unembedding = self.groups[-1]
        fuse_rms_norms(model)
        fuse_rotary(model)
        _register_attention()
        model.set_attn_implementation(ATTENTION_NAME)
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                module.tinkerpool_pass = self.current
        self._recomputation = Recomputation(self._layers(), self.current)
        self.numerics = Numerics()
        """How products are computed; see `use`."""
        self.use(Numerics(block_rows=BLOCK_ROWS, can_batch=False) if exact else Numerics())

    def use(self, numerics: Numerics) -> None:
        """Compute products this way from now on."""
        self.numerics = numerics
        is_fused = numerics.block_rows is None and can_group(self.device, self.dtype, self.group_shapes)
        self.current.use(numerics, group_segments if is_fused else None)
        for group in self.groups:
            group.use(numerics)

    # ------------------------------------------------------------------ forward

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        attend: Attend,
        *,
        recompute: bool = False,
    ) -> Tensor:
        """Token ids and positions (T,), int64 -> last hidden states (T, D), normalised, ready for `unembed`.

        Rows are padded at the end up to `pad_rows`; `attend` sees the padding, the result does not have it.
        With gradients enabled, `torch.autograd.backward(hidden, dhidden)` adds every adapter's gradient to its row, and
        must run before the next forward. With `recompute` it runs every layer again, which keeps the layers' inputs
        alone in memory meanwhile; the bits are the same.
        """
        num_rows = tokens.shape[0]
        padding = self.pad_rows(num_rows) - num_rows
        if padding:
            tokens, positions = F.pad(tokens, (0, padding)), F.pad(positions, (0, padding))
        self.current.begin(segments, attend)
        self._recomputation.is_on = recompute
        for group in self.groups:
            group.forget()
        out = self.model.model(
            input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), attention_mask=None, use_cache=False
        )
        hidden: Tensor = out.last_hidden_state[0]  # (T + padding, D)
        return hidden[:num_rows] if padding else hidden

    @torch.no_grad()
    def unembed(self, hidden: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Hidden states (N, D) of `forward` -> logits (N, V), adapters included. Segments count rows of `hidden`."""
        num_rows = hidden.shape[0]
        padding = max(0, self.current.rows_min - num_rows)
        routing = self.current.route(segments, needs_grad=False)
        (logits,), _ = self._unembedding.forward(F.pad(hidden, (0, 0, 0, padding)), routing)
        return logits[:num_rows]

    @property
    def unembedding(self) -> LinearGroup:
        """The last linear, hidden (.., D) -> logits (.., V), which the chunked loss runs block by block."""
        return self._unembedding

    def pad_rows(self, num_rows: int) -> int:
        """The number of rows that a pass of `num_rows` runs with: whole multiples of `rows_min`, or of exact blocks."""
        if self.numerics.is_packed:
            return kernel_rows(num_rows, self.current.rows_min)
        multiple = self.numerics.block_rows or self.current.rows_min
        return -(-num_rows // multiple) * multiple

    @property
    def num_base_matmuls(self) -> int:
        """Products with frozen weights so far, forward only; for tests and metering."""
        return self.current.num_base_matmuls

    # ------------------------------------------------------------------ facts

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a canonical chunk. Depends on the model alone, or a replay would group gradients differently."""
        return 1024 if self.hidden_size <= 1024 else 512

    @property
    def max_rank(self) -> int:
        """The largest power of two that is allowed as a rank."""
        return min(MAX_RANK, 1 << (self.hidden_size.bit_length() - 1))

    def info(self, *, is_thread_count_invariant: bool, are_samples_batch_invariant: bool) -> ModelInfo:
        """The facts that the coordinator and clients need; see `fingerprint`."""
        # A deferred loss does not pad its blocks of logits to `rows_min`.
        numerics = replace(self.numerics, rows_min=None) if self.is_deferred else self.numerics
        files = [self.path / file_name for file_name in TOKENIZER_FILES]
        return ModelInfo(
            name=self.name,
            num_params=self.num_params,
            vocab_size=self.vocab_size,
            max_seq_len=self.max_seq_len,
            max_rank=self.max_rank,
            chunk_tokens=self.chunk_tokens,
            eos_token_ids=self._eos_token_ids(),
            attn_modules=self._leaf_names("attn"),
            mlp_modules=self._leaf_names("mlp"),
            unembed_modules=self._leaf_names("unembed"),
            tokenizer_files={file.name: file.read_bytes() for file in files if file.is_file()},
            fingerprint=fingerprint(
                numerics,
                self.device,
                self.dtype,
                is_thread_count_invariant=is_thread_count_invariant,
                are_samples_batch_invariant=are_samples_batch_invariant,
            ),
            is_exact=numerics.block_rows is not None or numerics.rows_min is not None,
        )

    def _leaf_names(self, kind: ModuleKind) -> tuple[str, ...]:
        names = [name.rpartition(".")[2] for shape in self.group_shapes if shape.kind == kind for name in shape.names]
        return tuple(dict.fromkeys(names))

    def _eos_token_ids(self) -> tuple[int, ...]:
        generation = getattr(self.model, "generation_config", None)
        ids = getattr(generation, "eos_token_id", None)
        if ids is None:
            ids = getattr(self.config, "eos_token_id", None)
        if ids is None:
            return ()
        return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)

    # ------------------------------------------------------------------ loading

    def _layers(self) -> list[nn.Module]:
        """The decoder layers, in the order of the forward."""
        layers = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if len(layers) != self.num_layers:
            raise UnsupportedModelError(
                f"the model has {len(layers)} decoder layers that transformers can run again in the backward, and "
                f"{self.num_layers} layers in its config.json; its architecture is not supported"
            )
        return layers

    def _put_linears_in(self) -> tuple[LinearGroup, ...]:
        """Replace the linears of every layer and the unembedding; groups in the order of the forward."""
        unembedding = self.model.get_output_embeddings()
        groups: list[LinearGroup] = []
        by_parent: dict[str, dict[str, nn.Linear]] = {}
        unembedding_name = ""
        for name, module in self.model.named_modules():
            if module is unembedding:
                unembedding_name = name
            elif isinstance(module, nn.Linear):
                parent, _, leaf = name.rpartition(".")
                by_parent.setdefault(parent, {})[leaf] = module
        for parent, linears in by_parent.items():
            kind = KIND_OF_PARENT.get(parent.rpartition(".")[2])
            if kind is None:
                raise UnsupportedModelError(
                    f"the model has linear layers in {parent!r}, which is neither attention nor MLP; supported are "
                    "dense decoder-only models in the shape of Llama, Qwen 2 and 3, Mistral, SmolLM2 and Gemma 3"
                )
            for leaves in _sibling_groups(list(linears)):
                names = tuple(f"{parent}.{leaf}" for leaf in leaves)
                groups.append(self._replace(len(groups), kind, names))
        if not unembedding_name or not groups:
            raise UnsupportedModelError("the model has no linear output layer or no linear layers at all")
        groups.append(self._replace(len(groups), "unembed", (unembedding_name,)))
        return tuple(groups)

    def _replace(self, index: int, kind: ModuleKind, names: tuple[str, ...]) -> LinearGroup:
        linears = [self.model.get_submodule(name) for name in names]
        shape = GroupShape(
            index=index,
            kind=kind,
            names=names,
            d_in=linears[0].in_features,
            d_outs=tuple(linear.out_features for linear in linears),
        )
        assert all(linear.in_features == shape.d_in for linear in linears)
        group = LinearGroup(shape, linears, self.current)
        for position, (name, linear) in enumerate(zip(names, linears, strict=True)):
            parent, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(parent), leaf, MultiLoraLinear(linear, group, position))
        return group

    @torch.no_grad()
    def _own_logprobs(self) -> _Reference:
        """Return the log-probabilities of two sequences, computed by the model's own code."""
        lengths = [min(24, self.max_seq_len), min(11, self.max_seq_len)]
        num_tokens = int(self.model.get_input_embeddings().num_embeddings)
        tokens = (torch.arange(sum(lengths), device=self.device) * 7919 + 13) % min(num_tokens, self.vocab_size)
        logprobs = [
            self.model(input_ids=part.unsqueeze(0), use_cache=False).logits[0].float().log_softmax(-1)
            for part in tokens.split(lengths)
        ]
        return _Reference(tokens, lengths, logprobs)

    @torch.no_grad()
    def probe(self) -> None:
        """Compare the packed forward with the model's own, sequence by sequence. Called once, when the model is loaded.

        Raises UnsupportedModelError if they differ.
        """
        reference, self._reference = self._reference, None
        assert reference is not None, "the model has been probed already"
        lengths = reference.lengths
        positions = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        hidden = self.forward(reference.tokens, positions, (), self.attend_packed(lengths, [1] * len(lengths)))
        actual = self.unembed(hidden, ()).float().log_softmax(-1)
        for logprobs, own in zip(actual.split(lengths), reference.logprobs, strict=True):
            difference, tolerance = self._difference(logprobs, own)
            if not difference <= tolerance:
                raise UnsupportedModelError(
                    f"the fused pass gives other log-probabilities than the model's own code (by {difference:.2g}, "
                    f"allowed are {tolerance:.2g}); this architecture has a feature that is not supported"
                )
        self.current.reset()

    def _difference(self, logprobs: Tensor, own: Tensor) -> tuple[float, float]:
        """How far log-probabilities (N, V) are from the model's own, and how far they may be.

        In fp32 the largest difference. In bf16, in which two roundings of one value may be 2^-8 of it apart, the root
        mean square of the differences, as a fraction of that of the log-probabilities around their mean.
        """
        if self.dtype == torch.float32:
            return float((logprobs - own).abs().max()), PROBE_TOLERANCE
        spread = (own - own.mean(-1, keepdim=True)).square().mean().sqrt()
        difference = (logprobs - own).square().mean().sqrt() / spread
        return float(difference), 2.0**-8 * (ROUNDINGS_PER_LAYER * self.num_layers) ** 0.5


def _directory(path: Path | str) -> Path:
    """A directory as it is; otherwise a hub name that is in the local cache."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(path), local_files_only=True))


def _check_config(config: Any) -> None:
    """Refuse by name what is known to be unsupported, with a better message than the probe could give."""
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if num_experts := getattr(config, key, None):
            raise UnsupportedModelError(
                f"{config.model_type} is a mixture of {num_experts} experts ({key} in config.json), and adapters of "
                "experts cannot be trained yet; take a dense model: Llama 3, Qwen 2 or 3, Mistral, SmolLM2 or Gemma 3"
            )
    refused = {
        "attn_logit_softcapping": "attention logit soft-capping",
        "final_logit_softcapping": "soft-capping of the output logits",
        "use_bidirectional_attention": "bidirectional attention",
        "vision_config": "a vision tower",
        "audio_config": "an audio tower",
    }
    for key, feature in refused.items():
        if getattr(config, key, None):
            raise UnsupportedModelError(f"models with {feature} ({key} in config.json) are not supported")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError("encoder-decoder models are not supported; take a causal language model")


def _sibling_groups(leaves: list[str]) -> list[tuple[str, ...]]:
    """Leaf names of one module, siblings together, in order of their first member."""
    groups: list[tuple[str, ...]] = []
    for leaf in leaves:
        if any(leaf in group for group in groups):
            continue
        siblings = next((names for names in SIBLINGS if leaf in names and set(names) <= set(leaves)), (leaf,))
        groups.append(siblings)
    return groups


def _register_attention() -> None:
    """Route attention to the `Attend` of the pass, and keep transformers from making masks. Idempotent."""
    if ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _no_mask)


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Sequences are kept apart by `Attend`; a mask of transformers would be guesswork from position ids."""


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for every layer: (1, heads, T, head_dim) each -> (1, T, heads, head_dim)."""
    assert attention_mask is None, "transformers made a mask although it was told not to"
    if kwargs.get("softcap") or kwargs.get("s_aux") is not None or not getattr(module, "is_causal", True):
        raise UnsupportedModelError("soft-capped, sink or non-causal attention is not supported")
    scaling = module.head_dim**-0.5 if scaling is None else scaling
    attend: Attend = module.tinkerpool_pass.attend
    out = attend(module.layer_idx, query, key, value, scaling=scaling, sliding_window=sliding_window)
    return out, None
