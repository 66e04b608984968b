"""One warm base model: any causal language model that transformers loads, with multi-LoRA linears.

Does not depend on the storage of adapters, on losses or on tenants.

Main invariant: sequences and tenants share the frozen weights and nothing else. There is no cache and no attention mask
of transformers; attention is the `Attend` of the pass.

How to run a forward, as the packed pass and the sampler do::

    with torch.no_grad():  # or not: then `base_model.backward(hidden, ...)` adds the gradients of adapters
        hidden = base_model.forward(tokens, positions, segments, attend)  # (T, D)
        logits = base_model.unembed(hidden[rows], row_segments)           # (N, V)

Rows may be in any arrangement: whole sequences, one token of each of many sequences, or both. Each row has a token and
its position in its own sequence; each `Segment` names the rows of one adapter (`Row.groups` of the bank); rows in no
segment see only the base model. `attend` gets the queries, keys and values of all rows, layer by layer, and may keep
keys and values in a cache of its own. For equal bits in any batch, the rows of each adapter must be one segment.

A forward with `recompute` keeps only the inputs of the decoder layers, and the backward runs each layer again (gradient
checkpointing). The bits are the same with and without: a layer runs the same kernels on the same input both times, and
its adapters' gradients are added once, by the second run, in the order of a backward without recomputation. The second
run reads the state of the pass (`CurrentPass`), so the backward must run before the next forward.

Dimensions: T rows of the pass, N rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tinkerpool.model_weights import weights_id
from workers.contract.messages import ModelInfo
from workers.model.attention import Attend, AttendPacked, LayerAttention
from workers.model.delta_heads import can_convolve, convolved_by_kernels
from workers.model.delta_rule import DeltaShape, convolved_heads
from workers.model.expert_groups import can_group
from workers.model.experts import choices_of_probe, is_router
from workers.model.files import find_directory, tokenizer_files
from workers.model.fixed_order import fixed_order, prepare
from workers.model.frozen_products import BLOCK_ROWS, kernel_rows
from workers.model.fused_runs import ForwardRun, TrainingRun, can_run, forward_runs, training_runs
from workers.model.gpu_attention import attend_packed_for
from workers.model.gpu_operations import has_kernels, missing_kernels
from workers.model.library_delta import PACKAGE, VERSION, LibraryDelta, Rule, switch_to_one_way
from workers.model.linears import CurrentPass, LinearGroup
from workers.model.numerics import Numerics, fingerprint
from workers.model.packed_delta import ALONE, PackedDelta, Recur, group_values_max
from workers.model.pretrained import (
    Probe,
    UnsupportedModelError,
    eos_token_ids,
    has_tied_unembedding,
    load_pretrained,
    logit_scale,
    max_rank,
    max_seq_len,
)
from workers.model.recomputation import Recomputation
from workers.model.replacement import adapted_modules, decoder_layers, replace_layers
from workers.model.sampling_layers import AttendsProjected, SamplingLayers, SplitProjections
from workers.model.segments import Routing, Segment
from workers.model.training_layers import TrainingLayers
from workers.model.usual_layers import UsualModel, has_form

logger = logging.getLogger(__name__)


class BaseModel:
    """A frozen causal language model whose linears add each row's own adapter. Used by one thread only."""

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

        With `exact` an adapter's bits in training do not depend on co-batched rows on any device and in any dtype, at
        some cost; on a CPU in fp32 they never do.
        """
        self.path = find_directory(path)
        self.name = name or str(path)
        self.device = torch.device(device)
        self.dtype = dtype
        self._is_ordered = exact and self.device.type == "cuda"
        """Whether backwards need the library's switch for adding in a fixed order."""
        if self._is_ordered:
            prepare()
        if self.device.type == "cuda":
            switch_to_one_way()
        self.model = model = load_pretrained(self.path, device, dtype)
        self.config = config = model.config
        self.is_deferred = self.device.type == "cuda" or dtype != torch.float32
        """Whether results are fetched at the end of a pass or a phase, instead of when each one is computed."""
        self.num_params = sum(parameter.numel() for parameter in model.parameters())
        self.num_layers = int(config.num_hidden_layers)
        self.hidden_size = int(config.hidden_size)
        self.num_heads = int(config.num_attention_heads)
        self.num_key_value_heads = int(getattr(config, "num_key_value_heads", None) or self.num_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or self.hidden_size // self.num_heads)
        self.vocab_size = int(model.get_output_embeddings().out_features)
        self.max_seq_len = max_seq_len(config)
        self.logit_scale = logit_scale(config)
        """By which `forward` multiplies hidden states, and so logits."""
        self._has_kernels = can_run(self.device, dtype)
        self.scores_by_kernels = has_kernels(self.device)
        """Whether kernels of our own compute losses from logits."""
        self.attend_packed: AttendPacked
        """Makes the `Attend` of whole sequences, one after another."""
        self.has_own_attention: bool
        """Whether the attention of short sequences has a backward of our own."""
        self._choose_attention(has_own=self._has_kernels and not exact)
        self._probe: Probe | None = Probe.of(model, self.max_seq_len)
        self.current = CurrentPass()
        self._layers = layers = replace_layers(model, self.current)
        self.groups, self.delta_layers, self.expert_layers = layers.linears, layers.delta, layers.experts
        """The linears; the layers of linear attention of a hybrid, all of one shape; and those of experts."""
        self.group_shapes = layers.shapes
        self.num_attention_layers = self.num_layers - len(self.delta_layers)
        """Layers of full attention: those that have keys and values."""
        self.library_rule: Rule | None = None
        """What computes the linear attention of passes with whole sequences; None: our own rule."""
        self._attention = LayerAttention(model)
        self.has_sliding_window = self._attention.has_sliding_window
        """Whether any layer may attend with a sliding window."""
        self.has_sinks = self._attention.has_sinks
        """Whether any layer attends with sinks."""
        self.sampling_layers: SamplingLayers | None = None
        """The decoder layers in few kernels, for passes whose `attend` takes projections; None: the model or the device
        has none, and its modules compute."""
        self.training_layers: TrainingLayers | None = None
        """The same for all other passes."""
        self.has_pass_graphs = True
        """Whether passes with `training_layers` may be graphs: False once they gave other gradients."""
        self._usual: UsualModel | None = None
        if self._has_kernels and not (self.has_sliding_window or self.has_sinks) and has_form(model, self.head_dim):
            self._usual = UsualModel(model)
            self.sampling_layers = None if exact else SamplingLayers(self._usual, has_gate=self._usual.has_silu)
            if self._usual.has_silu:
                self.training_layers = TrainingLayers(self._usual, self.current, self.num_heads)
        self._recomputation = Recomputation(decoder_layers(model, self.num_layers), self.current)
        self.numerics = Numerics()
        """How products are computed; see `use`."""
        self.use(self._exactly(Numerics(can_batch=False)) if exact else Numerics())

    def use(self, numerics: Numerics) -> None:
        """Compute products this way from now on. On a GPU those of routers keep a row's bits in every mode: the last
        bit of one decides now and then where a token goes.
        """
        self.numerics = numerics
        are_routers_apart = self.device.type == "cuda" and not numerics.is_exact
        for group in self.groups:
            group.use(self._exactly(numerics) if are_routers_apart and is_router(group.shape) else numerics)
        in_parts = frozenset(group.shape.index for group in self.groups if group.is_in_parts)
        self.current.use(numerics, in_parts, *((training_runs, forward_runs) if self._has_kernels else (None, None)))
        self._convolve(by_kernels=self._has_kernels)
        for layer in self.expert_layers[:1]:
            is_grouped = self._has_kernels and not numerics.is_exact and can_group(self.device, layer.shapes)
            layer.shared.use(numerics, is_grouped=is_grouped)
        if self._usual is not None:
            self._usual.use(numerics)

    def _convolve(self, *, by_kernels: bool) -> None:
        for layer in self.delta_layers:
            has_kernels = by_kernels and can_convolve(self.device, self.dtype, layer.delta_weights.shape)
            layer.use(convolved_by_kernels if has_kernels else convolved_heads)

    def _exactly(self, numerics: Numerics) -> Numerics:
        """Return how products are computed whose rows keep their bits at any number of rows."""
        return replace(numerics, **({"is_tiled": True} if self._has_kernels else {"block_rows": BLOCK_ROWS}))

    @property
    def trains_by_kernels(self) -> bool:
        """Whether adapters of passes with a backward are added by kernels of our own."""
        return self.current.fuse is not None

    @property
    def sets_gradients(self) -> bool:
        """Whether a pass can set gradients instead of adding to them: its kernels write all of them."""
        are_fused = all(group.is_batched for group in self.groups)
        return self.trains_by_kernels and self.training_layers is not None and are_fused and self.is_deferred

    @contextmanager
    def training_by_modules(self) -> Iterator[None]:
        """Train by the modules, and without kernels of our own for adapters and heads, in this block."""
        kept = self.training_layers, self.current.fuse
        self.training_layers = self.current.fuse = None
        self._convolve(by_kernels=False)
        try:
            yield
        finally:
            self.training_layers, self.current.fuse = kept
            self._convolve(by_kernels=self._has_kernels)

    @property
    def _computed_by_kernels(self) -> str:
        """What kernels of our own compute, for the fingerprint."""
        if not has_kernels(self.device):
            return ""
        losses = "losses and " if self.scores_by_kernels else ""
        adapters = "adapters, " if self._has_kernels else ""
        are_heads = any(layer.delta_weights.convolve is convolved_by_kernels for layer in self.delta_layers)
        attention = "attention of short sequences, " if self.has_own_attention else ""
        few = "products of few rows, " if self.sampling_layers is not None and self.sampling_layers.takes_few else ""
        return f"{adapters}{attention}{few}{'heads of linear attention, ' if are_heads else ''}{losses}steps"

    def attend_alone(self) -> None:
        """Let requests share no calls of attention in exact mode from now on."""
        self._choose_attention(is_shared=False)

    def attend_by_library(self) -> None:
        """Let attention have no backward of our own from now on, outside exact mode."""
        self._choose_attention()

    def _choose_attention(self, *, has_own: bool = False, is_shared: bool = True) -> None:
        self.has_own_attention = has_own
        self.attend_packed = attend_packed_for(
            self.device,
            self.dtype,
            self.num_heads,
            self.head_dim,
            exact=self._is_ordered,
            is_shared=is_shared,
            has_own=has_own,
        )

    def drop_kernels(self) -> None:
        """Add adapters, and compute layers in training, without kernels of our own from now on."""
        self._has_kernels, self.training_layers = False, None
        self.use(self.numerics)

    @torch.no_grad()
    def probe(self) -> None:
        """Compare the packed forward with the model's own. Called once, when the model is loaded.

        Raises UnsupportedModelError if they differ.
        """
        probe, self._probe = self._probe, None
        assert probe is not None, "the model has been probed already"

        def logits_of(
            tokens: Tensor,
            positions: Tensor,
            lengths: list[int],
            *,
            is_projected: bool = False,
            routing: Routing | None = None,
        ) -> Tensor:
            attend: Attend = self.attend_packed(lengths, [1] * len(lengths))
            if is_projected:
                attend = SplitProjections(attend, self.num_heads, self.num_key_value_heads)
            recur = self.recur_packed(lengths)
            return self.unembed(self.forward(tokens, positions, routing or (), attend, recur), ())

        def logits_of_each(tokens: Tensor, positions: Tensor, lengths: list[int], *, has_run: bool) -> Tensor:
            """Return those of sequences of few rows, one after another; `has_run`: with adapters that adapt nothing."""
            logits = []
            for ids, places, length in zip(tokens.split(lengths), positions.split(lengths), lengths, strict=True):
                routing = Routing((), self.current.rows_min)
                if has_run:
                    routing.runs.append(ForwardRun.of_nothing(length, len(self.groups), self.device))
                logits.append(logits_of(ids, places, [length], is_projected=True, routing=routing))
            return torch.cat(logits)

        if self.training_layers is not None:
            try:
                probe.check(logits_of, self.dtype)
            except UnsupportedModelError as error:
                logger.warning("%s trains by transformers' modules, which is slower: %s", self.name, error)
                self.training_layers = None
        if self.training_layers is None:
            with choices_of_probe(self.expert_layers, probe.choices, self.dtype):
                probe.check(logits_of, self.dtype)
        if self.sampling_layers is not None:
            try:
                probe.check(partial(logits_of, is_projected=True), self.dtype)
            except UnsupportedModelError as error:
                logger.warning("%s samples by transformers' modules, which is slower: %s", self.name, error)
                self.sampling_layers = None
        if self.sampling_layers is not None and self.sampling_layers.takes_few:
            try:
                for has_run in (False, True):
                    probe.check(partial(logits_of_each, has_run=has_run), self.dtype)
            except Exception as error:  # noqa: BLE001 (whatever it is: the library has products of few rows, too)
                logger.warning("%s decodes by the library's products, which is slower: %s", self.name, error)
                self.sampling_layers.leave_few()
        self.reset()

    def reset(self) -> None:
        """Drop the state of the last pass, and the count of products."""
        self.current.reset()
        self._attention.end()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Sequence[Segment] | Routing,
        attend: Attend,
        recur: Recur | None = None,
        *,
        recompute: bool = False,
    ) -> Tensor:
        """Return the last hidden states (T, D), normalised, of token ids and positions (T,), int64.

        They are times the `logit_scale`, so that every unembedding of them, adapters included, gives scaled logits.
        Rows are padded at the end up to `pad_rows`; `attend` sees the padding, the result does not have it. With
        `training_layers` there is no padding, and with an `attend` that takes projections and `sampling_layers`, which
        have no gradients. `recur` is the linear attention of a hybrid, and sees the padding too.
        With gradients enabled, `backward` adds every adapter's gradient to its row; it must run before the next
        forward. With `recompute` it runs every layer again, so that only the layers' inputs stay in memory meanwhile;
        the bits are the same.
        """
        self.current.begin(segments, recur)
        if self.sampling_layers is not None and isinstance(attend, AttendsProjected):
            return self._scaled(self.sampling_layers.forward(tokens, positions, self.current.routing, attend))
        if self.training_layers is not None:
            return self._scaled(self.training_layers.forward(tokens, positions, attend, recompute=recompute))
        num_rows = tokens.shape[0]
        padding = self.pad_rows(num_rows) - num_rows
        if padding:
            tokens, positions = F.pad(tokens, (0, padding)), F.pad(positions, (0, padding))
        self._attention.begin(attend)
        self._recomputation.switch(on=recompute)
        for group in self.groups:
            group.drop_outputs()
        out = self.model.model(
            input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), attention_mask=None, use_cache=False
        )
        hidden: Tensor = out.last_hidden_state.squeeze(0)  # (T + padding, D)
        return self._scaled(hidden[:num_rows] if padding else hidden)

    def _scaled(self, hidden: Tensor) -> Tensor:
        return hidden if self.logit_scale == 1 else hidden * self.logit_scale

    def backward(self, hidden: Tensor, dhidden: Tensor) -> None:
        """Add every adapter's gradient to its row, from the hidden states of the last forward and d(loss)/d(hidden)."""
        with fixed_order() if self._is_ordered else nullcontext():
            torch.autograd.backward(hidden, dhidden)
        for run in self.current.routing.runs:
            if isinstance(run, TrainingRun):
                run.check_set()

    @torch.no_grad()
    def unembed(self, hidden: Tensor, segments: Sequence[Segment] | Routing) -> Tensor:
        """Return the logits (N, V), adapters included, of hidden states (N, D). Segments count rows of `hidden`.

        Segments whose runs are made already come as a routing.
        """
        num_rows = hidden.shape[0]
        padding = max(0, self.current.rows_min - num_rows)
        routing = segments if isinstance(segments, Routing) else self.current.route(segments, needs_grad=False)
        (logits,), _ = self.unembedding.forward(F.pad(hidden, (0, 0, 0, padding)), routing)
        return logits[:num_rows]

    @property
    def unembedding(self) -> LinearGroup:
        """The last linear, hidden (.., D) -> logits (.., V), which the chunked loss runs block by block."""
        return self.groups[-1]

    def pad_rows(self, num_rows: int) -> int:
        """Return the rows of a pass with its padding: a multiple of the least number of rows, or of exact blocks."""
        if self.numerics.is_packed:
            return kernel_rows(num_rows, self.current.rows_min)
        multiple = self.numerics.block_rows or self.current.rows_min
        return -(-num_rows // multiple) * multiple

    @property
    def delta_shape(self) -> DeltaShape | None:
        """The sizes of every layer of linear attention; None without any."""
        return self.delta_layers[0].delta_weights.shape if self.delta_layers else None

    def recur_packed(self, lengths: Sequence[int]) -> Recur:
        """Return the linear attention of whole sequences, one after another."""
        if self.library_rule is None:
            return PackedDelta(lengths, self.device, self.delta_group_values)
        return LibraryDelta(self.library_rule, lengths, self.device)

    @property
    def delta_group_values(self) -> int:
        """Values of queries, keys or values for which linear attention holds all its tensors at a time, at most."""
        if self.library_rule is not None:
            return sys.maxsize
        return ALONE if self.numerics.are_sequences_alone else group_values_max(self.device)

    @property
    def num_base_matmuls(self) -> int:
        """Products with frozen weights so far, forward only; for tests and metering."""
        return self.current.num_base_matmuls

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a canonical chunk. Depends only on the model, or a replay would group gradients differently."""
        return 1024 if self.hidden_size <= 1024 else 512

    @property
    def max_rank(self) -> int:
        """The largest power of two that is allowed as a rank."""
        return max_rank(self.config)

    def info(self, *, is_thread_count_invariant: bool, are_samples_batch_invariant: bool) -> ModelInfo:
        """Return the facts that the coordinator and clients need; the flags are part of the `fingerprint`."""
        # A deferred loss neither pads its blocks of logits to `rows_min` nor aligns their rows.
        numerics = replace(self.numerics, rows_min=None) if self.is_deferred else self.numerics
        return ModelInfo(
            name=self.name,
            num_params=self.num_params,
            vocab_size=self.vocab_size,
            max_seq_len=self.max_seq_len,
            max_rank=self.max_rank,
            chunk_tokens=self.chunk_tokens,
            eos_token_ids=eos_token_ids(self.model),
            modules=adapted_modules(self.model, self._layers),
            tokenizer_files=tokenizer_files(self.path),
            fingerprint=fingerprint(
                numerics,
                self.device,
                self.dtype,
                kernels=self._computed_by_kernels,
                linear_attention="" if self.library_rule is None else f"{PACKAGE} {VERSION}",
                is_thread_count_invariant=is_thread_count_invariant,
                are_samples_batch_invariant=are_samples_batch_invariant,
            ),
            is_exact=numerics.is_exact or numerics.rows_min is not None,
            has_tied_unembedding=has_tied_unembedding(self.model),
            weights_id=weights_id(self.path),
            slow_because=missing_kernels(self.device),
        )
