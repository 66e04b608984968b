"""Tries the kernels of our own that a pass with a backward has, against the model's modules and the library's products.

Wrong gradients look like gradients. So kernels that give other ones, with this model on this GPU and this build of
torch and Triton, are not used: modules and products compute then, which is slower.

Then the same pass runs as graphs (`training.pass_graphs`): if these give other gradients, passes run without.

The backward of attention is tried by itself, also for a model with experts, against the library's, with queries as
layers may leave them in memory.

Depends on a loaded base model. Layers of experts are not tried: in bf16 a token may go to another expert.

Dimensions: T rows, H query heads, K key-value heads, E head dimension.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workers.model.attention import AttendPacked
from workers.model.base_model import BaseModel
from workers.model.gpu_attention import attend_packed_for
from workers.model.pretrained import UnsupportedModelError
from workers.model.segments import Segment
from workers.rows import AdapterViews, RowLayout
from workers.selftest.sequence_invariance import attention_results
from workers.training.pass_graphs import PassGraphs, PlainTrunk

logger = logging.getLogger(__name__)

LENGTHS = (20, 1, 33)
"""Of a sequence of each adapter; the last belongs to the first adapter, too."""
RANKS = (8, 16)
PART = 0.5
"""What an adapter adds to a linear's output, about, as a part of normalised inputs: a wrong kernel is to be seen in the
gradients, and roundings of one layer are not to grow in the next ones."""
TOLERANCE = 0.25
"""Largest Euclidean norm of the difference of gradients, as a part of the gradients'. Both are rounded to 8 bits in all
layers of a deep model; a wrong kernel is wrong by more."""
ATTENTION_LENGTHS, WINDOW = (200, 64, 20, 1), 50
"""Of the sequences whose attention is tried: several tiles, one, a part of one, a lone token; and a window, of a
model that has any."""
ATTENTION_TOLERANCE = 2.0**-5
"""As `TOLERANCE`, of one layer's attention."""
GRAPH_RUNS = 3
"""Of one bucket: without graphs, one that captures them, and one that runs them with other addresses."""


@dataclass(frozen=True, slots=True)
class TrialRows:
    """Implements `pass_graphs.Rows`."""

    tokens: Tensor
    positions: Tensor
    lengths: Sequence[int]
    counts: Sequence[int]
    segments: Sequence[Segment]


def check_training_kernels(model: BaseModel) -> None:
    """Let the model train without kernels or graphs that give other gradients.

    Raises UnsupportedModelError for kernels in exact mode.
    """
    if not model.trains_by_kernels or model.expert_layers:
        return
    by_kernels = _gradients(model, are_set=model.sets_gradients)
    with model.training_by_modules():
        expected = _gradients(model)
    apart = relative_distance(by_kernels, expected)
    if apart > TOLERANCE:
        what = f"they give other gradients, {apart:.2g} of their size apart (at most {TOLERANCE:g})"
        if model.numerics.is_exact:
            raise UnsupportedModelError(
                f"exact mode is not possible with {model.name} on this device by kernels of our own: {what}"
            )
        logger.warning("%s trains without kernels of our own, which is slower: %s", model.name, what)
        model.drop_kernels()
        return
    graphs = PassGraphs(model)
    runs = (_gradients(model, graphs, are_set=model.sets_gradients and number % 2 == 1) for number in range(GRAPH_RUNS))
    apart = max(relative_distance(run, by_kernels) for run in runs)
    model.has_pass_graphs = not graphs.has_failed and apart <= TOLERANCE
    if apart > TOLERANCE:
        logger.warning("%s trains without graphs, which is slower: gradients are %.2g apart", model.name, apart)


def check_attention(model: BaseModel) -> None:
    """Let attention have the library's backward, if our own gives other gradients."""
    if not model.has_own_attention:
        return
    theirs = attend_packed_for(model.device, model.dtype, model.num_heads, model.head_dim, exact=False)
    apart = relative_distance(_attention_gradients(model, model.attend_packed), _attention_gradients(model, theirs))
    if apart > ATTENTION_TOLERANCE:
        logger.warning("%s trains by the library's attention: gradients of ours are %.2g apart", model.name, apart)
        model.attend_by_library()


def _attention_gradients(model: BaseModel, attend_packed: AttendPacked) -> list[Tensor]:
    """Return gradients of random queries, keys and values (T, H or K, E)."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(model.device, model.dtype)

    num_rows, heads = sum(ATTENTION_LENGTHS), (model.num_heads, *[model.num_key_value_heads] * 2)
    by_head = [draw(number, num_rows, model.head_dim).transpose(0, 1) for number in heads]
    by_row = [rows.contiguous() for rows in by_head]
    dout, sinks = draw(*by_row[0].shape), draw(model.num_heads) if model.has_sinks else None
    counts, gradients = [1] * len(ATTENTION_LENGTHS), list[Tensor]()
    for rows in (by_head, by_row):
        for window in (None, *[WINDOW] * model.has_sliding_window):
            found = attention_results(
                attend_packed, ATTENTION_LENGTHS, counts, [*rows, dout], window=window, sinks=sinks
            )
            gradients += found[1:]
    return gradients


def _gradients(model: BaseModel, graphs: PassGraphs | None = None, *, are_set: bool = False) -> list[Tensor]:
    """Return hidden states of random sequences with random adapters, and the gradient (P,) of each adapter.

    With `are_set` gradients are set, in memory that holds no number, instead of being added to zeros.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    adapters, gradients, set_adapters = list[AdapterViews](), list[Tensor](), set[int]()
    for rank in RANKS:
        layout = RowLayout(model.group_shapes, rank, ("attn", "mlp"))
        scale = math.sqrt(PART / math.sqrt(model.hidden_size * rank))
        weights = (draw(1, layout.num_values) * scale).to(model.device, model.dtype)
        is_set = are_set and not layout.has_gaps
        gradients.append(torch.full(weights.shape, math.nan if is_set else 0.0, device=model.device))
        slab = layout.views(weights, gradients[-1])
        adapters.append(AdapterViews(slab, [views and views.row(0) for views in slab], 0, 1.0))
        set_adapters |= {id(adapters[-1])} if is_set else set()
    num_rows = sum(LENGTHS)
    tokens = torch.randint(0, model.vocab_size, (num_rows,), generator=generator).to(model.device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).to(model.device)
    segments = [replace(each, is_set=id(each.adapter) in set_adapters) for each in _segments(adapters)]
    rows = TrialRows(tokens, positions, LENGTHS, [1] * len(LENGTHS), segments)
    with torch.enable_grad():
        trunk = (None if graphs is None else graphs.trunk(rows)) or PlainTrunk(model, rows)
        hidden = trunk.forward()
        trunk.backward(draw(num_rows, model.hidden_size).to(model.device, model.dtype))
        copy = hidden.float().clone()  # the next forward of a graph overwrites it
    model.reset()
    return [copy, *gradients]


def _segments(adapters: Sequence[AdapterViews]) -> list[Segment]:
    segments, start = [], 0
    for number, length in enumerate(LENGTHS):
        segments.append(Segment(start, start + length, adapters[number % len(adapters)]))
        start += length
    return segments


def relative_distance(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest Euclidean norm of a difference, as a part of that of what is expected; NaN: infinite."""
    parts = [float((mine - right).norm() / right.norm()) for mine, right in zip(actual, expected, strict=True)]
    return max(math.inf if math.isnan(part) else part for part in parts)
