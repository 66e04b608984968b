"""Tries the kernels of our own that compute losses from logits, with adapters of the unembedding, against torch.

Wrong log-probabilities look like log-probabilities. So kernels that fail, or give other ones or other gradients on this
GPU and with this build of torch and Triton, are not used: torch computes losses then, which is slower. In exact mode a
request must also have the bits that it has alone.

Depends on the shapes of a loaded base model: its weights have no part in it.

Dimensions: T rows, D hidden size, V vocabulary, K targets of a token, R padded rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.contract.adapted_modules import ModuleKind
from workers.contract.messages import Datum
from workers.model.base_model import BaseModel
from workers.model.fused_runs import TrainingRun
from workers.model.pretrained import UnsupportedModelError
from workers.model.segments import Segment
from workers.rows import AdapterViews, RowLayout
from workers.selftest.training_kernels import relative_distance
from workers.training.kernel_scores import KernelScores
from workers.training.logits import Part, Piece
from workers.training.losses import prepare

logger = logging.getLogger(__name__)

LENGTHS = (70, 1, 33, 20)
"""Of requests: more than a tile, a lone token, parts of tiles; the last has the first one's adapter."""
RANKS = (8, 0, 32)
"""Of their adapters; 0: it does not adapt the unembedding."""
NUMBERS_OF_TARGETS = (1, 3)
"""Of each token: kernels have a way for one, and another for more."""
SPREAD, ADDED = 4.0, 2.0
"""Standard deviations of logits and of what adapters add to them: so few tokens have most of the probability, and
adapters have a say in which."""
LOGPROBS_TOLERANCE = 2.0**-8
"""Largest difference of a log-probability; both are computed in fp32."""
TOLERANCE = 2.0**-6
"""Largest Euclidean norm of the difference of gradients, as a part of the gradients', which are rounded to 8 bits."""


def check_losses(model: BaseModel) -> None:
    """Let torch compute losses from logits, if kernels of our own fail or give other ones.

    Raises UnsupportedModelError for kernels in exact mode.
    """
    if not model.scores_by_kernels:
        return
    reason = _reason_against(model)
    if not reason:
        return
    if model.numerics.is_exact:
        raise UnsupportedModelError(
            f"exact mode is not possible with {model.name} on this device by our own kernels of the loss: {reason}"
        )
    logger.warning("torch computes the losses of %s, which is slower: %s", model.name, reason)
    model.scores_by_kernels = False


def _reason_against(model: BaseModel) -> str:
    """Return why the kernels are not used; empty: they are."""
    try:
        for num_targets, is_adapted in product(NUMBERS_OF_TARGETS, (False, model.trains_by_kernels)):
            trial = _Trial(model, num_targets, is_adapted=is_adapted)
            logprobs, *gradients = trial.by_kernels(trial.parts)
            expected_logprobs, *expected = trial.by_torch()
            apart = float((logprobs - expected_logprobs).abs().max())
            if not apart <= LOGPROBS_TOLERANCE:
                return f"log-probabilities are {apart:.2g} apart (at most {LOGPROBS_TOLERANCE:.2g})"
            apart = relative_distance(gradients, expected)
            if apart > TOLERANCE:
                return f"gradients are {apart:.2g} of their size apart (at most {TOLERANCE:.2g})"
            if model.numerics.is_exact and not trial.is_alone_as_together(logprobs, gradients[0]):
                return "a request has other bits with others than alone"
    except Exception as error:  # noqa: BLE001 (whatever it is: torch can do it, too)
        return str(error) or type(error).__name__
    return ""


class _Trial:
    """Random logits, adapters and targets, the same every time."""

    def __init__(self, model: BaseModel, num_targets: int, *, is_adapted: bool) -> None:
        self._model, self._is_adapted, self._random = model, is_adapted, torch.Generator().manual_seed(0)
        adapters = [self._adapter(rank) for rank in RANKS]
        num_rows = sum(LENGTHS)
        self._logits = (SPREAD * self._draw(num_rows, model.vocab_size)).to(model.device, model.dtype)
        self._hidden = self._draw(num_rows, model.hidden_size).to(model.device, model.dtype)
        likely = self._logits.float().topk(num_targets).indices.int().cpu().numpy()  # (T, K)
        likely[1::2] = (likely[1::2] + 7) % model.vocab_size
        self.parts: list[Part] = []
        for number, length in enumerate(LENGTHS):
            start = self.parts[-1].stop if self.parts else 0
            rows = slice(start, start + length)
            inputs: dict[str, Any] = {"target_tokens": likely[rows], "weights": np.ones_like(likely[rows], np.float32)}
            datum = Datum(tokens=np.zeros(length, np.int32), loss_inputs=inputs)
            loss = prepare([datum], "cross_entropy", {}, model.vocab_size)
            self.parts.append(Part(start=start, stop=rows.stop, adapter=adapters[number % len(RANKS)], loss=loss))

    def by_kernels(self, parts: Sequence[Part]) -> list[Tensor]:
        """Return log-probabilities (T, K), d(loss)/d(logits) (T, V), and its product with B (T, R) of each adapter.

        Of all these parts' rows, which are adjacent.
        """
        first, rows = parts[0].start, slice(parts[0].start, parts[-1].stop)
        parts = [replace(part, start=part.start - first, stop=part.stop - first) for part in parts]
        logits, hidden, group = self._logits[rows].clone(), self._hidden[rows], self._group
        segments = [Segment(part.start, part.stop, part.adapter) for part in parts]
        runs = self._model.current.route(segments, group=group).runs
        pending = runs[0].pending(group, hidden) if isinstance(runs[0], TrainingRun) else None
        scores = KernelScores(parts, len(logits), logits.device)
        block = [(Piece(own.part, 0, own.part.stop - own.part.start), own) for own in scores.results.parts]
        scored = scores.score(logits, block, pending)
        scores.add_local(block)
        dxa = scores.differentiate(logits, scored, block, pending)
        scores.results.settle()
        products = [] if dxa is None else [dxa[0, part.start : part.stop, : self._rank(part)] for part in parts]
        return [torch.cat([part.logprobs for part in parts]), logits, *(each for each in products if each.numel())]

    def by_torch(self) -> list[Tensor]:
        """Return the same of all parts, in fp32."""
        logits = self._logits.to(torch.float32, copy=True)
        targets, products = torch.cat([part.loss.targets for part in self.parts]), []
        for part in self.parts:
            rows, views = slice(part.start, part.stop), part.adapter.groups[self._group]
            if views is not None:
                xa = part.adapter.scaling * self._hidden[rows].float() @ views.A.float().T
                logits[rows] += xa @ views.Bs[0].float()
        logprobs, targets = logits.log_softmax(-1), targets.to(logits.device)
        slopes = torch.full(targets.shape, -1.0, device=logits.device)
        dlogits = (targets.shape[1] * logprobs.exp()).scatter_add_(1, targets, slopes)
        for part in self.parts:
            rows, views = slice(part.start, part.stop), part.adapter.groups[self._group]
            if views is not None:
                products.append(part.adapter.scaling * dlogits[rows] @ views.Bs[0].float().T)
        return [logprobs.gather(1, targets).cpu(), dlogits, *products]

    def is_alone_as_together(self, logprobs: Tensor, dlogits: Tensor) -> bool:
        """Return whether each request has these bits alone."""
        for part in self.parts:
            rows = slice(part.start, part.stop)
            own_logprobs, own_dlogits, *_ = self.by_kernels([part])
            if not (torch.equal(own_logprobs, logprobs[rows]) and torch.equal(own_dlogits, dlogits[rows])):
                return False
        return True

    @property
    def _group(self) -> int:
        return self._model.unembedding.shape.index

    def _rank(self, part: Part) -> int:
        return part.adapter.padded_rank if part.adapter.groups[self._group] is not None else 0

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random)

    def _adapter(self, rank: int) -> AdapterViews:
        """Return an adapter of the unembedding, if there are any in the trial and its rank is not 0."""
        is_adapted, rank = self._is_adapted and rank > 0, rank or RANKS[0]
        kind: ModuleKind = "unembed" if is_adapted else "attn"
        layout = RowLayout(self._model.group_shapes, rank, (kind,))
        weights = self._draw(1, layout.num_values).to(self._model.device, self._model.dtype)
        slab = layout.views(weights, torch.zeros(weights.shape, device=self._model.device))
        adapter = AdapterViews(slab, [views and views.row(0) for views in slab], 0, 0.5)
        views = adapter.groups[self._group]
        if views is not None:
            views.A.mul_(1 / math.sqrt(self._model.hidden_size))
            views.Bs[0].mul_(ADDED / (adapter.scaling * math.sqrt(rank)))
        return adapter
