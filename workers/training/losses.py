"""The losses: what a request minimises, as a function of the log-probabilities of its targets.

Knows log-probabilities and the loss inputs of one request; not logits, models or adapters. Every loss is a sum over
tokens and sequences, and gives its derivative by hand, so that d(logits) follows without autograd.

Main invariant: a request's loss is computed from its own values, in vectors of its own length. Formulas with p the
log-probability of the target under the adapter, q the one given as `logprobs`, A `advantages`, r = exp(p - q):

    cross_entropy         sum -p w                                                 targets (N,) or (N, K)
    importance_sampling   sum -r A
    ppo                   sum -min(r A, clamp(r, low, high) A)                     low 0.8, high 1.2
    cispo                 sum -stop(clamp(r, low, high)) p A                       low 0, high 4
    dro                   sum -(p A - beta / 2 (p - q)^2)                          beta 0.05
    gspo                  as ppo with r = exp(stop(mean(p - q)) + p - stop(p))     low 1 - 3e-4, high 1 + 4e-4

`stop` is a constant to the gradient. low and high bound the ratio. gspo's mean is over the sequence, or over the tokens
that `sequence_ratio_mask` selects (weighted by it).

Dimensions: N tokens of a request (all its sequences, one behind the other), K targets of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.contract.messages import Datum

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Terms:
    """A loss at some tokens: value and derivative, shapes as the log-probabilities'."""

    loss: Tensor
    slope: Tensor
    """d(loss) / d(log-probability)."""
    num_clipped: Tensor | None = None
    """How many tokens' gradients the clipping changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One loss function: what it needs and how it is computed."""

    compute: Callable[[Tensor, Inputs, Config], Terms]
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    defaults: Config = field(default_factory=dict)
    is_local: bool = True
    """Each token's term depends on that token alone; otherwise on its whole sequence."""
    allows_many_targets: bool = False


def _cross_entropy(p: Tensor, inputs: Inputs, config: Config) -> Terms:
    del config
    slope = -inputs["weights"]
    return Terms(p * slope, slope)


def _importance_sampling(p: Tensor, inputs: Inputs, config: Config) -> Terms:
    del config
    loss = -(torch.exp(p - inputs["logprobs"]) * inputs["advantages"])
    return Terms(loss, loss)


def _clipped(ratio: Tensor, inputs: Inputs, config: Config) -> Terms:
    """-min(r A, clamp(r) A), with dr/dp = r where it is not clipped."""
    advantages = inputs["advantages"]
    free = ratio * advantages
    clipped = _clamp(ratio, inputs, config) * advantages
    loss = -torch.minimum(free, clipped)
    return Terms(loss, torch.where(clipped < free, torch.zeros_like(loss), loss), (clipped < free).sum())


def _clamp(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    low, high = (inputs[name] if name in inputs else ratio.new_full((), config[name]) for name in _BOUNDS)
    return torch.clamp(ratio, low, high)


def _ppo(p: Tensor, inputs: Inputs, config: Config) -> Terms:
    return _clipped(torch.exp(p - inputs["logprobs"]), inputs, config)


def _cispo(p: Tensor, inputs: Inputs, config: Config) -> Terms:
    ratio = torch.exp(p - inputs["logprobs"])
    clamped = _clamp(ratio, inputs, config)
    slope = -(clamped * inputs["advantages"])
    return Terms(slope * p, slope, (clamped != ratio).sum())


def _dro(p: Tensor, inputs: Inputs, config: Config) -> Terms:
    advantages, beta = inputs["advantages"], config["beta"]
    distance = p - inputs["logprobs"]
    loss = -(p * advantages - distance.square() * (beta / 2))
    return Terms(loss, distance * beta - advantages)


def _gspo(p: Tensor, inputs: Inputs, config: Config) -> Terms:
    """One whole sequence."""
    mask = inputs["sequence_ratio_mask"] if "sequence_ratio_mask" in inputs else torch.ones_like(p)
    mean = ((p - inputs["logprobs"]) * mask).sum() / mask.sum()
    return _clipped(torch.exp(mean).expand_as(p), inputs, config)


_POLICY = ("target_tokens", "logprobs", "advantages")
_BOUNDS = ("clip_low_threshold", "clip_high_threshold")

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(compute=_cross_entropy, required=("target_tokens", "weights"), allows_many_targets=True),
    "importance_sampling": Loss(compute=_importance_sampling, required=_POLICY),
    "ppo": Loss(
        compute=_ppo,
        required=_POLICY,
        optional=_BOUNDS,
        defaults={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    "cispo": Loss(
        compute=_cispo,
        required=_POLICY,
        optional=_BOUNDS,
        defaults={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    ),
    "dro": Loss(compute=_dro, required=_POLICY, defaults={"beta": 0.05}),
    "gspo": Loss(
        compute=_gspo,
        required=_POLICY,
        optional=("sequence_ratio_mask",),
        defaults={"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
        is_local=False,
    ),
}
IGNORED_INPUT = "mask"
"""The one unknown input that is ignored, with a note in the metrics: clients keep it for themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLoss:
    """The loss of one request's chunk, ready to be evaluated."""

    loss: Loss
    config: Config
    targets: Tensor
    """(N, K) int64; K is 1 for plain targets."""
    inputs: Inputs
    """fp32, (N,) or, beside many targets, (N, K)."""
    lengths: tuple[int, ...]
    num_targets: tuple[int | None, ...]
    """Per datum its own K, or None for targets (n,)."""
    has_ignored_input: bool

    def to(self, device: torch.device) -> RequestLoss:
        """The same on a device; for its terms, for log-probabilities are cut per datum on the CPU."""
        inputs = {name: values.to(device, non_blocking=True) for name, values in self.inputs.items()}
        return replace(self, targets=self.targets.to(device, non_blocking=True), inputs=inputs)

    def terms(self, logprobs: Tensor, start: int, stop: int) -> Terms:
        """The terms of tokens `start` to `stop`, from their log-probabilities (stop - start, K). For a local loss."""
        return self._evaluate(logprobs, start, stop)

    def sequence_terms(self, logprobs: Tensor) -> Terms:
        """The terms of all tokens (N, K), sequence by sequence."""
        parts = []
        start = 0
        for length in self.lengths:
            parts.append(self._evaluate(logprobs[start : start + length], start, start + length))
            start += length
        clipped = [part.num_clipped for part in parts if part.num_clipped is not None]
        return Terms(
            torch.cat([part.loss for part in parts]),
            torch.cat([part.slope for part in parts]),
            torch.stack(clipped).sum() if clipped else None,
        )

    def _evaluate(self, logprobs: Tensor, start: int, stop: int) -> Terms:
        inputs = {name: values[start:stop] for name, values in self.inputs.items()}
        if self.loss.allows_many_targets:
            return self.loss.compute(logprobs, inputs, self.config)
        terms = self.loss.compute(logprobs[:, 0], inputs, self.config)
        return Terms(terms.loss.unsqueeze(1), terms.slope.unsqueeze(1), terms.num_clipped)

    def split_logprobs(self, logprobs: Tensor) -> tuple[NDArray[np.float32], ...]:
        """Log-probabilities (N, K) cut per datum, in the shape of its `target_tokens`."""
        parts = logprobs.cpu().numpy()
        results = []
        start = 0
        for length, num_targets in zip(self.lengths, self.num_targets, strict=True):
            part = parts[start : start + length]
            results.append(np.ascontiguousarray(part[:, 0] if num_targets is None else part[:, :num_targets]))
            start += length
        return tuple(results)


def prepare(data: Sequence[Datum], loss_fn: str, loss_config: Config, vocab_size: int) -> RequestLoss:
    """Check a chunk's loss inputs and lay them out. Raises ValueError with what to change; datums count from 0."""
    loss = LOSSES.get(loss_fn)
    if loss is None:
        raise ValueError(f"unknown loss function {loss_fn!r}; expected one of {', '.join(sorted(LOSSES))}")
    if not data:
        raise ValueError("the batch is empty; send at least one datum")
    ignored = False
    for index, datum in enumerate(data):
        ignored |= _check_datum(loss, loss_fn, index, datum, vocab_size)
        for name in loss.optional:
            if (name in datum.loss_inputs) != (name in data[0].loss_inputs):
                raise ValueError(f"{name} is given for some datums only; give it for all of them or for none")
    targets = [np.asarray(datum.loss_inputs["target_tokens"], dtype=np.int64) for datum in data]
    width = max(1 if target.ndim == 1 else target.shape[1] for target in targets)
    names = [*loss.required[1:], *(name for name in loss.optional if name in data[0].loss_inputs)]
    inputs = {}
    for name in names:
        values = [np.asarray(datum.loss_inputs[name], dtype=np.float32) for datum in data]
        inputs[name] = torch.from_numpy(_stacked(values, width) if loss.allows_many_targets else np.concatenate(values))
    return RequestLoss(
        loss=loss,
        config=_checked_config(loss, loss_fn, loss_config),
        targets=torch.from_numpy(_stacked(targets, width)),
        inputs=inputs,
        lengths=tuple(len(datum.tokens) for datum in data),
        num_targets=tuple(None if target.ndim == 1 else target.shape[1] for target in targets),
        has_ignored_input=ignored,
    )


def _stacked(arrays: Sequence[NDArray[Any]], width: int) -> NDArray[Any]:
    """Arrays (n,) or (n, k) one behind the other as (N, width), zeros to the right: weight zero, target zero."""
    columns = [array.reshape(len(array), -1) for array in arrays]
    return np.concatenate([np.pad(array, ((0, 0), (0, width - array.shape[1]))) for array in columns])


def _check_datum(loss: Loss, loss_fn: str, index: int, datum: Datum, vocab_size: int) -> bool:
    """Raise ValueError if a datum does not fit the loss; return whether it has the input that is ignored."""
    num_tokens = len(datum.tokens)
    if num_tokens == 0:
        raise ValueError(f"datum {index} has no tokens")
    _check_token_ids(f"datum {index}", datum.tokens, vocab_size)
    allowed = {*loss.required, *loss.optional, IGNORED_INPUT}
    unknown = sorted(set(datum.loss_inputs) - allowed)
    missing = sorted(set(loss.required) - set(datum.loss_inputs))
    if unknown or missing:
        wrong = f"unknown loss inputs {', '.join(unknown)}" if unknown else f"no {', '.join(missing)}"
        raise ValueError(
            f"datum {index} has {wrong}; {loss_fn} takes {', '.join(loss.required)}"
            + (f" and optionally {', '.join(loss.optional)}" if loss.optional else "")
        )
    targets = datum.loss_inputs["target_tokens"]
    if targets.ndim not in {1, 2} or len(targets) != num_tokens or targets.size == 0:
        raise ValueError(f"datum {index} has {num_tokens} tokens but target_tokens of shape {targets.shape}")
    if targets.ndim == 2 and not loss.allows_many_targets:
        raise ValueError(f"datum {index} has several targets per token, which only cross_entropy takes")
    _check_token_ids(f"datum {index}, target_tokens", targets, vocab_size)
    for name, values in datum.loss_inputs.items():
        if name in {"target_tokens", IGNORED_INPUT}:
            continue
        if values.shape != targets.shape:
            raise ValueError(
                f"datum {index}: {name} has shape {values.shape}, expected {targets.shape} as target_tokens"
            )
        if not np.issubdtype(values.dtype, np.floating) and not np.issubdtype(values.dtype, np.integer):
            raise ValueError(f"datum {index}: {name} has type {values.dtype}, expected float32")
    mask = datum.loss_inputs.get("sequence_ratio_mask")
    if mask is not None and not float(mask.sum()) > 0:
        raise ValueError(f"datum {index}: sequence_ratio_mask selects no token")
    return IGNORED_INPUT in datum.loss_inputs


def _check_token_ids(where: str, ids: NDArray[np.generic], vocab_size: int) -> None:
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{where}: token ids have type {ids.dtype}, expected int32")
    low, high = int(np.min(ids)), int(np.max(ids))
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"{where}: token id {wrong} is outside the vocabulary of {vocab_size}")


def _checked_config(loss: Loss, loss_fn: str, config: Config) -> Config:
    unknown = sorted(set(config) - set(loss.defaults))
    if unknown:
        known = ", ".join(loss.defaults) or "no options"
        raise ValueError(f"unknown option {', '.join(unknown)} of {loss_fn}; it takes {known}")
    merged = {**loss.defaults, **{name: float(value) for name, value in config.items()}}
    for name, value in merged.items():
        if not math.isfinite(value):
            raise ValueError(f"option {name} of {loss_fn} is {value}; expected a finite number")
    if "clip_low_threshold" in merged and merged["clip_low_threshold"] > merged["clip_high_threshold"]:
        raise ValueError(f"clip_low_threshold of {loss_fn} is above clip_high_threshold; they bound the ratio")
    return merged
