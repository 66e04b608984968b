"""Cases: what the engine does on a GPU with models of real shapes, and a row of counts for each.

Imports torch: the guard of `tests.support.fake_cuda` must be loaded before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import workers.engine
from scripts.bench.common import Row
from scripts.bench.gpu import sides
from scripts.bench.gpu.cases import SHAPES, Case, num_weights, random_data
from tests.support.fake_cuda.costs import keys_max
from tests.support.fake_cuda.counting import Counting, Counts
from tests.support.fake_cuda.device import fake_cuda
from tests.support.fake_cuda.engines import make_engine, no_files
from workers.contract.messages import (
    AdapterSpec,
    PassItem,
    SampleEvent,
    SampleRequest,
    SampleResult,
    SamplerVersion,
    SamplingParams,
    TokenEvent,
)
from workers.engine import TrainingEngine
from workers.host.free_memory import MemoryShare
from workers.model.base_model import BaseModel
from workers.sampling.attention import pages
from workers.sampling.sampler import SamplerLimits
from workers.training import pass_graphs
from workers.training.device_logits import DeviceLoss
from workers.training.passes import PassRunner, pack

RANK = 32
PROMPT_TOKENS, LONG_PROMPT_TOKENS = 128, 8192
NUM_SEQS, NUM_LONG_SEQS = 32, 8
"""Sequences of a decode step, and of one with long prompts, whose keys and values must fit."""
NUM_ADAPTERS = 8
TOP_P = 0.95
LOSS_ROWS = 512
FEW_LAYERS, MORE_LAYERS = 2, 4
"""The kernels of one layer are the difference between models with so many layers, divided by that of the layers."""
PATTERN_LAYERS = 4
"""Layers of a model that is counted at reduced depth: those of a hybrid's pattern, three of linear attention and one of
full attention. Its kernels of a layer are the difference to a model with twice as many, so they are the pattern's mean.
"""
REDUCED_SHAPES: dict[str, dict[str, Any]] = {
    "9b-hybrid": {
        "model_type": "qwen3_5_text",
        "hidden_size": 4096,
        "num_hidden_layers": PATTERN_LAYERS,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 12_288,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248_320,
        "tie_word_embeddings": False,
    },
    "30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": PATTERN_LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    },
    "tiny-hybrid": {
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "num_hidden_layers": PATTERN_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "vocab_size": 384,
    },
    "tiny-mixture": {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 384,
    },
}
"""Shapes of Qwen3.5 9B and Qwen3-30B-A3B with few of their 32 and 48 layers, and miniatures of both kinds. These have
vocabularies of which one block of a device finds the likeliest tokens: that is counted."""
ALL_KINDS = {"train_attn": True, "train_mlp": True, "train_unembed": True}


def shape_of(model: str) -> dict[str, Any]:
    """Return the shape of a name of `SHAPES` or `REDUCED_SHAPES`, or of `NAME@LAYERS` with so many layers."""
    name, _, layers = model.partition("@")
    shape = SHAPES.get(name) or REDUCED_SHAPES[name]
    return shape | ({"num_hidden_layers": int(layers)} if layers else {})


@contextmanager
def engine_of(model: str, **settings: Any) -> Iterator[tuple[TrainingEngine, Counting]]:
    """Return an engine with a model of a named shape on the fake device, and what counts its work."""
    with fake_cuda() as counting, no_files(shape_of(model)):
        yield make_engine(**settings), counting


def row_of(model: str, case: str, counts: Counts, **more: Any) -> Row:
    """Return the row of a case."""
    return {
        "model": model,
        "case": case,
        "kernels": counts.num_kernels,
        "bytes": counts.num_bytes,
        "flops": counts.flops,
        "waits": counts.num_waits,
        "to_host_bytes": counts.to_host_bytes,
        "peak_bytes": counts.peak_bytes,
        "device_s": counts.device_s,
        "host_s": counts.host_s,
        "predicted_s": counts.predicted_s,
        "waits_by_line": dict(counts.waits.most_common()),
        **more,
    }


# ------------------------------------------------------------------ training


def training(model: str, load: Case, **settings: Any) -> tuple[Counts, Counts]:
    """Count a step's passes and its optimizer steps.

    All adapters are resident before, and have taken a step. If the bank does not hold all of them, they are loaded and
    evicted in the step.
    """
    with engine_of(model, num_slots=max(16, load.num_tenants), **settings) as (engine, counting):
        with patch.object(sides, "TrainingEngine", lambda _: engine):
            side = sides.Fused(engine.settings, load, RANK)
        if engine.bank.fits(side.keys):
            side.run_steps()
        with counting.stretch() as passes, noting_kept(counting, passes):
            side.run_passes()
        with counting.stretch() as steps:
            side.run_steps()
        if load.total_tokens <= pass_graphs.ROWS_MAX:  # now as a graph, which has its memory already
            with counting.stretch() as by_graph:
                side.run_passes()
            by_graph.peak_bytes, by_graph.kept_bytes = passes.peak_bytes, passes.kept_bytes
            passes = by_graph
    return passes, steps


@contextmanager
def noting_kept(counting: Counting, counts: Counts) -> Iterator[None]:
    """Note the most memory that a forward leaves in use: what autograd keeps for the backward, and the result."""
    forward = BaseModel.forward

    def noted(self: BaseModel, *args: Any, **kwargs: Any) -> Tensor:
        before = counting.live_bytes
        hidden = forward(self, *args, **kwargs)
        counts.kept_bytes = max(counts.kept_bytes, counting.live_bytes - before)
        return hidden

    with patch.object(BaseModel, "forward", noted):
        yield


def training_rows(model: str, load: Case) -> list[Row]:
    """Return the rows of a training step: passes, and optimizer steps."""
    try:
        passes, steps = training(model, load)
    except torch.OutOfMemoryError:
        return [{"model": model, "case": f"passes {load}"}]
    _, adapter = num_weights(SimpleNamespace(**shape_of(model)), RANK)
    bytes_a_value = steps.num_bytes / adapter / load.num_tenants
    return [
        row_of(model, f"passes {load}", passes, kept_bytes=passes.kept_bytes),
        row_of(model, f"optimizer {load}", steps, bytes_a_value=bytes_a_value),
    ]


def passes(model: str, load: Case) -> list[Row]:
    """Count a step's passes alone, of a model of any kind."""
    counts, _ = training(model, load)
    return [row_of(model, f"passes {load}", counts, kept_bytes=counts.kept_bytes)]


def loss(model: str) -> list[Row]:
    """Count the loss of one request, from the last hidden states to their gradient, with an adapted unembedding."""
    name, _, _ = model.partition("@")  # no layer has a part in it
    with engine_of(f"{name}@1") as (engine, counting):
        base_model, bank = engine.base_model, engine.bank
        bank.add("a", AdapterSpec(adapter_id="a", rank=RANK, alpha=32.0, seed=0, **ALL_KINDS))
        item = PassItem(
            op_id="",
            adapter_id="a",
            prev_seq=0,
            seq=1,
            chunk_index=0,
            num_chunks=1,
            data=random_data(0, [LOSS_ROWS], base_model.vocab_size),
            loss_fn="cross_entropy",
            loss_config={},
            backward=True,
        )
        runner = PassRunner(base_model, bank, MemoryShare(base_model.device))
        packed = pack([runner.checked(item)], bank.acquire(["a"]), base_model.device, by_adapter=True)
        hidden = torch.empty(LOSS_ROWS, base_model.hidden_size, dtype=base_model.dtype, device=base_model.device)
        device_loss = DeviceLoss(base_model.unembedding, base_model.vocab_size, has_kernels=True)
        with counting.stretch() as counts:
            device_loss.run(hidden, packed.parts, backward=True)
            device_loss.settle()
    return [row_of(model, f"loss of {LOSS_ROWS} rows", counts)]


# ------------------------------------------------------------------ sampling


class Sampling:
    """An engine with requests that sample; every prompt is of its own."""

    def __init__(self, engine: TrainingEngine, num_adapters: int) -> None:
        self._engine = engine
        self._keys = [f"version-{number}" for number in range(num_adapters)]
        for number, key in enumerate(self._keys):
            spec = AdapterSpec(adapter_id=key, rank=RANK, alpha=32.0, seed=number, **ALL_KINDS)
            engine.bank.add(key, spec, is_trained=False)

    def start(self, num_seqs: int, prompt_tokens: int, top_p: float = 1.0) -> None:
        """Begin requests of one sample each, in turn for each adapter."""
        vocab_size = self._engine.info.vocab_size
        for number in range(num_seqs):
            name = f"sample-{number}"
            self._engine.start_sample(
                SampleRequest(
                    op_id=name,
                    scope=name,
                    version=SamplerVersion(key=self._keys[number % len(self._keys)] if self._keys else ""),
                    prompt=np.random.default_rng(number).integers(0, vocab_size, prompt_tokens).astype(np.int32),
                    num_samples=1,
                    params=SamplingParams(max_tokens=256, seed=number, top_p=top_p),
                    stream=True,
                )
            )

    def step(self) -> set[str]:
        """Run a decode step; return the requests that drew a token."""
        events: Sequence[SampleEvent] = self._engine.decode_step()
        failed = [event.error for event in events if isinstance(event, SampleResult)]
        assert not failed, failed
        return {event.op_id for event in events if isinstance(event, TokenEvent)}


@contextmanager
def no_layers() -> Iterator[None]:
    """Let forwards return at once in this block: there are no values, so nothing is lost but time."""

    def hidden_states(self: BaseModel, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.empty(tokens.shape[0], self.hidden_size, dtype=self.dtype, device=self.device)

    with patch.object(BaseModel, "forward", hidden_states):
        yield


def decoding(
    model: str,
    num_seqs: int,
    num_adapters: int,
    prompt_tokens: int = PROMPT_TOKENS,
    top_p: float = 1.0,
    *,
    own_attention: bool = False,
) -> list[Row]:
    """Count a decode step in which all sequences continue, as in the step before it.

    `own_attention`: by our kernel, as with torch before 2.12, whose own takes no tables of pages.
    """
    # All prompts in one step: they are not what is counted.
    limits = partial(SamplerLimits, prefill_tokens_max=num_seqs * prompt_tokens)
    with (
        patch.object(workers.engine, "SamplerLimits", limits),
        patch.object(pages, "takes_tables", return_value=pages.takes_tables() and not own_attention),
        engine_of(model) as (engine, counting),
        keys_max(prompt_tokens),
    ):
        sampling = Sampling(engine, num_adapters)
        sampling.start(num_seqs, prompt_tokens, top_p)
        with no_layers():
            sampling.step()
        sampling.step()
        with counting.stretch() as counts:
            drawn = sampling.step()
        assert len(drawn) == num_seqs, f"{len(drawn)} of {num_seqs} sequences drew a token"
    adapters = f"{num_adapters} adapters" if num_adapters else "no adapter"
    nucleus = "" if top_p == 1 else f", top-p {top_p:g}"
    kernel = ", attention by our kernel" if own_attention else ""
    return [row_of(model, f"decode {num_seqs}, {adapters}, {prompt_tokens:,} tokens{nucleus}{kernel}", counts)]


def prefill(model: str, num_seqs: int) -> list[Row]:
    """Count the first step after requests with new prompts have come."""
    with engine_of(model) as (engine, counting):
        sampling = Sampling(engine, 0)
        sampling.start(num_seqs, PROMPT_TOKENS)
        with counting.stretch() as counts:
            sampling.step()
    return [row_of(model, f"first prefill of {num_seqs} x {PROMPT_TOKENS}", counts)]


def with_layers(count: Callable[..., list[Row]], model: str, *args: Any) -> list[Row]:
    """Return the row of a case, with the kernels of one layer."""
    (row,) = count(model, *args)
    few, more = (count(f"{model}@{layers}", *args)[0]["kernels"] for layers in (FEW_LAYERS, MORE_LAYERS))
    return [row | {"layer_kernels": (more - few) / (MORE_LAYERS - FEW_LAYERS)}]


def reduced(count: Callable[..., list[Row]], name: str, *args: Any) -> list[Row]:
    """Return the row of a case of a model of `REDUCED_SHAPES`, with the kernels of one layer."""
    few, more = (count(f"{name}@{layers}", *args)[0] for layers in (PATTERN_LAYERS, 2 * PATTERN_LAYERS))
    return [few | {"layer_kernels": (more["kernels"] - few["kernels"]) / PATTERN_LAYERS}]


LOADS = (Case(8, 4, 64), Case(64, 1, 64), Case(16, 4, 512))


def counted(model: str) -> Iterator[list[Row]]:
    """Count every case of a model, one after another."""
    if model in REDUCED_SHAPES:
        yield reduced(passes, model, LOADS[0])
        yield reduced(decoding, model, NUM_SEQS, 0)
        yield reduced(decoding, model, NUM_SEQS, NUM_ADAPTERS)
        return
    for load in LOADS:
        yield training_rows(model, load)
    yield loss(model)
    yield with_layers(decoding, model, NUM_SEQS, 0)
    yield with_layers(decoding, model, NUM_SEQS, NUM_ADAPTERS)
    yield decoding(model, NUM_SEQS, NUM_ADAPTERS, PROMPT_TOKENS, TOP_P)
    yield with_layers(decoding, model, NUM_LONG_SEQS, NUM_ADAPTERS, LONG_PROMPT_TOKENS)
    yield decoding(model, NUM_LONG_SEQS, NUM_ADAPTERS, LONG_PROMPT_TOKENS, own_attention=True)
    yield with_layers(prefill, model, NUM_SEQS)


def counted_quickly() -> Iterator[list[Row]]:
    """Count a case of each kind of a miniature model."""
    model = "tiny"
    yield training_rows(model, Case(2, 1, 16))
    yield loss(model)
    yield decoding(model, 2, 1)
    yield decoding(model, 2, 1, own_attention=True)
    yield prefill(model, 2)
    for other in ("tiny-hybrid", "tiny-mixture"):
        yield passes(other, Case(2, 1, 16))
        yield decoding(other, 2, 1)
